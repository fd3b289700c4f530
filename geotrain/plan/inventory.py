"""The planner's inputs: the hosts of each region, and the settings that the user has fixed (pins)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from geotrain.config import (
    Architecture,
    ClusterConfig,
    ConfigError,
    DeviceConfig,
    HostConfig,
    OfferConfig,
    ParallelConfig,
    RegionConfig,
    RunConfig,
    WorkerConfig,
    WorkerSetup,
    codec_config,
)
from geotrain.plan.model.loss import LOSS
from geotrain.plan.model.network import LinkTable

CUTS = ("tensor", "pipeline", "sequence", "context", "expert")  # keys of `parallel` that a plan chooses
LOSSY = codec_config("bf16")
DAY_S = 86_400.0
MOST_WORKERS = max(LOSS)
Objective = Literal["speed", "cost", "tokens"]


@dataclass(frozen=True)
class Wish:
    """What the user asks of a plan. tokens: how many to train. objective: most tokens a second; fewest dollars a
    token; or most tokens within `usd` and `within_days`, in place of `tokens`. within_days: the latest end, for which
    cost takes as many hosts as it needs. utilization: that workers should reach in spite of the outer loop. usd: most
    to pay, traffic left out. tokens_per_s: the least speed. most_workers: of which the fastest are
    kept; None: MOST_WORKERS, shared out among groups of like hosts, of which each may have one. idle_s: for which
    machines are paid, too, before and after they train."""

    tokens: float
    objective: Objective = "speed"
    within_days: float | None = None
    utilization: float = 0.95
    usd: float | None = None
    tokens_per_s: float | None = None
    most_workers: int | None = None
    idle_s: float = 0.0

    def __post_init__(self) -> None:
        if self.objective == "tokens" and (self.usd is None or self.within_days is None):
            raise PlanError("--objective tokens: most tokens for how much, until when? Add --usd and --within-days")

    @property
    def priced(self) -> bool:
        """Whether prices decide."""
        return self.objective != "speed" or self.usd is not None

    @property
    def partial(self) -> bool:
        """Whether some hosts of a group may be wanted, and not all of it."""
        return self.priced and (self.within_days, self.usd, self.tokens_per_s) != (None, None, None)

    @property
    def seconds(self) -> float:
        return (self.within_days or 0.0) * DAY_S

    @property
    def least_tokens_per_s(self) -> float:
        in_time = self.tokens / self.seconds if self.within_days and self.objective != "tokens" else 0.0
        return max(in_time, self.tokens_per_s or 0.0)


class PlanError(ConfigError):
    """No plan is possible. Says what stands in the way, by how much, and what would help."""


@dataclass(frozen=True)
class Pins:
    """Keys that the user wrote into the run file; the plan keeps them. outer: keys of the outer block."""

    tensor: int | None = None
    pipeline: int | None = None
    sequence: bool | None = None
    context: int | None = None
    expert: int | None = None
    recompute: str | None = None
    balance: bool | None = None
    outer: frozenset[str] = frozenset()
    global_region: str | None = None

    @property
    def cuts(self) -> list[str]:
        """Pinned keys of the parallel layout."""
        return [cut for cut in CUTS if getattr(self, cut) is not None]

    def without_parallel(self) -> Pins:
        return replace(self, tensor=None, pipeline=None, sequence=None, context=None, expert=None)


def pins_of(raw: Mapping[str, Any], global_region: str | None = None) -> Pins:
    """Find the pins of a run file. raw: its JSON. The micro-batch is no pin: DeepSpeed's block must always state
    one."""
    parallel, outer = raw.get("parallel", {}), raw.get("outer", {})
    return Pins(
        **{cut: parallel.get(cut) for cut in CUTS},
        recompute=raw.get("model", {}).get("recompute"),
        balance=(raw.get("acco") or {}).get("balance"),
        outer=frozenset(outer) | {f"rule.{key}" for key in outer.get("rule", {})},
        global_region=global_region,
    )


@dataclass(frozen=True)
class Host:
    """A host that may be used. slots: accelerators that it has."""

    region: str
    host: str
    slots: int
    kind: str
    device: DeviceConfig = field(compare=False)
    offer: OfferConfig = field(default=OfferConfig(), compare=False)
    spot: bool = False

    @property
    def unpriced(self) -> bool:
        return self.device.usd_per_hour is None

    def config(self, home: str, slots: int) -> HostConfig:
        """Cluster file entry of this host for a worker whose region is `home`."""
        away = None if self.region == home else self.region
        return HostConfig(host=self.host, slots=slots, device=self.kind, region=away, spot=self.spot)

    def on_spot(self) -> Host:
        """The same host, which may be taken back, at the offer's price."""
        device = self.device.model_copy(update={"usd_per_hour": self.offer.spot_usd_per_hour})
        return replace(self, spot=True, device=device)


