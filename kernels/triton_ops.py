"""The Triton kernels under the names of `reference`, for dispatch and tests."""

from geotrain.kernels.triton_dequantize import add_decoded, dequantize
from geotrain.kernels.triton_orthogonalize import orthogonalize
from geotrain.kernels.triton_quantize import quantize
from geotrain.kernels.triton_rotate import rotate
from geotrain.kernels.triton_update import adam, merge, outer_update

__all__ = ["adam", "add_decoded", "dequantize", "merge", "orthogonalize", "outer_update", "quantize", "rotate"]
