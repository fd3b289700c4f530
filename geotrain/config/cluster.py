"""The cluster file: the regions, hosts, links and servers of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, Field, model_validator

from geotrain.common.names import GLOBAL
from geotrain.config.block import (
    AbsolutePath,
    Block,
    ConfigError,
    EnvironmentKey,
    Name,
    Port,
    PositiveFloat,
    PositiveInt,
    from_folder,
    parse,
    read_json,
)
from geotrain.config.deepspeed import check_block
from geotrain.config.hosts import HostName, HostPattern, SshHost, expand_hosts, host_port
from geotrain.config.run import ParallelConfig, PrecisionConfig

RESERVED = ("global", "launcher", "operator", "wan")  # logs, events and messages name other processes so


EVERY_ADDRESS = ("0.0.0.0", "::")  # of a machine; to listen on, not to be reached by


class Address(Block):
    """A server's address."""

    host: HostName = Field("127.0.0.1", description="By which others reach it.")
    port: Port = Field(0, description="0: the launcher picks a free port (only for a server it starts locally).")
    bind: HostName | None = Field(
        None, description="Address that it listens on, behind NAT or in a container; 0.0.0.0, ::: all. null: `host`."
    )
    bind_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="Port that it listens on. null: `port`."
    )

    @model_validator(mode="after")
    def _others_can_reach_it(self) -> Address:
        if self.host in EVERY_ADDRESS:
            raise ValueError(
                f'host = "{self.host}" reaches no machine from another: write it as `bind`, and in `host` '
                "what others reach it by"
            )
        return self

    def __str__(self) -> str:
        return host_port(self.host, self.port)

    @property
    def listening(self) -> tuple[str, int]:
        """Host and port that the server listens on."""
        return self.bind or self.host, self.bind_port or self.port


class DeviceConfig(Block):
    """A kind of accelerator, for planning."""

    memory_gb: PositiveFloat = Field(description="Memory a training rank may use, in 1e9 bytes.")
    tflops: PositiveFloat = Field(description="Dense matrix peak at the training type, in 1e12 operations a second.")
    efficiency: Annotated[float, Field(gt=0, le=1)] = Field(
        0.4, description="Share of the peak that training reaches; `geotrain probe` measures it."
    )
    host_gbps: PositiveFloat = Field(
        256.0, description="Rate between two of them in one host, each way; as given, that of PCIe 4 with 16 lanes."
    )
    usd_per_hour: Annotated[float, Field(ge=0)] | None = Field(None, description="Price of one accelerator.")


class OfferConfig(Block):
    """Accelerators of one kind as a region's provider offers them, for planning."""

    quota: PositiveInt | None = Field(None, description="Most of them that may be used here. null: all of `hosts`.")
    usd_per_hour: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Price of one here. null: that of its kind in `devices`."
    )
    spot_usd_per_hour: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Price of one on a host that may be taken back. null: there are none."
    )
    preemptions_per_hour: Annotated[float, Field(ge=0)] = Field(
        0.0, description="How often such a host is taken back."
    )
    replaced_after_s: Annotated[float, Field(ge=0)] = Field(
        600.0,
        description="From there until its worker trains again, on it or another: the machine's and the worker's.",
    )


class HostConfig(Block):
    host: HostPattern = Field(description="Or several, as gpu[01-04,7].")
    slots: PositiveInt = Field(description="Accelerators (or CPU ranks) used on this host.")
    device: str | None = Field(None, description="Kind of accelerator: a key of the cluster's `devices`.")
    region: Name | None = Field(
        None, description="The region it stands in, where that is not its worker's: a worker may span regions."
    )
    spot: bool = Field(False, description="It may be taken back; `geotrain plan` chooses by the region's `offers`.")


class ServerHostConfig(Block):
    """A host for shards of servers."""

    host: HostPattern = Field(description="By which others, and ssh, reach it. Or several, as mem[01-04,7].")
    memory_gb: PositiveFloat = Field(description="Memory that servers may use, in 1e9 bytes.")


Host = TypeVar("Host", HostConfig, ServerHostConfig)


