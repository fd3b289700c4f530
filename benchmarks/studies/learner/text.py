"""Real text on any machine: the sources of Python's standard library and pydoc's topics, as bytes."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}
MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class Text:
    """uint8 arrays. train: in four quarters, which differ in their kind of text because files are in the order of
    their paths. selection, test: other files, which are never trained on. digest: of all files, since the text
    depends on the Python version."""

    train: tuple[np.ndarray, ...]
    selection: np.ndarray
    test: np.ndarray
    digest: str

    def windows(self, part: np.ndarray, count: int, length: int) -> np.ndarray:
        """`count` windows of length + 1 bytes, spread evenly over a held-out part: int64 [count, length + 1]."""
        starts = np.linspace(0, len(part) - length - 1, count).astype(np.int64)
        return part[starts[:, None] + np.arange(length + 1)].astype(np.int64)

    def samples(self, first: int, count: int, length: int, seed: int, quarter: int | None = None) -> np.ndarray:
        """Training samples first … first + count − 1 of a run: int64 [count, length + 1]. Which text a number means
        depends on the seed alone. quarter: only that kind of text (regions with different data)."""
        numbers = _mixed(np.arange(first, first + count, dtype=np.uint64) + np.uint64(seed) * np.uint64(1 << 40))
        parts = self.train if quarter is None else (self.train[quarter % len(self.train)],)
        ends = np.cumsum([len(p) - length - 1 for p in parts])
        places = (numbers % np.uint64(ends[-1])).astype(np.int64)
        which = np.searchsorted(ends, places, side="right")
        rows = []
        for place, i in zip(places, which, strict=True):
            start = place - (ends[i - 1] if i else 0)
            rows.append(parts[i][start : start + length + 1])
        return np.stack(rows).astype(np.int64)


@lru_cache(maxsize=1)
def standard_library() -> Text:
    """The text of the Python that runs this, about 11 MB. Which files are held out follows from their names alone."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        files += [Path(folder) / name for name in names if name.endswith(".py") and name not in LEFT_OUT]
    files.sort()
    train: list[bytes] = []
    held_out: dict[str, list[bytes]] = {"selection": [], "test": []}
    whole = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        whole.update(content)
        place = hashlib.sha256(str(path.relative_to(root)).encode()).digest()[0]
        if place < 26:
            held_out["selection" if place % 2 else "test"].append(content)
        else:
            train.append(content)
    return Text(
        _quarters(train),
        np.frombuffer(b"".join(held_out["selection"]), np.uint8),
        np.frombuffer(b"".join(held_out["test"]), np.uint8),
        whole.hexdigest()[:16],
    )


def _quarters(files: list[bytes]) -> tuple[np.ndarray, ...]:
    text = np.frombuffer(b"".join(files), np.uint8)
    return tuple(np.array_split(text, 4))


def _mixed(x: np.ndarray) -> np.ndarray:
    """Splitmix64's finalizer: numbers in a row become numbers all over."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)) & MASK
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
