"""Delta ↔ bytes: one small interface over every wire format, with error feedback.

Formats: fp32, bf16; int8, int4, e3m0 and e2m1 with a scale for each block; topk2, the largest elements of each
block as 2 bits each. The arithmetic is in `geotrain.kernels`, which gives the same bits from torch, Triton and C.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from geotrain import kernels
from geotrain.config import CodecConfig
from geotrain.kernels.layout import Spec


class CodecError(ValueError):
    """A payload, or a tensor handed to the codec, is not what it must be. Nothing has been written."""


class NonFiniteError(ValueError):
    """What was to be encoded holds infinities or NaN. Names the parameter or fragment."""


def refusal(what: str) -> NonFiniteError:
    return NonFiniteError(
        f"{what}: holds infinities or NaN and cannot be sent; "
        "skip this delta and look for a diverged loss or a too high learning rate"
    )


@dataclass(frozen=True)
class Encoded:
    """A coded tensor.

    payload: uint8, 1-D, on the device of what was encoded.
    sum_of_squares: of what was meant to be sent (values + decayed residual); a float, on a GPU a 0-d tensor.
    finite: whether all of it was finite; on a GPU a 0-d tensor, so that encoding never waits for the device.
    """

    payload: Tensor
    sum_of_squares: float | Tensor
    finite: bool | Tensor
    what: str

    def check(self) -> Encoded:
        """Raise NonFiniteError unless all was finite; on a GPU this waits for the device.

        CPU tensors are checked when they are encoded. On a GPU, call this before the payload is sent.
        """
        if not bool(self.finite):
            raise refusal(self.what or "a tensor")
        return self


class Codec:
    """One wire format. Stateless: residuals belong to the caller.

    Tensors are taken flat in memory order. `values` and `weights` may be fp32 or bf16; anchors, residuals and outputs
    are fp32 and contiguous, on the same device. error_feedback: whether the caller is to keep a residual (zeros at
    first, one for each stream of deltas) and pass it with every encode; never for fp32, which leaves nothing.
    """

    def __init__(self, name: str, spec: Spec, error_feedback: bool) -> None:
        self.name = name
        self.error_feedback = error_feedback and name != "fp32"
        self._spec = spec

    def encoded_bytes(self, numel: int) -> int:
        """Exact payload size, in advance."""
        return self._spec.encoded_bytes(numel)

    def encode(self, values: Tensor, *, residual: Tensor | None = None, seed: int = 0, what: str = "") -> Encoded:
        """Code v = values + decay · residual; residual (fp32, same size) becomes v − decoded, in place.

        seed: chooses the random bits of stochastic rounding. what: names the tensor in errors. Raises
        NonFiniteError (the residual of blocks that were finite has then been spent: drop it), CodecError.
        """
        return self._encode(values, None, residual, seed, what)

    def encode_delta(
        self, anchor: Tensor, weights: Tensor, *, residual: Tensor | None = None, seed: int = 0, what: str = ""
    ) -> Encoded:
        """Code v = anchor − weights + decay · residual in one pass over memory; else as `encode`."""
        return self._encode(weights, anchor, residual, seed, what)

    def decode(self, payload: Tensor, numel: int, *, out: Tensor | None = None, checked: bool = False) -> Tensor:
        """The `numel` fp32 values of a payload, in `out` if given.

        Raises CodecError if the payload's size is wrong or a scale is not finite or out of range. On a GPU that
        check waits for the device: `check` the payload while it is in host memory and pass checked=True.
        """
        if out is None:
            out = torch.empty(numel, dtype=torch.float32, device=payload.device)
        elif out.numel() != numel:
            raise CodecError(f"decode: out has {out.numel()} elements, the payload {numel}")
        self._decode(payload, out, None, checked)
        return out

    def decode_accumulate(self, payload: Tensor, out: Tensor, weight: float = 1.0, *, checked: bool = False) -> None:
        """out += weight · decoded, in place; `out` is fp32 and as large as what was encoded. Raises as `decode`."""
        self._decode(payload, out, weight, checked)

    def check(self, payload: Tensor, numel: int) -> None:
        """Raise CodecError unless this payload decodes to `numel` finite values."""
        wanted = self.encoded_bytes(numel)
        if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != wanted:
            raise CodecError(
                f"{self.name} payload of {numel} elements must be {wanted} bytes (uint8, 1-D), "
                f"not {tuple(payload.shape)} of {payload.dtype}"
            )
        if not bool(kernels.payload_ok(payload, numel, self._spec)):
            raise CodecError(f"{self.name} payload of {numel} elements holds values that are not finite; refused")

    def _encode(
        self, values: Tensor, anchor: Tensor | None, residual: Tensor | None, seed: int, what: str
    ) -> Encoded:
        if values.dtype not in (torch.float32, torch.bfloat16):
            raise CodecError(f"{what or 'a tensor'}: is {values.dtype}; the codecs take float32 and bfloat16")
        for role, other in (("anchor", anchor), ("residual", residual)):
            if other is not None:
                _need_fp32(other, values.numel(), values.device, f"{what or 'a tensor'}: its {role}")
        payload, sum_of_squares, finite = kernels.quantize(
            values, self._spec, anchor=anchor, residual=residual, seed=seed
        )
        if values.device.type == "cpu":
            return Encoded(payload, float(sum_of_squares), bool(finite), what).check()
        return Encoded(payload, sum_of_squares, finite, what)

    def _decode(self, payload: Tensor, out: Tensor, weight: float | None, checked: bool) -> None:
        _need_fp32(out, out.numel(), payload.device, "decode: out")
        if not checked:
            self.check(payload, out.numel())
        kernels.dequantize(payload, out, self._spec, weight=weight)


def make_codec(config: CodecConfig) -> Codec:
    """The codec that a run's configuration names."""
    spec = Spec(
        format=config.name,
        block=config.block,
        scale=config.scale,
        stochastic=config.rounding == "stochastic",
        error_decay=config.error_decay,
        density=config.density,
    )
    return Codec(config.name, spec, config.error_feedback)


def rounding_seed(*stream: str | int) -> int:
    """The seed of one encoding's random bits: another for each sender, part, sequence number and fragment, so that
    the errors of what is summed are independent; the same in a replay."""
    return int.from_bytes(blake2b(repr(stream).encode(), digest_size=8).digest(), "little")


def _need_fp32(tensor: Tensor, numel: int, device: torch.device, role: str) -> None:
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise CodecError(f"{role} must be contiguous float32, is {tensor.dtype} with strides {tensor.stride()}")
    if tensor.numel() != numel or tensor.device != device:
        raise CodecError(f"{role} must have {numel} elements on {device}, has {tensor.numel()} on {tensor.device}")
