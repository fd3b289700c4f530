"""What is measured of a run in the same way for all methods, whatever they exchange over."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from claims_methods import DATA

from geotrain.config import OuterConfig
from geotrain.outer.codec import make_codec
from geotrain.simulate.published import Exchange
from geotrain.simulate.spec import Environment, ring_factor


@lru_cache(maxsize=1)
def home_region() -> str:
    """The one that the global server stands in."""
    return f"region-{json.loads(DATA.read_text())['global_server_region']}"


def compute_bound_s(environment: Environment, steps: float) -> float:
    """Seconds that all devices together would need for so many steps at full speed."""
    return steps / sum(1 / w.step_s for w in environment.world.workers)


def wide_bytes(exchange: Exchange, report: dict[str, Any], outer: OuterConfig, environment: Environment) -> float:
    """Bytes that crossed from one region to another; what the global server's region sends to it does not.

    A ring goes around region by region, so that as many of its hops cross as there are regions. report: of the world.
    """
    regions = environment.world.regions
    members = len(environment.world.workers)
    crossing = len(regions) if len(regions) > 1 else 0
    links = report["links"]
    if exchange == "ring":  # every member's hop is counted there
        return sum(usage["sent_bytes"] for usage in links.values()) * crossing / members
    if exchange == "one-worker":  # the ring is inside the worker's step
        hop_bytes = ring_factor(members) * make_codec(outer.up).encoded_bytes(environment.numel)
        return report["committed_steps"] * hop_bytes * crossing
    far = {f"{r.name} {way}" for r in regions for way in ("up", "down") if r.name != home_region()}
    return sum(usage["sent_bytes"] for name, usage in links.items() if name in far)
