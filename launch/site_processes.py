"""The processes that one machine starts for a run: servers and workers. The launcher's machine and those behind ssh
use the same code.

A *site* is "global" or a region's name. The run's folder on each machine holds

    run.json cluster.json     the configuration with all addresses filled in, which every process reads
    hosts/                    a hostfile for each worker
    servers/<site>/           the state of a server
    logs/<process>.log        the output of each process
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from geotrain.common.files import write_whole
from geotrain.config import (
    ClusterConfig,
    ConfigError,
    RunConfig,
    Topology,
    WorkerConfig,
    relocated,
    shard_name,
    shards_of,
)
from geotrain.emulate.wan import DEVICE, Wan
from geotrain.launch.check import free_ports
from geotrain.launch.guard import JOB
from geotrain.launch.supervisor import ProcessSpec, guarded
from geotrain.launch.worker_command import (
    FIRST_MASTER_PORT,
    Assigned,
    HostMachine,
    LauncherCommand,
    WorkerPlace,
    assign_devices,
    regions_of,
    worker_commands,
)
from geotrain.outer.messages import GLOBAL

SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")


@dataclass(frozen=True)
class LaunchRequest:
    """What a machine is asked to start.

    launch: names the launcher's incarnation. launch_id: names the launch, in which a server that has ended stays
    ended; "": the launcher's incarnation is that.
    """

    run: RunConfig
    cluster: ClusterConfig
    sites: tuple[str, ...]
    resume: bool
    launch: str = ""
    launch_id: str = ""

    def to_line(self) -> bytes:
        """The request as one line of JSON, for another machine."""
        return TypeAdapter(LaunchRequest).dump_json(self, by_alias=True) + b"\n"

    @staticmethod
    def from_line(line: bytes) -> LaunchRequest:
        """The request that `to_line` encoded. Raises ConfigError."""
        try:
            return TypeAdapter(LaunchRequest).validate_json(line)
        except ValueError as error:
            raise ConfigError(
                f"no valid order on standard input; is GeoTrain the same here and there? {error}"
            ) from None

    def seen_from(self, folder: str | None) -> LaunchRequest:
        """The request for another machine, with the paths that things have there. folder: see `path_there`."""

        def there(path: str) -> str:
            return path_there(path, folder)

        return replace(self, run=relocated(self.run, there), cluster=relocated(self.cluster, there))

    def write_files(self, folder: Path) -> None:
        """Write the configuration to the run's folder. Raises OutputError."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, config in (("run.json", self.run), ("cluster.json", self.cluster)):
            write_whole(folder / name, config.model_dump_json(by_alias=True, indent=2) + "\n")


def ssh_hosts(cluster: ClusterConfig) -> dict[str, str | None]:
    """The host of each site, for ssh; None: this machine."""
    return {GLOBAL: cluster.global_ssh, **{region.name: region.ssh for region in cluster.regions}}


def local_processes(
    request: LaunchRequest, folder: Path, machine: HostMachine, namespaces: Mapping[str, int] | None = None
) -> list[ProcessSpec]:
    """The processes to start here for the request's sites. It also writes the workers' hostfiles.

    Of a worker that spans regions, each site starts the ranks on its own hosts; but DeepSpeed's multi-node launchers
    start all ranks from the worker's home region.
    folder: the run's, absolute. namespaces: the network namespace of each region's processes, as a file descriptor.
    Raises ConfigError.
    """
    namespaces = namespaces or {}
    workers = [(region.name, worker) for region in request.cluster.regions for worker in region.workers]
    here = {}
    for region, worker in workers:
        hosts = tuple(host for host in worker.hosts if (host.region or region) in request.sites)
        if hosts:
            here[worker.name] = worker.model_copy(update={"hosts": hosts})
    devices = assign_devices(here, machine)
    started = _server(request, folder, GLOBAL, None) if GLOBAL in request.sites else []
    if not request.run.outer.flat:
        regions = [region.name for region in request.cluster.serving if region.name in request.sites]
        for region in regions:
            started += _server(request, folder, region, namespaces.get(region))
    for number, (region, worker) in enumerate(workers):
        port = worker.master_port or FIRST_MASTER_PORT + number
        started += _worker(request, folder, region, worker, port, devices.get(worker.name), namespaces)
    return started


def remote_site(request: LaunchRequest, site: str, host: str) -> ProcessSpec:
    """The front, by ssh, of a site on another machine (`geotrain launch-site`).

    The request goes to its standard input. The site's processes have their logs on that machine, are restarted there,
    and live on without the front; the log here has what ssh and that site's launcher say.
    """
    folder = request.cluster.global_folder if site == GLOBAL else request.cluster.region(site).folder
    command = over_ssh(host, folder, (remote_python(folder), "-m", "geotrain", "launch-site"))
    role: Literal["server", "worker"] = "server" if site == GLOBAL else "worker"

    line = replace(request.seen_from(folder), sites=(site,)).to_line()

    def process() -> ProcessSpec:
        above = "" if site == GLOBAL else _unit_of_global(request.cluster)
        return ProcessSpec(
            f"{site}.ssh", command, first_input=line, role=role, respawn=process, front=True, depends_on=above
        )

    return process()


