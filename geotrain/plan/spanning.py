"""One worker on unlike or far hosts: a pipeline whose stages DT-FM's placement deals out.

Every host holds (a part of) one stage, so a stage is k hosts, and the placement's table of stages × pipelines is one
of hosts: `geotrain.plan.search` finds it, with hosts left idle where that is cheaper. For each shape of the table
(how many accelerators of a host are used, tensor parallelism, stages, columns) the placement's cost only ranks; what
a step takes is predicted as for any worker. Shapes are tried in the order of a bound that ignores most of the links,
and at most MOST_SHAPES of them are searched: this is no proof of the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from geotrain.config import ParallelConfig
from geotrain.plan.bound import quick_bound, quick_bound_of_hidden
from geotrain.plan.cost import Floats, Problem, problem_from_links
from geotrain.plan.inventory import Spot, Task
from geotrain.plan.layouts import Layout, Refusals, evaluated, fitting, least_step_s, micro_batches, parallels
from geotrain.plan.network import Seat
from geotrain.plan.search import Effort, search
from geotrain.plan.work import stage_flops
from geotrain.sharing.checks import trains_in_bf16
from geotrain.sharing.mapping import stage_parameters

MOST_SHAPES = 4


@dataclass(frozen=True)
class Shape:
    """A table of parallel.pipeline stages × columns of hosts, `slots` accelerators of each; spots: to choose from."""

    spots: tuple[Spot, ...]
    slots: int
    parallel: ParallelConfig
    columns: int

    @property
    def replicas(self) -> int:
        return self.columns * (self.slots // self.parallel.tensor)


@dataclass(frozen=True)
class Links:
    """place: (region, host) → row and column of the tables of one-way delays and rates."""

    place: dict[tuple[str, str], int]
    delay_s: Floats
    gbps: Floats


def spanning_layouts(task: Task, spots: Sequence[Spot], refused: Refusals) -> list[Layout]:
    """The fastest few of one worker on some of these hosts, which may be of any kind and region.

    Raises ConfigError when a figure of a link between them is missing.
    """
    links, acco = link_tables(task, spots), task.run.acco
    ranked: list[tuple[float, int, Shape, Problem]] = []
    for shape in shapes(task, spots, refused):
        problem = placement_problem(task, shape, links)
        speed = 1e12 * max(s.device.tflops * s.device.efficiency for s in shape.spots)
        least = least_step_s(task, shape.parallel, shape.replicas, 1, speed)
        bound = quick_bound(problem) if acco is None else quick_bound_of_hidden(problem, acco.balance)
        ranked.append((max(least, bound), len(ranked), shape, problem))
    found: list[Layout] = []
    for bound, _, shape, problem in sorted(ranked, key=lambda entry: entry[:2])[:MOST_SHAPES]:
        if found and bound > min(layout.step.step_s for layout in found):
            break
        placed = search(problem, 0, effort(problem))
        order = [shape.spots[i] for stage in placed.stages for i in stage]
        tried = [
            evaluated(task, order, shape.slots, shape.parallel, micro, refused)
            for micro in micro_batches(task, shape.replicas)
        ]
        found += sorted((layout for layout in tried if layout is not None), key=lambda layout: layout.order)[:1]
    return sorted(found, key=lambda layout: layout.order)


def effort(problem: Problem) -> Effort:
    """Tables of hosts are small, and there are many of them."""
    return Effort(steps=min(600, 12 * problem.devices), chains=8, exact_work=20_000)


def shapes(task: Task, spots: Sequence[Spot], refused: Refusals) -> Iterator[Shape]:
    """Every shape that is allowed and whose ranks fit, with micro-batches of one. Of unequal accelerators, those with
    too little memory are left out."""
    for slots in sorted({spot.slots for spot in spots}, reverse=True):
        for parallel in parallels(task, slots, len(spots)):
            for limit in sorted({spot.device.memory_gb for spot in spots}):
                roomy = tuple(s for s in spots if s.slots >= slots and s.device.memory_gb >= limit)
                for columns in range(len(roomy) // parallel.pipeline, 0, -1):
                    shape = Shape(roomy, slots, parallel, columns)
                    placed = roomy[: parallel.pipeline * columns]
                    if micro_batches(task, shape.replicas) and fitting(task, placed, slots, parallel, 1, refused):
                        yield shape


def link_tables(task: Task, spots: Sequence[Spot]) -> Links:
    """Of every two hosts."""
    seats = [Seat(spot.region, spot.host, spot.device) for spot in spots]
    n = len(seats)
    delay, gbps = np.zeros((n, n)), np.full((n, n), np.inf)
    for i in range(n):
        for j in range(n):
            if i != j:
                line = task.network.between(seats[i], seats[j])
                delay[i, j], gbps[i, j] = line.latency_s, line.gbps
    return Links({(spot.region, spot.host): i for i, spot in enumerate(spots)}, delay, gbps)


def placement_problem(task: Task, shape: Shape, links: Links) -> Problem:
    """Hosts as DT-FM's devices: what a host's stage reduces, and what its pipelines send on, in one step."""
    run, a, parallel = task.run, task.architecture, shape.parallel
    chosen = [links.place[spot.region, spot.host] for spot in shape.spots]
    size = 2 if trains_in_bf16(run.deepspeed) else 4
    stages = range(parallel.pipeline)
    parameters = max(stage_parameters(a, parallel, s) for s in stages) * parallel.tensor
    sequence = run.data.sequence_length
    flops = max(sum(stage_flops(a, sequence, s, parallel.pipeline, run.model.recompute)) for s in stages)
    tokens = task.batch // shape.columns * sequence  # of a column of hosts
    copies = 1 if parallel.sequence else parallel.tensor
    return problem_from_links(
        links.delay_s[np.ix_(chosen, chosen)],
        links.gbps[np.ix_(chosen, chosen)],
        stages=parallel.pipeline,
        replicas=shape.columns,
        gradient_gigabytes=1.5 * parameters * size / 1e9,  # reduced and gathered, and new weights gathered
        activation_gigabytes=tokens * a.hidden_size * size * copies / 1e9,
        compute_s=[
            tokens * flops / (1e12 * s.device.tflops * s.device.efficiency * shape.slots) for s in shape.spots
        ],
    )
