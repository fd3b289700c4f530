"""Reads an engine's checkpoint, in whatever parallel layout."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from geotrain.checkpoint.folders import CheckpointFolder
from geotrain.checkpoint.state import RESIDUAL, described, layout_of_ranks, state_of
from geotrain.inner.engine.engine import GeoEngine
from geotrain.inner.runtime import platform
from geotrain.optimizers.inner_optimizer import set_step_count
from geotrain.parameters.parameter_map import StridedSlice


def load(engine: GeoEngine, files: CheckpointFolder, tag: str | None) -> dict[str, Any] | None:
    """Restore the optimizer's state from the newest whole checkpoint, or the one called `tag`; return its `extra`.

    Every rank of the worker must call it. Masters stay as they are: at a restart they come from the outer loop.
    Random states belong to ranks, so they are restored only in the parallel layout that was saved. Returns None if
    there is no checkpoint and no tag was given. Raises CheckpointError on every rank if any rank failed, and as
    `CheckpointFolder.newest` does.
    """
    engine.settle()  # a step that is still under way would write the masters after this
    manifest = files.newest(described(engine, {}), tag)
    if manifest is None:
        return None
    if engine.residuals:
        engine.optimizer.forget_residuals()
    files.ranks.together(lambda: _read_rank(engine, files, manifest), files.folder / manifest["tag"])
    if engine.residuals:
        engine.keep_residuals_once()
    set_step_count(engine.basic_optimizer, manifest["optimizer_steps"])
    for counter, value in manifest["counters"].items():
        setattr(engine, counter, value)
    engine.refresh()  # ACCO begins anew at the masters
    return manifest["extra"]


def _read_rank(engine: GeoEngine, files: CheckpointFolder, manifest: dict[str, Any]) -> None:
    """Read the state that this rank owns, and no more, from the files of whichever ranks saved it."""
    folder = files.folder / manifest["tag"]
    with contextlib.ExitStack() as stack:
        # parameter → (file, shard, the run's offset in the shard, run) of each run that was saved
        saved: dict[str, list[tuple[Any, int, int, StridedSlice]]] = defaultdict(list)
        names = files.needed(manifest, layout_of_ranks(engine))
        for name in names:
            file = stack.enter_context(safe_open(folder / name, "pt"))
            for shard, (pushes, runs) in enumerate(json.loads(file.metadata()["shards"])):
                if len(names) > 1 and not pushes:
                    continue
                offset = 0
                for parameter, start, length, stride, count in runs:
                    run = StridedSlice(start, length, stride, count, parameter)
                    saved[parameter].append((file, shard, offset, run))
                    offset += run.numel
        for own in engine.shards():
            spans = list(_locate(own.runs, saved))
            for name, view in state_of(engine, own).items():
                read = torch.zeros(own.numel, dtype=view.dtype)  # on the host, so that a GPU gets it in one copy
                for file, shard, into, outof, length in spans:
                    if name == RESIDUAL and f"{shard}.{name}" not in file.keys():  # noqa: SIM118 (not a dict)
                        continue  # saved where no codes travelled
                    # Only the range of the wanted elements is read from the file, not the whole tensor.
                    low, high = int(outof.min()), int((outof + length).max())
                    _copy(read, file.get_slice(f"{shard}.{name}")[low:high], into, outof - low, length)
                view.copy_(read)
    if manifest["layout"] == layout_of_ranks(engine):
        with safe_open(folder / files.file, "pt") as file:
            torch.set_rng_state(file.get_tensor("rng.cpu"))
            if platform.HAS_CUDA:
                torch.cuda.set_rng_state(file.get_tensor("rng.cuda"))


def _locate(
    wanted: Iterable[StridedSlice], saved: Mapping[str, list[tuple[Any, int, int, StridedSlice]]]
) -> Iterator[tuple[Any, int, np.ndarray, np.ndarray, np.ndarray]]:
    """Find the saved runs that hold some of the wanted elements; yields (file, shard, into, outof, length).

    into, outof, length: int64 arrays. For each i, the shard's length[i] elements from outof[i] on are the wanted
    elements from into[i] on. Raises ValueError if some wanted elements were not saved.
    """
    position = 0
    for run in wanted:
        found = 0
        for file, shard, offset, other in saved[run.parameter]:
            if other.start >= run.stop or run.start >= other.stop:
                continue
            into, outof, length = overlap(run, other)
            if length.size:
                yield file, shard, into + position, outof + offset, length
                found += int(length.sum())
        if found != run.numel:
            raise ValueError(f"{run.parameter}: {found} of {run.numel} wanted elements were saved")
        position += run.numel


def overlap(wanted: StridedSlice, saved: StridedSlice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Intersect two runs of one parameter: offsets into the first, offsets into the second, lengths (int64).

    A run is `count` rows of `length` elements, `stride` apart. Both runs' rows are sorted, so the rows of the second
    that a row of the first overlaps are neighbours, and two binary searches find the first and the last.
    """
    # Where each row begins, as an offset in the parameter.
    a = wanted.start + np.arange(wanted.count, dtype=np.int64) * wanted.stride
    b = saved.start + np.arange(saved.count, dtype=np.int64) * saved.stride
    first = np.searchsorted(b + saved.length, a, side="right")
    overlaps = np.maximum(np.searchsorted(b, a + wanted.length, side="left") - first, 0)
    # One entry for each pair of rows that overlap: i counts rows of the first run, j of the second.
    i = np.repeat(np.arange(wanted.count), overlaps)
    j = np.arange(overlaps.sum()) - np.repeat(np.cumsum(overlaps) - overlaps, overlaps) + np.repeat(first, overlaps)
    begin = np.maximum(a[i], b[j])
    end = np.minimum(a[i] + wanted.length, b[j] + saved.length)
    return i * wanted.length + begin - a[i], j * saved.length + begin - b[j], end - begin


def _copy(out: Tensor, source: Tensor, into: np.ndarray, outof: np.ndarray, length: np.ndarray) -> None:
    """Copy length[i] elements of `source` from outof[i] on to `out` from into[i] on, for each i."""
    steps = [np.unique(np.diff(x)) for x in (into, outof)]
    if np.unique(length).size == 1 and all(s.size <= 1 for s in steps):
        # Rows of a matrix, as tensor parallelism cuts it: one strided copy instead of one for each row.
        shape = (length.size, int(length[0]))
        to_step, from_step = (int(s[0]) if s.size else shape[1] for s in steps)
        target = out.as_strided(shape, (to_step, 1), int(into[0]))
        target.copy_(source.as_strided(shape, (from_step, 1), source.storage_offset() + int(outof[0])))
        return
    for to, start, n in zip(into.tolist(), outof.tolist(), length.tolist(), strict=True):
        out[to : to + n] = source[start : start + n]
