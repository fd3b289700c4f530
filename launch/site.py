"""What one machine starts for a run: servers, and workers of regions. The same on this machine and behind ssh.

A *site* is "global" or a region's name. The run's folder on each machine holds

    run.json cluster.json     as resolved: what every process reads
    hosts/                    a hostfile a worker
    servers/<site>/           state of a server
    logs/<process>.log
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from geotrain.config import ClusterConfig, ConfigError, RunConfig, WorkerConfig
from geotrain.files import whole_file
from geotrain.launch.check import free_ports
from geotrain.launch.guard import JOB
from geotrain.launch.supervise import Process, guarded
from geotrain.launch.wan import DEVICE
from geotrain.launch.world import FIRST_MASTER_PORT, Job, Machine, Place, place_local, regions_of, world
from geotrain.outer.messages import GLOBAL

SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")


@dataclass(frozen=True)
class Order:
    """What a machine is told to start."""

    run: RunConfig
    cluster: ClusterConfig
    sites: tuple[str, ...]
    resume: bool

    def to_line(self) -> bytes:
        """As one line of JSON."""
        text = json.dumps(
            {
                "run": self.run.model_dump(by_alias=True, mode="json"),
                "cluster": self.cluster.model_dump(by_alias=True, mode="json"),
                "sites": self.sites,
                "resume": self.resume,
            }
        )
        return text.encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> Order:
        """Raises ConfigError."""
        try:
            raw = json.loads(line)
            run = RunConfig.model_validate_json(json.dumps(raw["run"]))
            cluster = ClusterConfig.model_validate_json(json.dumps(raw["cluster"]))
            return Order(run, cluster, tuple(raw["sites"]), bool(raw["resume"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"no valid order on standard input; is GeoTrain the same here and there? {error}"
            ) from None


def sites_of(cluster: ClusterConfig) -> dict[str, str | None]:
    """Every site and the host it is on, by ssh; None: this machine."""
    return {GLOBAL: cluster.global_ssh, **{region.name: region.ssh for region in cluster.regions}}


def write_files(order: Order, folder: Path) -> None:
    """The resolved configuration. Raises OutputError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in (("run.json", order.run), ("cluster.json", order.cluster)):
        with whole_file(folder / name) as file:
            file.write(config.model_dump_json(by_alias=True, indent=2) + "\n")


def processes(
    order: Order, folder: Path, machine: Machine, namespaces: Mapping[str, int] | None = None
) -> list[Process]:
    """What to start here for the sites of the order; hostfiles are written. folder: the run's, absolute. Of a worker
    that spans regions, each site starts the ranks on its own hosts; DeepSpeed's own launchers start all from the
    worker's.

    namespaces: by region, the network namespace (file descriptor) its processes run in. Raises ConfigError.
    """
    inside = namespaces or {}
    regions = [region for region in order.cluster.serving if region.name in order.sites]
    workers = [(region.name, worker) for region in order.cluster.regions for worker in region.workers]
    placed = place_local(dict(filter(None, (_part_here(order.sites, *pair) for pair in workers))), machine)
    started = [_server(order, folder, GLOBAL, None)] if GLOBAL in order.sites else []
    if order.run.outer.levels == 2:
        started += [_server(order, folder, region.name, inside.get(region.name)) for region in regions]
    for number, (region, worker) in enumerate(workers):
        started += _worker(order, folder, region, worker, number, placed.get(worker.name), inside)
    return started


def _part_here(sites: Sequence[str], region: str, worker: WorkerConfig) -> tuple[str, WorkerConfig] | None:
    """The worker with those of its hosts that these sites start."""
    hosts = tuple(host for host in worker.hosts if (host.region or region) in sites)
    return (worker.name, worker.model_copy(update={"hosts": hosts})) if hosts else None


