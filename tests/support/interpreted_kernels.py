"""Run by test_kernels_triton.py in a process of its own, with TRITON_INTERPRET=1: the Triton kernels on the CPU."""

import pytest

from geotrain.kernels import triton_ops
from tests.support.kernel_cases import (
    PAYLOAD_FORMATS,
    check_adam,
    check_quantize,
    check_rotate,
    format_id,
)


@pytest.mark.parametrize("fmt", PAYLOAD_FORMATS, ids=format_id)
def test_quantize_and_dequantize_match_the_reference(fmt):
    for numel in (0, 33, fmt.block + 69):
        check_quantize(triton_ops, fmt, numel)


def test_rotate_matches_the_reference():
    for shape in ((1, 1, 1, 2), (3, 2, 9, 10)):
        check_rotate(triton_ops, shape)


def test_adam_matches_the_reference():
    for numel in (0, 1, 1500):
        check_adam(triton_ops, numel)
