"""Where a server stands: what its process makes its parts of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import Address, ClusterConfig, RunConfig, shard_name, shards_of
from geotrain.monitor.events import EventLog
from geotrain.monitor.history import facts
from geotrain.monitor.monitor import Monitor
from geotrain.net.storage.remote_snapshots import Copies, RemoteSnapshots
from geotrain.net.transport.certs import Credentials, Role, load_credentials
from geotrain.net.transport.sharded_link import ShardsAbove, shards_above
from geotrain.parameters.parameter_map import parameter_map_of

LISTENING = "listening.json"  # in the server's folder while it listens: its address and process id

# Weights as (canonical name, fp32 tensor), and whether to go on, asked now and then → nats a token.
Evaluate = Callable[[Iterable[tuple[str, Tensor]], Callable[[], bool]], float]


@dataclass(frozen=True)
class ServerSetup:
    """A server's place in the cluster, and the folder of its state.

    evaluate: gives the validation loss of the final weights of a run that is validated; None: nothing does. It may
    raise whatever it meets. launch: as `recover` takes it.
    """

    run: RunConfig
    cluster: ClusterConfig
    role: Role
    name: str
    folder: Path
    evaluate: Evaluate | None = None
    launch: str = ""

    @property
    def address(self) -> Address:
        """Raises ConfigError."""
        return self.cluster.global_server if self.role == "global" else self.cluster.region(self.name).server

    def credentials(self) -> Credentials | None:
        """Raises CertificateError."""
        security = self.cluster.security
        return load_credentials(Path(security.folder), self.role, self.name) if security else None

    def above(self) -> ShardsAbove | None:
        """The shards of the global server, for a region's. Raises CertificateError."""
        return shards_above(self.cluster, parameter_map_of(self.run), "region", self.name, GLOBAL)

    def copies(self) -> Copies | None:
        """Where copies of this server's snapshots go. Raises ConfigError."""
        own = mirror_of(self.run, self.name)
        shards = range(len(shards_of(self.cluster, self.name)))
        others = [mirror_of(self.run, shard_name(self.name, shard)) for shard in shards]
        return Copies(own, self.run.checkpoint.keep, [each for each in others if each]) if own else None

    def monitor(self, events: EventLog) -> Monitor:
        """Raises ConfigError."""
        parameter_map = parameter_map_of(self.run)
        names = tuple(fragment.name for fragment in parameter_map.fragments)
        top = facts(self.run, self.cluster, parameter_map.numel, names) if self.role == "global" else None
        return Monitor(self.run, self.cluster, self.name, events, top)


def mirror_of(run: RunConfig, process: str) -> RemoteSnapshots | None:
    """Where copies of a server's or a shard's snapshots go. Raises ConfigError."""
    url = run.checkpoint.snapshots
    return RemoteSnapshots(f"{url.rstrip('/')}/{run.name}/{process}") if url else None
