"""The plain torch truth of the kernels. Slow, several passes; Triton and C must give the same bits.

Rules that make bits reproducible: IEEE fp32 with one rounding an operation (no fused multiply-add, no estimated
reciprocals), maxima and integer sums instead of ordered sums, rounding half to even written out on integers, and
counter-based random numbers. The one ordered sum, of squares in fp64, has its order written down (`sum_of_squares`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from geotrain.kernels import reference_topk
from geotrain.kernels.payload_format import GRIDS, SCALE_BYTES, SQUARES_BLOCK, SQUARES_LANES, TINY_BITS, PayloadFormat
from geotrain.kernels.reference_math import (
    NAN_BITS,
    as_float,
    as_int,
    magnitude_bits,
    narrow_scale,
    random_words,
    round_scale_up,
    widen_scale,
)
from geotrain.kernels.steps import AdamStep, Coefficients, OuterStep

MAX_BF16 = 0x7F7F
STATE_BLOCK = 256  # elements for which as many half words are drawn, of state that is kept in bf16
SECOND_STREAM = 1 << 63  # in a seed's bits: other random numbers than the first rounding with that seed
TO_INTEGER = 8388608.0  # 2^23: adding it rounds a small fp32 to an integer, half to even, in the low bits


def quantize(
    values: Tensor, payload: Tensor, fmt: PayloadFormat, anchor: Tensor | None, residual: Tensor | None, seed: int,
    moves_anchor: bool = False,
) -> Tensor:  # fmt: skip
    """Encode v = (anchor −) values + residual into `payload`; residual becomes v − decoded, in place.

    All 1-D: values fp32 or bf16, anchor fp32, residual fp32 or bf16 (rounded by chance), payload uint8 of
    `fmt.encoded_bytes`. Returns whether all v are finite (0-d bool). A block that is not finite is coded as zeros
    with a NaN scale and keeps its residual; of fp32 and bf16 a single element that is not finite keeps its own.
    moves_anchor: the anchor becomes the values, finite or not.
    """
    v = values.float() if anchor is None else anchor - values.float()
    if residual is not None:
        v = v + residual.float()
    if fmt.name in ("fp32", "bf16"):
        good = torch.isfinite(v)
        decoded = _write_plain(v, payload, fmt)
    else:
        rows = torch.zeros(fmt.blocks(v.numel()), fmt.block)
        rows.view(-1)[: v.numel()] = v
        finite = torch.isfinite(rows).all(1, keepdim=True)
        good = finite.expand_as(rows).reshape(-1)[: v.numel()]
        code = reference_topk.encode if fmt.name == "topk2" else _encode_dense
        decoded = code(torch.where(finite, rows, 0.0), finite, v.numel(), payload, fmt)
    if residual is not None:
        _keep(residual, torch.where(good, v - decoded, residual.float()), seed ^ SECOND_STREAM)
    if moves_anchor and anchor is not None:
        anchor.copy_(values)
    return good.all()


def _keep(state: Tensor, wide: Tensor, seed: int) -> None:
    """Write fp32 values into state, into bf16 up or down by chance.

    Element i of a block of STATE_BLOCK takes the low half of word i; one of its second half the high half of word
    i − STATE_BLOCK / 2.
    """
    if state.dtype == torch.float32:
        state.copy_(wide)
    else:
        words = random_words(-(-wide.numel() // STATE_BLOCK), STATE_BLOCK // 2, seed)
        halves = torch.cat([words & 0xFFFF, words >> 16], 1).view(-1)[: wide.numel()]
        state.view(torch.int16).copy_(_to_bf16(wide, halves))


def dequantize(
    payload: Tensor, out: Tensor, fmt: PayloadFormat, weight: float | None, squares: Tensor | None = None
) -> None:
    """Decode a payload: out = decoded, or with a weight out += weight · decoded. `out`: fp32, 1-D; may be a slice.

    squares: gets `sum_of_squares` of `out`.
    """
    if fmt.name == "fp32":
        decoded = _aligned(payload).view(torch.float32)
    elif fmt.name == "bf16":
        decoded = as_float(_aligned(payload).view(torch.int16).to(torch.int32) << 16)
    elif fmt.name == "topk2":
        # A weighted zero that changes nothing, not even −0.0: what was left out stays.
        left_out = -0.0 if weight is not None and weight >= 0 else 0.0
        decoded = reference_topk.decode(payload, out.numel(), fmt, left_out)
    else:
        decoded = _decode_dense(payload, out.numel(), fmt)
    if weight is None:
        out.copy_(decoded)
    else:
        out.copy_(out + torch.tensor(weight, dtype=torch.float32) * decoded)
    if squares is not None:
        squares.copy_(sum_of_squares(out))


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum the squares of each SQUARES_BLOCK elements of `x` (fp32, 1-D), in fp64; the last block may be shorter.

    The square of an fp32 number is exact in fp64. Element i of a block is added to lane i mod SQUARES_LANES, then the
    upper half of the lanes to the lower half until one is left: an order that vectors of any width can follow.
    """
    blocks = -(-x.numel() // SQUARES_BLOCK)
    padded = torch.zeros(blocks, SQUARES_BLOCK // SQUARES_LANES, SQUARES_LANES, dtype=torch.float64)
    padded.view(-1)[: x.numel()] = x
    lanes = torch.zeros(blocks, SQUARES_LANES, dtype=torch.float64)
    for row in padded.square_().unbind(1):
        lanes += row
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, dim=1)
        lanes = low + high
    return lanes.view(-1)


def payload_ok(payload: Tensor, numel: int, fmt: PayloadFormat) -> Tensor:
    """Check, as a 0-d bool, that all values of a payload of the right size are finite, and all positions exist."""
    if fmt.name == "fp32":
        return torch.isfinite(_aligned(payload).view(torch.float32)).all()
    if fmt.name == "bf16":
        return torch.isfinite(_aligned(payload).view(torch.bfloat16)).all()
    if fmt.name == "topk2":
        return reference_topk.payload_ok(payload, numel, fmt)
    bits = widen_scale(payload[: fmt.blocks(numel) * SCALE_BYTES].view(-1, SCALE_BYTES))
    return ((bits >= 0) & (bits <= fmt.max_scale_bits)).all()


def _write_plain(v: Tensor, payload: Tensor, fmt: PayloadFormat) -> Tensor:
    """Encode fp32 or bf16. Rounding to bf16 stops at the largest finite value: the rest stays in the residual."""
    if fmt.name == "fp32":
        payload.copy_(v.view(torch.uint8))
        return v
    code = _to_bf16(v, 0x7FFF + ((as_int(v) >> 16) & 1))
    payload.copy_(code.to(torch.int16).view(torch.uint8))
    return as_float(code << 16)


def _to_bf16(v: Tensor, increment: Tensor) -> Tensor:
    """Round to bf16's bits (int32): increment: what is added below them before the rest is cut off."""
    bits = as_int(v)
    magnitude = ((bits & 0x7FFFFFFF) + increment) >> 16
    magnitude = torch.where(torch.isfinite(v), magnitude.clamp(max=MAX_BF16), NAN_BITS >> 16)
    return (magnitude | ((bits >> 16) & 0x8000)).to(torch.int32)


def _encode_dense(rows: Tensor, finite: Tensor, numel: int, payload: Tensor, fmt: PayloadFormat) -> Tensor:
    """Encode int8 or a 4-bit format. rows [blocks, block] fp32, zeros after the end. Returns the decoded values."""
    grid = GRIDS[fmt.name]
    places = _places(numel, fmt)
    rows = torch.zeros_like(rows).view(-1).scatter_(0, places, rows.view(-1)[:numel]).view_as(rows)
    amax = magnitude_bits(rows).amax(1, keepdim=True)
    bits = round_scale_up(as_int(as_float(amax) * torch.tensor(1.0 / grid.max_level)))
    bits = torch.where(amax < TINY_BITS, 0, bits.clamp(max=fmt.max_scale_bits))
    scale = as_float(bits)
    inverse = torch.where(bits == 0, 0.0, 1.0 / scale)
    code = to_code(rows.abs() * inverse, grid.mantissa, grid.max_code)
    decoded = torch.copysign(to_level(code, grid.mantissa) * scale, rows)
    negative = as_int(rows) < 0
    stored = narrow_scale(torch.where(finite, bits, NAN_BITS)).reshape(-1)
    payload.zero_()
    payload[: stored.numel()] = stored
    if grid.bits == 8:
        packed = torch.where(negative, -code, code).to(torch.int8).view(torch.uint8)
    else:
        nibble = (code | (negative.to(torch.int32) << 3)).to(torch.uint8)
        packed = nibble[:, : fmt.block // 2] | (nibble[:, fmt.block // 2 :] << 4)
    codes = payload[fmt.codes_offset(numel) :]
    codes.copy_(packed.reshape(-1)[: codes.numel()])
    return decoded.view(-1)[places]


def _decode_dense(payload: Tensor, numel: int, fmt: PayloadFormat) -> Tensor:
    grid, blocks = GRIDS[fmt.name], fmt.blocks(numel)
    scale = as_float(widen_scale(payload[: blocks * SCALE_BYTES].view(blocks, SCALE_BYTES)))
    codes = payload[fmt.codes_offset(numel) :]
    padded = torch.zeros(blocks, fmt.block * grid.bits // 8, dtype=torch.uint8)
    padded.view(-1)[: codes.numel()] = codes
    packed = padded.to(torch.int32)
    if grid.bits == 8:
        signed = (packed << 24) >> 24
        code, negative = signed.abs(), signed < 0
    else:
        nibble = torch.cat([packed & 15, packed >> 4], 1)
        code, negative = nibble & 7, nibble >= 8
    value = to_level(code, grid.mantissa) * scale
    return torch.where(negative, -value, value).view(-1)[_places(numel, fmt)]


def to_code(x: Tensor, mantissa: int, max_code: int) -> Tensor:
    """Find the index (int32) of the grid's magnitude nearest to x ≥ 0, ties to the even index."""
    bits = as_int(x)
    shift, offset = 23 - mantissa, ((126 + mantissa) << mantissa)
    small = as_int(x.clamp(max=TO_INTEGER) + TO_INTEGER) & 0x7FFFFF
    increment = (1 << (shift - 1)) - 1 + ((bits >> shift) & 1)
    large = ((bits + increment) >> shift) - offset
    return torch.where(x < float(1 << mantissa), small, large).clamp(max=max_code)


def to_level(code: Tensor, mantissa: int) -> Tensor:
    """Look up the grid's magnitude (fp32, exact) with that index."""
    large = as_float((code << (23 - mantissa)) + ((126 + mantissa) << 23))
    return torch.where(code < (1 << mantissa), code.to(torch.float32), large)


def _places(numel: int, fmt: PayloadFormat) -> Tensor:
    """Find the place of each element in the padded rows of blocks.

    Nibbles pair the two halves of a block: at 4 bits the second half of a shorter last block begins where that of a
    whole one does.
    """
    places, tail = torch.arange(numel), numel % fmt.block
    if GRIDS[fmt.name].bits == 4 and tail:
        low = (tail + 1) // 2
        places[numel - tail + low :] += fmt.block // 2 - low
    return places


def _aligned(payload: Tensor) -> Tensor:
    """Copy a payload that is an unaligned slice of a received buffer: a wider view needs its own alignment."""
    return payload if payload.data_ptr() % 4 == 0 and payload.storage_offset() % 4 == 0 else payload.clone()


# ------------------------------------------------------------------------------------------- updates


def outer_update(
    weights: Tensor, delta: Tensor, momentum: Tensor | None, accumulator: Tensor | None, step: OuterStep, seed: int
) -> None:
    """Apply an `OuterStep` to tensors of one size, in place. Without an accumulator acc is Δ itself.

    Momentum and accumulator: fp32 or bf16, rounded by chance; weights move by the momentum before it is rounded.
    """
    total = delta if accumulator is None else accumulator.float() + delta
    change = _f(step.from_delta) * delta
    if step.moves_momentum:
        assert momentum is not None
        moved = _f(step.keep) * momentum.float() + _f(step.gain) * total
        change = _f(step.from_momentum) * moved + change
        _keep(momentum, moved, seed)
    if accumulator is not None:
        _keep(accumulator, torch.zeros_like(total) if step.moves_momentum else total, seed ^ SECOND_STREAM)
    weights.sub_(change)


def merge(weights: Tensor, base: Tensor, incoming: Tensor, ledger: bool, alpha: float) -> None:
    """Merge global weights into a region's, in place on fp32 `weights` x and `base` (docs/algorithms.md, the ledger).

    base = (1−α)·s + α·incoming ;  x = base − (s − x), where s is what `base` holds before: the weights when the last
    update left, so that what was committed since stays. Without the ledger, s = x: the published rule.
    """
    start = base if ledger else weights
    pending = base - weights if ledger else None
    base.copy_(_f(1 - alpha) * start + _f(alpha) * incoming)
    weights.copy_(base if pending is None else base - pending)


def rotate(x: Tensor, out: Tensor, cosine: Tensor, sine: Tensor, inverse: bool) -> None:
    """Apply the rotary embedding, in fp32, rounded once."""
    a, b = x.float().chunk(2, dim=-1)
    c, s = cosine[:, None, None], (-sine if inverse else sine)[:, None, None]
    out.copy_(torch.cat((a * c - b * s, b * c + a * s), dim=-1))


def adam(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    step: AdamStep,
    look_ahead: AdamStep | None,
    commit: bool,
) -> None:
    """Step fp32 weights and moments by AdamW, in place if `commit`; `grad` fp32 or bf16.

    `out` (fp32 or bf16) gets the new weights; with `look_ahead` those after one more step with the same gradient.
    """
    result = _adamw(weights, exp_avg, exp_avg_sq, grad, step)
    if commit:
        for tensor, new in zip((weights, exp_avg, exp_avg_sq), result, strict=True):
            tensor.copy_(new)
    if out is not None:
        out.copy_(_adamw(*result, grad, look_ahead)[0] if look_ahead else result[0])


def orthogonalize(matrices: Tensor, coefficients: Coefficients) -> Tensor:
    """Orthogonalize [batch, rows, columns], in fp64: X = G / ‖G‖, then X ← aX + (bA + cA²)X with A = XXᵀ.

    `newton_schulz` comes near to it, within bounds that the tests state: it sums in other orders.
    """
    flip = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if flip else matrices).double()
    norm = x.square().sum((1, 2), keepdim=True).sqrt()
    x = x / torch.where(norm == 0, 1.0, norm)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    x = torch.where(torch.isfinite(norm), x, torch.nan)
    return (x.mT if flip else x).to(matrices.dtype).contiguous()


def _adamw(x: Tensor, m: Tensor, v: Tensor, grad: Tensor, step: AdamStep) -> tuple[Tensor, Tensor, Tensor]:
    grad_scale, beta1, rest1, beta2, rest2, root_scale, eps, rate, shrink = map(_f, step.coefficients)
    g = grad.float() * grad_scale
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    root = torch.sqrt(v.double()).float()  # fp32 torch.sqrt may come from MKL, which is an ulp off at times
    return (x - shrink * x) - rate * (m / (root * root_scale + eps)), m, v


def _f(x: float) -> Tensor:
    """Make an fp32 scalar: a Python number would be applied in double precision."""
    return torch.tensor(x, dtype=torch.float32)
