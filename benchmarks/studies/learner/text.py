"""Real text, as bytes, that the repository carries: the sources of Python's standard library and pydoc's topics."""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benchmarks import DATA

CARRIED = DATA / "text.xz"  # its licence is beside it
ENDS = 9_374_785, 10_628_345  # of what is trained on and of the selection slice; the test slice is the rest
DIGEST = "c35bd61df602adae"  # of all its files, as keys of rows have it
MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class Text:
    """uint8 arrays. train: in four parts; no sample spans two. selection, test: other files, which are never trained
    on. digest: of all files."""

    train: tuple[np.ndarray, ...]
    selection: np.ndarray
    test: np.ndarray
    digest: str

    def windows(self, part: np.ndarray, count: int, length: int) -> np.ndarray:
        """`count` windows of length + 1 bytes, spread evenly over a held-out part: int64 [count, length + 1]."""
        starts = np.linspace(0, len(part) - length - 1, count).astype(np.int64)
        return part[starts[:, None] + np.arange(length + 1)].astype(np.int64)

    def samples(self, first: int, count: int, length: int, seed: int) -> np.ndarray:
        """Training samples first … first + count − 1 of a run: int64 [count, length + 1]. Which text a number means
        depends on the seed alone."""
        numbers = _mixed(np.arange(first, first + count, dtype=np.uint64) + np.uint64(seed) * np.uint64(1 << 40))
        ends = np.cumsum([len(p) - length - 1 for p in self.train])
        places = (numbers % np.uint64(ends[-1])).astype(np.int64)
        which = np.searchsorted(ends, places, side="right")
        rows = []
        for place, i in zip(places, which, strict=True):
            start = place - (ends[i - 1] if i else 0)
            rows.append(self.train[i][start : start + length + 1])
        return np.stack(rows).astype(np.int64)


@lru_cache(maxsize=1)
def carried_text() -> Text:
    """The text that the repository carries, the same on every Python, 11 MB. Its files are those of CPython 3.11.7's
    standard library but for tests, in the order of their paths; held out are those whose path's SHA-256 says so."""
    data = np.frombuffer(lzma.decompress(CARRIED.read_bytes()), np.uint8)
    train, selection, test = np.split(data, ENDS)
    return Text(tuple(np.array_split(train, 4)), selection, test, DIGEST)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Splitmix64's finalizer: numbers in a row become numbers all over."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)) & MASK
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
