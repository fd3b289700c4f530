"""Newton–Schulz: the reference against singular value decompositions, the CPU's kernel against the reference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from geotrain import kernels
from geotrain.kernels import QUINTIC, Coefficients, reference
from tests.support.orthogonal_cases import (
    FP32_BOUND,
    LARGE_SHAPES,
    SHAPES,
    UNEQUAL,
    check_awkward_values,
    check_bf16_products,
    in_bf16,
    in_fp32,
    relative_error,
)

sides = st.integers(1, 40)


def scalar(x: Tensor, coefficients: Coefficients) -> Tensor:
    for a, b, c in coefficients:
        x = a * x + b * x**3 + c * x**5
    return x


def with_singular_values(values: Tensor, rows: int, columns: int) -> Tensor:
    """[1, rows, columns] in fp64, with random singular vectors."""
    left, _ = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, len(values), dtype=torch.float64))
    return ((left * values) @ right.mT)[None]


@pytest.mark.parametrize("coefficients", [QUINTIC, UNEQUAL, UNEQUAL[:1]], ids=["quintic", "unequal", "one"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_applies_the_polynomials_to_singular_values(shape, coefficients):
    torch.manual_seed(0)
    matrices = torch.randn(shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = scalar(values / values.norm(dim=1, keepdim=True), coefficients)
    want = (left * values[:, None, :]) @ right
    torch.testing.assert_close(reference.orthogonalize(matrices, coefficients), want, rtol=1e-9, atol=1e-9)


@given(st.integers(0, 3), sides, sides, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**32))
def test_the_cpus_kernel_is_near_the_reference(batch, rows, columns, dtype, seed):
    matrices = torch.randn(batch, rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    before = matrices.clone()
    have = kernels.orthogonalize(matrices)
    assert torch.equal(matrices, before)
    assert have.shape == matrices.shape and have.dtype == dtype and have.is_contiguous()
    truth = reference.orthogonalize(matrices.double(), QUINTIC)
    last_rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    assert relative_error(have, truth) < FP32_BOUND + last_rounding


@pytest.mark.parametrize("shape", [*LARGE_SHAPES, (1, 96, 3000)])
@pytest.mark.parametrize("coefficients", [QUINTIC, UNEQUAL], ids=["quintic", "unequal"])
def test_larger_matrices_are_as_near(shape, coefficients):
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    truth = reference.orthogonalize(matrices.double(), coefficients)
    assert relative_error(kernels.orthogonalize(matrices, coefficients), truth) < 1e-5
    spectrum = torch.logspace(0, -5, min(shape[1:]), dtype=torch.float64)
    matrices = with_singular_values(spectrum, *shape[1:]).float()
    truth = reference.orthogonalize(matrices.double(), coefficients)
    assert relative_error(kernels.orthogonalize(matrices, coefficients), truth) < 1e-5


@given(sides, sides, st.integers(-60, 60), st.integers(0, 2**32))
def test_invariances(rows, columns, exponent, seed):
    torch.manual_seed(seed)
    matrices = torch.randn(2, rows, columns)
    out = kernels.orthogonalize(matrices)
    assert torch.equal(kernels.orthogonalize(matrices * 2.0**exponent), out)
    assert torch.equal(kernels.orthogonalize(-matrices), -out)
    turned = kernels.orthogonalize(matrices.mT.contiguous()).mT
    assert relative_error(turned, out) < 2 * FP32_BOUND
    left, right = (torch.linalg.qr(torch.randn(side, side, dtype=torch.float64))[0] for side in (rows, columns))
    rotated = kernels.orthogonalize((left @ matrices.double() @ right).float())
    assert relative_error(rotated, left @ out.double() @ right) < 3 * FP32_BOUND  # also rounds what it is given


def test_awkward_values():
    check_awkward_values(in_fp32)
    check_awkward_values(in_bf16)
    check_awkward_values(reference.orthogonalize)


def test_products_in_bf16_are_near_the_reference() -> None:
    for shape in SHAPES:
        check_bf16_products(shape)
    for shape in LARGE_SHAPES:  # not with a step whose c is 0: torch's baddbmm in bf16 forgets beta on CPUs
        check_bf16_products(shape, coefficients=UNEQUAL[::2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_gpu() -> None:
    for shape in (*SHAPES[1:], *LARGE_SHAPES, (3, 640, 1920), (3, 1921, 641)):
        check_bf16_products(shape, "cuda")
    check_bf16_products((2, 300, 500), "cuda", UNEQUAL)
    check_awkward_values(in_bf16, "cuda")


@pytest.mark.parametrize("shape", [(3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_nothing_of_nothing(shape):
    assert kernels.orthogonalize(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([torch.zeros(3, 4)], r"must be \[batch, rows, columns\], is float32 of shape \(3, 4\)"),
        ([torch.zeros(1, 3, 4, dtype=torch.float64)], "matrices must be contiguous float32 or bfloat16, is float64"),
        ([torch.zeros(1, 3, 4).mT], "contiguous"),
        ([torch.zeros(1, 3, 4), ()], "finite triples, one a step, at least one"),
        ([torch.zeros(1, 3, 4), ((1.0, 0.0, math.nan),)], "finite triples, one a step, at least one"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        kernels.orthogonalize(*arguments)


def test_a_result_has_no_gradient():
    assert not kernels.orthogonalize(torch.ones(1, 2, 2, requires_grad=True)).requires_grad
