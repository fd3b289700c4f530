"""The interface of launchers, and what several of them share. Pure: nothing is started here.

A new launcher is one file in this folder, or one class of another package (`geotrain.launch.launchers.registry`). It
is a subclass of `HostLauncher` (a command a host) or `WorldLauncher` (one command for all), and provides

- its `name`, which a worker's `launcher` in the cluster file says;
- the commands that start the ranks (`commands`), and where ranks find their numbers, if not in torch's variables
  (`rank_variables`);
- how hosts are asked for their facts before a launch (`inquiry`, `host_of`, `queue_s`). A launcher without an inquiry
  starts on hosts that nobody has looked at;
- nothing for the end of ranks: each command runs under `geotrain.launch.guard`, on this machine or, by `on_host`, on
  the host, and the guard ends all processes of the command. So a command that starts ranks elsewhere, as srun does,
  must end them when it gets SIGTERM.

What must be installed: the programs that `commands` and `inquiry` name, on the machine that starts the worker. One
that is missing is reported by the look at hosts. Hosts need GeoTrain under the same paths as that machine.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from geotrain.config import ClusterConfig, ConfigError, WorkerConfig, parse
from geotrain.launch import guard

EXIT_FORM = 76  # of a rank that has ended its job, and saved, so that its worker can be formed anew
SCRIPT = Path(__file__).resolve().parents[1] / "pretrain.py"
_ENV_FILE_VALUE = re.compile(r"[^\s\"'`$\\]*")  # DeepSpeed writes these into shell commands
_SECRET = re.compile(r"(^|_)(KEY|SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE)(_|$)")


@dataclass(frozen=True)
class WorkerPlace:
    """The place where a worker runs.

    folder: the run's, absolute. master_port: of its ranks' rendezvous. devices: numbers of the CUDA devices that a
    `local` worker's ranks use on this machine; empty: they use the CPU. threads: CPU threads of each of these ranks.
    resume: whether to load the newest checkpoint. master: the address of rank 0; None: the first host, or this
    machine for a `local` worker. interface: the network interface between the hosts of a `local` worker. formed: the
    worker is not as in the cluster file, so that its ranks must be given how it is.
    """

    folder: Path
    master_port: int
    devices: tuple[int, ...] = ()
    threads: int = 1
    resume: bool = False
    master: str | None = None
    interface: str = "lo"
    formed: bool = False


@dataclass(frozen=True)
class LauncherCommand:
    """One command that starts ranks. host: where it runs; None: on this machine. region: the site that starts it."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    host: str | None = None
    region: str = ""


@dataclass(frozen=True)
class WorkerCommands:
    """The commands that start a worker, one for each process; `files` are written first, path in the run's folder →
    text."""

    commands: tuple[LauncherCommand, ...]
    files: Mapping[str, str]


@dataclass(frozen=True)
class Inquiry:
    """One command that asks some hosts of a worker for their facts."""

    launcher: Launcher
    hosts: tuple[str, ...]
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


class Launcher(ABC):
    """Starts the ranks of a worker. name: as in the cluster file.

    rank_variables: torch's variables (RANK, WORLD_SIZE, LOCAL_RANK) → what the launcher calls them, where it does not
    set torch's own. on_this_machine: ranks run on the machine that starts them, whatever the hosts are called.
    queue_s: how long an inquiry may wait for hosts that are in use; not 0: then to get no answer is no obstacle.
    rank_failed: a line by which a command for all hosts logs that ranks have failed; None: it ends with the first.
    end_s: how long it may take to end them.
    """

    name: str
    rank_variables: ClassVar[Mapping[str, str]] = {}
    on_this_machine: ClassVar[bool] = False
    queue_s: ClassVar[float] = 0.0
    rank_failed: ClassVar[re.Pattern[bytes] | None] = None
    end_s: ClassVar[float] = guard.GRACE_S

    @abstractmethod
    def commands(self, place: WorkerPlace, region: str, worker: WorkerConfig) -> WorkerCommands:
        """The commands that start the ranks of a worker of this region. Raises ConfigError."""

    def inquiry(self, worker: WorkerConfig, hosts: Sequence[str], command: Sequence[str]) -> Inquiry | None:
        """The command line that runs `command`, which prints a host's facts, on these hosts of the worker. None: this
        launcher cannot ask."""
        return None

    def host_of(self, inquiry: Inquiry, line: str, own_name: str) -> str:
        """The host that printed a line of the answer. own_name: what the host calls itself."""
        return inquiry.hosts[0]


