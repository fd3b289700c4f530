"""A model that fits nowhere: by how many bytes, and the smallest change with which it would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from geotrain.plan.inventory import PlanError, Spot, Task
from geotrain.plan.layouts import Refusals, fitting, micro_batches, parallels

MOST_MORE_HOSTS = 256


def nothing_fits(task: Task, refused: Refusals) -> PlanError:
    """The error that says why there is no worker at all."""
    what = f"{task.architecture.parameter_count:,} parameters, sequences of {task.run.data.sequence_length}"
    if refused.missing:
        apart = f"fits into no region alone, and regions cannot be joined: {refused.missing}"
        return PlanError(f"the model ({what}) {apart}")
    if refused.shortage_bytes is None:
        rule = refused.rules[0] if refused.rules else pinned_words(task)
        return PlanError(f"no layout of the model ({what}) is allowed on any hosts: {rule}")
    return PlanError(
        f"the model ({what}) fits on no hosts of cluster {task.cluster.name!r}: the layout that comes nearest, "
        f"{refused.shortage_of}, is short of {refused.shortage_bytes:,} bytes a rank; {smallest_change(task)}"
    )


def pinned_words(task: Task) -> str:
    a, pins = task.architecture, task.pins
    return (
        f"tensor parallelism stays inside a host and divides {a.heads} and {a.kv_heads} heads, pipeline parallelism "
        f"divides {a.layers} layers, replicas divide a batch of {task.batch}; pinned: parallel.tensor = "
        f"{pins.tensor or 'free'}, parallel.pipeline = {pins.pipeline or 'free'}; free them or change the batch"
    )


def smallest_change(task: Task) -> str:
    """Tried in this order: keys of the run, then more hosts of the largest kind, then larger accelerators."""
    if task.pins.recompute is None:
        task = task.with_recompute("full")  # as the plan itself would
    every = [spot for spots in task.spots.values() for spot in spots]
    for words, changed in _changes(task):
        if fits(changed, every):
            return f"it would fit with {words}"
    largest = max(every, key=lambda spot: (spot.device.memory_gb * spot.slots, spot.slots))
    alike = [spot for spot in every if (spot.kind, spot.slots) == (largest.kind, largest.slots)]
    more = 1
    while more <= MOST_MORE_HOSTS:
        grown = [*alike, *(replace(largest, host=f"new-{i}") for i in range(more))]
        if fits(task, grown):
            return f"it would fit with {more} more host{'s' * (more > 1)} of {largest.slots} × {largest.kind}"
        more += 1
    return "use accelerators with more memory, or a smaller model"


def _changes(task: Task) -> list[tuple[str, Task]]:
    found = []
    if task.run.model.recompute != "full":
        found.append(("model.recompute = 'full'", task.with_recompute("full")))
    free = replace(task, pins=replace(task.pins, tensor=None, pipeline=None, sequence=None))
    if free.pins != task.pins:
        found.append(("parallel.tensor and parallel.pipeline not pinned", free))
        found.append(("parallel not pinned and model.recompute = 'full'", free.with_recompute("full")))
    zero = task.run.deepspeed.get("zero_optimization", {})
    if zero.get("stage", 0) == 0:
        block = {**task.run.deepspeed, "zero_optimization": {**zero, "stage": 1}}
        changed = task.run.model_copy(update={"deepspeed": block})
        found.append(("deepspeed.zero_optimization.stage = 1", replace(task, run=changed)))
    return found


def fits(task: Task, spots: Sequence[Spot]) -> bool:
    """Whether some worker on some of these hosts, wherever they stand, holds the model."""
    refused = Refusals()
    for slots in sorted({spot.slots for spot in spots}, reverse=True):
        roomy = sorted((s for s in spots if s.slots >= slots), key=lambda s: -s.device.memory_gb)
        for parallel in parallels(task, slots, len(roomy) * slots):
            share = parallel.tensor * parallel.pipeline
            for count in range(len(roomy), 0, -1):
                ranks = count * slots
                if ranks % share or not micro_batches(task, ranks // share):
                    continue
                if fitting(task, roomy[:count], slots, parallel, 1, refused) is not None:
                    return True
    return False
