"""The emulated links, which go by the machine: their times are so many steps of training there."""

from __future__ import annotations

from benchmarks.rivals.task import new_model

LINKS = {"slow": 45.0, "fast": 4.5}  # steps' time that all weights take in fp32, one way
ROUND_TRIP_STEPS = 2.0


def link(name: str, step_s: float) -> tuple[float, float]:
    """(Gbit/s one way, ms there and back) of the link of that name, where a step without communication takes so
    many seconds."""
    bits = 32 * sum(parameter.numel() for parameter in new_model().parameters())
    return 1e-9 * bits / (LINKS[name] * step_s), 1e3 * ROUND_TRIP_STEPS * step_s


def described(name: str, step_ms: float) -> str:
    gbps, rtt_ms = link(name, step_ms / 1e3)
    return (
        f"The {name} link: all weights in fp32 take as long as {LINKS[name]:g} steps of {step_ms:.1f} ms, the round "
        f"trip as {ROUND_TRIP_STEPS:g} (here {1000 * gbps:.0f} Mbit/s and {rtt_ms:.0f} ms)."
    )
