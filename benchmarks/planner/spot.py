"""Spot hosts: what the planner's workers train of what a clairvoyant could, in the simulator.

benchmarks/data/sailor.json has Sailor's availability trace: how many of 16 A100 one zone gave, over 87 minutes. Three
zones: the trace as it is, and from its first and its second third on, since others were not published. Hosts have
four; the planner knows their price, and how often and for how long one is away on average, not when. A worker whose
host comes back needs REJOIN_S until it trains; what it trained for updates that it had not sent is lost.

clairvoyant: every host trains from when it comes until it goes, in the layout that does most for a host: an upper
bound, which loses nothing. share: of its steps, what ours had committed in the end.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from benchmarks.planner.sailor import SLOTS, Sailor, inventory, run_of
from benchmarks.studies.environments import one_block
from geotrain.config import ClusterConfig, parse
from geotrain.parameters.parameter_map import parameter_count
from geotrain.plan.inventory import Pins, Wish, task_of
from geotrain.plan.planner import decide, name_workers, resolve
from geotrain.simulate.spec import WorldSpec, world_of_cluster
from geotrain.simulate.world import VirtualWorld, timing_task

ZONES = ("us-central1-a", "us-central1-b", "us-central1-c")
REJOIN_S = 120.0
SPOT = 1 / 3  # of the price
PARTS = 16  # of the batch, a worker's each
Spans = list[tuple[float, float]]


def measure() -> dict[str, Any]:
    sailor = Sailor("OPT-350")
    trace = [(at_s, gpus // SLOTS) for at_s, gpus in sailor.data["available_a100"]]
    end_s = trace[-1][0]
    away = {(z, i): absences(trace, i, n * end_s / len(ZONES)) for n, z in enumerate(ZONES) for i in range(4)}
    gone_s = [end - begin for spans in away.values() for begin, end in spans if begin > 0]
    hosts_s = len(away) * end_s - sum(end - begin for spans in away.values() for begin, end in spans)
    offer = {
        "spot_usd_per_hour": SPOT * sailor.data["usd_per_hour"]["A100-40"],
        "preemptions_per_hour": 3600 * len(gone_s) / hosts_s,
        "replaced_after_s": sum(gone_s) / len(gone_s) + REJOIN_S,
    }
    raw = inventory(sailor, {f"{zone} A100-40": 16 for zone in ZONES}).model_dump(by_alias=True, mode="json")
    for region in raw["regions"]:
        region["offers"] = {"A100-40": offer}
        region["hosts"] = [{**host, "spot": True} for host in region["hosts"]]
    run = run_of(sailor, sailor.model["batch"] // PARTS)
    task = task_of(run, Pins(recompute="none"), parse(ClusterConfig, raw, "spot"))
    tokens = 1e5 * task.tokens_per_step
    decided = decide(task, Wish(tokens), sailor.layouts)
    setting, named = decided.settings[0], name_workers(task, decided.workers)
    run, cluster = resolve(task, named, decided.places[0].region, setting.outer, tokens, setting.shards)
    world = world_of_cluster(cluster, {name: w.layout.step.step_s for name, w in named.items()})
    taken = {
        name: union([s for h in w.layout.hosts for s in away[h.region, number(h.host)]]) for name, w in named.items()
    }
    world = with_absences(world, taken)
    played = VirtualWorld(world, timing_task(setting.outer, one_block(parameter_count(run.architecture)), 10**12, 1))
    committed = played.run(end_s)["committed_steps"]
    most = hosts_s * max(1 / w.layout.step.step_s / len(w.layout.hosts) for w in decided.every + decided.workers)
    return {
        "share": committed / most,
        "workers": len(named),
        "hosts_of_a_worker": len(decided.workers[0].layout.hosts),
        "taken_back": len(gone_s),
        **offer,
    }


def number(host: str) -> int:
    return int(host.rpartition("-")[2])


def absences(trace: list[tuple[float, int]], host: int, from_s: float) -> Spans:
    """Spans in which a zone gives no more than `host` hosts, of a trace that begins at from_s and then goes round."""
    end_s = trace[-1][0]
    gone = [(begin, end) for (begin, hosts), (end, _) in pairwise(trace) if hosts <= host]
    turned = [(begin + turn - from_s, end + turn - from_s) for turn in (0, end_s) for begin, end in gone]
    return union([(max(0.0, begin), min(end_s, end)) for begin, end in turned if end > 0 and begin < end_s])


def union(spans: Spans) -> Spans:
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def with_absences(world: WorldSpec, taken: dict[str, Spans]) -> WorldSpec:
    def worker_away(name: str) -> tuple[tuple[float, float], ...]:
        return tuple(union([(begin, end + REJOIN_S) for begin, end in taken[name]]))

    return replace(
        world,
        regions=tuple(
            replace(r, workers=tuple(replace(w, away=worker_away(w.name)) for w in r.workers)) for r in world.regions
        ),
    )
