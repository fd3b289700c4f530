"""Holds what a server process needs to start: configs, role, name, folder, credentials."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import Address, ClusterConfig, ConfigError, RunConfig, shard_name, shards_of
from geotrain.monitor.events import EventLog
from geotrain.monitor.history import facts
from geotrain.monitor.monitor import Monitor
from geotrain.net.storage.owner import Owner
from geotrain.net.storage.remote_snapshots import Copies, RemoteSnapshots
from geotrain.net.transport.certs import Credentials, Role, load_credentials
from geotrain.parameters.parameter_map import parameter_map_of

EVENTS = "events.jsonl"
LISTENING = "listening.json"  # in the process's folder while it listens: its address and process id

# Weights as (canonical name, fp32 tensor), and whether to go on, asked now and then → nats a token.
Evaluate = Callable[[Iterable[tuple[str, Tensor]], Callable[[], bool]], float]


@dataclass(frozen=True)
class ServerSetup:
    """Holds what the process of a server, or of one of its shards, needs to start.

    server: `GLOBAL`, or the region's name. shard: number of the shard that this process is; None: it is the server.
    evaluate: gives the validation loss of the final weights of a run that is validated; None: nothing does. It may
    raise any error. launch: as `geotrain.net.storage.recovery.recover` takes it. newest: given, now and then,
    the cluster that is served; gives the cluster as it is now, whose members may have become more. None: it stays.
    enroll: answers the calls of those that are to become members.
    """

    run: RunConfig
    cluster: ClusterConfig
    server: str
    folder: Path
    shard: int | None = None
    evaluate: Evaluate | None = None
    launch: str = ""
    newest: Callable[[ClusterConfig], ClusterConfig] | None = None
    enroll: Callable[[Any, Any], Awaitable[Any]] | None = None

    def __post_init__(self) -> None:
        """Check the names. Raises ConfigError: the cluster file has no such server or shard."""
        shards = len(shards_of(self.cluster, self.server))
        if self.shard is not None and not 0 <= self.shard < shards:
            raise ConfigError(f"server {self.server!r} has {shards} shards in the cluster file, and no {self.shard}")

    @property
    def name(self) -> str:
        """Name of the process, in events, object storage and messages."""
        return self.server if self.shard is None else shard_name(self.server, self.shard)

    @property
    def owner(self) -> Owner:
        """Whose state its folder holds, but for the origin."""
        return Owner(self.run.name, self.name)

    @property
    def server_role(self) -> Role:
        return "global" if self.server == GLOBAL else "region"

    @property
    def server_address(self) -> Address:
        """Address of the server, which is its shards' ledger."""
        return self.cluster.global_server if self.server == GLOBAL else self.cluster.region(self.server).server

    @property
    def address(self) -> Address:
        """Address at which this process listens."""
        return self.server_address if self.shard is None else shards_of(self.cluster, self.server)[self.shard]

    def credentials(self) -> Credentials | None:
        """Load this process's certificate; None: the cluster's links are plaintext. Raises CertificateError."""
        role: Role = self.server_role if self.shard is None else "shard"
        security = self.cluster.security
        return load_credentials(Path(security.folder), role, self.server) if security else None

    def copies(self) -> Copies | None:
        """Open the object storage for copies of this process's snapshots. Raises ConfigError."""
        if (url := self.run.checkpoint.snapshots) is None:
            return None
        return Copies(RemoteSnapshots(f"{url.rstrip('/')}/{self.run.name}/{self.name}"), self.run.checkpoint.keep)

    def events(self) -> EventLog:
        return EventLog(self.folder / EVENTS, source=self.name, enabled=self.run.monitor.enabled)

    def monitor(self, events: EventLog) -> Monitor:
        """Make the server's page and metrics. Raises ConfigError."""
        parameter_map = parameter_map_of(self.run)
        if self.shard is not None:  # its ledger shows what it does
            quiet = self.run.monitor.model_copy(update={"enabled": False})
            return Monitor(self.run.model_copy(update={"monitor": quiet}), self.cluster, self.name, events)
        names = tuple(fragment.name for fragment in parameter_map.fragments)
        top = facts(self.run, self.cluster, parameter_map.numel, names) if self.server == GLOBAL else None
        return Monitor(self.run, self.cluster, self.name, events, top)
