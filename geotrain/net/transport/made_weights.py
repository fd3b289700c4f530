"""First weights that a member has made by itself, in place of an answer to its join."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import sha256

from geotrain.outer.messages import ChunkWeights


@dataclass(frozen=True)
class MadeWeights:
    """The weights of an answer to a join, with their digests: a receiver that has made them by itself needs a word
    only."""

    weights: tuple[ChunkWeights, ...]
    digests: tuple[bytes, ...]

    @staticmethod
    def of(weights: Iterable[ChunkWeights]) -> MadeWeights:
        found = tuple(weights)
        heads = (f"{w.chunk} {w.version} {w.increment} ".encode() for w in found)
        return MadeWeights(found, tuple(h + sha256(w.payload).digest() for h, w in zip(heads, found, strict=True)))

    @property
    def digest(self) -> str:
        return sha256(b"".join(sorted(self.digests))).hexdigest()

    def only(self, chunks: Collection[int]) -> MadeWeights:
        kept = [(w, d) for w, d in zip(self.weights, self.digests, strict=True) if w.chunk in chunks]
        return MadeWeights(tuple(w for w, _ in kept), tuple(d for _, d in kept))
