"""Ranges of samples."""

from __future__ import annotations

Range = tuple[int, int]  # start, samples


def take_out(ranges: list[Range], start: int, samples: int) -> tuple[list[Range], list[Range]]:
    """Cut disjoint ranges into what lies outside of that range, and what lies within it."""
    end, outside, inside = start + samples, list[Range](), list[Range]()
    for at, size in ranges:
        first, last = max(at, start), min(at + size, end)
        if first >= last:
            outside.append((at, size))
            continue
        inside.append((first, last - first))
        outside += [(a, b - a) for a, b in ((at, first), (last, at + size)) if a < b]
    return outside, inside
