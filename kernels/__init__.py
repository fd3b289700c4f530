"""The arithmetic under codecs, servers and optimizers: Triton for GPUs, C for CPUs, plain torch as the truth.

layout, steps    what the ops take: payload layouts, coefficients (no tensors)
dispatch         the ops, and which implementation runs them
reference*       torch: the truth that the others reproduce bit for bit
triton_*         Triton, one file an op
cpu, csrc/       C with OpenMP
"""

from geotrain.kernels.dispatch import (
    adam_estimate,
    adam_step,
    dequantize,
    merge,
    outer_update,
    payload_ok,
    quantize,
)
from geotrain.kernels.steps import AdamStep, OuterStep

__all__ = [
    "AdamStep",
    "OuterStep",
    "adam_estimate",
    "adam_step",
    "dequantize",
    "merge",
    "outer_update",
    "payload_ok",
    "quantize",
]
