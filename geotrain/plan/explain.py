"""Explains a plan: the reasons for its decisions, and the next best of each.

An alternative takes one decision otherwise and keeps the others; the whole run is then predicted for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from geotrain.config import SHORT_RUN, ConfigError, Topology
from geotrain.parallelism.acco_forms import best_hiding, least_step_s
from geotrain.parallelism.checks import accumulation_steps, gradient_wire_bytes, trains_in_bf16, zero_stage
from geotrain.parallelism.optimizer_settings import uses_muon
from geotrain.parameters.parameter_map import parameter_count
from geotrain.plan.grouping import Worker
from geotrain.plan.inventory import PlanTask
from geotrain.plan.layouts import layout_text
from geotrain.plan.model.answering import updates_per_send, waits
from geotrain.plan.model.loss import worth
from geotrain.plan.model.step import PARTS
from geotrain.plan.planner import Plan, resolve
from geotrain.plan.predict import RunPrediction, WorkerPrediction, predict
from geotrain.plan.settings import BUSY, TRAFFIC, Setting

SHOWN = 3  # alternatives to each decision
DISTINCT = 1.1  # times as many steps between exchanges
MOST_WORKERS = 6  # whose layouts are explained; like ones once
EXCHANGES = 100  # of fewer in a run, an outer momentum over a tenth of them (`momentum_share`) averages less than ten


@dataclass(frozen=True)
class Alternative:
    """One decision taken otherwise, the whole run's figures then, and what is worse."""

    decision: str
    prediction: RunPrediction
    worse: str


def reasons(plan: Plan) -> list[str]:
    """Explain the decisions in words."""
    p = plan.prediction
    found = []
    for names, worker in alike(plan):
        layout, limit = worker.layout, p.workers[names[0]].limit
        where, hosts = " + ".join(worker.regions), len(layout.hosts)
        found.append(
            f"{', '.join(names)}: {layout_text(layout.parallel, layout.ranks, layout.micro_batch)} on {hosts} "
            f"host{'s' * (hosts > 1)} of {where}: the shortest step of all parallel layouts that fit, "
            f"{layout.step.step_s:.3g} s; most of what is lost: {limit}"
        )
        found += hiding_text(plan, names[0])
        if worker.unlike and plan.task.balanced:
            found.append(
                f"{names[0]}: acco.balance, since its replicas are unlike in speed: each takes its next "
                "micro-batches when it is free"
            )
        if layout.parallel.stage_layers:
            found.append(
                f"{names[0]}: each stage holds as many layers as its accelerators compute in the time of the others "
                f"and have memory for; several workers of {where} would train on staler weights, or not fit"
            )
        if len(worker.regions) > 1:
            found.append(
                f"{names[0]} spans {where}: one of these is too small for the model alone, or would train on staler "
                f"weights; together they train {p.workers[names[0]].tokens_per_s:,.0f} tokens/s"
            )
    found.append(
        f"global server in {plan.place.region}: the slowest region exchanges the whole model (bf16) in "
        f"{plan.place.worst_s:.3g} s, less than from any other place compared ({len(plan.places)})"
    )
    s = plan.setting
    found.append(
        f"outer loop: the fewest inner steps between global exchanges ({s.steps:.3g}) with which workers lose "
        f"at most {1 - plan.wish.utilization:.0%} waiting ({1 - s.utilization:.1%}), links stay under "
        f"{BUSY:.0%} (fullest: {s.busy:.0%}) and traffic under {TRAFFIC:.0%} of the accelerators' price"
    )
    if waits(s.outer):
        tau = s.outer.overlap.steps
        latest = max(p.workers.values(), key=lambda worker: p.regions[worker.region].answer_s / worker.step_s)
        found.append(
            f"answers wait for the other regions' deltas, as workers have fewer than {SHORT_RUN} jobs: an update and "
            f"its answer take {p.regions[latest.region].answer_s:.3g} s of the {tau * latest.step_s:.3g} s that "
            f"overlap.steps = {tau} leave them"
        )
    where = "in its own process" if s.shards == 1 else f"in {s.shards} shards, processes of their own"
    found.append(
        f"a server's vectors {where}: the fewest with which every server rests half of the time (busiest: "
        f"{s.server_busy:.0%}) and its hosts have room"
    )
    found += synchronous_text(plan)
    found += [
        f"idle: {count} of {host.slots} {host.kind} on {host.host} ({host.region}): {why}"
        for host, count, why in plan.idle
    ]
    return found


