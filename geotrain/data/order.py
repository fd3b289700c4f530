"""The order in which a run trains its samples: a pseudo-random permutation that needs no memory and no state.

Sample i of a run belongs to epoch i // n, and in it takes the place that a permutation of [0, n) gives to i mod n.
The permutation is a balanced Feistel network over the next power of four; a value that lands outside [0, n) is
encrypted again until it lands inside, which keeps it a permutation (cycle walking: Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002, §3).

So any process can compute any part of the order by itself. That is why a lease is two numbers, and why resuming a run
or giving a lease to another worker moves no state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

_ROUNDS = 8  # of the Feistel network
_Int64 = npt.NDArray[np.int64]
_UInt64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class SampleOrder:
    """The order of a data set's samples. samples_per_epoch: n, at least 1.

    The same (n, seed) gives the same order on every machine, for ever.
    """

    samples_per_epoch: int
    seed: int

    def positions(self, samples: npt.NDArray[Any]) -> _Int64:
        """Find the places in [0, n) of samples of the run (int64, ≥ 0, any shape). Each epoch visits each place
        once."""
        samples = np.asarray(samples, np.int64)
        epochs, indices = np.divmod(samples, self.samples_per_epoch)
        positions = np.empty_like(samples)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            positions[chosen] = self._permute(indices[chosen].astype(np.uint64), int(epoch)).astype(np.int64)
        return positions

    def _permute(self, values: _UInt64, epoch: int) -> _UInt64:
        half_bits = max(1, ((self.samples_per_epoch - 1).bit_length() + 1) // 2)  # smallest with 4^half_bits ≥ n
        keys = _round_keys(self.seed, epoch)
        values = _feistel(values, half_bits, keys)
        while (outside := values >= self.samples_per_epoch).any():  # fewer than 4 turns on average
            values[outside] = _feistel(values[outside], half_bits, keys)
        return values


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    # Kept, because the loader asks for the same epoch at every batch.
    digest = hashlib.blake2b(f"sample order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(np.frombuffer(digest, "<u8"))


def _feistel(values: _UInt64, half_bits: int, keys: tuple[np.uint64, ...]) -> _UInt64:
    """Permute [0, 4^half_bits), with any keys: each round can be undone from its own output."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return left << shift | right


def _mix(z: _UInt64) -> _UInt64:
    """Mix bits by the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators",
    2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
