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
    dequantize,
    merge,
    orthogonalize,
    outer_update,
    payload_ok,
    quantize,
    rotate,
)
from geotrain.kernels.steps import QUINTIC, AdamStep, Coefficients, OuterStep

__all__ = [
    "QUINTIC",
    "AdamStep",
    "Coefficients",
    "OuterStep",
    "adam_step",
    "add_decoded",
    "dequantize",
    "merge",
    "orthogonalize",
    "outer_update",
    "payload_ok",
    "quantize",
    "rotate",
]
