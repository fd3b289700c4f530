"""Prepares the hosts on which a `HostLauncher` starts ranks, or ssh shards: brings the run's files, and checks that
data, or certificates, are there. So the hosts need not share a file system."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, ConfigError
from geotrain.data.dataset import local_files
from geotrain.launch.launchers.base import HostLauncher, hostfile_path
from geotrain.launch.launchers.registry import launcher_of
from geotrain.launch.launchers.ssh import Ssh
from geotrain.launch.one_host import bring_files
from geotrain.launch.site_processes import LaunchRequest

DEADLINE_S = 60.0  # for one host
AT_ONCE = 32


def prepare_far_hosts(request: LaunchRequest, folder: Path, added: bool = False) -> None:
    """Bring the run's files to the hosts on which this request's sites start ranks, or shards, by a command each.
    Look for the ranks' data and the shards' certificates there.

    folder: the run's, absolute, with its files written. added: the sites join a run that is on: shards of its
    global server learn of them by these files. Raises ConfigError, which names the host.
    """
    wanted: dict[tuple[HostLauncher, str], list[str]] = {}
    for home, worker in request.cluster.workers:
        launcher = launcher_of(worker)
        for host in worker.hosts:
            if isinstance(launcher, HostLauncher) and (host.region or home) in request.sites:
                wanted.setdefault((launcher, host.host), []).append(hostfile_path(worker.name))
    data = [path for prefix in request.run.data.prefixes for path in local_files(prefix)]
    shards: dict[str, list[str]] = {}
    for site in (*request.sites, GLOBAL) if added else request.sites:
        for name in request.cluster.sites[site].far_hosts:
            shards.setdefault(name, []).extend(_certificates(request.cluster, site))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        prepared = [
            pool.submit(_prepare, "a worker", launcher, host, folder, hostfiles, data)
            for (launcher, host), hostfiles in wanted.items()
        ]
        prepared += [
            pool.submit(_prepare, "a shard", Ssh(), name, folder, (), needs) for name, needs in shards.items()
        ]
    for each in prepared:
        each.result()


def _certificates(cluster: ClusterConfig, site: str) -> list[str]:
    """Files that a shard of this site's server reads; none without `security`."""
    if cluster.security is None:
        return []
    return [f"{cluster.security.folder}/{name}" for name in ("ca.pem", f"shard-{site}.pem", f"shard-{site}.key")]


def _prepare(
    what: str, launcher: HostLauncher, host: str, folder: Path, hostfiles: Sequence[str], data: Sequence[str]
) -> None:
    if why := bring_files(launcher, host, folder, hostfiles, data, DEADLINE_S):
        raise ConfigError(
            f"host {host}: not ready for {what}: {why}; {launcher.name} must reach it, and checkout, environment "
            "and data, or certificates, must be there under the same paths as here"
        )
