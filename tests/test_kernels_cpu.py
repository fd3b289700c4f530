"""The C kernels give the reference's bits, from any number of threads and any instruction set."""

import pytest

from geotrain.kernels import cpu
from tests.support.kernel_cases import (
    OUTER_STEPS,
    SIZES,
    SPECS,
    check_adam,
    check_merge,
    check_outer_update,
    check_quantize,
    spec_id,
)


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_quantize_and_dequantize_match_the_reference(spec):
    for numel in SIZES:
        check_quantize(cpu, spec, numel)


@pytest.mark.parametrize("spec", SPECS[::5], ids=spec_id)  # one of each format
def test_several_threads_match_the_reference(spec):
    check_quantize(cpu, spec, 40_001)  # more than one chunk


@pytest.mark.parametrize("step", OUTER_STEPS)
def test_outer_update_matches_the_reference(step):
    for numel in (0, 1, 1000, 40_001):
        check_outer_update(cpu, step, numel)


def test_merge_matches_the_reference():
    for numel in (0, 1, 1000, 40_001):
        check_merge(cpu, numel)


def test_adam_matches_the_reference():
    for numel in (0, 1, 1000, 40_001):
        check_adam(cpu, numel)
