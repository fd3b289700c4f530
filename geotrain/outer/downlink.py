"""Codes weights on their way down to a member: whole, or as a change against what that member already has.

With a lossy codec both ends keep a *mirror*, the vector that the receiver has after decoding everything sent so far.
The sender codes the difference between its weights and the mirror, then decodes its own payload into the mirror, as
the receiver will. What coding lost is therefore part of the next difference: error feedback without a residual.

Each end also keeps a *fingerprint* of its mirror, which follows from all that went into it. So after a restart of
either end both know whether the mirrors are still equal; if they are not, the next weights go whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import numpy as np
from torch import Tensor

from geotrain.config import CodecConfig, codec_config
from geotrain.outer.codec import Codec, CodecError, make_codec, rounding_seed
from geotrain.outer.messages import ChunkWeights
from geotrain.outer.mirror_store import MirrorStore
from geotrain.staging.interface import from_bytes, on_host, to_bytes

# Takes a payload and a check, runs the check on the payload in host memory, returns it on the device that decodes it.
Bring = Callable[[bytes, Callable[[Tensor], None]], Tensor]

# Precise enough to carry weights themselves. Coarser formats spend their few levels on the much smaller changes.
ABSOLUTE = ("fp32", "bf16")
FINGERPRINT_BYTES = 1 << 18  # so much of a payload, spread over it, goes into a fingerprint
VALIDATION_CODEC = codec_config("bf16")


def sends_changes(config: CodecConfig) -> bool:
    """Whether this codec, on a way down, carries changes against a mirror instead of whole weights."""
    return config.name not in ABSOLUTE


class _Mirror:
    """State of both ends of a way down.

    mirror: chunk → fp32 vector that the receiver has of it (empty for codecs that carry whole weights).
    fingerprints: chunk → fingerprint of its mirror. before: chunk → fingerprint before the last weights (sender).
    """

    def __init__(self, config: CodecConfig, mirror_store: MirrorStore | None = None) -> None:
        self.changes = sends_changes(config)
        self.mirror_store = mirror_store or MirrorStore()  # of the mirror
        self.codec = make_codec(config)
        # The first weights go whole, and exactly: there is nothing yet that they could be a change of.
        self.plain = make_codec(codec_config("fp32")) if self.changes else self.codec
        self.mirror: dict[int, Tensor] = {}
        self.fingerprints: dict[int, int] = {}
        self.before: dict[int, int] = {}

    def fetch(self, chunks: Iterable[int]) -> None:
        """Begin to read the mirrors of chunks whose next changes are about to be coded or decoded."""
        self.mirror_store.fetch([self.mirror[chunk] for chunk in chunks if chunk in self.mirror])

    def _note(self, weights: ChunkWeights) -> ChunkWeights:
        """Note that the mirror holds these weights now; return them."""
        before = self.fingerprints.get(weights.chunk, 0) if weights.increment else 0
        self.fingerprints[weights.chunk] = fingerprint(weights, before)
        return weights


def fingerprint(weights: ChunkWeights, before: int) -> int:
    """Fingerprint of a mirror into which these weights have gone. before: the one before them; 0: it was empty.

    It distinguishes histories, for which a sample of the payload is enough: frames have checksums of their own."""
    sample = np.frombuffer(weights.payload, np.uint8)[:: 1 + len(weights.payload) // FINGERPRINT_BYTES]
    return (weights.version + 1 << 32 | zlib.crc32(sample.tobytes(), before & 0xFFFFFFFF)) & (1 << 63) - 1


class WeightsSender(_Mirror):
    """The server's end of a way down, for one part of one member."""

    def forget(self, chunks: Iterable[int]) -> None:
        """Forget what was sent of these chunks: their next weights go whole."""
        for chunk in chunks:
            for table in (self.mirror, self.fingerprints, self.before):
                table.pop(chunk, None)

    def encode(self, chunk: int, version: int, held: Tensor) -> ChunkWeights:
        """Encode the weights for this receiver; with changes, its mirror then holds what the receiver will have.

        held: the receiver's elements of the chunk, fp32, 1-D. With changes, every message must be delivered, once
        and in order, or the two mirrors differ; a member that lost one joins with other fingerprints.
        """
        what = f"weights of chunk {chunk}"
        was_whole, self.before[chunk] = not self.before.get(chunk), self.fingerprints.get(chunk, 0)
        if chunk in self.mirror:
            if was_whole:  # the mirror is still the memory of that payload
                self.mirror[chunk] = self.mirror_store.put(self.mirror[chunk].clone())
            mirror, seed = self.mirror_store.page_in(self.mirror[chunk]), rounding_seed(version, chunk)
            # The codec encodes anchor − values, so this is the change: weights now minus what the receiver has.
            payload = self.codec.encode(mirror, anchor=held, seed=seed, what=what).payload
            self.codec.decode_accumulate(payload, mirror)
            self.mirror_store.page_out(self.mirror[chunk])
            return self._note(ChunkWeights(chunk, version, to_bytes(payload), increment=True))
        payload = self.plain.encode(held, what=what).payload
        if not self.changes:
            return ChunkWeights(chunk, version, to_bytes(payload))
        # not copied before the next change
        mirror = self.mirror[chunk] = self.mirror_store.put(payload.view(held.dtype))
        return self._note(ChunkWeights(chunk, version, to_bytes(mirror.view(payload.dtype))))


class WeightsReceiver(_Mirror):
    """The member's end of a way down."""

    def check(self, weights: ChunkWeights, numel: int) -> None:
        """Raise CodecError if `decode` would refuse these weights. numel: elements that this receiver has of it."""
        self._codec_of(weights).check(from_bytes(weights.payload), numel)

    def decode(self, weights: ChunkWeights, numel: int, bring: Bring = on_host) -> Tensor:
        """Return the weights as fp32, 1-D, on the device to which `bring` takes the payload.

        The caller must not write to them: the vector may be the mirror itself, against which the next change is
        decoded, until `page_out` takes it back. Raises CodecError; then nothing has changed.
        """
        codec = self._codec_of(weights)
        payload = bring(weights.payload, lambda host: codec.check(host, numel))
        if weights.increment:
            mirror = self.mirror_store.page_in(self.mirror[weights.chunk])
            codec.decode_accumulate(payload, mirror, checked=True)
            self._note(weights)
            return mirror
        vector = codec.decode(payload, numel, checked=True)
        if self.changes:
            self.mirror[weights.chunk] = self.mirror_store.put(vector)
            self._note(weights)
        return vector

    def page_out(self, chunk: int) -> None:
        """Take back what `decode` returned of the chunk."""
        if chunk in self.mirror:
            self.mirror_store.page_out(self.mirror[chunk])

    def fingerprints_of(self, chunks: int) -> tuple[int, ...]:
        """Return the fingerprints of all chunks, for a join; 0: none is here. Empty where weights travel whole."""
        return tuple(self.fingerprints.get(i, 0) for i in range(chunks)) if self.changes else ()

    def clear(self) -> None:
        """Forget everything: the next weights must be whole."""
        self.mirror.clear()
        self.fingerprints.clear()

    def _codec_of(self, weights: ChunkWeights) -> Codec:
        if weights.increment and (not self.changes or weights.chunk not in self.mirror):
            raise CodecError(f"a change of chunk {weights.chunk} came, but not what it changes")
        return self.codec if weights.increment else self.plain
