"""The arithmetic under codecs, servers and optimizers: Triton for GPUs, C for CPUs, plain torch as the truth.

layout, steps    what the ops take: payload layouts, coefficients (no tensors)
dispatch         the ops, and which implementation runs them
reference*       torch, or Python: the truth that the others reproduce bit for bit; `orthogonalize` alone has bounds
triton_*         Triton; triton_ops lists the ops
cpu, csrc/       C with OpenMP, and the calls into it; matrix products go to torch's BLAS
"""

from geotrain.kernels.dispatch import (
    adam_step,
    add_decoded,
    anneal,
    dequantize,
    extend,
    merge,
    orthogonalize,
    outer_update,
    payload_ok,
    possible,
    quantize,
    rotate,
    transport,
)
from geotrain.kernels.steps import (
    QUINTIC,
    AdamStep,
    Annealing,
    Beginnings,
    Coefficients,
    Endings,
    OuterStep,
    Pairs,
    StageVectors,
)

__all__ = [
    "QUINTIC",
    "AdamStep",
    "Annealing",
    "Beginnings",
    "Coefficients",
    "Endings",
    "OuterStep",
    "Pairs",
    "StageVectors",
    "adam_step",
    "add_decoded",
    "anneal",
    "dequantize",
    "extend",
    "merge",
    "orthogonalize",
    "outer_update",
    "payload_ok",
    "possible",
    "quantize",
    "rotate",
    "transport",
]