def doubts(plan: Plan, exchanges: Mapping[str, float]) -> Iterator[str]:
    """Find what may be planned, and is seldom wanted. exchanges: of the whole model, that each region makes in the
    run."""
    p, outer = plan.prediction, plan.setting.outer
    if few := {region: count for region, count in exchanges.items() if count < EXCHANGES}:
        counted = ", ".join(f"{region} {count:.0f}" for region, count in few.items())
        full = ", ".join(region for region in few if p.regions[region].busy > BUSY)
        link = f"; of {full} the link sets the pace: a faster one, or a coarser codec" if full else ""
        yield (
            f"fewer than {EXCHANGES} exchanges with the global server in the whole run ({counted}): the outer loop "
            f"learns little from so few; lower outer.local_steps or updates_per_send, or train more tokens{link}"
        )
    if len(p.regions) == 1 and not outer.flat:
        yield (
            f"only region {next(iter(p.regions))!r} trains: a region server between its workers and the global "
            "server gains nothing; outer.levels = 1 leaves it out"
        )


def alternatives(plan: Plan) -> Iterator[Alternative]:
    """Find the next best of each decision: parallel layouts, the global server's place, outer settings."""

    def predicted(
        workers: dict[str, Worker], place: str, setting: Setting, task: PlanTask = plan.task
    ) -> RunPrediction:
        run, cluster = resolve(task, workers, place, setting.outer, plan.wish.tokens, setting.shards)
        return predict(run, cluster, task.imbalance)

    for names, worker in alike(plan)[:MOST_WORKERS]:
        for other in worker.others[:SHOWN]:
            changed = {**plan.workers, names[0]: replace(worker, layout=other)}
            prediction = predicted(changed, plan.place.region, plan.setting)
            decision = f"{names[0]}: {layout_text(other.parallel, other.ranks, other.micro_batch)}"
            if other.ranks != worker.layout.ranks:
                decision += f", {other.ranks} of its accelerators"
            worse = _worse_step(plan.prediction.workers[names[0]], prediction.workers[names[0]])
            yield Alternative(decision, prediction, worse)

    unlike = [name for name, worker in plan.workers.items() if worker.unlike]
    if unlike and plan.task.may_balance:
        task = plan.task.with_balance(not plan.task.balanced)
        prediction = predicted(plan.workers, plan.place.region, plan.setting, task)
        worse = _worse_step(plan.prediction.workers[unlike[0]], prediction.workers[unlike[0]])
        yield Alternative(f"acco.balance = {str(task.balanced).lower()}", prediction, worse)

    now_s = plan.place.worst_s
    for place in plan.places[1 : 1 + SHOWN]:
        worse = f"the slowest region exchanges the whole model in {place.worst_s:.3g} s, not {now_s:.3g} s"
        prediction = predicted(plan.workers, place.region, plan.setting)
        yield Alternative(f"global server in {place.region}", prediction, worse)

    # Settings come in order; those that exchange about as often differ only in codec, overlap or shares of H and K.
    shown, last = 0, plan.setting.steps
    for setting in plan.settings[1:]:
        if shown == SHOWN:
            break
        if setting.steps < DISTINCT * last and setting.misses == plan.setting.misses:
            continue
        shown, last = shown + 1, setting.steps
        worse = f"{setting.steps:.3g} inner steps between global exchanges, not {plan.setting.steps:.3g}"
        if setting.misses > 0:
            worse = (
                f"utilization {setting.utilization:.0%}, fullest link {setting.busy:.0%}, busiest server "
                f"{setting.server_busy:.0%}: beyond the limits"
            )
        yield Alternative(outer_text(setting), predicted(plan.workers, plan.place.region, setting), worse)


