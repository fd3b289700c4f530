"""How like hosts can share a model: every layout of one worker on them, the fastest first.

Tensor parallelism stays inside a host. Layouts that DeepSpeed, Megatron-core or the memory do not allow are left out.
They are tried in the order of a lower bound on their step, and the trying stops when no other can be among the best:
what is found is the fastest of all of them under the cost model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from geotrain.config import ConfigError, ParallelConfig, WorkerConfig
from geotrain.plan.inventory import Spot, Task
from geotrain.plan.job import work_of
from geotrain.plan.memory import rank_memory
from geotrain.plan.step import StepTime, step_time
from geotrain.plan.work import stage_flops

FULL_MICRO_TOKENS = (
    8192  # a micro-batch of so many tokens keeps an accelerator's matrix units as busy as a larger one
)
KEPT = 4  # layouts of one worker that are remembered


@dataclass(frozen=True)
class Layout:
    """One worker's layout on given hosts, in rank order, and its predicted step."""

    spots: tuple[Spot, ...]
    slots: int  # used on each host
    parallel: ParallelConfig
    micro_batch: int
    step: StepTime
    memory_bytes: int

    @property
    def ranks(self) -> int:
        return self.slots * len(self.spots)

    @property
    def replicas(self) -> int:
        return self.ranks // (self.parallel.tensor * self.parallel.pipeline)

    @property
    def usd_per_hour(self) -> float | None:
        prices = [spot.device.usd_per_hour for spot in self.spots]
        return None if None in prices else self.slots * sum(p for p in prices if p is not None)

    @property
    def order(self) -> tuple[float, float]:
        """Faster is better; where it makes no difference, the larger micro-batch."""
        return round(self.step.step_s, 9), -self.micro_batch

    def worker(self, name: str) -> WorkerConfig:
        return worker_of(name, self.spots, self.slots, self.parallel, self.micro_batch)


@dataclass
class Refusals:
    """Why layouts were left out. shortage: the smallest one, in bytes a rank, with the layout's words. missing: the
    first link without a figure, for want of which regions were not joined."""

    shortage_bytes: int | None = None
    shortage_of: str = ""
    missing: str = ""
    rules: list[str] = field(default_factory=list)

    def short(self, missing_bytes: int, of: str) -> None:
        if self.shortage_bytes is None or missing_bytes < self.shortage_bytes:
            self.shortage_bytes, self.shortage_of = missing_bytes, of

    def rule(self, text: str) -> None:
        if text not in self.rules and len(self.rules) < 8:
            self.rules.append(text)


def home_of(spots: Sequence[Spot]) -> str:
    """The region that most of the hosts stand in."""
    regions = [spot.region for spot in spots]
    return max(dict.fromkeys(regions), key=regions.count)


