"""Compares a run that is on with a plan of today's inventory, made with its speeds and links as measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any, Literal

from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, RunConfig, parse
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.plan.inventory import hosts_of
from geotrain.plan.planner import Plan
from geotrain.plan.predict import predict

LONG_S = 2.0  # of a message: then the fastest second holds nothing else
APART = 0.1  # a region's accelerators that are so much faster or slower than others of their kind are planned as such


@dataclass(frozen=True)
class Change:
    """A region to add, drop or move (to other hosts), or one that stays as it is, and why."""

    what: Literal["add", "drop", "move", "keep"]
    region: str
    why: str


def as_measured(
    run: RunConfig,
    now: ClusterConfig,
    inventory: ClusterConfig,
    step_s: Mapping[str, float],
    peaks: Mapping[str, float],
    top: str | None,
) -> ClusterConfig:
    """Return the inventory with accelerators and links as fast as they were found. Raises ConfigError.

    now: as the run is launched. step_s: worker → seconds of an inner step. A kind gets the median over its workers;
    in a region that is APART from it, it becomes a kind of its own, `<kind>.<region>`. peaks: region → bytes that it
    sent towards the global server, which stands in region `top`, in the fastest second. A link has at least that
    rate, and no more where a message takes longer than LONG_S.
    """
    found: dict[str, dict[str, float]] = {}  # kind → region → how many times as fast as predicted
    predicted = predict(run, now)
    for region, worker in now.workers:
        kinds = {str(host.device) for host in worker.hosts}
        if len(kinds) == 1 and step_s.get(worker.name):
            found.setdefault(kinds.pop(), {})[region] = predicted.workers[worker.name].step_s / step_s[worker.name]
    raw = inventory.model_dump(by_alias=True, mode="json")
    fragments = len(parameter_map_of(run).group_numel)
    for link, (region, paced) in product(raw["links"], predicted.regions.items()):
        peak = peaks.get(region)
        if peak and region != top and set(link["regions"]) in ({region, GLOBAL}, {region, top}):
            slower = paced.up_bytes / fragments > LONG_S * peak
            link["gbps"] = 8e-9 * peak if slower else max(link["gbps"], 8e-9 * peak)
    for kind, by_region in found.items():
        usual, device = median(by_region.values()), raw["devices"].get(kind)
        for region in raw["regions"] if device else ():
            if abs(by_region.get(region["name"], usual) / usual - 1) > APART:
                own = f"{kind}.{region['name']}"
                raw["devices"][own] = _times(device, by_region[region["name"]])
                for host in (*region["hosts"], *(host for worker in region["workers"] for host in worker["hosts"])):
                    host["device"] = own if host["device"] == kind else host["device"]
                if kind in region["offers"]:
                    region["offers"][own] = region["offers"].pop(kind)
        if device:
            raw["devices"][kind] = _times(device, usual)
    return parse(ClusterConfig, raw, "the inventory, as measured")


def _times(device: Mapping[str, Any], factor: float) -> dict[str, Any]:
    return {**device, "efficiency": min(1.0, device["efficiency"] * factor)}


def changes(now: ClusterConfig, plan: Plan) -> Iterator[Change]:
    """Compare the run's regions with the plan's, in the order of both files."""
    before, after = _hosts(now), _hosts(plan.cluster)
    idle = {(host.region, host.host): why for host, _, why in plan.idle}
    listed = {(region.name, host.host) for region in plan.task.cluster.regions for host in hosts_of(region)}
    for name in dict.fromkeys((*before, *after)):
        mine = [(plan.workers[w], p) for w, p in plan.prediction.workers.items() if p.region == name]
        gain = f"{sum(p.tokens_per_s for _, p in mine):,.0f} tokens/s"
        if prices := [p.usd_per_hour for _, p in mine if p.usd_per_hour is not None]:
            gain += f" for {sum(prices):,.2f} USD/h"
        if name not in before:
            kinds = ", ".join(f"{w.layout.ranks} × {w.layout.kinds}" for w, _ in mine)
            yield Change("add", name, f"{kinds}: {gain}")
        elif name not in after:
            reasons = [
                idle.get(place, "would not make any worker faster") if place in listed else "is not in the inventory"
                for place in ((name, host) for host in before[name])
            ]
            yield Change("drop", name, "; ".join(dict.fromkeys(reasons)))
        elif before[name] != after[name]:
            gone, new = (
                sorted(a.keys() - b.keys()) for a, b in ((before[name], after[name]), (after[name], before[name]))
            )
            moved = [*(f"not {host}" for host in gone), *new] or ["other accelerators of the same hosts"]
            yield Change("move", name, f"{', '.join(moved)}: {gain}")
        else:
            yield Change("keep", name, gain)


def _hosts(cluster: ClusterConfig) -> dict[str, dict[str, tuple[int, bool]]]:
    """Region with workers → their hosts → (accelerators used, whether on the spot market)."""
    return {
        region.name: {host.host: (host.slots, host.spot) for w in region.workers for host in w.hosts}
        for region in cluster.regions
        if region.workers
    }
