"""How weights travel down to a member: whole, or as a coded change against what that member already has.

With a lossy codec both ends keep a *mirror*, the vector that the receiver has after decoding everything sent so far.
The sender codes the difference between its weights and the mirror, then decodes its own payload into the mirror, as
the receiver will. What coding lost is therefore part of the next difference: error feedback without a residual.

Each end also keeps a *mark* of its mirror, which follows from all that went into it. So after a restart of either end
both know whether the mirrors are still equal; if they are not, the next weights go whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
from torch import Tensor

from geotrain.config import CodecConfig, codec_config
from geotrain.outer.codec import Codec, CodecError, make_codec, rounding_seed
from geotrain.outer.messages import PieceWeights
from geotrain.outer.mirror_store import Shelf
from geotrain.staging.interface import from_bytes, on_host, to_bytes

# Takes a payload and a check, runs the check on the payload in host memory, returns it on the device that decodes it.
Bring = Callable[[bytes, Callable[[Tensor], None]], Tensor]

# Precise enough to carry weights themselves. Coarser formats spend their few levels on the much smaller changes.
ABSOLUTE = ("fp32", "bf16")
MARK_BYTES = 1 << 18  # so much of a payload, spread over it, goes into a mark
VALIDATION_CODEC = codec_config("bf16")


def sends_changes(config: CodecConfig) -> bool:
    """Whether this codec, on a way down, carries changes against a mirror instead of whole weights."""
    return config.name not in ABSOLUTE


class _Mirror:
    """What both ends of a way down keep. mirror: piece → fp32 vector that the receiver has of it (empty for codecs
    that carry whole weights). marks: piece → mark of the mirror."""

    def __init__(self, config: CodecConfig, shelf: Shelf | None = None) -> None:
        self.changes, self.shelf = sends_changes(config), shelf or Shelf()  # the mirror's; callers fetch it
        self.codec = make_codec(config)
        # The first weights go whole, and exactly: there is nothing yet that they could be a change of.
        self.plain = make_codec(codec_config("fp32")) if self.changes else self.codec
        self.mirror: dict[int, Tensor] = {}
        self.marks: dict[int, int] = {}
        self.before: dict[int, int] = {}  # a sender's: piece → the mark before the last weights of it

    def _note(self, weights: PieceWeights) -> PieceWeights:
        """The mirror holds these weights now."""
        before = self.marks.get(weights.piece, 0) if weights.increment else 0
        self.marks[weights.piece] = mark(weights, before)
        return weights


def mark(weights: PieceWeights, before: int) -> int:
    """The mark of a mirror into which these weights have gone. before: its mark before them; 0: it was empty.

    It tells histories apart, for which a sample of the payload is enough: frames have checksums of their own."""
    sample = np.frombuffer(weights.payload, np.uint8)[:: 1 + len(weights.payload) // MARK_BYTES]
    return (weights.version + 1 << 32 | zlib.crc32(sample.tobytes(), before & 0xFFFFFFFF)) & (1 << 63) - 1


class WeightsSender(_Mirror):
    """The server's end, for one part of one member."""

    def encode(self, piece: int, version: int, held: Tensor) -> PieceWeights:
        """Encode the weights for this receiver; with changes, its mirror then holds what the receiver will have.

        held: the receiver's elements of the piece, fp32, 1-D. With changes, every message must be delivered, once
        and in order, or the two mirrors differ; for a member that lost one, `matches` is false.
        """
        what = f"weights of piece {piece}"
        was_whole, self.before[piece] = not self.before.get(piece), self.marks.get(piece, 0)
        if piece in self.mirror:
            if was_whole:  # the mirror is still the memory of that payload
                self.mirror[piece] = self.shelf.put(self.mirror[piece].clone())
            mirror, seed = self.mirror[piece], rounding_seed(version, piece)
            # The codec encodes anchor − values, so this is the change: weights now minus what the receiver has.
            payload = self.codec.encode(mirror, anchor=held, seed=seed, what=what).payload
            self.codec.decode_accumulate(payload, mirror)
            return self._note(PieceWeights(piece, version, to_bytes(payload), increment=True))
        payload = self.plain.encode(held, what=what).payload
        if not self.changes:
            return PieceWeights(piece, version, to_bytes(payload))
        mirror = self.mirror[piece] = self.shelf.put(payload.view(held.dtype))  # not copied before the next change
        return self._note(PieceWeights(piece, version, to_bytes(mirror.view(payload.dtype))))


class WeightsReceiver(_Mirror):
    """The member's end."""

    def check(self, weights: PieceWeights, numel: int) -> None:
        """Raise CodecError if `decode` would refuse these weights. numel: elements that this receiver has of it."""
        self._codec_of(weights).check(from_bytes(weights.payload), numel)

    def decode(self, weights: PieceWeights, numel: int, bring: Bring = on_host) -> Tensor:
        """Return the weights as fp32, 1-D, on the device to which `bring` takes the payload.

        The caller must not write to them: the vector may be the mirror itself, against which the next change is
        decoded. Raises CodecError; then nothing has changed.
        """
        codec = self._codec_of(weights)
        payload = bring(weights.payload, lambda host: codec.check(host, numel))
        if weights.increment:
            mirror = self.mirror[weights.piece]
            codec.decode_accumulate(payload, mirror, checked=True)
            self._note(weights)
            return mirror
        vector = codec.decode(payload, numel, checked=True)
        if self.changes:
            vector = self.mirror[weights.piece] = self.shelf.put(vector)
            self._note(weights)
        return vector

    def marks_of(self, pieces: int) -> tuple[int, ...]:
        """The marks of all pieces, for a join; 0: nothing is here. Empty where weights travel whole."""
        return tuple(self.marks.get(i, 0) for i in range(pieces)) if self.changes else ()

    def clear(self) -> None:
        """Forget everything: the next weights must be whole."""
        self.mirror.clear()
        self.marks.clear()

    def _codec_of(self, weights: PieceWeights) -> Codec:
        if weights.increment and (not self.changes or weights.piece not in self.mirror):
            raise CodecError(f"a change of piece {weights.piece} came, but not what it changes")
        return self.codec if weights.increment else self.plain
