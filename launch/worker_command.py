"""The commands that start one worker: DeepSpeed's launcher, its hostfile and its environment. Pure, except for
`this_machine`.

With `local` and `ssh`, DeepSpeed's launcher of one host is started on each; `deepspeed --no_ssh` starts the same one
after it has imported DeepSpeed once more. `pdsh`, `slurm` and the MPIs are DeepSpeed's own multi-node launchers; with
these, all hosts of a worker must see the run's folder under the same path.
Ranks are numbered in the order of the worker's hosts, whatever regions they are in: by that order
`geotrain plan` decides which pipeline stage is computed where.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from geotrain.config import ConfigError, WorkerConfig

SCRIPT = Path(__file__).resolve().with_name("pretrain.py")
FIRST_MASTER_PORT = 29500
ENV_FILE_VALUE = re.compile(r"[^\s\"'`$\\]*")  # DeepSpeed writes these into shell commands


Assigned = tuple[tuple[int, ...], int]  # device numbers, and CPU threads a rank


@dataclass(frozen=True)
class HostMachine:
    """What this machine has for `local` workers. devices: the numbers of its CUDA devices; if empty, ranks use the
    CPU."""

    cores: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker runs.

    folder: the run's, absolute. master_port: where its ranks meet. devices: of a `local` worker's hosts on this
    machine, in their order; threads: CPU threads of each of its ranks. resume: whether to load the newest checkpoint.
    master: the address of rank 0; None: the first host, or this machine for a `local` worker. interface: the network
    interface between the hosts of a `local` worker.
    """

    folder: Path
    master_port: int
    devices: tuple[int, ...] = ()
    threads: int = 1
    resume: bool = False
    master: str | None = None
    interface: str = "lo"


