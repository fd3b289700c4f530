"""Newton–Schulz on a batch of matrices: products of bf16 values, summed in fp32.

A step is three products. Two of them, XXᵀ and A·A, are symmetric: only blocks on and above the diagonal are computed,
and stored twice. What is added to a product is added to its sums before they are rounded: bA + cA² and aX + BX take
no pass of their own. Matrices stay as they lie in memory: of a tall one (rows > columns) X is the transpose, and XXᵀ
is computed by reading the same memory the other way round.

Every sum has one order, fixed by the shapes alone, so that a call gives the same bits each time.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from geotrain.kernels.steps import Coefficients
from geotrain.kernels.triton_math import ALIGNED, as_float, read_float, to_bf16

ELEMENTS = 4096  # of one program of the two kernels that normalize
# Triton's interpreter would multiply the bits of bf16 numbers: it is given their values in fp32, of equal products.
WIDENS = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def widen(x):
    """bf16 as fp32."""
    return as_float(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def narrow(x):
    """fp32 rounded to bf16."""
    return to_bf16(x).to(tl.bfloat16, bitcast=True)


@triton.jit
def add_product(left, right, sums):
    """sums (fp32) + left · right, of blocks in bf16."""
    if WIDENS:
        left, right = widen(left), widen(right)
    return tl.dot(left, right, sums)


@triton.jit
def squares_kernel(matrices, sums, size, chunks, ELEMENTS: tl.constexpr, IS_BF16: tl.constexpr):
    """sums [batch, chunks], fp64: the sum of squares of each ELEMENTS elements of each matrix of `size` elements.

    In fp64 the square of an fp32 number is exact, and neither over- nor underflows.
    """
    program = tl.program_id(0)
    at = (program % chunks).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    values = read_float(matrices + (program // chunks).to(tl.int64) * size, at, at < size, IS_BF16).to(tl.float64)
    tl.store(sums + program, tl.sum(values * values, axis=0))


@triton.jit
def normalize_kernel(matrices, squares, out, size, chunks, ELEMENTS: tl.constexpr, IS_BF16: tl.constexpr):
    """out = matrix / √(its sum of squares) in bf16; zeros of zeros; NaN everywhere of a matrix that is not finite."""
    program = tl.program_id(0)
    matrix = (program // chunks).to(tl.int64)
    at = (program % chunks).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    total = tl.load(squares + matrix)
    inverse = 1.0 / tl.sqrt(tl.where(total == 0.0, 1.0, total))
    inverse = tl.where(total < float("inf"), inverse, float("nan"))
    values = read_float(matrices + matrix * size, at, at < size, IS_BF16).to(tl.float64) * inverse
    tl.store(out + matrix * size + at, narrow(values.to(tl.float32)), mask=at < size)


@triton.jit
def symmetric_kernel(
    x, added, out, rows, columns, alpha, beta,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TALL: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """out = alpha · XXᵀ (+ beta · added): [batch, rows, rows] bf16; `added` is symmetric, and may be X itself.

    X is [rows, columns]. TALL: in memory lies its transpose. A program computes one block (i, j), i ≤ j.
    """
    blocks = tl.cdiv(rows, BLOCK)
    pairs = blocks * (blocks + 1) // 2
    pair = tl.program_id(0) % pairs
    matrix = (tl.program_id(0) // pairs).to(tl.int64)
    # Pair j·(j+1)/2 + i is block (i, j). The root is only near; the next two lines make it right.
    j = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(tl.int32)
    j = tl.where(j * (j + 1) // 2 > pair, j - 1, j)
    j = tl.where((j + 1) * (j + 2) // 2 <= pair, j + 1, j)
    i = pair - j * (j + 1) // 2
    upper = i * BLOCK + tl.arange(0, BLOCK)
    lower = j * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    x += matrix * rows * columns
    sums = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, columns, BLOCK_K):
        inside = start + k < columns
        if TALL:
            row = x + (start + k).to(tl.int64)[:, None] * rows
            left = tl.load(row + upper[None, :], mask=inside[:, None] & (upper < rows)[None, :], other=0.0)
            right = tl.load(row + lower[None, :], mask=inside[:, None] & (lower < rows)[None, :], other=0.0)
            sums = add_product(tl.trans(left), right, sums)
        else:
            column = x + (start + k)[None, :]
            left = tl.load(
                column + upper.to(tl.int64)[:, None] * columns,
                mask=inside[None, :] & (upper < rows)[:, None],
                other=0.0,
            )
            right = tl.load(
                column + lower.to(tl.int64)[:, None] * columns,
                mask=inside[None, :] & (lower < rows)[:, None],
                other=0.0,
            )
            sums = add_product(left, tl.trans(right), sums)
    at = matrix * rows * rows + upper.to(tl.int64)[:, None] * rows + lower[None, :]
    mask = (upper < rows)[:, None] & (lower < rows)[None, :]
    sums *= alpha
    if ADDS:
        sums += beta * widen(tl.load(added + at, mask=mask, other=0.0))
    block = narrow(sums)
    tl.store(out + at, block, mask=mask)
    mirrored = matrix * rows * rows + lower.to(tl.int64)[:, None] * rows + upper[None, :]
    tl.store(out + mirrored, tl.trans(block), mask=tl.trans(mask) & (i != j))


@triton.jit
def product_kernel(
    left, right, added, out, rows, columns, inner, beta,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = left · right + beta · added, of [rows, inner] and [inner, columns], batched; bf16, `out` also fp32."""
    across, down = tl.cdiv(columns, BLOCK_N), tl.cdiv(rows, BLOCK_M)
    block = tl.program_id(0) % (across * down)
    matrix = (tl.program_id(0) // (across * down)).to(tl.int64)
    # Blocks along the shorter side follow one another: they share the part of the long operand that is in the cache.
    if rows < columns:
        i, j = block % down, block // down
    else:
        i, j = block // across, block % across
    row = i * BLOCK_M + tl.arange(0, BLOCK_M)
    column = j * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    left += matrix * rows * inner + row.to(tl.int64)[:, None] * inner
    right += matrix * inner * columns + column[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inner, BLOCK_K):
        inside = start + k < inner
        a = tl.load(left + (start + k)[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            right + (start + k).to(tl.int64)[:, None] * columns,
            mask=inside[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        sums = add_product(a, b, sums)
    at = matrix * rows * columns + row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    sums += beta * widen(tl.load(added + at, mask=mask, other=0.0))
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out + at, narrow(sums), mask=mask)
    else:
        tl.store(out + at, sums, mask=mask)


def orthogonalize(matrices: Tensor, coefficients: Coefficients) -> Tensor:
    """As `reference.orthogonalize`, with bf16 operands and fp32 sums; X, A and the polynomial are kept in bf16.

    Sides that are no multiple of ALIGNED are filled up with zeros, which change neither norm nor product, and which
    the products keep. That costs two copies; without it every element would be loaded by itself, and the addresses
    alone would spill.
    """
    rows, columns = matrices.shape[1:]
    if rows % ALIGNED or columns % ALIGNED:
        padded = torch.nn.functional.pad(matrices, (0, -columns % ALIGNED, 0, -rows % ALIGNED))
        return orthogonalize(padded, coefficients)[:, :rows, :columns].contiguous()
    tall, short = rows > columns, min(rows, columns)
    x = _normalized(matrices)
    gram, polynomial = (x.new_empty(len(x), short, short) for _ in range(2))
    spare = torch.empty_like(x) if len(coefficients) > 1 else x
    result = torch.empty_like(matrices)
    for step, (a, b, c) in enumerate(coefficients, 1):
        out = result if step == len(coefficients) else spare
        _symmetric(x, gram, 1.0, 0.0, tall)
        _symmetric(gram, polynomial, c, b, False)
        _product(*((x, polynomial) if tall else (polynomial, x)), x, out, a)
        x, spare = out, x
    return result


def _normalized(matrices: Tensor) -> Tensor:
    size, is_bf16 = matrices[0].numel(), matrices.dtype == torch.bfloat16
    given = matrices.view(torch.int16) if is_bf16 else matrices  # as `read_float` takes it
    chunks = triton.cdiv(size, ELEMENTS)
    sums = torch.empty(len(matrices), chunks, dtype=torch.float64, device=matrices.device)
    x = torch.empty_like(matrices, dtype=torch.bfloat16)
    constants = {"ELEMENTS": ELEMENTS, "IS_BF16": is_bf16}
    squares_kernel[(sums.numel(),)](given, sums, size, chunks, **constants)
    normalize_kernel[(sums.numel(),)](given, sums.sum(1), x, size, chunks, **constants)
    return x


def _symmetric(x: Tensor, out: Tensor, alpha: float, beta: float, tall: bool) -> None:
    """out = alpha · XXᵀ + beta · X, where beta is not 0 only if X is symmetric itself."""
    rows, columns = x.shape[:0:-1] if tall else x.shape[1:]
    block = _block(rows, 128)
    blocks = triton.cdiv(rows, block)
    symmetric_kernel[(len(x) * (blocks * (blocks + 1) // 2),)](
        x, x, out, rows, columns, alpha, beta,
        BLOCK=block, BLOCK_K=_block(columns, 64), TALL=tall, ADDS=beta != 0, **_pipeline(block, block),
    )  # fmt: skip


def _product(left: Tensor, right: Tensor, added: Tensor, out: Tensor, beta: float) -> None:
    rows, columns, inner = left.shape[1], right.shape[2], left.shape[2]
    down, across = _block(rows, 128), _block(columns, 128)
    product_kernel[(len(left) * triton.cdiv(rows, down) * triton.cdiv(columns, across),)](
        left, right, added, out, rows, columns, inner, beta,
        BLOCK_M=down, BLOCK_N=across, BLOCK_K=_block(inner, 64), **_pipeline(down, across),
    )  # fmt: skip


def _block(length: int, most: int) -> int:
    """A power of two that tensor cores take, at least 16, no larger than the length needs."""
    return min(most, max(16, triton.next_power_of_2(length)))


def _pipeline(down: int, across: int) -> dict[str, int]:
    """Two groups of four warps share a large block, for its sums to fit into registers. Three stages of the largest
    operands are 96 KiB of shared memory, which every GPU since sm_80 has."""
    return {"num_warps": 8 if down * across > 64 * 64 else 4, "num_stages": 3}
