"""Checks of `orthogonalize`, within bounds that are derived here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from geotrain.kernels import QUINTIC, Coefficients, newton_schulz, reference

# Of fp32: half a unit in the last place of X, at most as much steeper as the product of the slopes at zero, where the
# quintic is steepest. (A Lipschitz bound of f on singular values is one of the matrix function in Frobenius' norm.)
FP32_BOUND = 3.4445**5 * 2.0**-24
# Of bf16, for the default coefficients. A step rounds X, A and the polynomial to 8 bits: errors of at most 2⁻⁸, about
# 2⁻⁹ root mean square, that are multiplied by terms aσ, bσ³, cσ⁵ of up to 3.5. The next steps pass them on at about
# their size: from 0.68 to 1.13 the quintic's slope lies between −1.6 and 1.7. So 15 errors of random sign:
# 2⁻⁹ · 3.5 · √15 = 2⁻⁵·².
BF16_BOUND = 2.0**-5
# Against the same roundings of exact products: fp32 sums put only few of them (1 in 10⁴) on the other side of a tie.
SAME_ROUNDINGS_BOUND = 2.0**-9

SHAPES = [(0, 3, 4), (2, 5, 17), (3, 8, 8), (2, 17, 5), (2, 1, 7), (2, 16, 48), (2, 7, 1), (1, 40, 33), (1, 1, 1)]
LARGE_SHAPES = [(2, 144, 208), (1, 208, 144), (1, 130, 70), (1, 70, 130)]  # several blocks, and parts of blocks
UNEQUAL: Coefficients = ((2.0, -1.5, 0.5), (1.5, -0.5, 0.0), (1.875, -1.25, 0.375))


def relative_error(have: Tensor, want: Tensor) -> float:
    """The largest ‖have − want‖ / ‖want‖ of the matrices of a batch (Frobenius); 0 where there is none."""
    norms = want.double().norm(dim=(1, 2)).clamp_min(1e-300)
    return float(((have.double() - want.double()).norm(dim=(1, 2)) / norms).max()) if have.numel() else 0.0


def rounded(matrices: Tensor, coefficients: Coefficients) -> Tensor:
    """Exact products, of X, A and the polynomial in bf16: what products in bf16 come near to; fp64."""

    def bf16(x: Tensor) -> Tensor:
        return x.float().bfloat16().double()

    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).double()
    x = bf16(x / x.norm(dim=(1, 2), keepdim=True))
    for a, b, c in coefficients:
        gram = bf16(x @ x.mT)
        x = bf16(a * x + bf16(b * gram + c * (gram @ gram)) @ x)
    return x.mT if tall else x


def check_bf16_products(
    shape: tuple[int, int, int], device: str = "cpu", coefficients: Coefficients = QUINTIC
) -> None:
    """Products in bf16, as on GPUs: near the truth, nearer to the same roundings of exact products."""
    given = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    for dtype in (torch.float32, torch.bfloat16):
        matrices = given.to(dtype)
        moved = matrices.to(device, copy=True)
        have = in_bf16(moved, coefficients)
        assert torch.equal(moved.cpu(), matrices)
        assert have.shape == shape and have.dtype == dtype and have.is_contiguous()
        assert torch.equal(have, in_bf16(moved, coefficients))
        truth = reference.orthogonalize(matrices.double(), coefficients)
        last_rounding = 2.0**-8
        assert relative_error(have.cpu(), truth) < BF16_BOUND + last_rounding
        assert relative_error(have.cpu(), rounded(matrices, coefficients)) < SAME_ROUNDINGS_BOUND + last_rounding


def in_fp32(matrices: Tensor, coefficients: Coefficients) -> Tensor:
    return newton_schulz.orthogonalize(matrices, coefficients, torch.float32)


def in_bf16(matrices: Tensor, coefficients: Coefficients) -> Tensor:
    return newton_schulz.orthogonalize(matrices, coefficients, torch.bfloat16)


def check_awkward_values(orthogonalize: Callable[[Tensor, Coefficients], Tensor], device: str = "cpu") -> None:
    """Zeros, tiny, huge and not finite matrices, wide and tall; none touches another of its batch by a single bit."""
    for shape in ((8, 6, 9), (8, 9, 6)):
        plain = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        want = orthogonalize(plain.to(device), UNEQUAL[::2]).cpu()
        matrices = plain.clone()
        matrices[0] = 0.0
        matrices[1, 2, 3] = torch.inf
        matrices[2, 5, 5] = torch.nan
        matrices[3] *= 2.0**100
        matrices[4] *= 2.0**-100
        matrices[5] *= 2.0**-140  # denormal: few bits are left
        matrices[6] = 3e38
        have = orthogonalize(matrices.to(device), UNEQUAL[::2]).cpu()
        assert have[0].eq(0).all()
        assert have[1:3].isnan().all()
        for same in (3, 4, 7):
            assert torch.equal(have[same], want[same])
        truth = reference.orthogonalize(matrices, UNEQUAL[::2])
        assert relative_error(have[5:7], truth[5:7]) < BF16_BOUND
