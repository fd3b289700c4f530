"""The Triton kernels under the names of `reference` and `reference_update`, for dispatch and tests."""

from geotrain.kernels.triton_adam import adam_estimate, adam_step
from geotrain.kernels.triton_dequantize import dequantize, payload_ok
from geotrain.kernels.triton_outer_update import merge, outer_update
from geotrain.kernels.triton_quantize import quantize

__all__ = ["adam_estimate", "adam_step", "dequantize", "merge", "outer_update", "payload_ok", "quantize"]
