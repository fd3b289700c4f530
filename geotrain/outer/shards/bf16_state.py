"""State that a server keeps in 16 bits between updates (`outer.server_state`): momenta, accumulators, residuals.

A momentum moves by a thousandth of itself at each update, less than bf16 resolves. So it is rounded up or down by
chance, right on the average; the random bits follow from a seed, so a replay and any number of shards give the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from geotrain import kernels
from geotrain.kernels.payload_format import PayloadFormat
from geotrain.outer.codec import rounding_seed
from geotrain.outer.rules.rule import Vectors

_BF16 = PayloadFormat("bf16", stochastic=True)


def round_to_bf16(wide: Tensor, out: Tensor, *stream: str | int) -> None:
    """Round fp32 into bf16, into `out`. stream: distinguishes this rounding from all others."""
    kernels.quantize(wide, _BF16, seed=rounding_seed(*stream), payload=out.view(torch.uint8))


@contextmanager
def in_fp32(v: Vectors, names: Sequence[str], room: Sequence[Tensor], *stream: str | int) -> Iterator[Vectors]:
    """Context with the vectors of these names in fp32, zeros at first, for a rule; rounded again at its end.

    room: fp32 buffers, one a name, of that size or larger; they hold nothing afterwards. stream: distinguishes this
    update of this chunk from all others.
    """
    wide = {name: each[: v.x.numel()] for name, each in zip(names, room, strict=True)}
    for name, vector in wide.items():
        vector.copy_(v.aux[name]) if name in v.aux else vector.zero_()
    computed = Vectors(v.x, v.aux | wide, v.waiting)
    yield computed
    for name, vector in computed.aux.items():
        if name in wide:
            kept = v.aux.setdefault(name, torch.empty_like(vector, dtype=torch.bfloat16))
            round_to_bf16(vector, kept, name, *stream)
        else:
            v.aux[name] = vector
