"""Prediction of a run on a cluster: times, memory, bytes and money, and what limits each.

The parts are `plan.model.step` (one inner step), `rounds` (the outer loop), `memory`; here they are put together.
"""

from __future__ import annotations

from dataclasses import dataclass

from geotrain.common.names import GLOBAL
from geotrain.config import (
    Architecture,
    ClusterConfig,
    ConfigError,
    ParallelConfig,
    RunConfig,
    WorkerConfig,
    WorkerSetup,
    shards_of,
)
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.plan.model.answering import settled_outer
from geotrain.plan.model.memory import tightest_rank
from geotrain.plan.model.network import Line, LinkTable, RankDevice
from geotrain.plan.model.rounds import RegionPace, WorkerPace, pace, server_times, worker_timing
from geotrain.plan.model.server_hosts import fullest_share
from geotrain.plan.model.server_rates import MEASURED
from geotrain.plan.model.sizes import Sizes
from geotrain.plan.model.step import PARTS, StepTime, step_time
from geotrain.plan.model.work import Work, useful_flops

DAY_S = 86_400.0


@dataclass(frozen=True)
class WorkerPrediction:
    """One worker. step: the parts of an inner step. job_s: H steps, and what exchanges add to them, `wait_s` of it.
    sent_bytes: of a job, between its own ranks, over each pair of regions, (from, to).

    utilization: useful arithmetic over what its ranks could do at their efficiency, all waiting counted.
    memory: of the rank that has least left, bytes by part. memory_limit_bytes: of its accelerator.
    limit: what takes most of the time that is not useful arithmetic. usd_per_hour: None without all prices.
    """

    name: str
    region: str
    regions: tuple[str, ...]
    ranks: int
    parallel: ParallelConfig
    replicas: int
    micro_batch: int
    step: StepTime
    local_steps: int
    job_s: float
    wait_s: float
    sent_bytes: dict[tuple[str, str], float]
    tokens_per_s: float
    utilization: float
    memory: dict[str, int]
    memory_limit_bytes: int
    limit: str
    usd_per_hour: float | None

    @property
    def step_s(self) -> float:
        return self.step.step_s

    @property
    def compute_s(self) -> float:
        """Arithmetic of the busiest pipeline stage in one step."""
        return self.step.compute_s

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class LinkPrediction:
    """One direction of a link between two places (regions, or "global"). what: the outer loop, or a worker's own
    communication across regions. busy: share of its rate."""

    sender: str
    receiver: str
    what: str
    bytes_per_s: float
    busy: float
    usd_per_hour: float

    @property
    def bytes_per_day(self) -> float:
        return self.bytes_per_s * DAY_S


@dataclass(frozen=True)
class RunPrediction:
    """The whole run, in its steady pace. inside: each region's line between its workers and its server, where it has
    one. server_busy: share of the time that each server works (a region's, by name, and "global"), its shards side
    by side. bound_tokens_per_s: of the same accelerators if they never waited and computed nothing twice.
    usd_per_hour: accelerators and traffic; None without all prices of accelerators."""

    workers: dict[str, WorkerPrediction]
    regions: dict[str, RegionPace]
    inside: dict[str, Line]
    links: tuple[LinkPrediction, ...]
    server_busy: dict[str, float]
    tokens_per_s: float
    bound_tokens_per_s: float
    usd_per_hour: float | None

    @property
    def round_s(self) -> float:
        """Seconds between two exchanges with the global server, of the region that exchanges least often."""
        return max(region.round_s for region in self.regions.values())

    @property
    def utilization(self) -> float:
        return self.tokens_per_s / self.bound_tokens_per_s

    def seconds(self, tokens: float) -> float:
        return tokens / self.tokens_per_s

    def usd(self, tokens: float) -> float | None:
        return None if self.usd_per_hour is None else self.usd_per_hour * self.seconds(tokens) / 3600


