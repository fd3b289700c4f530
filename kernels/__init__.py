"""Triton kernels, one file an operation; `reference` holds the plain torch truth."""

from geotrain.kernels.dispatch import dequantize, payload_ok, quantize

__all__ = ["dequantize", "payload_ok", "quantize"]
