"""The C kernels give the reference's bits, from any number of threads and any instruction set."""

import pytest
import torch

from geotrain import kernels
from geotrain.kernels import cpu, dispatch
from geotrain.kernels.payload_format import PayloadFormat
from tests.support.kernel_cases import (
    OUTER_STEPS,
    PAYLOAD_FORMATS,
    SIZES,
    awkward,
    check_adam,
    check_add_decoded,
    check_merge,
    check_outer_update,
    check_quantize,
    check_rotate,
    check_squares,
    format_id,
)


@pytest.mark.parametrize("fmt", PAYLOAD_FORMATS, ids=format_id)
def test_quantize_and_dequantize_match_the_reference(fmt):
    for numel in SIZES:
        check_quantize(cpu, fmt, numel)


@pytest.mark.parametrize("fmt", PAYLOAD_FORMATS[::5], ids=format_id)  # one of each format
def test_several_threads_match_the_reference(fmt):
    check_quantize(cpu, fmt, 40_001)  # more than one chunk


@pytest.mark.parametrize("fmt", PAYLOAD_FORMATS, ids=format_id)
def test_sums_of_squares_match_the_reference(fmt):
    for numel in (*SIZES, 40_001):
        payload, _ = kernels.quantize(torch.randn(numel), fmt)
        check_squares(cpu, payload, numel, fmt)


@pytest.mark.parametrize("step", OUTER_STEPS)
def test_outer_update_matches_the_reference(step):
    for numel in (0, 1, 1000, 40_001):
        check_outer_update(cpu, step, numel)


def test_merge_matches_the_reference():
    for numel in (0, 1, 1000, 40_001):
        check_merge(cpu, numel)


def test_rotate_matches_the_reference():
    for shape in ((1, 1, 1, 2), (5, 2, 3, 10), (130, 2, 9, 64)):
        check_rotate(cpu, shape)


def test_adam_matches_the_reference():
    for numel in (0, 1, 1000, 40_001):
        check_adam(cpu, numel)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_what_is_decoded_is_added_to_another_tensor(format):
    fmt = PayloadFormat(format, block=64)
    payload = torch.empty(fmt.encoded_bytes(645), dtype=torch.uint8)
    given, _ = kernels.quantize(awkward(645), fmt, payload=payload)
    assert given is payload
    check_add_decoded(dispatch, payload, 645, fmt)


def test_formats_and_payloads_that_do_not_fit_are_refused():
    values, fmt = torch.zeros(64), PayloadFormat("int4")
    with pytest.raises(ValueError, match="add_decoded: format 'bf16' is not one of int8, int4, e3m0"):
        kernels.add_decoded(torch.zeros(128, dtype=torch.uint8), values, values, PayloadFormat("bf16"), 1.0)
    with pytest.raises(
        ValueError, match=r"quantize: payload must be 48 bytes \(uint8\) on cpu, is uint8 of shape \(7,\)"
    ):
        kernels.quantize(values, fmt, payload=torch.zeros(7, dtype=torch.uint8))
