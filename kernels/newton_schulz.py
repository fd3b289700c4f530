"""The Newton–Schulz iteration on a batch of matrices: nothing but matrix products, which torch's BLAS makes near the
processor's peak, as no kernel of our own would."""

from __future__ import annotations

import torch
from torch import Tensor

from geotrain.kernels.steps import Coefficients


def orthogonalize(matrices: Tensor, coefficients: Coefficients, products: torch.dtype) -> Tensor:
    """Compute what `reference.orthogonalize` defines, with X, A and the polynomial in the dtype `products`.

    BLAS sums products in fp32 and adds bA and aX to the sums before they are rounded. The order of its sums depends
    on shapes and device alone, so that a call gives the same bits each time.
    """
    flip = matrices.shape[1] > matrices.shape[2]
    x = _normalized_on_host(matrices) if products == torch.float32 else _normalized(matrices, products)
    x = x.mT if flip else x  # BLAS reads either order: nothing is copied
    for a, b, c in coefficients:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return torch.empty_like(matrices).copy_(x.mT if flip else x)


def _normalized(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide each matrix by its norm, in two passes over memory; one that is not finite becomes NaN everywhere.

    In fp64 the square of an fp32 number is exact, and neither over- nor underflows.
    """
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=torch.float64)
    norm = torch.where(norm == 0, 1.0, norm).where(norm.isfinite(), torch.nan)
    return torch.div(matrices, norm, out=torch.empty_like(matrices, dtype=dtype))


def _normalized_on_host(matrices: Tensor) -> Tensor:
    """Divide each matrix by its norm, in fp32, which hosts compute in a third of the time that fp64 takes."""
    given = matrices.float()
    # First by the largest magnitude, so that no square over- or underflows; infinity becomes NaN here, and spreads.
    largest = torch.linalg.vector_norm(given, torch.inf, (1, 2), keepdim=True)
    x = given / torch.where(largest == 0, 1.0, largest)
    rows = torch.linalg.vector_norm(x, dim=2, keepdim=True)  # rows first: shorter sums round less
    x /= torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1.0)  # below 1 only where all is zero
    return x
