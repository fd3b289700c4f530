"""Turns a delta into bytes and back: one small interface over every wire format, with error feedback.

Formats: fp32, bf16; int8, int4 and e3m0 with a scale for each block; topk2, the largest elements of each
block as 2 bits each. The arithmetic is in `geotrain.kernels`, which gives the same bits from torch, Triton and C.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import fsum, isfinite
from typing import Any, cast

import torch
from torch import Tensor

from geotrain import kernels
from geotrain.config import CodecConfig, PluggedCodec
from geotrain.kernels.payload_format import SQUARES_BLOCK, PayloadFormat


class CodecError(ValueError):
    """A payload, or a tensor handed to the codec, has the wrong size, type or contents. Nothing has been written."""


class NonFiniteError(ValueError):
    """The tensor to encode holds infinities or NaN. The message names the parameter or fragment."""


def refusal(what: str) -> NonFiniteError:
    """The error that says that `what` (a parameter, a region's progress) cannot be sent; the caller raises it."""
    return NonFiniteError(
        f"{what}: holds infinities or NaN and cannot be sent; "
        "skip this delta and look for a diverged loss or a too high learning rate"
    )


@dataclass(frozen=True)
class EncodedDelta:
    """A coded tensor.

    payload: uint8, 1-D, on the same device as the tensor that was encoded.
    finite: whether every element was finite. On a GPU this is a 0-d tensor that the host has not read yet, because
    reading it would make training wait for the device.
    what: names the tensor in errors.
    """

    payload: Tensor
    finite: bool | Tensor
    what: str

    def check(self) -> EncodedDelta:
        """Return itself, or raise NonFiniteError if an element was not finite. On a GPU this waits for the device.

        `Codec.encode` has checked CPU tensors already. On a GPU, call this before the payload is sent.
        """
        if not bool(self.finite):
            raise refusal(self.what or "a tensor")
        return self


class Codec:
    """One wire format. It keeps no state: the caller owns the residuals, one for each stream of deltas.

    Tensors are read flat, in memory order. `values` may be fp32 or bf16; anchors, residuals and outputs are fp32; all
    are contiguous, on the same device.
    """

    def __init__(self, spec: PayloadFormat) -> None:
        self.name = spec.name
        self.spec = spec

    @property
    def error_feedback(self) -> bool:
        """Whether the caller must keep a residual (zeros at first, one for each stream of deltas) and pass it to
        every `encode`. True for every format but fp32, which loses nothing and so leaves nothing to carry over."""
        return self.name != "fp32"

    def encoded_bytes(self, numel: int) -> int:
        """Size in bytes of the payload of `numel` elements; it depends on nothing else, so receivers can check it."""
        return self.spec.encoded_bytes(numel)

    def encode(
        self,
        values: Tensor,
        *,
        anchor: Tensor | None = None,
        residual: Tensor | None = None,
        seed: int = 0,
        what: str = "",
        moves_anchor: bool = False,
    ) -> EncodedDelta:
        """Encode v = values + residual or, with an anchor, v = anchor − values + residual.

        One pass over memory. The residual (same size) becomes v − decoded(v), in place: what this payload could not
        express goes with the next one (error feedback). On hosts it may be bf16, which is rounded by chance.

        seed: of the random bits by which a bf16 residual is rounded. what: names the tensor in errors. moves_anchor:
        the anchor becomes the values (fp32, on a CPU), in the same pass. Raises CodecError, and NonFiniteError on a
        CPU; residual and anchor are then unusable, since those of the finite blocks were updated already.
        """
        try:
            payload, finite = kernels.quantize(
                values, self.spec, anchor=anchor, residual=residual, seed=seed, moves_anchor=moves_anchor
            )
        except ValueError as error:
            raise CodecError(f"{what or 'a tensor'}: {error}") from None
        if values.device.type == "cpu":
            return EncodedDelta(payload, bool(finite), what).check()
        # On a GPU the flag stays a tensor: `bool` would stop training until the device has caught up.
        return EncodedDelta(payload, finite, what)

    def decode(self, payload: Tensor, numel: int, *, out: Tensor | None = None, checked: bool = False) -> Tensor:
        """Return the `numel` fp32 values of a payload, in `out` if given.

        Raises CodecError if the payload's size is wrong or a scale is not finite or out of range. For a payload on a
        GPU that check would wait for the device: call `check` while it is still in host memory, then pass
        checked=True here.
        """
        if out is None:
            out = payload.new_empty(numel, dtype=torch.float32)
        elif out.numel() != numel:
            raise CodecError(f"decode: out has {out.numel()} elements, the payload {numel}")
        self._decode(payload, out, None, checked)
        return out

    def decode_accumulate(self, payload: Tensor, out: Tensor, weight: float = 1.0, *, checked: bool = False) -> None:
        """out += weight · decoded, in place; `out` is fp32 and as large as what was encoded. Raises as `decode`."""
        self._decode(payload, out, weight, checked)

    def decode_measured(self, payload: Tensor, out: Tensor) -> float:
        """Decode into `out` and return the sum of the squares of its values, from the same pass over memory.

        The sum has the same bits on every machine, so that a replay judges an update's norm alike. Raises CodecError
        as `decode` does. With fp32 and bf16 `out` has been written by then, unlike in `decode`.
        """
        # These two have no scales to look at beforehand. Checking every value would be a second pass over memory; the
        # sum of squares shows the same, since it is finite exactly when every value is (fp32 squared fits fp64).
        plain = self.name in ("fp32", "bf16")
        self._check_size(payload, out.numel())
        if not plain:
            self.check(payload, out.numel())
        squares = torch.empty(-(-out.numel() // SQUARES_BLOCK), dtype=torch.float64, device=out.device)
        self._dequantize(payload, out, squares=squares)
        total = fsum(squares.tolist())  # correctly rounded, so the order of the blocks does not matter
        if plain and not isfinite(total):
            raise self._not_finite(out.numel())
        return total

    def check(self, payload: Tensor, numel: int) -> None:
        """Raise CodecError unless this payload decodes to `numel` finite values."""
        self._check_size(payload, numel)
        if not kernels.payload_ok(payload, numel, self.spec):
            raise self._not_finite(numel)

    def _check_size(self, payload: Tensor, numel: int) -> None:
        wanted = self.encoded_bytes(numel)
        if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != wanted:
            raise CodecError(
                f"{self.name} payload of {numel} elements must be {wanted} bytes (uint8, 1-D), "
                f"not {tuple(payload.shape)} of {payload.dtype}"
            )

    def _not_finite(self, numel: int) -> CodecError:
        return CodecError(f"{self.name} payload of {numel} elements holds values that are not finite; refused")

    def _decode(self, payload: Tensor, out: Tensor, weight: float | None, checked: bool) -> None:
        if not checked:
            self.check(payload, out.numel())
        self._dequantize(payload, out, weight=weight)

    def _dequantize(self, payload: Tensor, out: Tensor, **how: Any) -> None:
        try:
            kernels.dequantize(payload, out, self.spec, **how)
        except ValueError as error:
            raise CodecError(f"decode: {error}") from None


def residual_dtype(config: CodecConfig, bf16_state: bool) -> torch.dtype | None:
    """Dtype of a server's residuals; None: the format needs none. Codecs of other packages take fp32 only."""
    if not make_codec(config).error_feedback:
        return None
    return torch.bfloat16 if bf16_state and not isinstance(config, PluggedCodec) else torch.float32


def make_codec(config: CodecConfig) -> Codec:
    """The codec that a run's configuration names."""
    if isinstance(config, PluggedCodec):
        return cast(Codec, config.codec())
    # Each codec's block has only the settings that mean something to it; they are named as the format's fields.
    return Codec(PayloadFormat(**config.model_dump()))


def rounding_seed(*stream: str | int) -> int:
    """The seed of one encoding's random bits, derived from what identifies it (sender, part, sequence, fragment).

    Every encoding has a seed of its own, so that the rounding errors of deltas that are summed are independent and
    average out. It is computed, not drawn, so that a replay gives the same bits.
    """
    # blake2b and not `hash`: Python salts the hashes of strings anew in every process.
    return int.from_bytes(blake2b(repr(stream).encode(), digest_size=8).digest(), "little")
