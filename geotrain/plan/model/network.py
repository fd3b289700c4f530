"""The network of the cost model: which hosts, regions and servers are linked, and how fast, by the cluster file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

from geotrain.config import (
    ClusterConfig,
    ConfigError,
    DeviceConfig,
    HostConfig,
    LinkConfig,
    OfferConfig,
    ParallelConfig,
    WorkerConfig,
)

Sent = defaultdict[tuple[str, str], float]  # (from region, to region) → bytes
Among = Literal["context", "expert", "tensor", "tensor and expert"]  # ranks that exchange something in a layer


@dataclass(frozen=True)
class Line:
    """One direction of a link between two places. key: lines with the same key share one rate; empty: nobody shares
    it. latency_s: one way."""

    key: tuple[str, ...]
    gbps: float
    latency_s: float
    usd_per_gb: float = 0.0

    def seconds(self, count_bytes: float, share: int = 1) -> float:
        """Seconds until `count_bytes` have arrived, while `share` equal flows use the line."""
        return self.latency_s + 8e-9 * count_bytes * share / self.gbps


@dataclass(frozen=True)
class RankDevice:
    """A rank's accelerator, and where it stands."""

    region: str
    host: str
    device: DeviceConfig


@dataclass(frozen=True)
class RankGroup:
    """Ranks of one pipeline stage that communicate, and the replicas that they belong to."""

    ranks: tuple[RankDevice, ...]
    replicas: tuple[int, ...]


class RankTable:
    """A worker's ranks as a table: at(stage, copy, tensor rank).

    A copy are the ranks that have one set of the parameters of a stage, but for experts; data and context parallelism
    make copies. Ranks are ordered tensor first, then context, data, pipeline, so that a replica's context ranks are
    neighbouring copies, and so are the ranks that divide experts.
    """

    def __init__(self, ranks: Sequence[RankDevice], parallel: ParallelConfig) -> None:
        self.ranks, self.tp, self.pp = ranks, parallel.tensor, parallel.pipeline
        self.cp, self.ep = parallel.context, parallel.expert
        self.copies = len(ranks) // (self.tp * self.pp)
        self.replicas = self.copies // self.cp

    def at(self, stage: int, copy: int, tensor: int) -> RankDevice:
        return self.ranks[(stage * self.copies + copy) * self.tp + tensor]

    def waiting(self, stage: int, replica: int) -> Sequence[RankDevice]:
        """List the ranks that wait for each other in every layer of a replica's stage, by tensor, context and expert
        parallelism."""
        together = lcm(self.cp, self.ep)
        return self._copies(stage, replica * self.cp // together * together, together)

    def groups(self, stage: int, among: Among) -> list[RankGroup]:
        """List the groups of a stage that exchange: those of more than one rank."""
        copies = {"context": self.cp, "tensor": 1}.get(among, self.ep)
        whole = among in ("tensor", "tensor and expert")  # all tensor ranks are in one group
        found = []
        for first in range(0, self.copies, copies):
            replicas = tuple(range(first // self.cp, (first + copies - 1) // self.cp + 1))
            ranks = self._copies(stage, first, copies)
            parts = [ranks] if whole else [ranks[t :: self.tp] for t in range(self.tp)]
            found += [RankGroup(tuple(part), replicas) for part in parts if len(part) > 1]
        return found

    def _copies(self, stage: int, first: int, count: int) -> Sequence[RankDevice]:
        begin = (stage * self.copies + first) * self.tp
        return self.ranks[begin : begin + count * self.tp]


class LinkTable:
    """Looks up lines and devices of a cluster file; what is missing there is an error that says what to add."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster
        self.links = {frozenset(link.regions): link for link in cluster.links}
        self._between: dict[tuple[str, str, str, str], Line] = {}

    def device(self, host: HostConfig, whose: str, region: str) -> DeviceConfig:
        """Return the kind of a host's accelerators, at their price in that region. Raises ConfigError when the host
        names none, or is a spot host without a price."""
        if host.device is None:
            kinds = ", ".join(sorted(self.cluster.devices)) or "describe one there"
            raise ConfigError(
                f"{whose}: host {host.host!r} names no device, so its memory and speed are unknown; "
                f'add "device": a key of the cluster\'s `devices` ({kinds})'
            )
        device, offer = self.cluster.devices[host.device], self.offer(region, host.device)
        price = offer.spot_usd_per_hour if host.spot else offer.usd_per_hour
        if host.spot and price is None:
            raise ConfigError(
                f"{whose}: host {host.host!r} has spot = true and no price; add spot_usd_per_hour to region "
                f"{region!r}, offers.{host.device}"
            )
        return device if price is None else device.model_copy(update={"usd_per_hour": price})

    def offer(self, region: str, kind: str) -> OfferConfig:
        """Return what a region's provider says of a kind of accelerator."""
        return self.cluster.region(region).offers.get(kind, OfferConfig())

    def ranks(self, region: str, worker: WorkerConfig) -> list[RankDevice]:
        """The worker's ranks, in their order."""
        return [
            RankDevice(place, host.host, self.device(host, f"worker {worker.name!r}", place))
            for host in worker.hosts
            for place in (host.region or region,)
            for _ in range(host.slots)
        ]

    def link(self, one: str, other: str) -> LinkConfig | None:
        return self.links.get(frozenset((one, other)))

    def between_regions(self, one: str, other: str) -> Line:
        """Find the line between two places. one, other: regions, or "global"; the same region twice: between its
        hosts. Raises ConfigError."""
        link = self.link(one, other)
        if link is None:
            what = f"between hosts of region {one!r}" if one == other else f"between {one!r} and {other!r}"
            raise ConfigError(
                f"cluster {self.cluster.name!r}: no figure for the link {what}; add "
                f'{{"regions": ["{one}", "{other}"], "gbps": …, "rtt_ms": …}} to `links`, or measure it with '
                "`geotrain probe`"
            )
        return Line((one, other), link.gbps, link.rtt_ms / 2000, link.usd_per_gb or 0.0)

    def between(self, one: RankDevice, other: RankDevice) -> Line:
        """Find the line between two ranks. A region's line to another is shared by all that goes that way, a host's
        by what leaves the host."""
        ends = one.region, one.host, other.region, other.host
        if ends not in self._between:
            self._between[ends] = self._line(one, other)
        return self._between[ends]

    def _line(self, one: RankDevice, other: RankDevice) -> Line:
        if one.region != other.region:
            return self.between_regions(one.region, other.region)
        if one.host == other.host:
            slower = min(one.device.host_gbps, other.device.host_gbps)
            return Line((), slower, 0.0)  # each accelerator has its own
        line = self.between_regions(one.region, one.region)
        return Line((one.region, one.host), line.gbps, line.latency_s, line.usd_per_gb)

    def inside(self, region: str) -> Line:
        """Find the line between a worker and its region's server: the region's network; of a single host, that host's
        own."""
        if self.link(region, region) is not None:
            return self.between_regions(region, region)
        config = self.cluster.region(region)
        of_workers = [h for w in config.workers for h in w.hosts if h.region in (None, region)]
        hosts = {host.host: host for host in (*config.hosts, *of_workers)}
        if len(hosts) > 1:
            return self.between_regions(region, region)  # says what is missing
        host = next(iter(hosts.values()))
        return Line((), self.device(host, f"region {region!r}", region).host_gbps, 0.0)