def worker_of(name: str, spots: Sequence[Spot], slots: int, parallel: ParallelConfig, micro: int) -> WorkerConfig:
    home = home_of(spots)
    return WorkerConfig(
        name=name,
        hosts=tuple(spot.config(home, slots) for spot in spots),
        parallel=parallel,
        deepspeed={"train_micro_batch_size_per_gpu": micro},
    )


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def micro_batches(task: Task, replicas: int) -> list[int]:
    """Micro-batch sizes with which so many replicas share the batch evenly, up to the first that is large enough."""
    if task.batch % replicas:
        return []
    sizes = divisors(task.batch // replicas)
    enough = next((m for m in sizes if m * task.run.data.sequence_length >= FULL_MICRO_TOKENS), sizes[-1])
    return [m for m in sizes if m <= enough]


def parallels(task: Task, slots: int, most_pipeline: int) -> Iterator[ParallelConfig]:
    """Layouts that divide the model, tensor parallelism inside a host, as far as they are not pinned."""
    a, pins = task.architecture, task.pins
    for tp in [pins.tensor] if pins.tensor is not None else divisors(slots):
        if slots % tp or any(size % tp for size in (a.heads, a.kv_heads, a.ffn_size, a.vocab_size)):
            continue
        even = task.run.data.sequence_length % tp == 0
        sequence = (tp > 1 and even) if pins.sequence is None else pins.sequence
        for pp in [pins.pipeline] if pins.pipeline is not None else divisors(a.layers):
            if pp <= most_pipeline and a.layers % pp == 0:
                yield ParallelConfig(tensor=tp, pipeline=pp, sequence=sequence)


def fitting(
    task: Task, spots: Sequence[Spot], slots: int, parallel: ParallelConfig, micro: int, refused: Refusals
) -> int | None:
    """Bytes of the fullest rank if this layout is allowed and fits the smallest accelerator."""
    worker = worker_of("w", spots, slots, parallel, micro)
    try:
        need = sum(rank_memory(task.run, task.architecture, worker).values())
    except ConfigError as error:
        refused.rule(str(error))
        return None
    limit = round(1e9 * min(spot.device.memory_gb for spot in spots))
    if need > limit:
        refused.short(need - limit, f"{words(parallel, worker.ranks, micro)} on {spots[0].kind}")
        return None
    return need


def words(parallel: ParallelConfig, ranks: int, micro: int) -> str:
    dp = ranks // (parallel.tensor * parallel.pipeline)
    return f"TP {parallel.tensor} × PP {parallel.pipeline} × DP {dp}, micro-batch {micro}"


def least_step_s(task: Task, parallel: ParallelConfig, replicas: int, micro: int, speed: float) -> float:
    """No step of this layout is shorter: arithmetic alone, every stage once and the slowest m − 1 times more.

    speed: useful operations a second of the fastest accelerator.
    """
    stages = [
        sum(
            stage_flops(
                task.architecture, task.run.data.sequence_length, s, parallel.pipeline, task.run.model.recompute
            )
        )
        for s in range(parallel.pipeline)
    ]
    tokens = micro * task.run.data.sequence_length
    times = [tokens * flops / (speed * parallel.tensor) for flops in stages]
    m = task.batch // (replicas * micro)
    return sum(times) + (m - 1) * max(times)


def layouts(task: Task, spots: Sequence[Spot], refused: Refusals) -> list[Layout]:
    """The fastest few layouts of one worker that uses all these hosts, which are of one kind and region."""
    tried: list[tuple[float, int, ParallelConfig, int]] = []
    speed = max(spot.device.tflops * spot.device.efficiency for spot in spots) * 1e12
    for slots in range(spots[0].slots, 0, -1):
        ranks = slots * len(spots)
        for parallel in parallels(task, slots, ranks):
            if ranks % (parallel.tensor * parallel.pipeline):
                continue
            replicas = ranks // (parallel.tensor * parallel.pipeline)
            for micro in micro_batches(task, replicas):
                bound = least_step_s(task, parallel, replicas, micro, speed)
                tried.append((bound, slots, parallel, micro))
    best: dict[tuple[int, ParallelConfig], Layout] = {}
    for bound, slots, parallel, micro in sorted(tried, key=lambda t: (t[0], -t[3])):
        ranked = sorted(layout.step.step_s for layout in best.values())
        if len(ranked) >= KEPT and bound > ranked[KEPT - 1]:
            break
        known = best.get((slots, parallel))
        if known is not None and bound >= known.step.step_s:
            continue
        found = evaluated(task, spots, slots, parallel, micro, refused)
        if found is not None and (known is None or found.order < known.order):
            best[slots, parallel] = found
    return sorted(best.values(), key=lambda layout: layout.order)[:KEPT]


def evaluated(
    task: Task, spots: Sequence[Spot], slots: int, parallel: ParallelConfig, micro: int, refused: Refusals
) -> Layout | None:
    """The layout with its step, if it is allowed and fits."""
    need = fitting(task, spots, slots, parallel, micro, refused)
    if need is None:
        return None
    worker = worker_of("w", spots, slots, parallel, micro)
    seats = task.network.seats(home_of(spots), worker)
    step = step_time(work_of(task.run, task.architecture, worker), seats, task.network)
    return Layout(tuple(spots), slots, parallel, micro, step, need)
