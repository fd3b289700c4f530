"""Makes an inventory of what providers offer, for who has no machines yet: kinds, places and prices.

A catalogue has no quotas and no links. So HOSTS machines are assumed in each of REGIONS regions, one type in each,
and links between them as between any two clouds; `geotrain probe` measures those that one gets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations_with_replacement

from geotrain.config import ClusterConfig, parse
from geotrain.plan.inventory import PlanError
from geotrain.plan.model.accelerators import ACCELERATORS

REGIONS, HOSTS = 4, 2
USABLE = 0.95  # of the memory, by one rank
STATE_BYTES = 18  # of a parameter, on the accelerators of one worker
OUTSIDE = {"gbps": 1.0, "rtt_ms": 100.0, "usd_per_gb": 0.09}
INSIDE = {"gbps": 50.0, "rtt_ms": 0.2}
LONGEST = 28  # name of a region


@dataclass(frozen=True)
class Offer:
    """One type of machine in one region of a cloud. kind: of its accelerators; usd_per_hour: of the machine."""

    cloud: str
    kind: str
    count: int
    place: str
    usd_per_hour: float

    @property
    def region(self) -> str:
        """Name of the region in the cluster file."""
        return region_name(self.cloud, self.place)

    @property
    def usd_per_tflops(self) -> float:
        return 1e12 * self.usd_per_hour / (self.count * ACCELERATORS[self.kind].flops)


def region_name(cloud: str, place: str) -> str:
    """Name a cloud's region as cluster files name regions."""
    return re.sub(r"[^a-z0-9]+", "-", f"{cloud}-{place}".lower()).strip("-")[:LONGEST].strip("-")


def inventory_of(offers: Iterable[Offer], parameters: int, spot: bool) -> tuple[ClusterConfig, dict[str, Offer]]:
    """Choose the regions whose machines compute the most for a dollar, among those that hold a model of so many
    parameters; returns them as an inventory for `geotrain plan`, and by region what is offered. spot: the prices are
    those of machines that may be taken back. Raises PlanError."""
    found: dict[str, Offer] = {}
    fitting = [
        offer
        for offer in offers
        if offer.kind in ACCELERATORS
        and offer.usd_per_hour > 0
        and HOSTS * offer.count * USABLE * ACCELERATORS[offer.kind].memory_bytes >= STATE_BYTES * parameters
    ]
    for offer in sorted(fitting, key=lambda each: (each.usd_per_tflops, -each.count, each.region)):
        if len(found) < REGIONS:
            found.setdefault(offer.region, offer)
    if not found:
        raise PlanError(
            f"SkyPilot's catalogues offer no machines of which {HOSTS} would hold {parameters:.3g} parameters, of "
            f"kinds {', '.join(ACCELERATORS)}; `sky gpus list` fetches catalogues, `sky check` says which clouds are "
            "yours; or name machines with --gpu"
        )
    price = "spot_usd_per_hour" if spot else "usd_per_hour"
    regions = [
        {
            "name": name,
            "hosts": [
                {"host": f"{name}-{n}", "slots": offer.count, "device": offer.kind, "spot": spot}
                for n in range(HOSTS)
            ],
            "offers": {offer.kind: {price: offer.usd_per_hour / offer.count}},
        }
        for name, offer in found.items()
    ]
    links = [
        {"regions": ends, **(INSIDE if ends[0] == ends[1] else OUTSIDE)}
        for ends in combinations_with_replacement(found, 2)
    ]
    devices = {
        kind: {"memory_gb": USABLE * of.memory_bytes / 1e9, "tflops": of.flops / 1e12, "host_gbps": 8e-9 * of.link}
        for kind, of in {offer.kind: ACCELERATORS[offer.kind] for offer in found.values()}.items()
    }
    raw = {"name": "offers", "regions": regions, "links": links, "devices": devices}
    return parse(ClusterConfig, raw, "SkyPilot's catalogues"), found
