"""Builds the processes that one machine starts for a run: servers and workers. The launcher's machine and those
behind ssh use the same code.

A *site* is "global" or a region's name. The run's folder on each machine holds

    run.json cluster.json     the configuration with all addresses filled in, which every process reads
    hosts/                    a hostfile for each worker
    servers/<site>/           the state of a server
    logs/<process>.log        the output of each process
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from geotrain.common.files import whole_file, write_whole
from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, ConfigError, RunConfig, Topology, WorkerConfig, relocated, shard_name
from geotrain.emulate import proxy, wan
from geotrain.emulate.wan import DEVICE, Wan
from geotrain.launch.check import free_ports, link_to_global
from geotrain.launch.forming import Forming, may_form
from geotrain.launch.guard import JOB
from geotrain.launch.launchers.base import HostLauncher, LauncherCommand, WorkerPlace, regions_of
from geotrain.launch.launchers.registry import launcher_of, worker_commands
from geotrain.launch.launchers.ssh import over_ssh
from geotrain.launch.machine import Assigned, HostMachine, assign_devices
from geotrain.launch.supervisor import ProcessSpec, guarded, guarded_there

FIRST_MASTER_PORT = 29500


@dataclass(frozen=True)
class LaunchRequest:
    """A run and the sites of it that one machine is asked to start.

    launch: names the launcher's incarnation. launch_id: names the launch, in which a server that has ended stays
    ended; "": the launcher's incarnation is that. without_checkpoints: as `preflight.obstacles` takes it.
    """

    run: RunConfig
    cluster: ClusterConfig
    sites: tuple[str, ...]
    resume: bool
    launch: str = ""
    launch_id: str = ""
    without_checkpoints: bool = False

    def to_line(self) -> bytes:
        """Encode the request as one line of JSON, for another machine."""
        return TypeAdapter(LaunchRequest).dump_json(self, by_alias=True) + b"\n"

    @staticmethod
    def from_line(line: bytes) -> LaunchRequest:
        """Decode a line of `to_line`. Raises ConfigError."""
        try:
            return TypeAdapter(LaunchRequest).validate_json(line)
        except ValueError as error:
            raise ConfigError(
                f"no valid request on standard input; is GeoTrain the same here and there? {error}"
            ) from None

    def seen_from(self, folder: str | None) -> LaunchRequest:
        """The request with the paths of another machine. folder: see `path_there`."""

        def there(path: str) -> str:
            return path_there(path, folder)

        return replace(self, run=relocated(self.run, there), cluster=relocated(self.cluster, there))

    def write_files(self, folder: Path) -> None:
        """Write the configuration to the run's folder. Raises OutputError."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, config in (("run.json", self.run), ("cluster.json", self.cluster)):
            write_whole(folder / name, config.model_dump_json(by_alias=True, indent=2) + "\n")


def fixed_master_port(worker: WorkerConfig, number: int) -> int:
    """The port of the ranks' rendezvous if several machines must agree on it before they start. number: the worker's
    place among all workers of the cluster file."""
    return worker.master_port or FIRST_MASTER_PORT + number


def local_processes(
    request: LaunchRequest,
    folder: Path,
    machine: HostMachine,
    namespaces: Mapping[str, int] | None = None,
    options: Mapping[str, tuple[str, ...]] | None = None,
) -> list[ProcessSpec]:
    """The processes to start here for the request's sites. Also writes the workers' hostfiles.

    Each site starts the ranks on its own hosts of a worker that spans regions; but a `WorldLauncher` starts all ranks
    from the worker's home region.
    folder: the run's, absolute. namespaces: the network namespace of each region's processes, as a file descriptor.
    options: more of them for a region's servers. Raises ConfigError.
    """
    namespaces, options = namespaces or {}, options or {}
    here = {}
    for region, worker in request.cluster.workers:
        hosts = tuple(host for host in worker.hosts if (host.region or region) in request.sites)
        if hosts:
            here[worker.name] = worker.model_copy(update={"hosts": hosts})
    devices = assign_devices(here, machine)
    started = _server(request, folder, GLOBAL, None, ()) if GLOBAL in request.sites else []
    if not request.run.outer.flat:
        regions = [region.name for region in request.cluster.serving if region.name in request.sites]
        for region in regions:
            started += _server(request, folder, region, namespaces.get(region), options.get(region, ()))
    taken = dict[str, str]()  # spare host → the worker that has it
    for number, (region, worker) in enumerate(request.cluster.workers):
        port = fixed_master_port(worker, number)
        assigned = devices.get(worker.name, ((), 1))
        started += _worker(request, folder, region, worker, port, assigned, namespaces, taken)
    return started


