"""`geotrain dry-run`: what a run would need, computed from its two files without any weight."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from geotrain.config import ClusterConfig, ParallelConfig, RunConfig
from geotrain.launch.check import architecture_of, check_together
from geotrain.launch.progress import size
from geotrain.outer.codec import make_codec
from geotrain.outer.layout import Layout, layout_of
from geotrain.plan.memory import rank_memory


@dataclass(frozen=True)
class WorkerNeeds:
    """One worker. delta_bytes, answer_bytes: of one exchange with its server, over all its ranks (without the
    padding of ranks' last blocks). memory: of its fullest rank."""

    name: str
    region: str
    layout: str
    ranks: int
    parameters_per_rank: int
    memory: dict[str, int]
    delta_bytes: int
    answer_bytes: int


@dataclass(frozen=True)
class LinkNeeds:
    """A region's link. up_s, down_s: how long one exchange occupies it; None: the cluster does not say its rate."""

    region: str
    up_bytes: int
    down_bytes: int
    steps_between: int
    up_s: float | None
    down_s: float | None


@dataclass(frozen=True)
class Needs:
    parameters: int
    fragments: tuple[tuple[str, int], ...]
    server_bytes: int
    workers: tuple[WorkerNeeds, ...]
    links: tuple[LinkNeeds, ...]


def needs(run: RunConfig, cluster: ClusterConfig) -> Needs:
    """Raises ConfigError, UnsupportedModelError, LayoutError when the run cannot be trained on this cluster."""
    sizes = check_together(run, cluster)
    layout = layout_of(run)
    workers = tuple(
        _worker(run, layout, region.name, worker.name, cluster, sizes[worker.name])
        for region in cluster.regions
        for worker in region.workers
    )
    links = tuple(_link(run, layout, cluster, region.name) for region in cluster.serving)
    fragments = tuple((f.name, f.numel) for f in layout.fragments)
    # A server holds its weights, its rule's momentum and accumulator, all fp32.
    return Needs(layout.numel, fragments, 3 * 4 * layout.numel, workers, links)


def check_shards(layout: Layout, run: RunConfig, parallel: ParallelConfig) -> int:
    """Parameters of the fullest rank. Raises LayoutError unless the ranks' shards lie in the layout and speak for
    each of its elements exactly once (counted, not located: the large models' elements do not fit here)."""
    from geotrain.sharing.mapping import local_parameters

    architecture, spoken_for, fullest = architecture_of(run), 0, 0
    for stage in range(parallel.pipeline):
        for rank in range(parallel.tensor):
            local = local_parameters(architecture, parallel, rank, stage)
            for parameter in local:
                for run_ in parameter.runs:
                    layout.slices((run_,), layout.fragment_of(run_.parameter))
            spoken_for += sum(p.numel for p in local if p.pushes)
            fullest = max(fullest, sum(p.numel for p in local))
    if spoken_for != layout.numel:
        raise AssertionError(f"the ranks speak for {spoken_for} of {layout.numel} elements")
    return fullest


def _worker(run: RunConfig, layout: Layout, region: str, name: str, cluster: ClusterConfig, dp: int) -> WorkerNeeds:
    from geotrain.sharing.checks import zero_stage

    worker = cluster.worker(region, name)
    parallel, block = worker.parallel or run.parallel, {**run.deepspeed, **worker.deepspeed}
    outer = run.outer
    up, down = (outer.local, outer.local) if outer.levels == 2 else (outer.up, outer.down)
    return WorkerNeeds(
        name,
        region,
        describe(parallel, dp, zero_stage(block)),
        worker.ranks,
        check_shards(layout, run, parallel),
        rank_memory(run, architecture_of(run), worker),
        sum(make_codec(up).encoded_bytes(f.numel) for f in layout.fragments),
        sum(make_codec(down).encoded_bytes(f.numel) for f in layout.fragments),
    )


def describe(parallel: ParallelConfig, dp: int, zero_stage: int) -> str:
    """A layout in words."""
    sequence = " + sequence" if parallel.sequence else ""
    return f"TP {parallel.tensor}{sequence} × PP {parallel.pipeline} × DP {dp}, ZeRO {zero_stage}"


def _link(run: RunConfig, layout: Layout, cluster: ClusterConfig, region: str) -> LinkNeeds:
    outer = run.outer
    workers = len(cluster.region(region).workers)
    times = workers if outer.levels == 1 else 1  # flat: every worker exchanges over the wide area
    up = times * sum(make_codec(outer.up).encoded_bytes(f.numel) for f in layout.fragments)
    down = times * sum(make_codec(outer.down).encoded_bytes(f.numel) for f in layout.fragments)
    updates = outer.updates_per_send if outer.levels == 2 and outer.rule != "sync" else workers
    steps = outer.local_steps * updates // workers
    gbps = next((link.gbps for link in cluster.links if set(link.regions) == {region, "global"}), None)
    seconds = [None if gbps is None else 8 * count / gbps / 1e9 for count in (up, down)]
    return LinkNeeds(region, up, down, max(steps, outer.local_steps), *seconds)


def show(found: Needs, console: Console) -> None:
    console.print(
        f"{found.parameters:,} parameters in {len(found.fragments)} fragment(s); "
        f"each server holds about {size(found.server_bytes)}"
    )
    memory = Table("worker", "region", "ranks", "layout", "parameters/rank", box=None, pad_edge=False)
    for part in [*found.workers[0].memory, "sum"]:
        memory.add_column(part, justify="right")
    for w in found.workers:
        cells = [size(count) for count in (*w.memory.values(), sum(w.memory.values()))]
        memory.add_row(w.name, w.region, str(w.ranks), w.layout, f"{w.parameters_per_rank:,}", *cells)
    console.print("\nmemory of the fullest rank", memory, sep="\n")
    links = Table("region", "up", "down", "inner steps between", "up takes", "down takes", box=None, pad_edge=False)
    for link in found.links:
        takes = ["–" if s is None else f"{s:.3g} s" for s in (link.up_s, link.down_s)]
        links.add_row(link.region, size(link.up_bytes), size(link.down_bytes), str(link.steps_between), *takes)
    console.print("\none exchange with the global server", links, sep="\n")
    first = found.workers[0]
    console.print(f"\none exchange inside a region: {size(first.delta_bytes)} up, {size(first.answer_bytes)} down")