@dataclass(frozen=True)
class PlanTask:
    """The planner's inputs. run: settings that are not pinned are replaced. imbalance: load of the fullest expert
    rank over the mean (`geotrain.plan.model.work.Work`). beyond_quota: hosts that are not among `hosts`."""

    run: RunConfig
    pins: Pins
    cluster: ClusterConfig
    architecture: Architecture
    network: LinkTable
    hosts: Mapping[str, Sequence[Host]]
    imbalance: float = 1.0
    beyond_quota: tuple[Host, ...] = ()

    @property
    def batch(self) -> int:
        return self.run.samples_per_step

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.run.data.sequence_length

    @cached_property
    def base(self) -> RunConfig:
        """The run whose memory is asked for. The codec inside a region is chosen later (`settings.py`): a lossy one
        keeps 4 bytes an owned parameter."""
        if "local" in self.pins.outer or self.run.outer.flat:
            return self.run
        return self.run.model_copy(update={"outer": self.run.outer.model_copy(update={"local": LOSSY})})

    @cached_property
    def _setup(self) -> WorkerSetup:
        return WorkerSetup.of(self.run, WorkerConfig(name="w"))

    def setup(self, parallel: ParallelConfig, micro: int) -> WorkerSetup:
        """Settings of a worker in this parallel layout, with this micro-batch."""
        block = {**self._setup.deepspeed, "train_micro_batch_size_per_gpu": micro}
        return replace(self._setup, parallel=parallel, deepspeed=block)

    def with_recompute(self, recompute: str) -> PlanTask:
        model = self.run.model.model_copy(update={"recompute": recompute})
        return replace(self, run=self.run.model_copy(update={"model": model}))

    def with_outer(self, changes: Mapping[str, Any]) -> PlanTask:
        """The same with these keys of `outer`."""
        return replace(self, run=self.run.model_copy(update={"outer": self.run.outer.model_copy(update=changes)}))

    @property
    def balanced(self) -> bool:
        return self.run.acco is not None and self.run.acco.balance

    def with_balance(self, balance: bool) -> PlanTask:
        """The same with `acco.balance` so, where the run uses ACCO."""
        acco = None if self.run.acco is None else self.run.acco.model_copy(update={"balance": balance})
        return replace(self, run=self.run.model_copy(update={"acco": acco}))

    @property
    def may_balance(self) -> bool:
        """Whether the plan chooses `acco.balance`: the run uses ACCO and does not say, and a worker could have
        replicas of unlike speed."""
        unlike = len({(host.region, host.kind) for hosts in self.hosts.values() for host in hosts}) > 1
        free = self.pins.balance is None and not self.run.precision.deterministic_mode
        return self.run.acco is not None and free and unlike


def hosts_of(region: RegionConfig) -> tuple[HostConfig, ...]:
    """List the hosts that a plan may use in a region: its inventory; without one, the hosts of its workers."""
    return region.hosts or tuple(h for w in region.workers for h in w.hosts)


def task_of(run: RunConfig, pins: Pins, cluster: ClusterConfig, imbalance: float = 1.0) -> PlanTask:
    """Build the planner's inputs. Raises ConfigError where a host names no device, UnsupportedModelError."""
    network = LinkTable(cluster)
    found: dict[str, list[Host]] = {}
    used, beyond = Counter[tuple[str, str]](), list[Host]()
    for region in cluster.regions:
        hosts = hosts_of(region)
        names = [h.host for h in hosts]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise PlanError(f"region {region.name!r}: hosts names {', '.join(twice)} twice; add up its slots")
        for host in hosts:
            device = network.device(host, f"region {region.name!r}", host.region or region.name)
            place, kind = host.region or region.name, str(host.device)
            offer = network.offer(place, kind)
            one = Host(place, host.host, host.slots, kind, device, offer, host.spot)
            if offer.quota is not None and used[place, kind] + host.slots > offer.quota:
                beyond.append(one)
                continue
            used[place, kind] += host.slots
            found.setdefault(place, []).append(one)
    if not found:
        raise PlanError(
            f"cluster {cluster.name!r}: no host is within its region's offers.<kind>.quota; raise one, or list "
            "smaller hosts"
        )
    known = [r.name for r in cluster.regions]
    if pins.global_region is not None and pins.global_region not in known:
        raise PlanError(f"--pin-global {pins.global_region}: no such region; regions: {', '.join(known)}")
    return PlanTask(run, pins, cluster, run.architecture, network, found, imbalance, tuple(beyond))
