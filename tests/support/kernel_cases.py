"""Cases that every implementation of the kernels must get right, bit for bit: for the C, Triton and GPU tests."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from geotrain import kernels
from geotrain.kernels import reference
from geotrain.kernels.payload_format import FORMATS, GRIDS, SQUARES_BLOCK, PayloadFormat
from geotrain.kernels.steps import AdamStep, OuterStep

PAYLOAD_FORMATS = [
    PayloadFormat(name, block, density)
    for name in FORMATS
    for block, density in ((32, 0.1), (64, 0.3), (128, 0.01), (256, 0.07))
]
PAYLOAD_FORMATS += [PayloadFormat("topk2", block, density) for block, density in ((4096, 0.25), (512, 1.0))]
SIZES = (0, 1, 2, 31, 33, 127, 256, 645)


def format_id(fmt: PayloadFormat) -> str:
    return f"{fmt.name}-{fmt.block}-{fmt.density}"


def awkward(numel: int, seed: int = 0) -> Tensor:
    """Normal values with zero, denormal, tiny, huge, tied and constant stretches, some at what is kept last."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-3, 3, (numel,), generator=generator)
    stretches = [0.0, 1e-40, -3e-39, 2.0**-101, 2.0e38, -2.5e38, 0.5, -7.0, 1e-30, -0.0]
    for i, value in enumerate(stretches):
        start = (37 * i) % max(numel, 1)
        x[start : start + 5] = value
    if numel > 90:  # more ties than are kept, with larger ones behind
        x[-40:-8] = 1e6
        x[-36:-8:9] = 2e6
    if numel > 400:
        x[256:384] = 0.0
        x[384:400] = 1e-41
    return x


