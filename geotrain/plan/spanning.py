"""One worker on hosts of different kinds or regions: a pipeline whose stages are placed by DT-FM's method.

Every host holds one stage or a part of it, so the placement's table of stages × pipelines is a table of hosts:
`plan.placement.search` finds it, and leaves hosts idle where that is cheaper. A shape of the table says how many
accelerators of each host are used, the tensor parallelism, and the numbers of stages and columns. For each shape the
placement's cost only serves to choose the hosts; the time of a step is then predicted as for any worker. Shapes are
tried in the order of a bound that ignores most of the links, and at most MOST_SHAPES of them are searched, so the
result is not proven to be the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, permutations
from math import lcm

import numpy as np

from geotrain.config import ConfigError, ParallelConfig
from geotrain.parallelism.checks import overlaps_reduction, trains_in_bf16, wire_bytes
from geotrain.parallelism.local_parameters import expert_parameters, stage_parameters
from geotrain.plan.inventory import Host, PlanTask
from geotrain.plan.layouts import (
    KEPT,
    ParallelLayout,
    Refusals,
    divisors,
    evaluated,
    fitting,
    layer_sums,
    layouts,
    least_step_s,
    micro_batches,
    parallels,
)
from geotrain.plan.model.division import Layers, divide, divide_within
from geotrain.plan.model.memory import stage_memory
from geotrain.plan.model.network import RankDevice
from geotrain.plan.model.work import stage_flops
from geotrain.plan.placement.cost import Floats, Problem, problem_from_links, quick_bound, quick_bound_of_hidden
from geotrain.plan.placement.search import Effort, search

MOST_SHAPES = 4
MOST_MIXED, MOST_TRIED = 4, 24  # shapes of mixed workers that are predicted, and whose memory is asked
MOST_ORDERED = 3  # kinds of which every order is tried


@dataclass(frozen=True)
class PipelineShape:
    """A table of parallel.pipeline stages × columns of hosts, `slots` accelerators of each; hosts: to choose from."""

    hosts: tuple[Host, ...]
    slots: int
    parallel: ParallelConfig
    columns: int

    @property
    def replicas(self) -> int:
        return self.columns * self.slots // (self.parallel.tensor * self.parallel.context)


@dataclass(frozen=True)
class MixedShape:
    """Pipeline stages on unlike hosts: of each kind its stages, of each stage its hosts, `slots` accelerators of each
    host. width: accelerators of a stage."""

    stages: tuple[tuple[tuple[Host, ...], ...], ...]
    slots: int
    width: int
    parallel: ParallelConfig


@dataclass(frozen=True)
class Links:
    """Tables of the links between hosts. place: (region, host) → row and column of the tables of one-way delays and
    rates."""

    place: dict[tuple[str, str], int]
    delay_s: Floats
    gbps: Floats


def spanning_layouts(task: PlanTask, hosts: Sequence[Host], refused: Refusals) -> list[ParallelLayout]:
    """Find the fastest few parallel layouts of one worker on some of these hosts, which may be of any kind and
    region.

    Raises ConfigError when a figure of a link between them is missing.
    """
    links = link_tables(task, hosts)
    ranked: list[tuple[float, int, PipelineShape, Problem]] = []
    for shape in shapes(task, hosts, refused):
        problem = placement_problem(task, shape, links)
        speed = 1e12 * max(s.device.tflops * s.device.efficiency for s in shape.hosts)
        least = least_step_s(task, shape.parallel, shape.replicas, 1, speed)
        bound = quick_bound(problem) if task.run.acco is None else quick_bound_of_hidden(problem, task.balanced)
        ranked.append((max(least, bound), len(ranked), shape, problem))
    found: list[ParallelLayout] = []
    for bound, _, shape, problem in sorted(ranked, key=lambda entry: entry[:2])[:MOST_SHAPES]:
        if found and bound > min(layout.step.step_s for layout in found):
            break
        placed = search(problem, 0, effort(problem))
        order = [shape.hosts[i] for stage in placed.stages for i in stage]
        tried = [
            evaluated(task, order, shape.slots, shape.parallel, micro, refused)
            for micro in micro_batches(task, shape.replicas)
        ]
        found += sorted((layout for layout in tried if layout is not None), key=lambda layout: layout.order)[:1]
    return sorted(found, key=lambda layout: layout.order)


def mixed_layouts(task: PlanTask, hosts: Sequence[Host], refused: Refusals, kept: int = KEPT) -> list[ParallelLayout]:
    """Find fast parallel layouts of one worker each of whose pipeline stages stands on hosts of one kind and region,
    and holds as many layers as they compute in the time of the others, and have memory for.

    For all (accelerators of a host, tensor, context, expert, accelerators of a stage) each kind has as many stages as
    it can. They are ranked by the time of their stages; the first MOST_MIXED that fit are predicted, with the kinds
    in any order. Raises ConfigError when a figure of a link is missing.
    """
    groups: dict[tuple[str, str], list[Host]] = {}
    for host in hosts:
        groups.setdefault((host.region, host.kind), []).append(host)
    one_stage = replace(task, pins=replace(task.pins, pipeline=1))
    ranked: list[tuple[float, int, MixedShape]] = []
    for slots in sorted({host.slots for host in hosts} if task.run.parallel.stage_layers is None else ()):
        for parallel in parallels(one_stage, slots, 1):
            each = lcm(parallel.context, parallel.expert) * parallel.tensor
            for width in (*divisors(slots)[:-1], *range(slots, slots * len(hosts), slots)):
                micros = [] if width % each else micro_batches(task, width // parallel.replica_ranks)
                placed = [[host for host in group if host.slots >= slots] for group in groups.values()]
                counts = [len(group) * slots // width for group in placed]
                pipeline = sum(counts)
                if not micros or not all(counts) or task.pins.pipeline not in (None, pipeline):
                    continue
                stages = tuple(
                    tuple(tuple(of[i * width // slots : -(-(i + 1) * width // slots)]) for i in range(count))
                    for of, count in zip(placed, counts, strict=True)
                )
                shape = MixedShape(stages, slots, width, parallel.model_copy(update={"pipeline": pipeline}))
                sums_s = [_sample_s(task, parallel, stage[0]) for of in stages for stage in of]
                a = task.architecture
                layers = divide(sums_s, [a.layers] * pipeline, a.predicting)
                if layers is not None:
                    ends = [0, *accumulate(layers)]
                    took_s = [sums[ends[s + 1]] - sums[ends[s]] for s, sums in enumerate(sums_s)]
                    for micro in micros:
                        again = task.batch * parallel.replica_ranks // (width * micro) - 1
                        ranked.append((micro * (sum(took_s) + again * max(took_s)), micro, shape))
    best: dict[MixedShape, ParallelLayout] = {}
    for bound, micro, shape in sorted(ranked, key=lambda entry: (entry[0], -entry[1]))[:MOST_TRIED]:
        if len(best) == MOST_MIXED or any(bound > layout.step.step_s for layout in best.values()):
            break
        orders = permutations(shape.stages) if len(groups) <= MOST_ORDERED else [shape.stages]
        tried = [_divided(task, replace(shape, stages=order), micro, refused) for order in orders]
        if shape not in best and (found := [layout for layout in tried if layout is not None]):
            best[shape] = min(found, key=lambda layout: layout.order)
    return sorted(best.values(), key=lambda layout: layout.order)[:kept]


def _sample_s(task: PlanTask, parallel: ParallelConfig, host: Host) -> Floats:
    """Seconds that a replica's accelerators of such a host take for a sample in all layers before each, and in all:
    arithmetic, and what tensor ranks exchange."""
    a, length, recompute = task.architecture, task.run.data.sequence_length, task.run.model.recompute
    speed = 1e12 * host.device.tflops * host.device.efficiency * parallel.tensor
    sent = 2 * a.hidden_size * (6 if recompute == "full" else 4) * 2 * (parallel.tensor - 1) / parallel.tensor
    exchanged_s = 8e-9 * sent / host.device.host_gbps * np.arange(a.layers + 1)
    return length / parallel.context * (layer_sums(a, length, recompute) / speed + exchanged_s)


def _divided(task: PlanTask, shape: MixedShape, micro: int, refused: Refusals) -> ParallelLayout | None:
    """Predict a worker of this shape, the layers divided so that each stage fits; None where none such does."""
    stages = [stage for of in shape.stages for stage in of]
    rooms = [1e9 * min(host.device.memory_gb for host in stage) for stage in stages]

    def cut(layers: Layers) -> ParallelConfig:
        return shape.parallel.model_copy(update={"stage_layers": layers if len(set(layers)) > 1 else None})

    def needs(layers: Layers) -> list[tuple[float, float]]:
        setup, every = task.setup(cut(layers), micro), range(len(stages))
        memory = stage_memory(task.base, task.architecture, setup, shape.width * len(stages), every)
        return [(sum(parts.values()), room) for parts, room in zip(memory, rooms, strict=True)]

    try:
        sums_s = [_sample_s(task, shape.parallel, stage[0]) for stage in stages]
        layers = divide_within(sums_s, needs, task.architecture.predicting)
    except ConfigError as error:
        refused.rule = refused.rule or str(error)
        return None
    hosts = list(dict.fromkeys(host for stage in stages for host in stage))
    return None if layers is None else evaluated(task, hosts, shape.slots, cut(layers), micro, refused)


def found_layouts(task: PlanTask, hosts: Sequence[Host], refused: Refusals, kept: int = KEPT) -> list[ParallelLayout]:
    """Find the fastest layouts of one worker: on like hosts of all, on others of those whose stages are alike, and
    with `acco.balance` also of replicas that are not."""
    if len({(host.region, host.kind, host.slots) for host in hosts}) == 1:
        return layouts(task, hosts, refused, kept)
    found = mixed_layouts(task, hosts, refused, kept)
    if task.balanced:
        found += spanning_layouts(task, hosts, refused)
    return sorted(found, key=lambda layout: layout.order)[:kept]


def effort(problem: Problem) -> Effort:
    """Limit the search of one shape's placement: tables of hosts are small, and there are many of them."""
    return Effort(turns=min(20_000, 400 * problem.devices))