def far_site(order: Order, site: str, host: str) -> Process:
    """A site on another machine: `geotrain launch-site` there, told by its standard input what to start.

    Its processes have their logs there, and are started again there; the log here has what ssh and that launcher say.
    """
    folder = order.cluster.global_folder if site == GLOBAL else order.cluster.region(site).folder
    command = over_ssh(host, folder, (python_there(folder), "-m", "geotrain", "launch-site"))

    def process(resume: bool) -> Process:
        hello = replace(order, sites=(site,), resume=resume).to_line()
        role: Literal["server", "worker"] = "server" if site == GLOBAL else "worker"
        return Process(f"{site}.ssh", command, hello=hello, role=role, again=lambda: process(True))

    return process(order.resume)


def over_ssh(
    host: str, folder: str | None, command: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The command line that runs a command on another machine, in a folder (None: that of the same name)."""
    settings = [f"{key}={value}" for key, value in (env or {}).items()]
    script = shlex.join(["exec", "env", *settings, *command] if settings else ["exec", *command])
    return (*SSH, host, f"cd {shlex.quote(folder or str(Path.cwd()))} && {script}")


def guarded_there(host: str, name: str, command: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The command line that runs a command on another machine, in the folder of the same name, under a guard there.

    name: of the job, one in the world: what an earlier connection left of it there is ended first.
    """
    guard = (sys.executable, "-m", "geotrain.launch.guard", "--", *command)
    return over_ssh(host, None, guard, {**env, JOB: name})


def _server(order: Order, folder: Path, site: str, netns: int | None) -> Process:
    what = ("global",) if site == GLOBAL else ("region", site)
    command = (sys.executable, "-m", "geotrain", "serve", *what, "--run", str(folder / "run.json"))
    keeps = () if netns is None else (netns,)

    def process(resume: bool) -> Process:
        whole = (*command, "--resume") if resume else command
        env = {JOB: str(folder / site)}
        return Process(site, guarded(whole, netns), env, role="server", keeps=keeps, again=lambda: process(True))

    return process(order.resume)


def _worker(
    order: Order,
    folder: Path,
    region: str,
    worker: WorkerConfig,
    number: int,
    placed: tuple[tuple[int, ...], int] | None,
    inside: Mapping[str, int],
) -> list[Process]:
    """Those of its processes, one for each job, that are started here. number: of the worker in the cluster. placed:
    devices and threads of a local worker; whole here, it meets at a port that is free whenever it is started."""
    devices, threads = placed or ((), 1)
    where = regions_of(region, worker)
    whole_here = placed is not None and set(where) <= set(order.sites)
    master, interface = None, "lo"
    if len(where) > 1 and where[0] in inside:
        master, interface = order.cluster.region(where[0]).server.host, DEVICE
    elif worker.launcher == "local" and not whole_here:
        master = worker.hosts[0].host
    server = GLOBAL if order.run.outer.levels == 1 else region

    def jobs(resume: bool) -> dict[int, Job]:
        port = free_ports(1)[0] if whole_here else FIRST_MASTER_PORT + number
        made = world(Place(folder, port, devices, threads, resume, master, interface), region, worker)
        mine = [job for job in made.jobs if job.region in order.sites]
        for name, text in made.files.items() if mine else ():
            (folder / name).parent.mkdir(exist_ok=True)
            with whole_file(folder / name) as file:
                file.write(text)
        return dict(enumerate(mine))

    following: dict[int, Job] = {}  # of the life that is being started: its jobs meet at one port

    def again(index: int) -> Process:
        if index not in following:
            following.update(jobs(True))
        return process(following.pop(index), index)

    def process(job: Job, index: int) -> Process:
        netns = inside.get(job.region)
        here, name = job.host is None, str(folder / job.name)
        there = () if job.host is None else guarded_there(job.host, name, job.command, job.env)
        return Process(
            job.name,
            there or guarded(job.command, netns),
            {**job.env, JOB: name} if here else {},
            keeps=(netns,) if here and netns is not None else (),
            again=lambda: again(index),
            unit=worker.name,
            needs=server,
        )

    return [process(job, index) for index, job in jobs(order.resume).items()]


def python_there(folder: str | None) -> str:
    """Python on the other machine: at the same place within its checkout, or the same path."""
    here = Path(sys.executable)
    if folder is not None and here.is_relative_to(Path.cwd()):
        return str(Path(folder) / here.relative_to(Path.cwd()))
    return str(here)
