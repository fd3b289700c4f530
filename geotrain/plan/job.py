"""What a run will do on a cluster: `predict`. Times, memory, bytes and money, and what limits each.

The pieces are `geotrain.plan.step` (one inner step), `rounds` (the outer loop), `memory`; here they are put together.
"""

from __future__ import annotations

from dataclasses import dataclass

from geotrain.canonical import Architecture, architecture_from_hf
from geotrain.config import ClusterConfig, ConfigError, ParallelConfig, RunConfig, WorkerConfig
from geotrain.outer.layout import layout_of
from geotrain.plan.memory import rank_memory
from geotrain.plan.network import GLOBAL, Line, Network, Seat
from geotrain.plan.rounds import Pace, RegionPace, pace, pacer, payloads
from geotrain.plan.step import StepTime, Work, step_time
from geotrain.plan.work import useful_flops

DAY_S = 86_400.0


@dataclass(frozen=True)
class WorkerPrediction:
    """One worker. step: the parts of an inner step. job_s: H steps, and what exchanges add to them, `wait_s` of it.
    sent_bytes: of a job, between its own ranks, over each pair of regions, (from, to).

    utilization: useful arithmetic over what its ranks could do at their efficiency, all waiting counted.
    memory: of the fullest rank, bytes by part. memory_limit_bytes: of the smallest accelerator.
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
class Prediction:
    """The whole run. bound_tokens_per_s: of the same accelerators if they never waited and computed nothing twice.
    usd_per_hour: accelerators and traffic; None without all prices of accelerators."""

    workers: dict[str, WorkerPrediction]
    regions: dict[str, RegionPace]
    links: tuple[LinkPrediction, ...]
    tokens_per_s: float
    bound_tokens_per_s: float
    usd_per_hour: float | None

    @property
    def round_s(self) -> float:
        """Between two exchanges with the global server, of the region that exchanges least often."""
        return max(region.round_s for region in self.regions.values())

    @property
    def utilization(self) -> float:
        return self.tokens_per_s / self.bound_tokens_per_s

    def seconds(self, tokens: float) -> float:
        return tokens / self.tokens_per_s

    def usd(self, tokens: float) -> float | None:
        return None if self.usd_per_hour is None else self.usd_per_hour * self.seconds(tokens) / 3600


def predict(run: RunConfig, cluster: ClusterConfig) -> Prediction:
    """run: from `load_run`. cluster: with workers, devices, links between each region and "global", between hosts
    of a region where a worker has several, and between regions where a worker spans them.

    Memory is told, not judged: see `WorkerPrediction.memory_limit_bytes`.
    Raises ConfigError naming what does not fit or the figure that is missing, UnsupportedModelError.
    """
    architecture = model_of(run)
    network = Network(cluster)
    placed = [(region.name, worker) for region in cluster.regions for worker in region.workers]
    if not placed:
        raise ConfigError(f"cluster {cluster.name!r} has no workers; `geotrain plan` makes them of its hosts")
    seats = {worker.name: network.seats(region, worker) for region, worker in placed}
    steps = {
        worker.name: step_time(work_of(run, architecture, worker), seats[worker.name], network)
        for _, worker in placed
    }
    regions = list(dict.fromkeys(region for region, _ in placed))
    wide = {region: network.between_regions(region, GLOBAL) for region in regions}
    sizes = payloads(run.outer, [f.numel for f in layout_of(run).fragments])
    inside = (
        {} if run.outer.levels == 1 else {region: _to_server(region, placed, seats, network) for region in regions}
    )
    found = pace(run.outer, sizes, [pacer(w.name, region, steps[w.name]) for region, w in placed], wide, inside)
    workers = {
        worker.name: _worker(run, architecture, region, worker, seats[worker.name], steps[worker.name], found)
        for region, worker in placed
    }
    links = _links(workers, found.regions, wide, network)
    prices = [w.usd_per_hour for w in workers.values()]
    hourly = None
    if None not in prices:
        hourly = sum(p for p in prices if p is not None) + sum(link.usd_per_hour for link in links)
    useful = useful_flops(architecture, run.data.sequence_length)
    return Prediction(
        workers,
        found.regions,
        links,
        sum(w.tokens_per_s for w in workers.values()),
        sum(_speed(seats[name]) for name in workers) / useful,
        hourly,
    )


def model_of(run: RunConfig) -> Architecture:
    """The run must come from `load_run`, which puts the model's config inline. Raises UnsupportedModelError."""
    assert isinstance(run.model.config, dict)
    return architecture_from_hf(run.model.config)


