"""Run by test_kernels_triton.py in a process of its own, with TRITON_INTERPRET=1: the Triton kernels on the CPU."""

import pytest

from geotrain.kernels import triton_ops
from tests.support.kernel_cases import (
    OUTER_STEPS,
    SPECS,
    check_adam,
    check_merge,
    check_outer_update,
    check_quantize,
    check_rotate,
    spec_id,
)
from tests.support.orthogonal_cases import LARGE_SHAPES, SHAPES, UNEQUAL, check_awkward_values, check_bf16_kernels


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_quantize_and_dequantize_match_the_reference(spec):
    for numel in (0, 33, spec.block + 69):
        check_quantize(triton_ops, spec, numel)


def test_sums_of_squares_of_several_blocks_match_the_reference():
    check_quantize(triton_ops, SPECS[0], 5000)


@pytest.mark.parametrize("step", OUTER_STEPS)
def test_outer_update_matches_the_reference(step):
    for numel in (0, 1, 1500):
        check_outer_update(triton_ops, step, numel)


def test_merge_matches_the_reference():
    for numel in (0, 1, 1500):
        check_merge(triton_ops, numel)


def test_rotate_matches_the_reference():
    for shape in ((1, 1, 1, 2), (3, 2, 9, 10)):
        check_rotate(triton_ops, shape)


def test_adam_matches_the_reference():
    for numel in (0, 1, 1500):
        check_adam(triton_ops, numel)


def test_orthogonalize_is_near_the_reference():
    for shape in SHAPES[1::2]:  # the GPU test takes all of them
        check_bf16_kernels(triton_ops, shape)


def test_orthogonalize_in_several_blocks_is_near_the_reference():
    for shape in LARGE_SHAPES:
        check_bf16_kernels(triton_ops, shape, coefficients=UNEQUAL[:2])


def test_orthogonalize_takes_awkward_values():
    check_awkward_values(triton_ops)
