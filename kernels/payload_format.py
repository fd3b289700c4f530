"""Payload formats: where scales and codes of each lie, in bytes. Integers only, no tensor is touched.

A tensor of `numel` elements is cut into blocks of `block` elements (the last may be shorter). Little endian.

fp32, bf16     the values themselves
int8           [scales, padded to 16 bytes][one signed code a byte]
4-bit formats  [scales, padded to 16 bytes][codes: byte j of a block holds elements j (low) and half + j (high);
               half = block / 2, in a shorter last block ceil(length / 2); a code is sign · 8 + magnitude's index]
topk2          one record a block, see `TopkRecord`
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import ceil

MIN_BLOCK, MAX_BLOCK = 32, 4096
SQUARES_BLOCK, SQUARES_LANES = 4096, 32  # of the sums of squares that decoding returns; CHUNK and LANES in csrc
SCALE_BYTES, SCALE_SHIFT = 2, 16  # a stored scale is bf16, the upper half of fp32's bits
MAX_FP32_BITS = 0x7F7FFFFF
TINY_BITS = 27 << 23  # 2^-100: a block whose largest magnitude is below is coded as zero (no denormal scales)


@dataclass(frozen=True)
class Grid:
    """The magnitudes a code can stand for: integers below 2^mantissa, from there on a float with that mantissa.

    Code c < 2^M means c; c = (e << M) + f with e ≥ 1 means (2^M + f) · 2^(e−1). A value is scale · magnitude.
    """

    bits: int
    mantissa: int
    max_code: int
    max_level: int


GRIDS = {
    "int8": Grid(bits=8, mantissa=7, max_code=127, max_level=127),
    "int4": Grid(bits=4, mantissa=3, max_code=7, max_level=7),
    "e3m0": Grid(bits=4, mantissa=0, max_code=7, max_level=64),  # 0 1 2 4 8 16 32 64
}
FORMATS = ("fp32", "bf16", *GRIDS, "topk2")


@dataclass(frozen=True)
class PayloadFormat:
    """A format of payload bytes. Raises ValueError for one that the kernels do not take.

    name: of FORMATS. block: elements that share a scale; a power of two. density: topk2, share of elements sent.
    """

    name: str
    block: int = 128
    density: float = 0.1

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise ValueError(f"codec: format {self.name!r} is unknown; known: {', '.join(FORMATS)}")
        if not MIN_BLOCK <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(f"codec: block = {self.block} must be a power of two from {MIN_BLOCK} to {MAX_BLOCK}")

    @property
    def max_scale_bits(self) -> int:
        """Bits, in fp32, of the largest scale at which every code decodes to a finite value.

        The codes of int8 include −128, which no encoder writes, but a payload may hold.
        """
        level = GRIDS[self.name].max_level if self.name in GRIDS else 1
        level += self.name == "int8"
        largest = struct.unpack("<f", struct.pack("<I", MAX_FP32_BITS))[0]
        below = struct.unpack("<I", struct.pack("<f", largest / level))[0]
        if struct.unpack("<f", struct.pack("<I", below))[0] * level > largest:  # the quotient was rounded up
            below -= 1
        return (below >> SCALE_SHIFT) << SCALE_SHIFT

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def groups(self, numel: int) -> list[tuple[int, int, int]]:
        """Group the blocks: the whole ones, then a shorter last one; (first block, blocks, elements of each)."""
        full, tail = divmod(numel, self.block)
        both = (0, full, self.block), (full, 1, tail)
        return [(first, blocks, length) for first, blocks, length in both if blocks and length]

    def codes_offset(self, numel: int) -> int:
        """Offset of the codes, in bytes: scales stand before them, padded so that wide loads stay aligned."""
        return -(-self.blocks(numel) * SCALE_BYTES // 16) * 16

    def encoded_bytes(self, numel: int) -> int:
        """Size of a payload, exactly."""
        if numel < 0:
            raise ValueError(f"codec: {numel} elements")
        if self.name in ("fp32", "bf16"):
            return numel * (4 if self.name == "fp32" else 2)
        full, tail = divmod(numel, self.block)
        if self.name == "topk2":
            return full * self.record(self.block).bytes + (self.record(tail).bytes if tail else 0)
        bits = GRIDS[self.name].bits
        return self.codes_offset(numel) + full * self.block * bits // 8 + (tail * bits + 7) // 8

    def record(self, length: int) -> TopkRecord:
        """Lay out one block of topk2 with `length` ≥ 1 elements."""
        kept = min(length, max(1, ceil(self.density * length)))
        low_bits = (length // kept).bit_length() - 1
        lows_at = 2 * SCALE_BYTES * 8
        highs_at = lows_at + kept * low_bits
        values_at = highs_at + (kept + ((length - 1) >> low_bits) if kept < length else 0)
        words = -(-(values_at + 2 * kept) // 32)
        return TopkRecord(length, kept, low_bits, lows_at, highs_at, values_at, 4 * words)


@dataclass(frozen=True)
class TopkRecord:
    """One block of topk2: `kept` elements of `length`, their positions in Elias–Fano form, 2 bits for each value.

    A string of bits, least significant first, in whole 32-bit words: [low scale][high scale][lows: low_bits each]
    [highs][values: 2 bits each, sign · 2 + which scale]. Of the i-th kept position p (ascending) the low_bits low
    bits stand in `lows`, and bit (p >> low_bits) + i of `highs` is set. That is close to the entropy of the
    positions, and of fixed size (P. Elias 1974; R. Fano 1971). Where all are kept there are neither lows nor highs.
    `*_at` are bit offsets.
    """

    length: int
    kept: int
    low_bits: int
    lows_at: int
    highs_at: int
    values_at: int
    bytes: int