def work_of(run: RunConfig, architecture: Architecture, worker: WorkerConfig) -> Work:
    return Work(
        architecture,
        run.data.sequence_length,
        run.model.recompute,
        worker.parallel or run.parallel,
        {**run.deepspeed, **worker.deepspeed},
        run.acco,
    )


def _speed(seats: list[Seat]) -> float:
    """Operations a second, at the efficiency that training reaches."""
    return 1e12 * sum(seat.device.tflops * seat.device.efficiency for seat in seats)


def _to_server(
    region: str, placed: list[tuple[str, WorkerConfig]], seats: dict[str, list[Seat]], network: Network
) -> Line:
    """A worker's line to its region's server; of a worker that spans regions, the slowest of its ranks' lines, with
    the rate that moves the whole payload when each far region carries its ranks' share."""
    line = network.inside(region)
    gbps, latency = line.gbps, line.latency_s
    for home, worker in placed:
        if home == region:
            mine = seats[worker.name]
            for far in {seat.region for seat in mine} - {region}:
                share = sum(seat.region == far for seat in mine) / len(mine)
                there = network.between_regions(far, region)
                gbps, latency = min(gbps, there.gbps / share), max(latency, there.latency_s)
    return Line(line.key, gbps, latency, line.usd_per_gb)


def _worker(
    run: RunConfig,
    architecture: Architecture,
    region: str,
    worker: WorkerConfig,
    seats: list[Seat],
    step: StepTime,
    found: Pace,
) -> WorkerPrediction:
    mine = found.workers[worker.name]
    work = work_of(run, architecture, worker)
    tokens_per_s = mine.local_steps * run.samples_per_step * run.data.sequence_length / mine.job_s
    useful = useful_flops(architecture, run.data.sequence_length)
    prices = [seat.device.usd_per_hour for seat in seats]
    memory = rank_memory(run, architecture, worker)
    steps_s = mine.local_steps
    computing = tokens_per_s * useful / _speed(seats) * mine.job_s
    losses = {
        "arithmetic done twice, or unequal work": max(0.0, steps_s * step.compute_s - computing),
        "tensor parallelism": steps_s * step.tensor_s,
        "the pipeline's bubble and transfers": steps_s * step.pipeline_s,
        "gradients between replicas": steps_s * step.reduction_s,
        "words between all ranks": steps_s * step.words_s,
        "weights between replicas at exchanges": mine.stop_s,
        "waiting for the outer loop": mine.wait_s - mine.stop_s,
    }
    sent = {
        pair: steps_s * count + mine.refreshes * step.refresh_bytes.get(pair, 0.0)
        for pair, count in step.sent_bytes.items()
    }
    worst = max(losses, key=lambda name: losses[name])
    limit = "arithmetic" if losses[worst] < 0.02 * mine.job_s else f"{worst} ({losses[worst] / mine.job_s:.0%})"
    return WorkerPrediction(
        worker.name,
        region,
        tuple(dict.fromkeys(seat.region for seat in seats)),
        len(seats),
        work.parallel,
        len(seats) // (work.parallel.tensor * work.parallel.pipeline),
        int(work.deepspeed["train_micro_batch_size_per_gpu"]),
        step,
        mine.local_steps,
        mine.job_s,
        mine.wait_s,
        sent,
        tokens_per_s,
        tokens_per_s * useful / _speed(seats),
        memory,
        round(1e9 * min(seat.device.memory_gb for seat in seats)),
        limit,
        None if None in prices else sum(p for p in prices if p is not None),
    )


def _links(
    workers: dict[str, WorkerPrediction], regions: dict[str, RegionPace], wide: dict[str, Line], network: Network
) -> tuple[LinkPrediction, ...]:
    links = []
    for region, found in regions.items():
        line = wide[region]
        links.append(_link(region, GLOBAL, "outer loop", found.up_bytes / found.round_s, line))
        links.append(_link(GLOBAL, region, "outer loop", found.down_bytes / found.round_s, line))
    for worker in workers.values():
        for (sender, receiver), count in worker.sent_bytes.items():
            rate = count / worker.job_s
            line = network.between_regions(sender, receiver)
            links.append(_link(sender, receiver, f"worker {worker.name}", rate, line))
    return tuple(links)


def _link(sender: str, receiver: str, what: str, bytes_per_s: float, line: Line) -> LinkPrediction:
    busy = 8e-9 * bytes_per_s / line.gbps
    return LinkPrediction(sender, receiver, what, bytes_per_s, busy, line.usd_per_gb * bytes_per_s * 3600 / 1e9)