def hiding_text(plan: Plan, name: str) -> list[str]:
    """Say how a worker best hides its own communication, over the links as they were measured, and what that gains at
    most; nothing where no other rank has the same parameters."""
    layout, block = plan.workers[name].layout, Topology(plan.run, plan.cluster).workers[name].deepspeed
    weights_s, compute_s = layout.step.refresh_s, layout.step.compute_s
    if not weights_s or zero_stage(block) != 1:
        return []
    each = gradient_wire_bytes(block), 2 if trains_in_bf16(block) else 4
    gradients_s, micro_batches = weights_s * each[0] / each[1], accumulation_steps(block, layout.replicas)
    best = best_hiding(uses_muon(block), micro_batches, compute_s, gradients_s, weights_s, each)
    plain_s = least_step_s(None, micro_batches, compute_s, gradients_s, weights_s)
    form = f"acco.form = {best.form!r}" if best.form else "ZeRO-1 without acco"
    bits = f", gradient_bits = {best.bits[0]}, weight_bits = {best.bits[1]}" if best.bits else ""
    return [
        f"{name}: gradients and weights of a step take {(gradients_s + weights_s) / compute_s:.2g} times as long as "
        f"its compute over these links; best hidden by {form}{bits}, at most {plain_s / best.step_s:.2f} times as "
        "fast as ZeRO-1"
    ]


def synchronous_text(plan: Plan) -> list[str]:
    """Say what one synchronous worker of all regions would reach, and from which links on more than the plan is
    worth: hierarchical data parallelism (`parallel.sites`), with the bytes of Megatron's distributed optimizer
    instances. Of gradients that were summed within regions, and of new weights, (R − 1) / R go over the slowest link;
    nothing of that is hidden, and compute is shared without waiting."""
    task, homes = plan.task, list(plan.prediction.regions)
    try:
        lines = [task.network.between_regions(a, b) for a, b in combinations(homes, 2)]
    except ConfigError:
        return []  # no figure of a link, or one region
    if not lines:
        return []
    block = Topology(plan.run, plan.cluster).workers[next(iter(plan.workers))].deepspeed
    around = 2 * (len(homes) - 1)
    each = gradient_wire_bytes(block) + (2 if trains_in_bf16(block) else 4)
    gigabits = 4e-9 * around / len(homes) * each * parameter_count(task.architecture)
    compute_s = 1 / sum(1 / w.layout.step.step_s for w in plan.workers.values())
    latency_s = around * max(line.latency_s for line in lines)
    reached = task.tokens_per_step / (compute_s + latency_s + gigabits / min(line.gbps for line in lines))
    mine = plan.prediction.tokens_per_s * worth(plan.expected_gap)
    left_s = task.tokens_per_step / mine - compute_s - latency_s  # for the bytes
    better = f"more from {gigabits / left_s:,.0f} Gbit/s on" if left_s > 0 else "less over any"
    return [
        f"as one synchronous worker of {len(homes)} regions (parallel.sites): {reached:,.0f} tokens/s over "
        f"these links, where this plan's are worth {mine:,.0f} of data parallelism's; {better}"
    ]


def alike(plan: Plan) -> list[tuple[list[str], Worker]]:
    """Group the workers with the same parallel layout on the same kinds of hosts in the same regions, with one of
    them."""
    groups: dict[object, tuple[list[str], Worker]] = {}
    for name, worker in plan.workers.items():
        own = worker.layout
        key = (own.parallel, own.micro_batch, tuple((s.region, s.kind) for s in own.hosts), own.slots)
        groups.setdefault(key, ([], worker))[0].append(name)
    return list(groups.values())


def outer_text(setting: Setting) -> str:
    o = setting.outer
    overlap = f", overlap {o.overlap.steps}" if o.overlap.steps else ""
    updates = f", K {every}" if not o.flat and (every := updates_per_send(o)) else ""
    overlap += ", answers wait" * waits(o)
    codecs = f"{o.up.name} up, {o.down.name} down, {o.local.name} local"
    return f"{o.rule.name}: H {o.local_steps}{updates}, {codecs}{overlap}"


def _worse_step(own: WorkerPrediction, other: WorkerPrediction) -> str:
    more = {name: getattr(other.step, part) - getattr(own.step, part) for part, name in PARTS.items()}
    most = max(more, key=lambda part: more[part])
    if more[most] <= 0:
        return "no slower a step; a smaller micro-batch" if other.step_s <= own.step_s * 1.0001 else "a slower step"
    return f"a step takes {other.step_s:.3g} s, not {own.step_s:.3g} s: {most} +{more[most]:.3g} s"
