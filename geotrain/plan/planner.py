"""The whole plan: workers, global server, outer settings; what it predicts, what came next, and how good it can be.

Decisions are taken one after the other, each by complete search where its module says so: workers first (most steps
a second), then the global server's place, then the outer settings that the links between them bear. What is proven
of the whole is only its distance from `Prediction.bound_tokens_per_s` and `Plan.inventory_tokens_per_s`: no plan on
these accelerators trains more tokens a second than all of them without any waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geotrain.config import ClusterConfig, RunConfig
from geotrain.plan.grouping import Worker, Workers, form_workers, speed
from geotrain.plan.inventory import Objective, PlanError, Spot, Task
from geotrain.plan.job import Prediction, predict
from geotrain.plan.layouts import Refusals, home_of
from geotrain.plan.resolve import name_workers, resolve
from geotrain.plan.settings import BUSY, TRAFFIC, Place, Setting, places, settings
from geotrain.plan.shortage import nothing_fits
from geotrain.plan.work import useful_flops

DAY_S = 86_400.0
NO_WORSE = 1.001  # prices a token within this factor are equal


@dataclass(frozen=True)
class Wish:
    """objective: most tokens a second, or fewest dollars a token. within_days: with cost, the latest end.
    utilization: that workers should reach in spite of the outer loop. tokens: how many to train."""

    tokens: float
    objective: Objective = "speed"
    within_days: float | None = None
    utilization: float = 0.95


@dataclass(frozen=True)
class Plan:
    """run, cluster: to be launched as they are. idle: accelerators left out, (spot, how many, why)."""

    task: Task
    wish: Wish
    refused: Refusals
    run: RunConfig
    cluster: ClusterConfig
    prediction: Prediction
    workers: dict[str, Worker]
    place: Place
    setting: Setting
    places: tuple[Place, ...]
    settings: tuple[Setting, ...]
    idle: tuple[tuple[Spot, int, str], ...]
    inventory_tokens_per_s: float
    notes: tuple[str, ...] = field(default=())


def plan(task: Task, wish: Wish) -> Plan:
    """Raises PlanError when the model fits nowhere, a figure is missing, or what is pinned cannot be had."""
    refused = Refusals()
    task, workers = _workers(task, refused)
    if not workers:
        raise nothing_fits(task, refused)
    every = workers
    if wish.objective == "cost":
        workers = cheapest(task, workers, wish)
    named = name_workers(task, workers)
    homes = list(dict.fromkeys(home_of(w.layout.spots) for w in workers))
    model_bytes = 2 * task.architecture.parameter_count  # bf16: which codec is chosen does not change the order
    found_places = places(task, homes, model_bytes)
    place = found_places[0]
    prices = [w.layout.usd_per_hour for w in workers]
    hourly = None if None in prices else sum(p for p in prices if p is not None)
    found_settings = settings(task, workers, place.region, wish.utilization, hourly)
    setting = found_settings[0]
    run, cluster = resolve(task, named, place.region, setting.outer, wish.tokens)
    notes = []
    if setting.misses > 0:
        notes.append(
            f"no outer setting keeps every limit (utilization ≥ {wish.utilization:.0%}, links ≤ {BUSY:.0%} busy, "
            f"traffic ≤ {TRAFFIC:.0%} of the accelerators' price): utilization {setting.utilization:.0%}, fullest "
            f"link {setting.busy:.0%}"
        )
    return Plan(
        task,
        wish,
        refused,
        run,
        cluster,
        predict(run, cluster),
        named,
        place,
        setting,
        tuple(found_places),
        tuple(found_settings),
        tuple(idle_spots(task, workers, every)),
        sum(s.slots * s.device.tflops * s.device.efficiency for spots in task.spots.values() for s in spots)
        * 1e12
        / useful_flops(task.architecture, task.run.data.sequence_length),
        tuple(notes),
    )


def _workers(task: Task, refused: Refusals) -> tuple[Task, Workers]:
    """The fastest, without recomputation where that makes no difference; and the task with that recomputation."""
    choices = [task.pins.recompute] if task.pins.recompute is not None else ["none", "full"]
    tried = []
    for recompute in choices:
        tasked = task.with_recompute(recompute)
        tried.append((tasked, form_workers(tasked, refused)))
    return max(tried, key=lambda entry: speed(entry[1]))


def cheapest(task: Task, workers: Workers, wish: Wish) -> Workers:
    """Workers in the order of their price a token: as many as are needed to end in time; without a time, all that
    are no dearer than the cheapest."""
    prices = {id(w): w.layout.usd_per_hour for w in workers}
    unpriced = sorted({s.kind for w in workers for s in w.layout.spots if s.device.usd_per_hour is None})
    if unpriced:
        raise PlanError(f"--objective cost: devices.{unpriced[0]} has no usd_per_hour; add it, or plan for speed")
    ranked = sorted(workers, key=lambda w: (prices[id(w)] or 0.0) * w.layout.step.step_s)
    dearest_s = [(prices[id(w)] or 0.0) * w.layout.step.step_s for w in ranked]
    if wish.within_days is None:
        return tuple(w for w, price in zip(ranked, dearest_s, strict=True) if price <= NO_WORSE * dearest_s[0])
    for count in range(1, len(ranked) + 1):
        days = wish.tokens / (speed(ranked[:count]) * task.tokens_per_step) / DAY_S
        if days <= wish.within_days:
            return tuple(ranked[:count])
    raise PlanError(
        f"{wish.tokens:.3g} tokens within {wish.within_days:g} days cannot be had: all workers together need "
        f"{days:.1f} days, without any waiting for the outer loop"
    )


def idle_spots(task: Task, workers: Workers, every: Workers) -> list[tuple[Spot, int, str]]:
    """Accelerators that no worker uses: (host, how many, why)."""
    used = {(s.region, s.host): w.layout.slots for w in workers for s in w.layout.spots}
    dear = {(s.region, s.host) for w in every for s in w.layout.spots}
    found = []
    for spots in task.spots.values():
        for spot in spots:
            place = (spot.region, spot.host)
            if place in used and used[place] < spot.slots:
                found.append((spot, spot.slots - used[place], "no layout of its worker gains from them"))
            elif place not in used:
                why = (
                    "dearer a token"
                    if place in dear
                    else "would not make any worker faster, or cannot hold the model"
                )
                found.append((spot, spot.slots, why))
    return found
