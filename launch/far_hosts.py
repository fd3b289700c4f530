"""Prepares the hosts on which a `HostLauncher` starts ranks, or ssh shards: brings the run's files, and checks that
data, or certificates, are there. So the hosts need not share a file system."""

from __future__ import annotations

import io
import shlex
import subprocess
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, ConfigError
from geotrain.data.dataset import local_files
from geotrain.launch.launchers.base import HostLauncher, hostfile_path
from geotrain.launch.launchers.registry import launcher_of
from geotrain.launch.launchers.ssh import Ssh
from geotrain.launch.site_processes import LaunchRequest

DEADLINE_S = 60.0  # for one host
AT_ONCE = 32  # hosts

# Each file gets its name when it is whole, since hosts that do share a file system may be reading it.
_TAKE = """
mkdir -p {folder}/hosts && new=$(mktemp -d {folder}/.new.XXXXXX) && trap 'rm -rf "$new"' EXIT &&
tar -xf - -C "$new" || exit
for name in {names}; do mv -f "$new/$name" {folder}/"$name" || exit; done
for file in {data}; do test -r "$file" || {{ echo "cannot read $file" >&2; exit 1; }}; done
"""


def prepare_far_hosts(request: LaunchRequest, folder: Path, added: bool = False) -> None:
    """Bring the run's files to the hosts on which this request's sites start ranks, or shards, by a command each.
    Look for the ranks' data and the shards' certificates there.

    folder: the run's, absolute, with its files written. added: the sites join a run that is on: shards of its
    global server hear of them by these files. Raises ConfigError, which names the host.
    """
    wanted: dict[tuple[HostLauncher, str], list[str]] = {}
    for home, worker in request.cluster.workers:
        launcher = launcher_of(worker)
        for host in worker.hosts:
            if isinstance(launcher, HostLauncher) and (host.region or home) in request.sites:
                wanted.setdefault((launcher, host.host), []).append(hostfile_path(worker.name))
    data = [path for each in request.run.data.train for path in local_files(each.prefix)]
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
    packed, names = io.BytesIO(), ["run.json", "cluster.json", *hostfiles]
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in names:
            archive.add(folder / name, name)
    script = _TAKE.format(folder=shlex.quote(str(folder)), names=shlex.join(names), data=shlex.join(data))
    _, why = ask(launcher.on_host(host, ("sh", "-c", script)), DEADLINE_S, input=packed.getvalue())
    if why:
        raise ConfigError(
            f"host {host}: not ready for {what}: {why}; {launcher.name} must reach it, and checkout, environment "
            "and data, or certificates, must be there under the same paths as here"
        )


def ask(command: Sequence[str], within_s: float, **more: Any) -> tuple[str, str]:
    """Run a command; returns what it printed, and why it failed; "": it did not. more: for `subprocess.run`."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=within_s, **more)
    except OSError as error:
        return "", str(error)
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), f"no answer within {within_s:g} s"
    why = ""
    if (
        done.returncode != 0
    ):  # where a program is missing or fails, its own words stand last; ssh itself says one line
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1].strip() if lines else f"exit code {done.returncode}"
    return done.stdout.decode(errors="replace"), why