def pump_process(links: Wan) -> ProcessSpec:
    """The process that carries the packets of emulated links."""
    return ProcessSpec("wan", guarded(links.pump_command), role="helper", inherited_fds=links.pump_fds)


def over_ssh(
    host: str, folder: str | None, command: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The command line that runs a command on another machine.

    folder: where it runs; None: the folder of the same path as this process's.
    """
    settings = [f"{key}={value}" for key, value in (env or {}).items()]
    script = shlex.join(["exec", "env", *settings, *command] if settings else ["exec", *command])
    return (*SSH, "--", host, f"cd -- {shlex.quote(folder or str(Path.cwd()))} && {script}")


def guarded_over_ssh(host: str, job: str, command: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The command line that runs a command on another machine, in the folder of the same path, under a guard there.

    job: a name that no other job has. Processes that an earlier connection left of this job are ended first.
    """
    guard = (sys.executable, "-m", "geotrain.launch.guard", "--", *command)
    return over_ssh(host, None, guard, {**env, JOB: job})


def remote_python(folder: str | None) -> str:
    """Python's path on another machine; folder: as `path_there` takes it."""
    return path_there(sys.executable, folder)


def path_there(path: str, folder: str | None) -> str:
    """Where a path of this machine lies on another: below `folder` there if it is below this process's working
    directory here, otherwise, and without `folder`, at the same place."""
    here = Path.cwd()
    if folder is not None and Path(path).is_relative_to(here):
        return str(Path(folder) / Path(path).relative_to(here))
    return path


def _server(request: LaunchRequest, folder: Path, site: str, netns: int | None) -> list[ProcessSpec]:
    """The server of a site, and its shards."""

    launch = request.launch_id or request.launch

    def process(name: str, which: tuple[str, ...], above: str, resume: bool) -> ProcessSpec:
        shard = which[0] == "shard"
        options = (*(("--resume",) if resume else ()), *(() if shard else ("--launch-id", launch)))
        command = (sys.executable, "-m", "geotrain", "serve", *which, "--run", str(folder / "run.json"), *options)
        return ProcessSpec(
            name,
            guarded(command, netns),
            {JOB: str(folder / name)},
            role="shard" if shard else "server",
            inherited_fds=() if netns is None else (netns,),
            respawn=lambda: process(name, which, above, True),
            depends_on=above,
        )

    which = ("global",) if site == GLOBAL else ("region", site)
    above = "" if site == GLOBAL else _unit_of_global(request.cluster)
    shards = range(len(shards_of(request.cluster, site)))
    return [
        process(site, which, above, request.resume),
        *(process(shard_name(site, i), ("shard", site, str(i)), site, request.resume) for i in shards),
    ]


def _unit_of_global(cluster: ClusterConfig) -> str:
    """What the supervisor calls the global server, or the front of its site."""
    return GLOBAL if cluster.global_ssh is None else f"{GLOBAL}.ssh"


def _worker(
    request: LaunchRequest,
    folder: Path,
    region: str,
    worker: WorkerConfig,
    fixed_port: int,
    assigned: Assigned | None,
    namespaces: Mapping[str, int],
) -> list[ProcessSpec]:
    """Those of the worker's processes that are started here, one for each launcher command.

    fixed_port: where its ranks meet if several machines must agree on a port. assigned: devices and threads of a
    `local` worker.
    """
    devices, threads = assigned or ((), 1)
    regions = regions_of(region, worker)
    whole_here = assigned is not None and set(regions) <= set(request.sites)
    master, interface = None, "lo"
    if len(regions) > 1 and regions[0] in namespaces:
        master, interface = request.cluster.region(regions[0]).server.host, DEVICE
    elif worker.launcher == "local" and not whole_here:
        master = worker.hosts[0].host

    def commands(resume: bool) -> dict[int, LauncherCommand]:
        # A new free port at every start, because an earlier incarnation of the worker may still occupy its own.
        port = free_ports(1)[0] if whole_here else fixed_port
        place = WorkerPlace(folder, port, devices, threads, resume, master, interface)
        made = worker_commands(place, region, worker)
        mine = [command for command in made.commands if command.region in request.sites]
        for name, text in made.files.items() if mine else ():
            (folder / name).parent.mkdir(exist_ok=True)
            write_whole(folder / name, text)
        return dict(enumerate(mine))

    # All processes of one incarnation of the worker must meet at the same port, but each is respawned by a call of
    # its own. So the first call makes the commands of all, and those that are not taken yet wait here.
    next_incarnation: dict[int, LauncherCommand] = {}

    def respawn(index: int) -> ProcessSpec:
        if index not in next_incarnation:
            next_incarnation.update(commands(True))
        return process(next_incarnation.pop(index), index)

    def process(start: LauncherCommand, index: int) -> ProcessSpec:
        job = str(folder / start.name)
        netns = namespaces.get(start.region) if start.host is None else None
        if start.host is None:
            command, env = guarded(start.command, netns), {**start.env, JOB: job}
        else:
            command, env = guarded_over_ssh(start.host, job, start.command, start.env), {}
        return ProcessSpec(
            start.name,
            command,
            env,
            inherited_fds=() if netns is None else (netns,),
            respawn=lambda: respawn(index),
            unit=worker.name,
            depends_on=Topology(request.run, request.cluster).server_of(worker.name),
        )

    return [process(start, index) for index, start in commands(request.resume).items()]