def check_quantize(
    ops: ModuleType, fmt: PayloadFormat, numel: int, device: str = "cpu", moves_anchor: bool = True
) -> None:
    """Payload, residual, finite flag, decoded values and their sums of squares equal the reference's bits. Residuals
    are in bf16, too, on hosts."""
    for variant in range(6 if device == "cpu" and ops.__name__.endswith("cpu") else 4):
        values = awkward(numel, 1).to(torch.bfloat16 if variant & 1 else torch.float32)
        anchor = awkward(numel, 2) * 0.25 if variant & 2 else None
        residual = awkward(numel, 3) * 0.125 if variant != 1 else None
        if variant >= 4:
            residual = residual.bfloat16()
        if variant in (3, 5) and numel > 40:  # refused, and nothing but that block suffers
            values[numel // 2] = float("nan") if numel % 2 else float("inf")
        seed = 0x123456789ABCDEF0 + variant
        want_payload = torch.empty(fmt.encoded_bytes(numel), dtype=torch.uint8)
        want_residual, want_anchor = (None if t is None else t.clone() for t in (residual, anchor))
        moves = (True,) if variant == 2 and moves_anchor else ()
        want_finite = reference.quantize(values, want_payload, fmt, want_anchor, want_residual, seed, *moves)
        payload = torch.full((fmt.encoded_bytes(numel) + 16,), 0xA5, dtype=torch.uint8, device=device)
        inputs = [None if t is None else t.to(device, copy=True) for t in (values, anchor, residual)]
        inside = payload[: fmt.encoded_bytes(numel)]
        finite = ops.quantize(inputs[0], inside, fmt, inputs[1], inputs[2], seed, *moves)
        if anchor is not None:
            assert_same_bits(inputs[1], values if moves else anchor)
            assert_same_bits(inputs[1], want_anchor)
        assert payload.cpu()[-16:].eq(0xA5).all(), "wrote behind the payload"
        if bool(want_finite) or fmt.name not in ("fp32", "bf16"):  # a NaN's own bits are nobody's promise
            assert torch.equal(inside.cpu(), want_payload)
        assert bool(finite) == bool(want_finite)
        if residual is not None:
            assert_same_bits(inputs[2], want_residual)
        assert kernels.payload_ok(inside, numel, fmt) == bool(want_finite)
        assert bool(reference.payload_ok(want_payload, numel, fmt)) == bool(want_finite)
        if bool(want_finite):
            _check_dequantize(ops, inside, numel, fmt, device, measured=variant == 0)


def _check_dequantize(
    ops: ModuleType, payload: Tensor, numel: int, fmt: PayloadFormat, device: str, measured: bool
) -> None:
    for weight, filled in ((None, 3.0), (-0.7, 3.0), (0.7, -0.0)):  # −0.0 + 0.0 is 0.0
        whole = torch.full((numel + 9,), filled, device=device)
        ops.dequantize(payload, whole[5 : 5 + numel], fmt, weight)  # a slice: what surrounds it stays
        wanted = torch.full((numel + 9,), filled)
        reference.dequantize(payload.cpu(), wanted[5 : 5 + numel], fmt, weight)
        assert_same_bits(whole, wanted)
    if measured and fmt.name in GRIDS:
        check_add_decoded(ops, payload, numel, fmt, device)


def check_squares(ops: ModuleType, payload: Tensor, numel: int, fmt: PayloadFormat) -> None:
    """Decoded values and the sums of their squares; on hosts only."""
    for weight in (None, -0.7):
        outs = [torch.full((numel,), 3.0) for _ in range(2)]
        squares = [torch.full((-(-numel // SQUARES_BLOCK),), -1.0, dtype=torch.float64) for _ in range(2)]
        for each, out, sums in zip((ops, reference), outs, squares, strict=True):
            each.dequantize(payload, out, fmt, weight, sums)
        assert_same_bits(*outs)
        assert_same_bits(*squares)


def check_add_decoded(ops: ModuleType, payload: Tensor, numel: int, fmt: PayloadFormat, device: str = "cpu") -> None:
    """The reference's bits, rounded once; also where the sum takes the place of its base."""
    for dtype in (torch.bfloat16, torch.float32):
        base = awkward(numel, 4).to(dtype)
        wanted = base.to(torch.float32, copy=True)
        reference.dequantize(payload.cpu(), wanted, fmt, -0.7)
        there = base.to(device, copy=True)
        for out in (torch.zeros(numel, dtype=torch.bfloat16, device=device), there):
            getattr(ops, "add_decoded", kernels.add_decoded)(payload, there, out, fmt, -0.7)  # of hosts by dispatch
            assert_same_bits(out, wanted.to(out.dtype))


OUTER_STEPS = [
    OuterStep(from_delta=0.2),
    OuterStep(keep=0.9, gain=1 / 16, from_momentum=2.88, from_delta=0.2, moves_momentum=True),
    OuterStep(keep=0.9, gain=1.0, from_momentum=0.63, from_delta=0.7, moves_momentum=True),
    OuterStep(keep=0.993, gain=0.007, from_momentum=0.75, from_delta=0.25, moves_momentum=True),
]


def check_outer_update(ops: ModuleType, step: OuterStep, numel: int) -> None:
    weights, delta, momentum, accumulator = (awkward(numel, i) for i in range(4))
    for dtype in (torch.float32, torch.bfloat16):
        for acc in (accumulator.to(dtype), None):
            moved = momentum.to(dtype) if acc is not None or step.moves_momentum else None
            want, have = ([t if t is None else t.clone() for t in (weights, delta, moved, acc)] for _ in range(2))
            for implementation, vectors in ((reference, want), (ops, have)):
                implementation.outer_update(*vectors, step, 2**63 + 12345)
            for a, b in zip(have, want, strict=True):
                assert (a is None and b is None) or assert_same_bits(a, b)


def check_merge(ops: ModuleType, numel: int) -> None:
    vectors = [torch.randn(numel) for _ in range(3)]
    for ledger in (False, True):
        want, have = ([t.clone() for t in vectors] for _ in range(2))
        reference.merge(*want, ledger, 0.25)  # type: ignore[call-arg]
        ops.merge(*have, ledger, 0.25)
        assert all(assert_same_bits(a, b) for a, b in zip(have, want, strict=True))


def check_rotate(ops: ModuleType, shape: tuple[int, int, int, int], device: str = "cpu") -> None:
    """Rotate a view into something wider, as queries are of fused queries, keys and values; and of a transposed
    one."""
    length, batch, heads, size = shape
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.randn(length, batch, heads, size + 6).to(dtype)
        angles = torch.randn(length, size // 2)
        tables = [t.to(device) for t in (angles.cos(), angles.sin())]
        for x in (wide[..., 2 : size + 2], wide[..., :size].transpose(0, 2).contiguous().transpose(0, 2)):
            for inverse in (False, True):
                want, have = (torch.zeros(shape, dtype=dtype, device=d) for d in ("cpu", device))
                reference.rotate(x, want, angles.cos(), angles.sin(), inverse)
                moved = x.to(device)
                assert moved.stride() == x.stride()
                ops.rotate(moved, have, *tables, inverse)
                assert torch.equal(have.cpu(), want)


def check_adam(ops: ModuleType, numel: int, device: str = "cpu") -> None:
    step = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step=3, grad_scale=0.37)
    after = AdamStep(9e-4, 0.9, 0.95, 1e-8, 0.1, step=4, grad_scale=0.37)
    for grad_dtype in (torch.float32, torch.bfloat16):
        weights, m, grad = torch.randn(numel), torch.randn(numel) * 0.1, torch.randn(numel).to(grad_dtype)
        v = torch.rand(numel) * 0.01
        for out_dtype in (torch.bfloat16, torch.float32, None):
            for mode in ("step", "ahead", "estimate"):
                if out_dtype is None and mode != "step":
                    continue
                out = None if out_dtype is None else torch.zeros(numel, dtype=out_dtype)
                want = [t if t is None else t.clone() for t in (weights, m, v, grad, out)]
                have = [t if t is None else t.to(device, copy=True) for t in (weights, m, v, grad, out)]
                for implementation, t in ((reference, want), (ops, have)):
                    implementation.adam(*t, step, after if mode == "ahead" else None, mode != "estimate")
                assert all(a is None or assert_same_bits(a, b) for a, b in zip(have, want, strict=True))


def assert_same_bits(have: Tensor, want: Tensor) -> bool:
    """Equal to the bit (NaN included), and True so that it can stand in an expression."""
    have = have.detach().cpu()
    kind = {torch.float64: torch.int64, torch.float32: torch.int32}.get(have.dtype, torch.int16)
    differs = (have.view(kind) != want.view(kind)).nonzero().flatten()
    assert not len(differs), (
        f"{len(differs)} differ, first at {int(differs[0])}: {have[differs[0]]} {want[differs[0]]}"
    )
    return True
