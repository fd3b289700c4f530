"""The ops that have Triton kernels, for dispatch and tests."""

from geotrain.kernels.triton_dequantize import add_decoded, dequantize
from geotrain.kernels.triton_quantize import quantize
from geotrain.kernels.triton_rotate import rotate
from geotrain.kernels.triton_update import adam

__all__ = ["adam", "add_decoded", "dequantize", "quantize", "rotate"]
