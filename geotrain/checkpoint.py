"""A worker's optimizer state on disk. It is stored by canonical address, so it can be loaded on any other layout.

`<folder>/<tag>/` holds one safetensors file for each rank, with the moments of the shards that the rank pushes and
their addresses in the file's metadata, and a `manifest.json` with the length and the checksum of every file. All is
written to a temporary folder that is renamed at the end, so a checkpoint appears whole or not at all.

The worker's hosts may share the file system or not. Where they do not, each host's folder holds the manifest and the
files of its own ranks. These then hold all shards of their rank, also those that another rank pushes, so that a rank
needs no file but its own: such a checkpoint can be loaded where every rank has the place in the layout, and the host,
that it had. Of the ranks that see the same folder, the lowest leads: it makes folders and renames them. Whether two
ranks see the same folder is tried out, with a file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import socket
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from geotrain.files import make_folder, out_of_room, sync
from geotrain.inner import platform
from geotrain.inner.engine import GeoEngine
from geotrain.inner.shards import OwnedShard
from geotrain.layout import StridedSlice, canonical_parameters, digest
from geotrain.optimizers.muon import Muon
from geotrain.optimizers.updates import moments, set_step_count, step_count

T = TypeVar("T")
log = logging.getLogger(__name__)
_FORMAT = 2
_MANIFEST = "manifest.json"
_PIECE_BYTES = 16 << 20  # so much is checksummed at once
_REPLACED = ".replaced.tmp"  # ends the name of a checkpoint that was moved aside for a newer one of the same tag
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class CheckpointError(OSError):
    """A checkpoint cannot be written or read. The message says which and why.

    no_room: a disk was full, and nothing else is wrong; the same on every rank.
    """

    def __init__(self, message: str, no_room: bool = False) -> None:
        super().__init__(message)
        self.no_room = no_room


def save(
    engine: GeoEngine, folder: str | Path, tag: str, extra: dict[str, Any], keep: int, with_masters: bool = False
) -> None:
    """Write a checkpoint and delete all but the newest `keep`. Every rank of the worker must call it.

    extra: anything JSON can hold; `load` returns it. with_masters: also save the fp32 weights. They can be left out
    where the weights come from the outer loop at a restart.
    Raises CheckpointError on every rank if any rank failed; earlier checkpoints stay.
    """
    engine.settle()
    folder = Path(folder)
    temporary, final = folder / f"{tag}.tmp", folder / tag
    try:
        group = _group(folder)
        # Each `_together` is also a barrier: no rank writes before its folder is there, the folders are renamed only
        # when every rank's file is on disk, and older checkpoints go only when the new one is whole on every host.
        numbers = _together(lambda: _prepare(temporary) if group.leads else 0, temporary)
        files = _together(lambda: _write_rank(engine, temporary, with_masters, not group.whole), temporary)
        manifest = _manifest(engine, tag, 1 + max(numbers), dict(files), extra, with_masters, group.whole)
        _together(lambda: _finish(temporary, final, manifest) if group.leads else None, temporary)
        _together(lambda: _drop(folder, keep) if group.leads else None, folder)
    except CheckpointError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def load(engine: GeoEngine, folder: str | Path, tag: str | None = None) -> dict[str, Any] | None:
    """Restore the optimizer's state from the newest whole checkpoint, or the one called `tag`; return its `extra`.

    Every rank of the worker must call it. Masters are read if they were saved and stay as they are otherwise. Random
    states belong to ranks, so they are restored only if the layout is the one that was saved. Damaged checkpoints are
    passed over with a warning. Returns None if there is no checkpoint and no tag was given. Raises CheckpointError on
    every rank if any rank failed, and where a checkpoint needs files that only other hosts have.
    """
    engine.settle()  # a step that is still under way would write the masters after this
    folder = Path(folder)
    _together(lambda: _bring_back(folder), folder)
    found = _together(lambda: _found(engine, folder, tag), folder)
    elsewhere: list[str] = []
    for key in sorted({key for here in found for key in here}, reverse=True):
        manifest = next(here[key] for here in found if key in here)
        place = folder / manifest["tag"]
        faults = [fault for fault in _together(partial(_lacks, engine, manifest, folder), place) if fault]
        if faults:
            elsewhere += faults
            if engine.rank == 0:
                log.warning("checkpoint %s: passed over: %s", place, faults[0])
            continue
        faults = [fault for fault in _together(partial(_damage, engine, manifest, folder), place) if fault]
        if not faults:
            break
        if engine.rank == 0:
            log.warning("checkpoint %s: damaged, passed over: %s", place, faults[0])
    else:
        if elsewhere:
            raise CheckpointError(f"checkpoint {folder}: {elsewhere[0]}")
        if tag is not None:
            raise CheckpointError(f"checkpoint {folder}: there is no whole checkpoint {tag!r} in {folder}")
        return None
    _together(lambda: _read_rank(engine, place, manifest), place)
    set_step_count(engine.basic_optimizer, manifest["optimizer_steps"])
    for counter, value in manifest["counters"].items():
        setattr(engine, counter, value)
    engine.refresh(predicted=_has_usable_prediction(engine, manifest))
    return manifest["extra"]


# ------------------------------------------------------------------------------------------------- all ranks


def _together(action: Callable[[], T], place: Path) -> list[T]:
    """Run the action on every rank and return all results, by rank; if it fails on any, all raise the same error.

    Otherwise the ranks that succeeded would go on and wait in their next collective for the one that failed.
    """
    result = problem = None
    no_room = False
    try:
        result = action()
    except (OSError, SafetensorError, CheckpointError, ValueError, KeyError) as error:
        words = str(error)
        if isinstance(error, OSError) and error.strerror:  # its str() would add "[Errno 28]"
            words = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        # safetensors raises an error of its own, which has no number but the system's words.
        no_room = out_of_room(error) or os.strerror(errno.ENOSPC) in words
        problem = f"rank {dist.get_rank()}: {words}"
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, problem, no_room))
    problems = [problem for _, problem, _ in outcomes if problem]
    if problems:
        more = f" (and {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
        room_only = all(full for _, problem, full in outcomes if problem)
        raise CheckpointError(f"checkpoint {place}: {problems[0]}{more}", room_only)
    return [result for result, _, _ in outcomes]


@dataclass(frozen=True)
class _Group:
    """The ranks that see the same folder as this one. whole: these are all ranks of the worker."""

    leads: bool
    whole: bool


_groups: dict[Path, _Group] = {}  # by folder; whether hosts share a file system does not change within a life


def _group(folder: Path) -> _Group:
    """Find out who sees the same folder, by a file of each rank there. Every rank must call it."""
    if folder in _groups:
        return _groups[folder]
    rank, token = dist.get_rank(), uuid.uuid4().hex

    def probe(token: str, number: int) -> Path:
        # A name that nobody has asked for before: network file systems remember for a while that a file is not there.
        return folder / f".seen-{token}-{number}"

    _together(lambda: make_folder(folder), folder)
    token = _together(lambda: token, folder)[0]
    try:
        _together(lambda: probe(token, rank).touch(), folder)
        leaders = _together(lambda: next(n for n in range(rank + 1) if probe(token, n).exists()), folder)
    finally:
        with contextlib.suppress(OSError):
            probe(token, rank).unlink(missing_ok=True)
    _groups[folder] = _Group(leaders[rank] == rank, set(leaders) == {0})
    return _groups[folder]


# ---------------------------------------------------------------------------------------------------- writing


def _prepare(temporary: Path) -> int:
    """Make the empty folder; returns the largest number of a checkpoint beside it."""
    make_folder(temporary.parent)
    _bring_back(temporary.parent)
    for left_over in temporary.parent.glob("*.tmp"):  # of a save that was killed
        shutil.rmtree(left_over)
    temporary.mkdir()
    return max((manifest["number"] for manifest, _ in _manifests(temporary.parent)), default=0)


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write_rank(engine: GeoEngine, folder: Path, with_masters: bool, every_shard: bool) -> tuple[str, list[int]]:
    """Write this rank's file; returns its name, and its length in bytes and its checksum.

    every_shard: also those shards that another rank pushes.
    """
    tensors: dict[str, Tensor] = {"rng.cpu": torch.get_rng_state()}
    if platform.HAS_CUDA:
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    runs: list[list[Any]] = []
    for shard in engine.shards():
        if not shard.pushes and not every_shard:
            continue
        for name, view in _state(engine, shard, with_masters, engine.has_prediction).items():
            tensors[f"{len(runs)}.{name}"] = view.detach().cpu()
        runs.append([shard.pushes, [[r.parameter, r.start, r.length, r.stride, r.count] for r in shard.runs]])
    path = folder / _rank_file(engine.rank)
    save_file(tensors, path, metadata={"shards": json.dumps(runs, separators=(",", ":"))})
    sync(path)
    return path.name, _size_and_checksum(path)


def _size_and_checksum(path: Path) -> list[int]:
    """(length in bytes, crc32) of a file. Raises OSError."""
    size = checksum = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return [size, checksum]


def _state(engine: GeoEngine, shard: OwnedShard, with_masters: bool, predicted: bool) -> dict[str, Tensor]:
    """1-D views of what is saved of a shard: its moments, its master, and the weights that ACCO predicted."""
    state = {
        name: moment.view(-1)[shard.offset : shard.offset + shard.numel]
        for name, moment in moments(engine.basic_optimizer, shard.owner).items()
    }
    if with_masters:
        state["master"] = shard.master
    if with_masters and predicted:
        state.update(engine.predicted_weights(shard))
    return state


def _has_usable_prediction(engine: GeoEngine, manifest: dict[str, Any]) -> bool:
    """Whether the checkpoint has weights that ACCO predicted, in the form in which this engine predicts."""
    form = manifest["predicted"]
    return manifest["with_masters"] and form is not None and form == engine.prediction_form


def _manifest(
    engine: GeoEngine,
    tag: str,
    number: int,
    files: dict[str, list[int]],
    extra: dict[str, Any],
    with_masters: bool,
    shared: bool,
) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "tag": tag,
        "number": number,
        "model": digest(canonical_parameters(engine.architecture)),
        "layout": _layout(engine),
        "shared": shared,
        "files": files,
        "with_masters": with_masters,
        "predicted": engine.prediction_form if engine.has_prediction else None,
        "optimizer": _kind(engine),
        "optimizer_steps": step_count(engine.basic_optimizer),
        "counters": {counter: getattr(engine, counter) for counter in _COUNTERS},
        "extra": extra,
    }


def _finish(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    path = temporary / _MANIFEST
    path.write_text(_sealed(manifest))
    # First the files' contents and then their names go to disk, and only then the name that makes them a checkpoint:
    # a power failure in between leaves the temporary folder, which nobody reads.
    sync(path)
    sync(temporary)
    if final.exists():  # a folder cannot be renamed over another that is not empty
        # If this process is killed between the two renames, `_bring_back` undoes the first.
        final.rename(final.with_name(final.name + _REPLACED))
    temporary.rename(final)
    sync(final.parent)


def _drop(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for _, old in _manifests(folder)[max(1, keep) :]:
        # Renamed before it is deleted, so that a deletion that is broken off leaves no checkpoint with files missing.
        old.rename(old.with_name(f"{old.name}.old.tmp"))
    for dropped in folder.glob("*.tmp"):
        shutil.rmtree(dropped, ignore_errors=True)


def _sealed(manifest: dict[str, Any]) -> str:
    """The text of a manifest, with a checksum of all that it says."""
    return json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1)


def _checksum(manifest: dict[str, Any]) -> int:
    said = {key: value for key, value in manifest.items() if key != "checksum"}
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


def _bring_back(folder: Path) -> None:
    """Give an older checkpoint its name back if a save was killed after it had moved that checkpoint aside."""
    for replaced in folder.glob(f"*{_REPLACED}"):
        final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
        with contextlib.suppress(FileNotFoundError):  # another rank has just done it
            if not final.exists():
                replaced.rename(final)


def _kind(engine: GeoEngine) -> str:
    optimizer = engine.basic_optimizer
    if "moments" in optimizer.param_groups[0]:  # another package's
        return type(optimizer).__name__
    return "Muon" if isinstance(optimizer, Muon) else "AdamW"


def _layout(engine: GeoEngine) -> dict[str, Any]:
    mesh = engine.mesh
    layout = {"tensor": mesh.tp_size, "pipeline": mesh.pp_size, "data": mesh.replicas, "cuda": platform.HAS_CUDA}
    newer = {"expert": mesh.ep_size, "context": mesh.cp_size}  # left out where 1, as checkpoints have it from before
    return layout | {name: size for name, size in newer.items() if size > 1}


# ---------------------------------------------------------------------------------------------------- reading


def _manifests(folder: Path) -> list[tuple[dict[str, Any], Path]]:
    """(manifest, folder) of each checkpoint whose manifest is what was written, newest first.

    The newest has the highest number. Neither the clock nor the count of steps would do: the one may be set back, and
    the other begins anew when a worker begins without its checkpoint.
    """
    found = []
    for path in folder.glob(f"*/{_MANIFEST}"):
        if path.parent.suffix == ".tmp":
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads(path.read_text())
            if manifest["checksum"] == _checksum(manifest) and manifest["format"] == _FORMAT:
                found.append((manifest, path.parent))
    return sorted(found, key=lambda pair: pair[0]["number"], reverse=True)


def _found(engine: GeoEngine, folder: Path, tag: str | None) -> dict[tuple[int, int], dict[str, Any]]:
    """The manifests of the checkpoints that this rank sees, by their number and checksum. Raises CheckpointError."""
    found = [manifest for manifest, path in _manifests(folder) if tag in (None, path.name)]
    wanted = digest(canonical_parameters(engine.architecture))
    if found and found[0]["model"] != wanted:
        raise CheckpointError(f"{found[0]['tag']!r} is of another model ({found[0]['model']}, not {wanted})")
    kind = found[0].get("optimizer", "AdamW") if found else _kind(engine)
    if kind != _kind(engine):
        raise CheckpointError(
            f"{found[0]['tag']!r} holds the state of {kind}, but deepspeed.optimizer.type is {_kind(engine)}, which "
            "keeps other moments; set the type back, or begin a new run from the exported weights (model.init_from)"
        )
    return {(manifest["number"], manifest["checksum"]): manifest for manifest in found}


def _needed(engine: GeoEngine, manifest: dict[str, Any]) -> list[str]:
    """The files that this rank reads: all, or where hosts shared no file system, its own."""
    return list(manifest["files"]) if manifest["shared"] else [_rank_file(engine.rank)]


def _lacks(engine: GeoEngine, manifest: dict[str, Any], folder: Path) -> str | None:
    """Why this rank cannot read the checkpoint, if it is none of damage; otherwise None."""
    tag = manifest["tag"]
    if not manifest["shared"] and manifest["layout"] != _layout(engine):
        return (
            f"{tag!r} was saved by hosts that share no file system, in another layout: resume with the layout "
            f"{manifest['layout']}, or copy the weights and begin without the optimizer's state"
        )
    here = folder / tag
    if missing := [name for name in _needed(engine, manifest) if not (here / name).exists()]:
        return (
            f"{tag!r}: rank {engine.rank} on {socket.gethostname()} does not find {missing[0]} in {here}: start the "
            "worker on the same hosts in the same order, or set checkpoint.folder to one that all its hosts share"
        )
    return None


def _damage(engine: GeoEngine, manifest: dict[str, Any], folder: Path) -> str | None:
    """What is wrong with those files that this rank checks. Of files that all ranks see, each rank checks a part."""
    names = _needed(engine, manifest)
    for name in names[engine.rank :: dist.get_world_size()] if manifest["shared"] else names:
        try:
            if _size_and_checksum(folder / manifest["tag"] / name) != manifest["files"][name]:
                return f"{name} differs from what was written (its length or its checksum is wrong)"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def _read_rank(engine: GeoEngine, folder: Path, manifest: dict[str, Any]) -> None:
    """Read the state that this rank owns, and no more, from the files of whichever ranks saved it."""
    with contextlib.ExitStack() as stack:
        # parameter → (file, shard, the run's offset in the shard, run) of each run that was saved
        saved: dict[str, list[tuple[Any, int, int, StridedSlice]]] = defaultdict(list)
        for name in _needed(engine, manifest):
            file = stack.enter_context(safe_open(folder / name, "pt"))
            for shard, (pushes, runs) in enumerate(json.loads(file.metadata()["shards"])):
                if manifest["shared"] and not pushes:
                    continue
                offset = 0
                for parameter, start, length, stride, count in runs:
                    run = StridedSlice(start, length, stride, count, parameter)
                    saved[parameter].append((file, shard, offset, run))
                    offset += run.numel
        for own in engine.shards():
            pieces = list(_locate(own.runs, saved))
            state = _state(engine, own, manifest["with_masters"], _has_usable_prediction(engine, manifest))
            for name, view in state.items():
                read = torch.empty(own.numel, dtype=view.dtype)  # on the host, so that a GPU gets it in one copy
                for file, shard, into, outof, length in pieces:
                    # Only the range that the wanted pieces span is read from the file, not the whole tensor.
                    low, high = int(outof.min()), int((outof + length).max())
                    _copy(read, file.get_slice(f"{shard}.{name}")[low:high], into, outof - low, length)
                view.copy_(read)
    if manifest["layout"] == _layout(engine):
        with safe_open(folder / _rank_file(engine.rank), "pt") as file:
            torch.set_rng_state(file.get_tensor("rng.cpu"))
            if platform.HAS_CUDA:
                torch.cuda.set_rng_state(file.get_tensor("rng.cuda"))


def _locate(
    wanted: Iterable[StridedSlice], saved: Mapping[str, list[tuple[Any, int, int, StridedSlice]]]
) -> Iterator[tuple[Any, int, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (file, shard, into, outof, length) for each saved run that holds some of the wanted elements.

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
    """Where two runs of one parameter overlap: offsets into the first, offsets into the second, lengths (int64).

    A run is `count` pieces of `length` elements, `stride` apart. Both runs' pieces are sorted, so the pieces of the
    second that a piece of the first meets are neighbours, and two binary searches find the first and the last.
    """
    # Where each piece begins, as an offset in the parameter.
    a = wanted.start + np.arange(wanted.count, dtype=np.int64) * wanted.stride
    b = saved.start + np.arange(saved.count, dtype=np.int64) * saved.stride
    first = np.searchsorted(b + saved.length, a, side="right")
    meets = np.maximum(np.searchsorted(b, a + wanted.length, side="left") - first, 0)
    # One entry for each pair of pieces that meet: i counts pieces of the first run, j of the second.
    i = np.repeat(np.arange(wanted.count), meets)
    j = np.arange(meets.sum()) - np.repeat(np.cumsum(meets) - meets, meets) + np.repeat(first, meets)
    begin = np.maximum(a[i], b[j])
    end = np.minimum(a[i] + wanted.length, b[j] + saved.length)
    return i * wanted.length + begin - a[i], j * saved.length + begin - b[j], end - begin


def _copy(out: Tensor, source: Tensor, into: np.ndarray, outof: np.ndarray, length: np.ndarray) -> None:
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
