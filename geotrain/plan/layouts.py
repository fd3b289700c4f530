"""Parallel layouts of a model on hosts of one kind: every layout of one worker on them, the fastest first.

Tensor, context and expert parallelism stay inside a host. Layouts that DeepSpeed, Megatron-core or the memory do not
allow are left out.
Layouts are tried in the order of a lower bound on their step, and the search stops when no untried one can be among
the best, so the result is the fastest of all under the cost model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import Any

import numpy as np

from geotrain.config import Architecture, ConfigError, ParallelConfig, WorkerConfig
from geotrain.families import family_of
from geotrain.parameters.parameter_map import parameter_count
from geotrain.plan.inventory import Host, PlanError, PlanTask
from geotrain.plan.model.division import divide
from geotrain.plan.model.memory import tightest_memory
from geotrain.plan.model.network import RankDevice
from geotrain.plan.model.step import StepTime, step_time
from geotrain.plan.model.work import stage_flops
from geotrain.plan.placement.cost import Floats
from geotrain.plan.predict import work_of

FULL_MICRO_TOKENS = 8192  # a micro-batch of so many tokens keeps the matrix units as busy as a larger one
KEPT = 4  # layouts of one worker that are remembered
MOST_MORE_HOSTS = 256  # tried, to say how many are missing


@dataclass(frozen=True)
class ParallelLayout:
    """One worker's parallel layout on given hosts, in rank order, and its predicted step."""

    hosts: tuple[Host, ...]
    slots: int  # used on each host
    parallel: ParallelConfig
    micro_batch: int
    step: StepTime
    memory_bytes: int

    @property
    def ranks(self) -> int:
        return self.slots * len(self.hosts)

    @property
    def replicas(self) -> int:
        return self.ranks // self.parallel.replica_ranks

    @property
    def kinds(self) -> str:
        return "+".join(dict.fromkeys(host.kind for host in self.hosts))

    @property
    def usd_per_hour(self) -> float | None:
        prices = [host.device.usd_per_hour for host in self.hosts]
        return None if None in prices else self.slots * sum(p for p in prices if p is not None)

    @property
    def order(self) -> tuple[float, float]:
        """Sort key: the fastest step first and, of equal ones, the largest micro-batch."""
        return round(self.step.step_s, 9), -self.micro_batch


@dataclass
class Refusals:
    """Reasons why parallel layouts were left out. shortage: the smallest one, in bytes a rank, with the layout's
    words. missing: the first link without a figure, for want of which regions were not joined. rule: the first that
    one broke."""

    shortage_bytes: int | None = None
    shortage_of: str = ""
    missing: str = ""
    rule: str = ""


def home_of(hosts: Sequence[Host]) -> str:
    """Return the region that most of the hosts stand in."""
    regions = [host.region for host in hosts]
    return max(dict.fromkeys(regions), key=regions.count)