def predict(run: RunConfig, cluster: ClusterConfig, imbalance: float = 1.0) -> RunPrediction:
    """Predict a run on a cluster. run: from `load_run`. cluster: with workers, devices, links between each region and
    "global", between hosts of a region where a worker has several, and between regions where a worker spans them.
    imbalance: as in `Work`.

    Memory is reported, not judged: compare it with `WorkerPrediction.memory_limit_bytes`.
    Raises ConfigError naming what does not fit or the figure that is missing, UnsupportedModelError.
    """
    architecture = run.architecture
    network = LinkTable(cluster)
    placed = {worker.name: (region.name, worker) for region in cluster.regions for worker in region.workers}
    if not placed:
        raise ConfigError(f"cluster {cluster.name!r} has no workers; `geotrain plan` makes them of its hosts")
    ranks = {name: network.ranks(region, worker) for name, (region, worker) in placed.items()}
    memory = {name: tightest_rank(run, cluster, worker) for name, (_, worker) in placed.items()}  # checks layouts
    steps = {
        name: step_time(work_of(run, architecture, WorkerSetup.of(run, worker), imbalance), ranks[name], network)
        for name, (_, worker) in placed.items()
    }
    regions = list(dict.fromkeys(region for region, _ in placed.values()))
    wide = {region: network.between_regions(region, GLOBAL) for region in regions}
    inside = {}
    if not run.outer.flat:
        homes = {region: [ranks[name] for name, (home, _) in placed.items() if home == region] for region in regions}
        inside = {region: _to_server(region, homes[region], network) for region in regions}
    timings = [worker_timing(name, region, steps[name]) for name, (region, _) in placed.items()]
    parameter_map, outer = parameter_map_of(run), settled_outer(run, len(placed))
    sizes = Sizes(outer, parameter_map.group_numel)
    shares = {
        name: fullest_share(parameter_map, max(1, len(shards_of(cluster, name)))) for name in (GLOBAL, *regions)
    }
    rates = MEASURED.over(cluster.security is not None)
    servers = server_times(outer, sizes, shares, shares[GLOBAL], rates)
    found = pace(outer, sizes, timings, wide, inside, servers)
    workers = {
        name: _worker(run, architecture, region, worker, ranks[name], steps[name], found.workers[name], memory[name])
        for name, (region, worker) in placed.items()
    }
    links = []
    for region, paced in found.regions.items():
        for sender, receiver, count in ((region, GLOBAL, paced.up_bytes), (GLOBAL, region, paced.down_bytes)):
            links.append(_link(sender, receiver, "outer loop", count / paced.round_s, wide[region]))
    for name, w in workers.items():
        for (sender, receiver), sent_bytes in w.sent_bytes.items():
            line = network.between_regions(sender, receiver)
            links.append(_link(sender, receiver, f"worker {name}", sent_bytes / w.job_s, line))
    busy = {} if run.outer.flat else {region: paced.server_busy for region, paced in found.regions.items()}
    busy[GLOBAL] = found.global_busy
    hourly = None
    prices = [w.usd_per_hour for w in workers.values() if w.usd_per_hour is not None]
    if len(prices) == len(workers):
        hourly = sum(prices) + sum(link.usd_per_hour for link in links)
    return RunPrediction(
        workers,
        found.regions,
        inside,
        tuple(links),
        busy,
        sum(w.tokens_per_s for w in workers.values()),
        sum(map(_speed, ranks.values())) / useful_flops(architecture, run.data.sequence_length),
        hourly,
    )


def work_of(run: RunConfig, architecture: Architecture, setup: WorkerSetup, imbalance: float = 1.0) -> Work:
    length = run.data.sequence_length
    return Work(architecture, length, run.model.recompute, setup.parallel, setup.deepspeed, run.acco, imbalance)


def _speed(ranks: list[RankDevice]) -> float:
    """Compute a worker's operations a second, at the efficiency that training reaches."""
    return 1e12 * sum(rank.device.tflops * rank.device.efficiency for rank in ranks)


def _to_server(region: str, workers: list[list[RankDevice]], network: LinkTable) -> Line:
    """A worker's line to its region's server. Of a worker that spans regions it is the slowest of its ranks' lines,
    with the rate that moves the whole payload when each far region carries its ranks' share."""
    line = network.inside(region)
    gbps, latency = line.gbps, line.latency_s
    for ranks in workers:
        for far in {rank.region for rank in ranks} - {region}:
            share = sum(rank.region == far for rank in ranks) / len(ranks)
            there = network.between_regions(far, region)
            gbps, latency = min(gbps, there.gbps / share), max(latency, there.latency_s)
    return Line(line.key, gbps, latency, line.usd_per_gb)


def _worker(
    run: RunConfig,
    architecture: Architecture,
    region: str,
    worker: WorkerConfig,
    ranks: list[RankDevice],
    step: StepTime,
    paced: WorkerPace,
    memory: tuple[dict[str, int], float, str | None],
) -> WorkerPrediction:
    work = work_of(run, architecture, WorkerSetup.of(run, worker))
    steps, job_s = paced.local_steps, paced.job_s
    tokens_per_s = steps * run.samples_per_step * run.data.sequence_length / job_s
    utilization = tokens_per_s * useful_flops(architecture, run.data.sequence_length) / _speed(ranks)
    # The largest part of a job that is no useful arithmetic is what limits the worker.
    losses = {name: steps * getattr(step, part) for part, name in PARTS.items()} | {
        PARTS["compute_s"]: 0.0,  # but for this part of it
        "arithmetic done twice, or unequal work": max(0.0, steps * step.compute_s - utilization * job_s),
        "weights between replicas at exchanges": paced.stop_s,
        "waiting for the outer loop": paced.wait_s - paced.stop_s,
    }
    worst = max(losses, key=lambda name: losses[name])
    limit = "arithmetic" if losses[worst] < 0.02 * job_s else f"{worst} ({losses[worst] / job_s:.0%})"
    prices = [rank.device.usd_per_hour for rank in ranks if rank.device.usd_per_hour is not None]
    return WorkerPrediction(
        name=worker.name,
        region=region,
        regions=tuple(dict.fromkeys(rank.region for rank in ranks)),
        ranks=len(ranks),
        parallel=work.parallel,
        replicas=len(ranks) // work.parallel.replica_ranks,
        micro_batch=int(work.deepspeed["train_micro_batch_size_per_gpu"]),
        step=step,
        local_steps=steps,
        job_s=job_s,
        wait_s=paced.wait_s,
        sent_bytes={
            pair: steps * count + paced.gatherings * step.refresh_bytes.get(pair, 0.0)
            for pair, count in step.sent_bytes.items()
        },
        tokens_per_s=tokens_per_s,
        utilization=utilization,
        memory=memory[0],
        memory_limit_bytes=round(memory[1]),
        limit=limit,
        usd_per_hour=sum(prices) if len(prices) == len(ranks) else None,
    )


def _link(sender: str, receiver: str, what: str, bytes_per_s: float, line: Line) -> LinkPrediction:
    busy = 8e-9 * bytes_per_s / line.gbps
    return LinkPrediction(sender, receiver, what, bytes_per_s, busy, line.usd_per_gb * bytes_per_s * 3600 / 1e9)