def _expanded(hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    return tuple(host.model_copy(update={"host": name}) for host in hosts for name in expand_hosts(host.host))


HostList = Annotated[tuple[HostConfig, ...], AfterValidator(_expanded)]
ServerHosts = Annotated[tuple[ServerHostConfig, ...], AfterValidator(_expanded)]


class WorkerConfig(Block):
    """One DeepSpeed world."""

    name: Name
    hosts: HostList = Field((HostConfig(host="localhost", slots=1),), min_length=1)
    launcher: str = Field(
        "local",
        description="What starts its ranks: local (on this machine), ssh, pdsh, slurm, openmpi, mpich, impi, or a "
        "launcher of another package.",
    )
    launcher_args: str = Field("", description="More arguments for srun, mpirun or pdsh.")
    parallel: ParallelConfig | None = Field(None, description="Overrides the run's `parallel` for this worker.")
    precision: PrecisionConfig | None = Field(None, description="Overrides the run's `precision` for this worker.")
    deepspeed: Annotated[dict[str, Any], AfterValidator(check_block)] = Field(
        {}, description="Keys laid over the run's `deepspeed` block."
    )
    env: dict[EnvironmentKey, str] = Field({}, description="Environment of this worker's processes.")
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None,
        description="Port of its ranks' rendezvous, unless all are on the machine that starts them. null: 29500 + "
        "the worker's number in this file. Of two runs on the same hosts, one must set it.",
    )
    min_step_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="An inner step takes at least so long: for rehearsals that leave the machine to others."
    )

    @property
    def ranks(self) -> int:
        return sum(h.slots for h in self.hosts)


class RegionConfig(Block):
    name: Name
    server: Address = Address()
    ssh: SshHost | None = Field(None, description="Host that runs this region's server and launches its workers.")
    folder: AbsolutePath | None = Field(
        None,
        description="Folder there in place of the launch's working directory: the run's paths below that are below "
        "this there, all others the same. null: all are the same.",
    )
    shards: tuple[Address, ...] = Field(
        (),
        description="Addresses of this server's shards, each a process; none: they are in the server's own. One with "
        "another `host` than `server` is started there by ssh.",
    )
    workers: tuple[WorkerConfig, ...] = Field((), description="`geotrain plan` makes them of `hosts`.")
    hosts: HostList = Field((), description="Hosts that `geotrain plan` may use here.")
    spare_hosts: HostList = Field((), description="Hosts in reserve, for workers that have lost one.")
    server_hosts: ServerHosts = Field(
        (), description="Hosts that `geotrain plan` may put shards on, of the global server too if it stands here."
    )
    offers: dict[str, OfferConfig] = Field(
        {}, description="Quotas and prices here by kind of accelerator, a key of `devices`. A zone is a region."
    )

    @model_validator(mode="after")
    def _has_something(self) -> RegionConfig:
        if not self.workers and not self.hosts:
            raise ValueError("a region needs workers, or hosts that `geotrain plan` makes workers of")
        return self


class LinkConfig(Block):
    """A link between two regions, or a region and the global server; for emulation, simulation and planning.

    The same region twice: the links between its hosts.
    """

    regions: tuple[str, str]
    gbps: PositiveFloat
    rtt_ms: Annotated[float, Field(ge=0)] = 0.0
    usd_per_gb: Annotated[float, Field(ge=0)] | None = Field(None, description="Price of 1e9 bytes sent over it.")


class SecurityConfig(Block):
    """The run's certificates. Without this block, links are plaintext and must be loopback."""

    folder: str


class RestartConfig(Block):
    """Restarts of processes that died.

    The launcher starts one again at once if it ran for longer than `longest_s`, otherwise after a pause that
    doubles with each death in a row. A configuration error is never tried again.
    """

    limit: Annotated[int, Field(ge=0)] = Field(10, description="Restarts of one process within the window; 0: none.")
    window_s: PositiveFloat = 3600.0
    first_s: PositiveFloat = Field(1.0, description="The pause after the first death in a row.")
    longest_s: PositiveFloat = Field(60.0, description="The longest pause before a restart.")
    host_back_s: PositiveFloat = Field(60.0, description="After it a lost host is asked; doubles with each loss.")


@dataclass(frozen=True)
class Site:
    """The place of a server, the global one or a region's. The fields are as in `RegionConfig`."""

    server: Address
    shards: tuple[Address, ...]
    ssh: str | None
    folder: str | None

    @property
    def far_hosts(self) -> tuple[str, ...]:
        """Hosts of shards that do not stand beside the server, which are started there by ssh."""
        return tuple(dict.fromkeys(shard.host for shard in self.shards if shard.host != self.server.host))