@dataclass(frozen=True)
class LauncherCommand:
    """One start of DeepSpeed's launcher. host: the machine, for ssh; None: this one. region: the site that starts
    it."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    host: str | None = None
    region: str = ""


@dataclass(frozen=True)
class WorkerCommands:
    """How to start a worker: `commands`, one for each process, after writing `files`, path in the run's folder →
    text."""

    commands: tuple[LauncherCommand, ...]
    files: Mapping[str, str]


def this_machine() -> HostMachine:
    """What this machine has. DS_ACCELERATOR=cpu in the environment hides its devices.

    Raises ConfigError if devices cannot be used, and if CUDA_VISIBLE_DEVICES does not name them by number.
    """
    cores = len(os.sched_getaffinity(0))
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return HostMachine(cores)
    from geotrain.kernels.devices import cuda_devices  # here, because torch takes seconds

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = cuda_devices()
    if visible is None or count == 0:
        return HostMachine(cores, tuple(range(count)))
    try:
        return HostMachine(cores, tuple(int(number) for number in visible.split(","))[:count])
    except ValueError:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES = {visible!r}: DeepSpeed's launcher takes devices by number only, as in 0,1"
        ) from None


def assign_devices(workers: Mapping[str, WorkerConfig], machine: HostMachine) -> dict[str, Assigned]:
    """The devices, and the CPU threads of each rank, for every `local` worker on this machine, by its name.

    Of a worker that spans regions, `workers` should have the hosts on this machine only.
    Raises ConfigError if there are devices, but not enough.
    """
    local = {name: w for name, w in workers.items() if w.launcher == "local"}
    on_devices = {
        name: w.ranks for name, w in local.items() if machine.devices and w.env.get("DS_ACCELERATOR") != "cpu"
    }
    if sum(on_devices.values()) > len(machine.devices):
        wishes = ", ".join(f"{name} {ranks}" for name, ranks in on_devices.items())
        raise ConfigError(
            f"the local workers want {sum(on_devices.values())} CUDA devices ({wishes}), this machine has "
            f"{len(machine.devices)}; lower their slots, or set DS_ACCELERATOR=cpu in a worker's env"
        )
    threads = max(1, machine.cores // max(1, sum(w.ranks for w in local.values())))
    free = iter(machine.devices)
    return {name: (tuple(islice(free, on_devices.get(name, 0))), threads) for name in local}


def regions_of(home: str, worker: WorkerConfig) -> tuple[str, ...]:
    """The regions in which a worker of region `home` has hosts, in the order of its ranks."""
    return tuple(dict.fromkeys(host.region or home for host in worker.hosts))


def hostfile_path(worker: str) -> str:
    """The worker's hostfile, below the run's folder."""
    return f"hosts/{worker}"


def deepspeed_program() -> str:
    beside = Path(sys.executable).with_name("deepspeed")
    return str(beside) if beside.exists() else (shutil.which("deepspeed") or "deepspeed")


def host_launcher(
    devices: Mapping[str, Sequence[int]], node_rank: int, master: str, master_port: int
) -> tuple[str, ...]:
    """DeepSpeed's launcher of one host, to be followed by a script and its arguments. devices: of all the worker's
    hosts."""
    listed = {host: list(numbers) for host, numbers in devices.items()}
    world = base64.urlsafe_b64encode(json.dumps(listed).encode()).decode()  # as DeepSpeed's runner hands it on
    return (
        *(sys.executable, "-u", "-m", "geotrain.launch.loading", "deepspeed.launcher.launch"),
        f"--world_info={world}",
        *("--node_rank", str(node_rank), "--master_addr", master, "--master_port", str(master_port)),
    )


def worker_commands(place: WorkerPlace, region: str, worker: WorkerConfig) -> WorkerCommands:
    """How to start a worker of this region. Raises ConfigError if its launcher cannot start it."""
    hosts = [h.host for h in worker.hosts]
    if len(set(hosts)) < len(hosts):
        raise ConfigError(f"worker {worker.name!r}: hosts names a host twice ({', '.join(hosts)}); add up its slots")
    if worker.launcher == "slurm" and len(regions_of(region, worker)) > 1:
        raise ConfigError(
            f"worker {worker.name!r}: Slurm numbers hosts in its own order, but which rank is where matters to a "
            "worker that spans regions; use launcher 'ssh' or 'pdsh'"
        )
    if worker.launcher in ("local", "ssh"):
        return _one_command_per_host(place, region, worker)
    return _multi_node_launcher(place, region, worker)


def _one_command_per_host(place: WorkerPlace, region: str, worker: WorkerConfig) -> WorkerCommands:
    local = worker.launcher == "local"
    regions = [h.region or region for h in worker.hosts]
    if local and len(set(regions)) < len(regions):
        raise ConfigError(
            f"worker {worker.name!r}: launcher 'local' starts ranks on one machine a region, but hosts has "
            f"{len(regions)} entries; keep one a region, or use 'ssh', 'pdsh', 'slurm' or an MPI"
        )
    slots = {h.host: h.slots for h in worker.hosts}
    if local and len(slots) == 1:
        slots = {"localhost": worker.ranks}
    devices: dict[str, Sequence[int]] = {host: range(count) for host, count in slots.items()}
    env = dict(worker.env)
    if local:
        network = {"GLOO_SOCKET_IFNAME": place.interface}  # gloo would choose by the machine's name
        if place.devices:
            network["NCCL_SOCKET_IFNAME"] = place.interface
            # With emulated links, NCCL would otherwise go through the machine's memory, past the links.
            if place.interface != "lo":
                network.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
            free = iter(place.devices)
            devices = {host: list(islice(free, count)) for host, count in slots.items()}
        else:
            network.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS=str(place.threads))
        env = {**network, **env}
    master = place.master or ("127.0.0.1" if local else worker.hosts[0].host)
    commands = []
    for node_rank, host in enumerate(slots):
        launcher = host_launcher(devices, node_rank, master, place.master_port)
        command = (*launcher, *_training(place, region, worker))
        name = worker.name if len(slots) == 1 else f"{worker.name}.{node_rank}"
        commands.append(LauncherCommand(name, command, env, None if local else host, regions[node_rank]))
    return WorkerCommands(tuple(commands), {hostfile_path(worker.name): _hostfile(slots)})


def _multi_node_launcher(place: WorkerPlace, region: str, worker: WorkerConfig) -> WorkerCommands:
    master = worker.hosts[0].host
    slots = {h.host: h.slots for h in worker.hosts}
    files = {hostfile_path(worker.name): _hostfile(slots)}
    env = {"MASTER_ADDR": master, "MASTER_PORT": str(place.master_port), **worker.env}
    arguments = worker.launcher_args
    if worker.launcher == "slurm":  # srun hands its own environment to the ranks
        if len(set(slots.values())) > 1:
            raise ConfigError(f"worker {worker.name!r}: slurm needs the same slots on every host, not {slots}")
        per_node = next(iter(slots.values()))
        layout = f"--nodes={len(slots)} --ntasks-per-node={per_node} --nodelist={','.join(slots)}"
        arguments = f"{layout} {arguments}".strip()
    else:  # the other launchers hand on the variables of a file
        for key, value in env.items():
            if not ENV_FILE_VALUE.fullmatch(value):
                raise ConfigError(
                    f"worker {worker.name!r}: env.{key} = {value!r}: DeepSpeed's launchers pass no spaces, quotes, "
                    "$ or \\"
                )
        env_file = f"hosts/{worker.name}.env"
        files[env_file] = "".join(f"{key}={value}\n" for key, value in env.items())
        env = {"DS_ENV_FILE": str(place.folder / env_file)}
    options = (
        *("--launcher", worker.launcher, "--force_multi"),
        *(() if worker.launcher == "pdsh" else ("--no_ssh_check",)),
        *(("--launcher_args=" + arguments,) if arguments else ()),
    )
    command = (
        deepspeed_program(),
        *("--hostfile", str(place.folder / hostfile_path(worker.name))),
        *("--master_addr", master, "--master_port", str(place.master_port)),
        *options,
        *_training(place, region, worker),
    )
    return WorkerCommands((LauncherCommand(worker.name, command, env, region=region),), files)


def _training(place: WorkerPlace, region: str, worker: WorkerConfig) -> tuple[str, ...]:
    """What each rank runs."""
    return (
        *(str(SCRIPT), "--run", str(place.folder / "run.json"), "--region", region, "--worker", worker.name),
        *(("--resume",) if place.resume else ()),
    )


def _hostfile(slots: Mapping[str, int]) -> str:
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())
