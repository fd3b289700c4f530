"""The arithmetic under codecs, servers and optimizers: Triton for GPUs, C for CPUs, plain torch as the truth.

payload_format, steps   what the ops take: payload formats, coefficients (no tensors)
dispatch                the ops, and which implementation runs them
reference*              torch: the truth that the others reproduce bit for bit
triton_*                Triton; triton_ops lists the ops
cpu, csrc/              C with OpenMP, and the calls into it
newton_schulz           matrix products, by torch's BLAS on any device; within bounds of the reference
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