def worker_of(name: str, hosts: Sequence[Host], slots: int, parallel: ParallelConfig, micro: int) -> WorkerConfig:
    home = home_of(hosts)
    return WorkerConfig(
        name=name,
        hosts=tuple(host.config(home, slots) for host in hosts),
        parallel=parallel,
        deepspeed={"train_micro_batch_size_per_gpu": micro},
    )


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def micro_batches(task: PlanTask, replicas: int) -> list[int]:
    """List the micro-batch sizes with which so many replicas share the batch evenly, up to the first that is large
    enough."""
    if not replicas or task.batch % replicas:
        return []
    sizes = divisors(task.batch // replicas)
    enough = next((m for m in sizes if m * task.run.data.sequence_length >= FULL_MICRO_TOKENS), sizes[-1])
    return [m for m in sizes if m <= enough]


def parallels(task: PlanTask, slots: int, most_pipeline: int) -> Iterator[ParallelConfig]:
    """List the parallel layouts that divide the model, as far as they are not pinned. Tensor ranks, the context ranks
    beside each, and the expert ranks beside each are inside a host, where links are fast.

    Context ranks that would have fewer than FULL_MICRO_TOKENS of a sequence are left out: their matrix units would
    idle, which the model of a step does not see.
    """
    a, pins, length = task.architecture, task.pins, task.run.data.sequence_length
    for tp in [pins.tensor] if pins.tensor is not None else divisors(slots):
        if slots % tp or any(size % tp for size in family_of(a.model_type).divided(a).values()):
            continue
        sequence = (tp > 1 and length % tp == 0) if pins.sequence is None else pins.sequence
        beside = divisors(slots // tp)
        contexts = [c for c in beside if c == 1 or _shares_sequences(a, tp, c, length)]
        divides = a.experts.count if a.experts and task.run.acco is None else 1  # ACCO goes with whole experts only
        experts = [e for e in beside if divides % e == 0]
        for pp in [pins.pipeline] if pins.pipeline is not None else divisors(a.layers):
            if pp > most_pipeline:
                continue
            for cp in [pins.context] if pins.context is not None else contexts:
                for ep in [pins.expert] if pins.expert is not None else experts:
                    cut: dict[str, Any] = {
                        "tensor": tp,
                        "pipeline": pp,
                        "sequence": sequence,
                        "context": cp,
                        "expert": ep,
                    }
                    even = a.layers % pp == 0 and a.layers // pp > a.predicting
                    if not even and task.run.parallel.stage_layers is None:
                        sums = layer_sums(a, length, task.run.model.recompute)
                        cut["stage_layers"] = divide([sums] * pp, [a.layers] * pp, a.predicting)
                    yield task.run.parallel.model_copy(update=cut)


def layer_sums(a: Architecture, length: int, recompute: str) -> Floats:
    """Add up the operations of a token in all layers before each, and in all."""
    each = [sum(stage_flops(a, length, range(layer, layer + 1), recompute)) for layer in range(a.layers)]
    return np.array([0.0, *accumulate(each)])


def _shares_sequences(a: Architecture, tp: int, cp: int, length: int) -> bool:
    whole_heads = a.latent is None and a.net is None and a.kv_heads % (tp * cp) == 0
    return whole_heads and length % (tp * cp) == 0 and length // cp >= FULL_MICRO_TOKENS


def fitting(
    task: PlanTask, hosts: Sequence[Host], slots: int, parallel: ParallelConfig, micro: int, refused: Refusals
) -> int | None:
    """Return the bytes of the tightest rank; None where this parallel layout is refused or a stage does not fit its
    accelerators. The reason is noted in `refused`."""
    ranks, placed = slots * len(hosts), [1e9 * host.device.memory_gb for host in hosts for _ in range(slots)]
    try:
        parts, room = tightest_memory(task.base, task.architecture, task.setup(parallel, micro), placed)
    except ConfigError as error:
        refused.rule = refused.rule or str(error)
        return None
    need, limit = sum(parts.values()), round(room)
    if need <= limit:
        return need
    if refused.shortage_bytes is None or need - limit < refused.shortage_bytes:
        refused.shortage_bytes = need - limit
        refused.shortage_of = f"{layout_text(parallel, ranks, micro)} on {hosts[0].kind}"
    return None


def layout_text(parallel: ParallelConfig, ranks: int, micro: int) -> str:
    return f"{parallel.text(ranks)}, micro-batch {micro}"


def least_step_s(task: PlanTask, parallel: ParallelConfig, replicas: int, micro: int, speed: float) -> float:
    """Bound the seconds of a step from below for this parallel layout: arithmetic alone, every stage once and the
    slowest m − 1 times more.

    speed: useful operations a second of the fastest accelerator.
    """
    a, length = task.architecture, task.run.data.sequence_length
    times = [
        micro * length * sum(stage_flops(a, length, parallel.layers_of(s, a.layers), task.run.model.recompute))
        / (speed * parallel.tensor * parallel.context)
        for s in range(parallel.pipeline)
    ]  # fmt: skip
    m = task.batch // (replicas * micro)
    return sum(times) + (m - 1) * max(times)


def layouts(task: PlanTask, hosts: Sequence[Host], refused: Refusals, kept: int = KEPT) -> list[ParallelLayout]:
    """Find the `kept` fastest parallel layouts of one worker that uses all these hosts, which are of one kind and
    region."""
    tried: list[tuple[float, int, ParallelConfig, int]] = []
    speed = max(host.device.tflops * host.device.efficiency for host in hosts) * 1e12
    for slots in range(hosts[0].slots, 0, -1):
        ranks = slots * len(hosts)
        for parallel in parallels(task, slots, ranks):
            if ranks % parallel.replica_ranks:
                continue
            replicas = ranks // parallel.replica_ranks
            for micro in micro_batches(task, replicas):
                # Of n samples together, context ranks hold no more of each than fewer ranks do of fewer samples.
                if gcd(micro, parallel.context) > 1 and task.pins.context is None:
                    continue
                bound = least_step_s(task, parallel, replicas, micro, speed)
                tried.append((bound, slots, parallel, micro))
    best: dict[tuple[int, ParallelConfig], ParallelLayout] = {}
    for bound, slots, parallel, micro in sorted(tried, key=lambda t: (t[0], -t[3])):
        ranked = sorted(layout.step.step_s for layout in best.values())
        if len(ranked) >= kept and bound > ranked[kept - 1]:
            break
        known = best.get((slots, parallel))  # of layouts that differ in the micro-batch alone one is kept
        if known is not None and bound >= known.step.step_s:
            continue
        found = evaluated(task, hosts, slots, parallel, micro, refused)
        if found is not None and (known is None or found.order < known.order):
            best[slots, parallel] = found
    return sorted(best.values(), key=lambda layout: layout.order)[:kept]


def evaluated(
    task: PlanTask, hosts: Sequence[Host], slots: int, parallel: ParallelConfig, micro: int, refused: Refusals
) -> ParallelLayout | None:
    """Predict the step of a parallel layout. Returns None where `fitting` does."""
    need = fitting(task, hosts, slots, parallel, micro, refused)
    if need is None:
        return None
    ranks = [RankDevice(host.region, host.host, host.device) for host in hosts for _ in range(slots)]
    work = work_of(task.run, task.architecture, task.setup(parallel, micro), task.imbalance)
    step = step_time(work, ranks, task.network)
    return ParallelLayout(tuple(hosts), slots, parallel, micro, step, need)


# ------------------------------------------------------------------------- a model that fits nowhere


def nothing_fits(task: PlanTask, refused: Refusals) -> PlanError:
    """Build the error that says why there is no worker at all."""
    what = f"{parameter_count(task.architecture):,} parameters, sequences of {task.run.data.sequence_length}"
    if refused.missing:
        apart = f"fits into no region alone, and regions cannot be joined: {refused.missing}"
        return PlanError(f"the model ({what}) {apart}")
    if refused.shortage_bytes is None:
        a, pins = task.architecture, task.pins
        pinned = ", ".join(f"parallel.{cut} = {getattr(pins, cut)}" for cut in pins.cuts) or "nothing"
        rule = refused.rule or (
            f"tensor parallelism stays inside a host and divides {a.heads} and {a.kv_heads} heads, pipeline "
            f"parallelism divides {a.layers} layers, replicas divide a batch of {task.batch}; pinned: "
            f"{pinned}; free that or change the batch"
        )
        return PlanError(f"no parallel layout of the model ({what}) is allowed on any hosts: {rule}")
    return PlanError(
        f"the model ({what}) fits on no hosts of cluster {task.cluster.name!r}: the parallel layout "
        f"that comes nearest, {refused.shortage_of}, is short of {refused.shortage_bytes:,} bytes a rank; "
        f"{smallest_change(task)}"
    )


def smallest_change(task: PlanTask) -> str:
    """Find the smallest change with which the model would fit. Tried in this order: keys of the run, then more hosts
    of the largest kind, then larger accelerators."""
    if task.pins.recompute is None:
        task = task.with_recompute("full")  # as the plan itself would
    changes = []
    if task.run.model.recompute != "full":
        changes.append(("model.recompute = 'full'", task.with_recompute("full")))
    free = replace(task, pins=task.pins.without_parallel())
    if free.pins != task.pins:
        changes.append((f"{' and '.join(f'parallel.{cut}' for cut in task.pins.cuts)} not pinned", free))
        changes.append(("parallel not pinned and model.recompute = 'full'", free.with_recompute("full")))
    zero = task.run.deepspeed.get("zero_optimization", {})
    if zero.get("stage", 0) == 0:
        block = {**task.run.deepspeed, "zero_optimization": {**zero, "stage": 1}}
        changed = replace(task, run=task.run.model_copy(update={"deepspeed": block}))
        changes.append(("deepspeed.zero_optimization.stage = 1", changed))
    every = [host for hosts in task.hosts.values() for host in hosts]
    for what, changed in changes:
        if fits(changed, every):
            return f"it would fit with {what}"
    largest = max(every, key=lambda host: (host.device.memory_gb * host.slots, host.slots))
    alike = [host for host in every if (host.kind, host.slots) == (largest.kind, largest.slots)]
    for more in range(1, MOST_MORE_HOSTS + 1):
        grown = [*alike, *(replace(largest, host=f"new-{i}") for i in range(more))]
        if fits(task, grown):
            return f"it would fit with {more} more host{'s' * (more > 1)} of {largest.slots} × {largest.kind}"
    return "use accelerators with more memory, or a smaller model"


def fits(task: PlanTask, hosts: Sequence[Host]) -> bool:
    """Whether some worker on some of these hosts, wherever they stand, holds the model."""
    refused = Refusals()
    for slots in sorted({host.slots for host in hosts}, reverse=True):
        roomy = sorted((s for s in hosts if s.slots >= slots), key=lambda s: -s.device.memory_gb)
        for parallel in parallels(task, slots, len(roomy) * slots):
            share = parallel.replica_ranks
            for count in range(len(roomy), 0, -1):
                ranks = count * slots
                if ranks % share or not micro_batches(task, ranks // share):
                    continue
                if fitting(task, roomy[:count], slots, parallel, 1, refused) is not None:
                    return True
    return False
