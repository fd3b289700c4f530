"""Everything that the product can launch of the Triton kernels, from the tables that the launchers themselves read.

An op has factors: what it can be called with, each with all its values. Sizes beyond 2^31 elements are among them.
The whole space is their product; `pairs` is a part of it in which each two values of two factors meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import Any

import torch

from benchmarks import triton_aot
from geotrain.kernels import AdamStep, payload_format, triton_ops
from geotrain.kernels.dispatch import LOW_PRECISION
from geotrain.kernels.payload_format import FORMATS, GRIDS, SCALE_BYTES, PayloadFormat

SMALL, LARGE = 1 << 16, 1 << 35  # elements; the larger ones would take 128 GiB in fp32
TAIL = 19  # elements of a shorter last block
ADAM, NEXT = (AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step=step) for step in (7, 8))
FLAG = (False, True)
Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call of an op. settings: a value for each of its factors."""

    op: str
    settings: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.op} {', '.join(f'{key} {value}' for key, value in self.settings)}"

    def launches(self, target: str) -> list[triton_aot.Launch]:
        return triton_aot.launches(lambda: _CALLS[self.op](**dict(self.settings)), target)


def factors() -> dict[str, Settings]:
    """Op → factor → its values."""
    blocks = [1 << i for i in range(payload_format.MIN_BLOCK.bit_length() - 1, payload_format.MAX_BLOCK.bit_length())]
    # A tail that is shorter than every block, and none.
    sizes = {"numel": (SMALL, LARGE), "tail": (0, TAIL)}
    given = {"values": LOW_PRECISION, "anchor": FLAG, "residual": FLAG, "stochastic": FLAG}
    dense, coded = tuple(GRIDS), {"block": tuple(blocks), "scale": tuple(SCALE_BYTES)}
    plain = tuple(name for name in FORMATS if name not in GRIDS and name != "topk2")
    # A power of two for each number of low bits that a position can have, and one that is none.
    densities = (*(2.0**-bits for bits in range(payload_format.MAX_BLOCK.bit_length())), 0.1)
    sparse = {"density": densities, "block": tuple(blocks), "scale": tuple(SCALE_BYTES), **sizes}
    return {
        "quantize": {"name": dense, **coded, **given, **sizes},
        "quantize_plain": {"name": plain, "block": tuple(blocks), **given, **sizes},
        "quantize_topk": {**sparse, **given},
        "dequantize": {"name": dense, **coded, "accumulate": FLAG, **sizes},
        "dequantize_plain": {"name": plain, "accumulate": FLAG, **sizes},
        "dequantize_topk": {**sparse, "accumulate": FLAG},
        "add_decoded": {"name": dense, **coded, "base": LOW_PRECISION, "out": LOW_PRECISION, **sizes},
        "adam": {"grad": LOW_PRECISION, "out": (None, *LOW_PRECISION), "ahead": FLAG, "commit": FLAG, **sizes},
        "rotate": {
            "states": LOW_PRECISION,
            "heads": (1, 8, 33),
            "size": (64, 96, 128, 256),
            "inverse": FLAG,
            "length": (64, 1 << 24),
        },
    }


def whole(op: str) -> Iterator[Case]:
    values = factors()[op]
    for chosen in product(*values.values()):
        yield Case(op, tuple(zip(values, chosen, strict=True)))


def pairs(values: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """Few settings, in which each two values of two factors meet: greedily, in a fixed order (D. Cohen et al., The
    AETG system, 1997)."""
    open_pairs = {
        ((a, x), (b, y))
        for a, b in combinations(values, 2)
        for x in range(len(values[a]))
        for y in range(len(values[b]))
    }
    rows = []
    while open_pairs:
        row = dict(min(open_pairs))
        for factor in values:
            if factor not in row:
                gained = [
                    sum(
                        tuple(sorted([(factor, i), other], key=lambda p: list(values).index(p[0]))) in open_pairs
                        for other in row.items()
                    )
                    for i in range(len(values[factor]))
                ]
                row[factor] = max(range(len(gained)), key=lambda i: (gained[i], -((i + len(rows)) % len(gained))))
        ordered = [(factor, row[factor]) for factor in values]
        open_pairs -= set(combinations(ordered, 2))
        rows.append({factor: values[factor][i] for factor, i in ordered})
    return rows


def key(launch: triton_aot.Launch) -> tuple[Any, ...]:
    """The key of a launch: what the compiler is told of it, but for lengths that only a shorter last block has, and
    where its parts lie."""
    constants = {name: launch.arguments[name] for name in launch.constants}
    if "KEPT" in constants:
        full = constants["LENGTH"] == constants["BLOCK"]
        constants["ALL"] = constants["KEPT"] == constants["LENGTH"]
        dropped = ["KEPT", "LENGTH", "LOWS_AT", "HIGHS_AT", "VALUES_AT", "FULL_WORDS", "HIGH_BITS"]
        constants = {
            name: v
            for name, v in constants.items()
            if name not in (dropped if full else [*dropped, "LOW_BITS", "ALL"])
        }
    return launch.kernel.__name__, *sorted(constants.items()), *sorted(launch.options.items())


def _meta(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device="meta")


def _format(
    name: str, block: int = 128, scale: str = "bf16", stochastic: bool = False, density: float = 0.1
) -> PayloadFormat:
    return PayloadFormat(name, block, scale, stochastic, density=density)


def _quantize(values: torch.dtype, anchor: bool, residual: bool, numel: int, tail: int, **settings: Any) -> None:
    fmt, size = _format(**settings), numel + tail
    others = (_meta(size) if given else None for given in (anchor, residual))
    triton_ops.quantize(_meta(size, values), _payload(fmt, size), fmt, *others, 2**40)


def _dequantize(accumulate: bool, numel: int, tail: int, **settings: Any) -> None:
    fmt, size = _format(**settings), numel + tail
    triton_ops.dequantize(_payload(fmt, size), _meta(size), fmt, 0.5 if accumulate else None)


def _add_decoded(base: torch.dtype, out: torch.dtype, numel: int, tail: int, **settings: Any) -> None:
    fmt, size = _format(**settings), numel + tail
    triton_ops.add_decoded(_payload(fmt, size), _meta(size, base), _meta(size, out), fmt, 0.5)


def _payload(fmt: PayloadFormat, numel: int) -> torch.Tensor:
    return _meta(fmt.encoded_bytes(numel), torch.uint8)


def _adam(grad: torch.dtype, out: torch.dtype | None, ahead: bool, commit: bool, numel: int, tail: int) -> None:
    if out is None and (ahead or not commit):
        return  # `dispatch` refuses it: nothing would be written
    new = None if out is None else _meta(numel + tail, out)
    states = (_meta(numel + tail) for _ in range(3))
    triton_ops.adam(*states, _meta(numel + tail, grad), new, ADAM, NEXT if ahead else None, commit)


def _rotate(states: torch.dtype, heads: int, size: int, inverse: bool, length: int) -> None:
    given, angles = torch.empty(length, 2, heads, size, dtype=states, device="meta"), _meta(length * size // 2)
    angles = angles.view(length, -1)
    triton_ops.rotate(given, torch.empty_like(given), angles, angles, inverse)


_CALLS: dict[str, Any] = {
    **dict.fromkeys(("quantize", "quantize_plain"), _quantize),
    "quantize_topk": partial(_quantize, name="topk2"),
    **dict.fromkeys(("dequantize", "dequantize_plain"), _dequantize),
    "dequantize_topk": partial(_dequantize, name="topk2"),
    "add_decoded": _add_decoded,
    "adam": _adam,
    "rotate": _rotate,
}