class HostLauncher(Launcher):
    """Starts a worker by one command on each of its hosts: DeepSpeed's launcher of one host.

    Each host's command is started by the site of the host's region. Hosts need no common file system: the run's files
    are brought to them (`geotrain.launch.far_hosts`).
    """

    @abstractmethod
    def on_host(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        """The command line that runs a command on a host, in the folder of the same path as this process's. Standard
        input must arrive there: it begins with the environment, and its end stops the command."""

    def inquiry(self, worker: WorkerConfig, hosts: Sequence[str], command: Sequence[str]) -> Inquiry | None:
        (host,) = hosts
        return Inquiry(self, (host,), self.on_host(host, with_settings(worker.env, command)))

    def commands(self, place: WorkerPlace, region: str, worker: WorkerConfig) -> WorkerCommands:
        return one_command_each(place, region, worker, {host.host: range(host.slots) for host in worker.hosts})


class WorldLauncher(Launcher):
    """Starts all ranks of a worker by one command of DeepSpeed's, from the machine of the worker's home region. All
    hosts of the worker must see the run's folder under the same path. Unless it is overridden, hosts are not asked.

    name: DeepSpeed's `--launcher`. options: more options of the `deepspeed` command. takes_ipv6: hosts may be IPv6
    addresses; where a list of hosts separates by ":", or has nodes' names only, they may not.
    """

    options: ClassVar[tuple[str, ...]] = ("--no_ssh_check",)
    takes_ipv6: ClassVar[bool] = False

    def hand_on(
        self, place: WorkerPlace, worker: WorkerConfig, env: Mapping[str, str]
    ) -> tuple[Mapping[str, str], dict[str, str]]:
        """Hand an environment on to the ranks: by that of the command, and by files, path in the run's folder → text.
        Unless overridden, by a file that DeepSpeed reads. Raises ConfigError."""
        for key, value in env.items():
            if is_secret(key):
                raise ConfigError(
                    f"worker {worker.name!r}: env.{key}: DeepSpeed's launcher {self.name!r} puts it on command "
                    "lines, which everybody on the hosts can read; put it into a file that only you may read, or use "
                    "the launcher 'ssh' or 'slurm'"
                )
            if not _ENV_FILE_VALUE.fullmatch(value):
                raise ConfigError(
                    f"worker {worker.name!r}: env.{key} = {value!r}: DeepSpeed's launchers pass no spaces, quotes, "
                    "$ or \\"
                )
        env_file = f"hosts/{worker.name}.env"
        text = "".join(f"{key}={value}\n" for key, value in env.items())
        return {"DS_ENV_FILE": str(place.folder / env_file)}, {env_file: text}

    def commands(self, place: WorkerPlace, region: str, worker: WorkerConfig) -> WorkerCommands:
        if bad := [host.host for host in worker.hosts if ":" in host.host and not self.takes_ipv6]:
            raise ConfigError(
                f"worker {worker.name!r}: hosts: launcher {self.name!r} does not take IPv6 addresses such as "
                f"{bad[0]}; write names of hosts, or use launcher 'ssh', 'pdsh' or 'openmpi'"
            )
        master, hostfile = worker.hosts[0].host, hostfile_path(worker.name)
        where = ("--master_addr", master, "--master_port", str(place.master_port))
        variables = {"MASTER_ADDR": master, "MASTER_PORT": str(place.master_port), **worker.env}
        env, files = self.hand_on(place, worker, variables)
        files[hostfile] = _hostfile({host.host: host.slots for host in worker.hosts})
        command = (
            *(deepspeed_program(), "--hostfile", str(place.folder / hostfile), *where),
            *("--launcher", self.name, "--force_multi", *self.options),
            *((f"--launcher_args={worker.launcher_args}",) if worker.launcher_args else ()),
            *_training(place, region, worker),
        )
        return WorkerCommands((LauncherCommand(worker.name, command, env, region=region),), files)


def is_secret(key: str) -> bool:
    """Whether a variable of this name may hold a key or a token."""
    return bool(_SECRET.search(key.upper()))


def with_settings(env: Mapping[str, str], command: Sequence[str]) -> tuple[str, ...]:
    """Add an environment to a command that looks at a host: all but secrets, which it does not need, and which stand
    on no command line."""
    return ("env", *(f"{key}={value}" for key, value in env.items() if not is_secret(key)), *command)


def regions_of(home: str, worker: WorkerConfig) -> tuple[str, ...]:
    """The regions in which a worker of region `home` has hosts, in the order of its ranks."""
    return tuple(dict.fromkeys(host.region or home for host in worker.hosts))


def hostfile_path(worker: str) -> str:
    """The worker's hostfile, below the run's folder."""
    return f"hosts/{worker}"


def end_file(worker: str) -> str:
    """The file, below the run's folder, that asks a worker to end its job, save, and end with EXIT_FORM."""
    return f"hosts/{worker}.end"


def deepspeed_program() -> str:
    """The path of the `deepspeed` command, that of this Python's environment first."""
    beside = Path(sys.executable).with_name("deepspeed")
    return str(beside) if beside.exists() else (shutil.which("deepspeed") or "deepspeed")


def host_launcher(
    devices: Mapping[str, Sequence[int]], node_rank: int, master: str, master_port: int
) -> tuple[str, ...]:
    """DeepSpeed's launcher of one host, to be followed by a script and its arguments. devices: host → the numbers of
    its devices, for all hosts of the worker."""
    listed = {host: list(numbers) for host, numbers in devices.items()}
    world = encoded(json.dumps(listed))  # as DeepSpeed's runner hands it on
    return (
        *(sys.executable, "-u", "-P", "-m", "geotrain.launch.loading", "deepspeed.launcher.launch"),
        f"--world_info={world}",
        *("--node_rank", str(node_rank), "--master_addr", master, "--master_port", str(master_port)),
    )


def one_command_each(
    place: WorkerPlace, region: str, worker: WorkerConfig, devices: Mapping[str, Sequence[int]], here: bool = False
) -> WorkerCommands:
    """Make a command for each host of the worker. `deepspeed --no_ssh` would start the same after it has imported
    DeepSpeed once more.

    devices: host → the numbers of its devices, in the order of the worker's hosts. here: run all on this machine.
    """
    master = place.master or ("127.0.0.1" if here else worker.hosts[0].host)
    commands = []
    for node_rank, (host, configured) in enumerate(zip(devices, worker.hosts, strict=True)):
        launcher = host_launcher(devices, node_rank, master, place.master_port)
        name = worker.name if len(devices) == 1 else f"{worker.name}.{node_rank}"
        command, where = (*launcher, *_training(place, region, worker)), None if here else host
        commands.append(LauncherCommand(name, command, worker.env, where, configured.region or region))
    slots = {host: len(numbers) for host, numbers in devices.items()}
    return WorkerCommands(tuple(commands), {hostfile_path(worker.name): _hostfile(slots)})


def _training(place: WorkerPlace, region: str, worker: WorkerConfig) -> tuple[str, ...]:
    """The script that each rank runs, with its arguments."""
    return (
        *(str(SCRIPT), "--run", str(place.folder / "run.json"), "--region", region, "--worker", worker.name),
        *(("--resume",) if place.resume else ()),
        *(("--formed", encoded(worker.model_dump_json(by_alias=True, exclude={"env"}))) if place.formed else ()),
    )


def encoded(text: str) -> str:
    """Encode a text as one word of any command line."""
    return base64.urlsafe_b64encode(text.encode()).decode()


def with_formed(cluster: ClusterConfig, region: str, word: str) -> ClusterConfig:
    """Put a worker into the cluster as `--formed` has it. Raises ConfigError."""
    raw = json.loads(base64.urlsafe_b64decode(word))
    return with_worker(cluster, region, parse(WorkerConfig, raw, "--formed"))


def with_worker(cluster: ClusterConfig, region: str, worker: WorkerConfig) -> ClusterConfig:
    """Put a worker in the place of the one of its name."""
    of = cluster.region(region)
    workers = tuple(worker if each.name == worker.name else each for each in of.workers)
    regions = (each.model_copy(update={"workers": workers}) if each is of else each for each in cluster.regions)
    return cluster.model_copy(update={"regions": tuple(regions)})


def _hostfile(slots: Mapping[str, int]) -> str:
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())
