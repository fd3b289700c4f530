"""Codes of gradients and of weights' changes, in which they travel between data-parallel ranks.

The kernels are those of the outer loop's codecs. Nothing that a code loses is lost for good. A gradient's sum keeps
it, and the next gradients are added to that. A weight's change is coded as the difference between what it should be
and what all ranks hold, so that the next difference has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from geotrain import kernels
from geotrain.kernels.payload_format import PayloadFormat
from geotrain.parallelism.checks import CODED_AT_ONCE
from geotrain.parallelism.whole_matrices import ALIGNED


class Codes:
    """Encodes and decodes lists of 1-D tensors, each list to and from one tensor of bytes."""

    def __init__(self, bits: int) -> None:
        """Make codes of 4 or 8 bits; each ALIGNED elements share a scale."""
        self.format = PayloadFormat(f"int{bits}", block=ALIGNED)

    def bytes(self, tensors: Sequence[Tensor]) -> int:
        """Count the bytes of the codes of these tensors."""
        return sum(piece.stop - piece.start for *_, piece in self._pieces(tensors))

    def encode_sums(self, sums: Sequence[Tensor], out: Tensor) -> None:
        """Encode fp32 sums of gradients; they then hold what the codes lose."""
        pieces = list(self._pieces(sums))
        longest = max((end - begin for _, begin, end, _ in pieces), default=0)
        zeros = out.new_zeros(longest, dtype=torch.bfloat16)  # the kernel encodes a sum of two; one is enough here
        for i, begin, end, piece in pieces:
            left = sums[i][begin:end]
            kernels.quantize(zeros[: end - begin], self.format, residual=left, payload=self._used(out[piece], left))

    def encode_changes(self, held: Sequence[Tensor], wanted: Sequence[Tensor], out: Tensor) -> None:
        """Encode how weights that all ranks hold, fp32 or bf16, must change to become those wanted, fp32."""
        for i, begin, end, piece in self._pieces(held):
            have, want = held[i][begin:end], wanted[i][begin:end]
            kernels.quantize(have, self.format, anchor=want, payload=self._used(out[piece], have))

    def decode(self, codes: Tensor, sums: Sequence[Tensor], first: bool) -> None:
        """Write decoded values to fp32 sums, or add them if they are not the first."""
        for i, begin, end, piece in self._pieces(sums):
            out = sums[i][begin:end]
            kernels.dequantize(self._used(codes[piece], out), out, self.format, weight=None if first else 1.0)

    def change(self, codes: Tensor, held: Sequence[Tensor]) -> None:
        """Apply coded changes to the weights, which get the same bits on every rank."""
        for i, begin, end, piece in self._pieces(held):
            out = held[i][begin:end]
            kernels.add_decoded(self._used(codes[piece], out), out, out, self.format, weight=1.0)

    def _used(self, codes: Tensor, like: Tensor) -> Tensor:
        return codes[: self.format.encoded_bytes(like.numel())]

    def _pieces(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, int, int, slice]]:
        """Cut these tensors. Yields (which tensor, [begin, end) in it, bytes of its codes), which begin at
        multiples of 16, as wide loads want them."""
        at = 0
        for i, tensor in enumerate(tensors):
            for begin in range(0, tensor.numel(), CODED_AT_ONCE):
                end = min(begin + CODED_AT_ONCE, tensor.numel())
                stop = at + -(-self.format.encoded_bytes(end - begin) // 16) * 16
                yield i, begin, end, slice(at, stop)
                at = stop
