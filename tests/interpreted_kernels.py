"""Run by test_kernels_triton.py in a process of its own, with TRITON_INTERPRET=1: the Triton kernels on the CPU."""

import pytest
from kernel_cases import OUTER_STEPS, SPECS, check_adam, check_merge, check_outer_update, check_quantize, spec_id

from geotrain.kernels import triton_ops


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_quantize_and_dequantize_match_the_reference(spec):
    for numel in (0, 33, spec.block + 69):
        check_quantize(triton_ops, spec, numel)


@pytest.mark.parametrize("step", OUTER_STEPS)
def test_outer_update_matches_the_reference(step):
    for numel in (0, 1, 1500):
        check_outer_update(triton_ops, step, numel)


def test_merge_matches_the_reference():
    for numel in (0, 1, 1500):
        check_merge(triton_ops, numel)


def test_adam_matches_the_reference():
    for numel in (0, 1, 1500):
        check_adam(triton_ops, numel)