def remote_site(request: LaunchRequest, site: str, host: str) -> ProcessSpec:
    """The relay, over ssh, of a site on another machine (`geotrain launch-site`).

    The request goes to its standard input. The site's processes have their logs on that machine, are restarted there,
    and live on without the relay; the log here has what ssh and that site's launcher say.
    """
    folder = request.cluster.sites[site].folder
    return ProcessSpec(
        f"{site}.ssh",
        over_ssh(host, folder, (remote_python(folder), "-P", "-m", "geotrain", "launch-site")),
        first_input=replace(request.seen_from(folder), sites=(site,)).to_line(),
        role="server" if site == GLOBAL else "worker",
        respawn=lambda: [remote_site(request, site, host)],
        relay=True,
        depends_on="" if site == GLOBAL else _global_group(request.cluster),
    )


def pump_process(links: Wan) -> ProcessSpec:
    """The process that carries the packets of emulated links."""
    return ProcessSpec("wan", guarded(links.pump_command), role="helper", inherited_fds=links.pump_fds)


def proxied_links(request: LaunchRequest, folder: Path) -> tuple[ProcessSpec, dict[str, tuple[str, ...]]]:
    """The process that shapes links where there are no namespaces, in front of the global server and its shards.

    Returns also, by region, the options with which its servers find the proxy in their place: a cluster file of their
    own, which is written here. Raises ConfigError.
    """
    site, regions = request.cluster.sites[GLOBAL], request.cluster.serving
    targets = (site.server, *site.shards)
    taken = {address.port for each in request.cluster.sites.values() for address in (each.server, *each.shards)}
    count = len(targets) * len(regions)
    ports = iter([port for port in free_ports(count + len(taken)) if port not in taken][:count])
    arguments, options = list[str](), dict[str, tuple[str, ...]]()
    for region in regions:
        shaped = wan.shape(link_to_global(request.cluster, region.name))
        server, *shards = [address.model_copy(update={"port": next(ports)}) for address in targets]
        pairs = ",".join(f"{near.port}:{far.port}" for near, far in zip((server, *shards), targets, strict=True))
        arguments += [str(shaped.rate_bytes_s), str(shaped.one_way_s), server.host, pairs]
        seen = request.cluster.model_copy(update={"global_server": server, "global_shards": tuple(shards)})
        path = folder / f"cluster.{region.name}.json"
        write_whole(path, seen.model_dump_json(by_alias=True, indent=2) + "\n")
        options[region.name] = ("--cluster", str(path))
    command = (sys.executable, "-I", "-S", str(Path(proxy.__file__).resolve()), *arguments)
    return ProcessSpec("wan", guarded(command), role="helper"), options


def remote_python(folder: str | None) -> str:
    """Python's path on another machine; folder: as `path_there` takes it."""
    return path_there(sys.executable, folder)


def path_there(path: str, folder: str | None) -> str:
    """Translate a path of this machine for another: below `folder` there if it is below this process's working
    directory here; otherwise, and without `folder`, the same path."""
    here = Path.cwd()
    if folder is not None and Path(path).is_relative_to(here):
        return str(Path(folder) / Path(path).relative_to(here))
    return path


