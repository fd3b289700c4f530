"""Reading a flat state, saved by any layout, for the runs of another: only the elements that are wanted."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from geotrain.canonical import Run


@dataclass(frozen=True)
class Piece:
    """Part of a saved shard that is wanted: elements saved[i] … saved[i] + length[i] go to wanted[i] …"""

    file: int
    shard: int
    wanted: np.ndarray
    saved: np.ndarray
    length: np.ndarray


def overlap(wanted: Run, saved: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where two runs of one parameter meet: offsets into the first, offsets into the second, lengths (int64)."""
    a = wanted.start + np.arange(wanted.count, dtype=np.int64) * wanted.stride
    b = saved.start + np.arange(saved.count, dtype=np.int64) * saved.stride
    first = np.searchsorted(b + saved.length, a, side="right")
    meets = np.maximum(np.searchsorted(b, a + wanted.length, side="left") - first, 0)
    i = np.repeat(np.arange(wanted.count), meets)
    j = np.arange(meets.sum()) - np.repeat(np.cumsum(meets) - meets, meets) + np.repeat(first, meets)
    begin = np.maximum(a[i], b[j])
    end = np.minimum(a[i] + wanted.length, b[j] + saved.length)
    return i * wanted.length + begin - a[i], j * saved.length + begin - b[j], end - begin


class Reader:
    """Rank files of a checkpoint, read lazily. Use as a context manager."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._stack = contextlib.ExitStack()
        self._files: list[Any] = []
        self._saved: dict[str, list[tuple[int, int, int, Run]]] = defaultdict(list)  # file, shard, offset, run
        for path in paths:
            file = self._stack.enter_context(safe_open(path, "pt"))
            for shard, runs in enumerate(json.loads(file.metadata()["shards"])):
                offset = 0
                for run in (Run(*fields) for fields in runs):
                    self._saved[run.parameter].append((len(self._files), shard, offset, run))
                    offset += run.numel
            self._files.append(file)

    def locate(self, runs: Sequence[Run]) -> list[Piece]:
        """What to read for these runs. Raises ValueError if some elements were not saved."""
        pieces, position = [], 0
        for run in runs:
            found = 0
            for file, shard, offset, saved in self._saved[run.parameter]:
                end, saved_end = (r.start + (r.count - 1) * r.stride + r.length for r in (run, saved))
                if saved.start >= end or run.start >= saved_end:
                    continue
                into, outof, length = overlap(run, saved)
                if length.size:
                    pieces.append(Piece(file, shard, into + position, outof + offset, length))
                    found += int(length.sum())
            if found != run.numel:
                raise ValueError(f"{run.parameter}: {found} of {run.numel} wanted elements were saved")
            position += run.numel
        return pieces

    def read(self, pieces: Sequence[Piece], name: str, numel: int) -> Tensor:
        """A new 1-D tensor of `numel` elements of the state `name`."""
        out: Tensor | None = None
        for piece in pieces:
            low, high = int(piece.saved.min()), int((piece.saved + piece.length).max())
            source = self._files[piece.file].get_slice(f"{piece.shard}.{name}")[low:high]
            if out is None:
                out = torch.empty(numel, dtype=source.dtype)
            _copy(out, source, piece.wanted, piece.saved - low, piece.length)
        assert out is not None
        return out

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _copy(out: Tensor, source: Tensor, into: np.ndarray, outof: np.ndarray, length: np.ndarray) -> None:
    steps = [np.unique(np.diff(x)) for x in (into, outof)]
    if np.unique(length).size == 1 and all(s.size <= 1 for s in steps):  # rows of a matrix: one strided copy
        shape = (length.size, int(length[0]))
        to_step, from_step = (int(s[0]) if s.size else shape[1] for s in steps)
        target = out.as_strided(shape, (to_step, 1), int(into[0]))
        target.copy_(source.as_strided(shape, (from_step, 1), source.storage_offset() + int(outof[0])))
        return
    for to, start, n in zip(into.tolist(), outof.tolist(), length.tolist(), strict=True):
        out[to : to + n] = source[start : start + n]