def shapes(task: PlanTask, hosts: Sequence[Host], refused: Refusals) -> Iterator[PipelineShape]:
    """List the shapes that are allowed and whose ranks fit, with micro-batches of one. Of unequal accelerators, those
    with too little memory are left out."""
    for slots in sorted({host.slots for host in hosts}, reverse=True):
        for parallel in parallels(task, slots, len(hosts)):
            for limit in sorted({host.device.memory_gb for host in hosts}):
                roomy = tuple(s for s in hosts if s.slots >= slots and s.device.memory_gb >= limit)
                for columns in range(len(roomy) // parallel.pipeline, 0, -1):
                    shape = PipelineShape(roomy, slots, parallel, columns)
                    placed = roomy[: parallel.pipeline * columns]
                    if micro_batches(task, shape.replicas) and fitting(task, placed, slots, parallel, 1, refused):
                        yield shape


def link_tables(task: PlanTask, hosts: Sequence[Host]) -> Links:
    """Tabulate delay and rate between each pair of hosts."""
    ranks = [RankDevice(host.region, host.host, host.device) for host in hosts]
    n = len(ranks)
    delay, gbps = np.zeros((n, n)), np.full((n, n), np.inf)
    for i in range(n):
        for j in range(n):
            if i != j:
                line = task.network.between(ranks[i], ranks[j])
                delay[i, j], gbps[i, j] = line.latency_s, line.gbps
    return Links({(host.region, host.host): i for i, host in enumerate(hosts)}, delay, gbps)


def placement_problem(task: PlanTask, shape: PipelineShape, links: Links) -> Problem:
    """Build the placement problem whose devices are hosts: what a host's stage reduces, and what its pipelines send
    on, in one step."""
    run, a, parallel = task.run, task.architecture, shape.parallel
    chosen = [links.place[host.region, host.host] for host in shape.hosts]
    size = 2 if trains_in_bf16(run.deepspeed) else 4
    # DT-FM's is one reduce-scatter and one all-gather. DeepSpeed's own ZeRO gathers weights besides.
    rounds = 1.0 if run.acco is not None or overlaps_reduction(run.deepspeed) else 1.5
    stages = range(parallel.pipeline)
    # Experts that ranks of a host divide are all reduced with other hosts, each by its rank.
    divided = [(parallel.expert - 1) * expert_parameters(a, parallel, s) for s in stages]
    parameters = max(stage_parameters(a, parallel, s) + divided[s] for s in stages) * parallel.tensor
    sequence = run.data.sequence_length
    held = (parallel.layers_of(s, a.layers) for s in stages)
    flops = max(sum(stage_flops(a, sequence, layers, run.model.recompute)) for layers in held)
    tokens = task.batch // shape.columns * sequence  # of a column of hosts
    copies = 1 if parallel.sequence else parallel.tensor
    return problem_from_links(
        links.delay_s[np.ix_(chosen, chosen)],
        links.gbps[np.ix_(chosen, chosen)],
        stages=parallel.pipeline,
        replicas=shape.columns,
        gradient_gigabytes=rounds * parameters * sum(wire_bytes(run.deepspeed, run.acco is not None)) / 2 / 1e9,
        activation_gigabytes=tokens * a.hidden_size * size * copies / 1e9,
        compute_s=[
            tokens * flops / (1e12 * s.device.tflops * s.device.efficiency * shape.slots) for s in shape.hosts
        ],
    )