class ClusterConfig(Block):
    """The cluster file.

    A relative path in it is meant from its folder, but `folder` and `global_folder`, which lie on other machines, are
    absolute.
    """

    paths: ClassVar[tuple[str, ...]] = ("security.folder",)

    name: Name
    global_server: Address = Address()
    global_shards: tuple[Address, ...] = Field((), description="The same as a region's `shards`.")
    global_hosts: ServerHosts = Field((), description="A region's `server_hosts`, where the global server stands.")
    global_ssh: SshHost | None = Field(None, description="Host that runs the global server; None: this machine.")
    global_folder: AbsolutePath | None = Field(None, description="A region's `folder`, for the global server's host.")
    regions: tuple[RegionConfig, ...] = Field(min_length=1)
    links: tuple[LinkConfig, ...] = ()
    devices: dict[str, DeviceConfig] = Field({}, description="Kinds of accelerators, by the names that hosts use.")
    emulate_links: bool = Field(False, description="Local runs: a namespace or a proxy for each region's link.")
    security: SecurityConfig | None = None
    restart: RestartConfig = RestartConfig()

    @model_validator(mode="after")
    def _names_are_unique(self) -> ClusterConfig:
        names = [r.name for r in self.regions] + [worker.name for _, worker in self.workers]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"regions and workers need names of their own; used twice: {', '.join(twice)}")
        if reserved := [name for name in names if name in RESERVED]:
            raise ValueError(
                f"no region or worker may be called {reserved[0]!r}: a process of every run has this name; choose "
                "another"
            )
        known = {r.name for r in self.regions} | {"global"}
        for link in self.links:
            for end in link.regions:
                if end not in known:
                    raise ValueError(f"links: no region is called {end!r}; known: {', '.join(sorted(known))}")
            if sum({*other.regions} == {*link.regions} for other in self.links) > 1:
                raise ValueError(f"links: {' – '.join(link.regions)} is there twice; a link has both directions")
        for region in self.regions:
            if region.shards and len(region.shards) != len(self.global_shards):
                number = len(self.global_shards)
                raise ValueError(
                    f"region {region.name!r} has {len(region.shards)} shards, the global server {number}; a region "
                    "has none, or as many, since each speaks with its counterpart"
                )
            for host in (*region.hosts, *region.spare_hosts, *(h for w in region.workers for h in w.hosts)):
                if host.device is not None and host.device not in self.devices:
                    kinds = ", ".join(sorted(self.devices)) or "none"
                    raise ValueError(f"host {host.host!r}: device {host.device!r} is not among `devices`: {kinds}")
                if host.region is not None and host.region not in known - {"global"}:
                    raise ValueError(f"host {host.host!r}: no region is called {host.region!r}")
            for kind, offer in region.offers.items():
                place = f"region {region.name!r}: offers.{kind}"
                if kind not in self.devices:
                    kinds = ", ".join(sorted(self.devices)) or "none"
                    raise ValueError(
                        f"{place} is no kind among `devices`: {kinds}; describe it there, or leave it out"
                    )
                if offer.preemptions_per_hour and offer.spot_usd_per_hour is None:
                    raise ValueError(
                        f"{place}.preemptions_per_hour without spot_usd_per_hour: only spot hosts are taken back; "
                        "state their price, or leave it out"
                    )
        return self

    @property
    def sites(self) -> dict[str, Site]:
        """The places of servers by name, the global one first, then all regions."""
        top = Site(self.global_server, self.global_shards, self.global_ssh, self.global_folder)
        return {GLOBAL: top, **{r.name: Site(r.server, r.shards, r.ssh, r.folder) for r in self.regions}}

    @property
    def server_memory(self) -> dict[str, float]:
        """Bytes of memory that servers may use, by host, where that is known."""
        known = (*self.global_hosts, *(host for region in self.regions for host in region.server_hosts))
        return {host.host: 1e9 * host.memory_gb for host in known}

    @property
    def workers(self) -> list[tuple[str, WorkerConfig]]:
        """All workers, each behind its region's name, in the file's order."""
        return [(region.name, worker) for region in self.regions for worker in region.workers]

    @property
    def serving(self) -> tuple[RegionConfig, ...]:
        """The regions that have workers, and so a server. Others only lend hosts to workers that span regions."""
        return tuple(region for region in self.regions if region.workers)

    def region(self, name: str) -> RegionConfig:
        """The region of that name. Raises ConfigError."""
        for region in self.regions:
            if region.name == name:
                return region
        known = ", ".join(r.name for r in self.regions)
        raise ConfigError(f"cluster {self.name!r} has no region {name!r}; its regions: {known}")

    def worker(self, region: str, name: str | None) -> WorkerConfig:
        """The region's worker of that name; without a name, its only worker. Raises ConfigError."""
        workers = self.region(region).workers
        if name is None and len(workers) == 1:
            return workers[0]
        for worker in workers:
            if worker.name == name:
                return worker
        raise ConfigError(
            f"region {region!r} has no worker {name!r}; its workers: {', '.join(w.name for w in workers)}"
        )


def shards_of(cluster: ClusterConfig, server: str) -> tuple[Address, ...]:
    """Addresses of a server's shards; none: they are in its own process. Raises ConfigError."""
    return cluster.global_shards if server == GLOBAL else cluster.region(server).shards


def shard_name(server: str, shard: int) -> str:
    """Name of a shard's process and folder."""
    return f"{server}.shard-{shard}"


def load_cluster(path: str | Path) -> ClusterConfig:
    """Read a cluster file. Its paths become absolute: relative ones are meant from its folder. Raises ConfigError."""
    path = Path(path)
    raw = from_folder(read_json(path, "model"), ClusterConfig.paths, path.parent, str(path))
    return parse(ClusterConfig, raw, str(path))