def _server(
    request: LaunchRequest, folder: Path, site: str, netns: int | None, more: tuple[str, ...]
) -> list[ProcessSpec]:
    """The server of a site, and its shards, which may stand on other hosts. more: options of theirs."""

    launch, there = request.launch_id or request.launch, request.cluster.sites[site]

    def process(name: str, which: tuple[str, ...], above: str, resume: bool) -> ProcessSpec:
        shard = which[0] == "shard"
        options = (*more, *(("--resume",) if resume else ()), *(() if shard else ("--launch-id", launch)))
        # -P: a checkout in the current folder is not the geotrain that is installed.
        command = (sys.executable, "-P", "-m", "geotrain", "serve", *which)
        command += ("--run", str(folder / "run.json"), *options)
        env, first, inherited = {JOB: str(folder / name)}, b"", () if netns is None else (netns,)
        if shard and (host := there.shards[int(which[2])].host) in there.far_hosts:
            inside, first = guarded_there(command, env)
            start, env, inherited = over_ssh(host, None, inside), {}, ()
        else:
            start = guarded(command, netns)
        return ProcessSpec(
            name,
            start,
            env,
            first,
            role="shard" if shard else "server",
            inherited_fds=inherited,
            respawn=lambda: [process(name, which, above, True)],
            depends_on=above,
        )

    which = ("global",) if site == GLOBAL else ("region", site)
    above = "" if site == GLOBAL else _global_group(request.cluster)
    shards = range(len(there.shards))
    return [
        process(site, which, above, request.resume),
        *(process(shard_name(site, i), ("shard", site, str(i)), site, request.resume) for i in shards),
    ]


def _global_group(cluster: ClusterConfig) -> str:
    """The restart group of the global server, or of the relay of its site."""
    return GLOBAL if cluster.global_ssh is None else f"{GLOBAL}.ssh"


def _worker(
    request: LaunchRequest,
    folder: Path,
    region: str,
    worker: WorkerConfig,
    fixed_port: int,
    assigned: Assigned,
    namespaces: Mapping[str, int],
    taken: MutableMapping[str, str],
) -> list[ProcessSpec]:
    """The processes of a worker that are started here, one for each launcher command.

    fixed_port: see `fixed_master_port`. assigned: devices and threads, if its ranks run on this machine. taken: as
    `Forming` takes it.
    """
    launcher, regions = launcher_of(worker), regions_of(region, worker)
    formation: Forming | None = None
    if may_form(request.cluster.region(region), worker) and region in request.sites:
        formation = Forming(request.run, request.cluster, folder, region, worker, taken)
    whole_here = launcher.on_this_machine and set(regions) <= set(request.sites)
    master, interface = None, "lo"
    if len(regions) > 1 and regions[0] in namespaces:
        master, interface = request.cluster.region(regions[0]).server.host, DEVICE
    elif launcher.on_this_machine and not whole_here:
        master = worker.hosts[0].host

    def processes(resume: bool) -> list[ProcessSpec]:
        # A new free port at every start, because an earlier incarnation of the worker may still occupy its own.
        port = free_ports(1)[0] if whole_here else fixed_port
        now = worker if formation is None else formation.take()
        place = WorkerPlace(folder, port, *assigned, resume, master, interface, formed=now != worker)
        made = worker_commands(place, region, now)
        mine = [command for command in made.commands if command.region in request.sites]
        for name, text in made.files.items() if mine else ():
            (folder / name).parent.mkdir(exist_ok=True)
            with whole_file(folder / name, permissions=0o600) as file:  # an environment may hold a key
                file.write(text)
        return [process(command) for command in mine]

    def process(start: LauncherCommand) -> ProcessSpec:
        # Whatever a host's place among those of its worker: there may be ranks of an earlier incarnation.
        job = start.name if start.host is None else f"{worker.name}@{start.host}"
        env, first = {**start.env, JOB: str(folder / job)}, b""
        if start.host is None:
            netns = namespaces.get(start.region)
            command = guarded(start.command, netns, launcher.end_s)
            inherited = () if netns is None else (netns,)
        else:  # a guard there ends what an earlier connection left of this job first
            assert isinstance(launcher, HostLauncher)
            inside, first = guarded_there(start.command, env)
            command, env, inherited = launcher.on_host(start.host, inside), {}, ()
        return ProcessSpec(
            start.name,
            command,
            env,
            first,
            inherited_fds=inherited,
            respawn=lambda: processes(True),
            group=worker.name,
            depends_on=Topology(request.run, request.cluster).server_of(worker.name),
            host=start.host or "",
            formation=formation,
        )

    return processes(request.resume)
