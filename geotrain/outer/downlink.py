"""How weights travel down: as they are, or as a coded change of what the receiver was last sent.

With a lossy codec both ends keep a mirror of what the receiver has; what a change leaves out stays in the
difference and goes with the next one: error feedback without a residual.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from geotrain.config import CodecConfig
from geotrain.outer.codec import Codec, CodecError, make_codec, rounding_seed
from geotrain.outer.messages import FragmentWeights
from geotrain.outer.staging import on_host

Bring = Callable[[bytes, Callable[[Tensor], None]], Tensor]  # (payload, its check in host memory) → where it is used

ABSOLUTE = ("fp32", "bf16")  # weights themselves survive these; anything coarser carries changes only


def sends_changes(config: CodecConfig) -> bool:
    return config.name not in ABSOLUTE


class WeightsSender:
    """The server's end, for one member."""

    def __init__(self, config: CodecConfig) -> None:
        self.changes = sends_changes(config)
        self.codec = make_codec(config)
        self.plain = make_codec(CodecConfig(name="fp32")) if self.changes else self.codec
        self.mirror: dict[int, Tensor] = {}

    def encode(self, fragment: int, version: int, held: Tensor) -> FragmentWeights:
        """held: the member's part of the fragment, fp32, 1-D."""
        what = f"weights of fragment {fragment}"
        if fragment in self.mirror:
            mirror = self.mirror[fragment]
            payload = self.codec.encode(held - mirror, seed=rounding_seed(version, fragment), what=what).payload
            self.codec.decode_accumulate(payload, mirror)
            return FragmentWeights(fragment, version, to_bytes(payload), increment=True)
        if self.changes:
            self.mirror[fragment] = held.clone()
        return FragmentWeights(fragment, version, to_bytes(self.plain.encode(held, what=what).payload))


class WeightsReceiver:
    """The member's end."""

    def __init__(self, config: CodecConfig) -> None:
        self.changes = sends_changes(config)
        self.codec = make_codec(config)
        self.plain = make_codec(CodecConfig(name="fp32")) if self.changes else self.codec
        self.mirror: dict[int, Tensor] = {}

    def check(self, weights: FragmentWeights, numel: int) -> None:
        """Raises CodecError unless `decode` can take them here."""
        self._codec_of(weights).check(from_bytes(weights.payload), numel)

    def decode(self, weights: FragmentWeights, numel: int, bring: Bring = on_host) -> Tensor:
        """The weights as fp32, 1-D, where `bring` puts the payload. The caller may not write to them.

        Raises CodecError; then nothing has changed.
        """
        codec = self._codec_of(weights)
        payload = bring(weights.payload, lambda host: codec.check(host, numel))
        if weights.increment:
            mirror = self.mirror[weights.fragment]
            codec.decode_accumulate(payload, mirror, checked=True)
            return mirror
        vector = codec.decode(payload, numel, checked=True)
        if self.changes:
            self.mirror[weights.fragment] = vector
        return vector

    def _codec_of(self, weights: FragmentWeights) -> Codec:
        if weights.increment and (not self.changes or weights.fragment not in self.mirror):
            raise CodecError(f"a change of fragment {weights.fragment} came, but not what it changes")
        return self.codec if weights.increment else self.plain


def to_bytes(payload: Tensor) -> bytes:
    return payload.cpu().numpy().tobytes()


def from_bytes(payload: bytes) -> Tensor:
    """uint8, 1-D, a copy."""
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
