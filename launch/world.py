"""What starts one worker: DeepSpeed's launcher, its hostfile and its environment. Pure, but for `this_machine`.

`local` and `ssh` start DeepSpeed's launcher on each host with `--no_ssh`; `pdsh`, `slurm` and the MPIs are
DeepSpeed's own multi-node launchers. The hosts of one worker see the run's folder under the same path, as these
launchers expect. Ranks are numbered through the worker's hosts in their order, whatever region they stand in: that
is how `geotrain plan` says which pipeline stage computes where.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from geotrain.config import ConfigError, WorkerConfig

SCRIPT = Path(__file__).resolve().with_name("pretrain.py")
FIRST_MASTER_PORT = 29500
ENV_FILE_VALUE = re.compile(r"[^\s\"'`$\\]*")  # DeepSpeed writes these into shell commands

# What Slurm and Open MPI call torch's variables; the other launchers set torch's own.
RANK_VARIABLES = {
    "RANK": ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    "WORLD_SIZE": ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
    "LOCAL_RANK": ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


@dataclass(frozen=True)
class Machine:
    """What this machine has for local workers. devices: numbers of its CUDA devices; none: ranks use the CPU."""

    cores: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a worker is put. folder: the run's, absolute. devices, threads: for `local` workers only, of those that
    stand here, in their order. master: where rank 0 is; None: the first host, or this machine for a `local` worker.
    interface: of the network between the hosts of a `local` worker."""

    folder: Path
    master_port: int
    devices: tuple[int, ...] = ()
    threads: int = 1
    resume: bool = False
    master: str | None = None
    interface: str = "lo"


@dataclass(frozen=True)
class Job:
    """One process to start. host: where, by ssh; None: here. region: whose machine starts it."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    host: str | None = None
    region: str = ""


@dataclass(frozen=True)
class World:
    """jobs: to start. files: to write first, path below the run's folder → text."""

    jobs: tuple[Job, ...]
    files: Mapping[str, str]


def this_machine() -> Machine:
    """DS_ACCELERATOR=cpu in the environment hides its devices.

    Raises ConfigError when CUDA_VISIBLE_DEVICES names devices otherwise than by number.
    """
    cores = len(os.sched_getaffinity(0))
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return Machine(cores)
    import torch  # takes seconds

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    if visible is None or count == 0:
        return Machine(cores, tuple(range(count)))
    try:
        return Machine(cores, tuple(int(number) for number in visible.split(","))[:count])
    except ValueError:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES = {visible!r}: DeepSpeed's launcher takes devices by number only, as in 0,1"
        ) from None


def place_local(workers: Mapping[str, WorkerConfig], machine: Machine) -> dict[str, tuple[tuple[int, ...], int]]:
    """Devices and CPU threads a rank for each `local` worker on this machine: name → (devices, threads). Of a worker
    that spans regions, with those of its hosts only that stand here.

    Raises ConfigError when there are devices, but not enough.
    """
    local = {name: w for name, w in workers.items() if w.launcher == "local"}
    on_devices = {name: w.ranks for name, w in local.items() if machine.devices and not _on_cpu(w)}
    if sum(on_devices.values()) > len(machine.devices):
        wishes = ", ".join(f"{name} {ranks}" for name, ranks in on_devices.items())
        raise ConfigError(
            f"the local workers want {sum(on_devices.values())} CUDA devices ({wishes}), this machine has "
            f"{len(machine.devices)}; lower their slots, or set DS_ACCELERATOR=cpu in a worker's env"
        )
    threads = max(1, machine.cores // max(1, sum(w.ranks for w in local.values())))
    free = list(machine.devices)
    placed = {}
    for name in local:
        count = on_devices.get(name, 0)
        placed[name] = (tuple(free[:count]), threads)
        free = free[count:]
    return placed


def world(place: Place, region: str, worker: WorkerConfig) -> World:
    """Raises ConfigError when the worker cannot be started this way."""
    hosts = [h.host for h in worker.hosts]
    if len(set(hosts)) < len(hosts):
        raise ConfigError(f"worker {worker.name!r}: hosts names a host twice ({', '.join(hosts)}); add up its slots")
    if worker.launcher == "slurm" and len(regions_of(region, worker)) > 1:
        raise ConfigError(
            f"worker {worker.name!r}: Slurm numbers hosts in its own order, but which rank is where matters to a "
            "worker that spans regions; use launcher 'ssh' or 'pdsh'"
        )
    if worker.launcher in ("local", "ssh"):
        return _without_launcher(place, region, worker)
    return _with_launcher(place, region, worker)


def regions_of(home: str, worker: WorkerConfig) -> tuple[str, ...]:
    """Where a worker of region `home` stands, in the order of its ranks."""
    return tuple(dict.fromkeys(host.region or home for host in worker.hosts))


def rank_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Torch's variables, as far as `env` lacks them and Slurm or Open MPI say them: for the training script."""
    return {
        ours: env[theirs]
        for ours, names in RANK_VARIABLES.items()
        if ours not in env
        for theirs in names
        if theirs in env
    }


def hosts_path(worker: str) -> str:
    """The worker's hostfile, below the run's folder."""
    return f"hosts/{worker}"


def _without_launcher(place: Place, region: str, worker: WorkerConfig) -> World:
    local = worker.launcher == "local"
    regions = [h.region or region for h in worker.hosts]
    if local and len(set(regions)) < len(regions):
        raise ConfigError(
            f"worker {worker.name!r}: launcher 'local' starts ranks on one machine a region, but hosts has "
            f"{len(regions)} entries; keep one a region, or use 'ssh', 'pdsh', 'slurm' or an MPI"
        )
    slots = {h.host: h.slots for h in worker.hosts}
    env = dict(worker.env)
    options: tuple[str, ...] = ()
    master = place.master or ("127.0.0.1" if local else worker.hosts[0].host)
    if local:
        if len(slots) == 1:
            slots = {"localhost": worker.ranks}
        env = {**_local_env(place), **env}
        if place.devices:
            slots, options = _on_devices(place.devices, slots)
    jobs = []
    for rank, host in enumerate(slots):
        command = (
            *_deepspeed(place, worker, master),
            *options,
            *("--no_ssh", "--node_rank", str(rank)),
            *_script(place, region, worker),
        )
        name = worker.name if len(slots) == 1 else f"{worker.name}.{rank}"
        jobs.append(Job(name, command, env, None if local else host, regions[rank]))
    return World(tuple(jobs), {hosts_path(worker.name): _hostfile(slots)})


def _on_devices(devices: tuple[int, ...], slots: Mapping[str, int]) -> tuple[dict[str, int], tuple[str, ...]]:
    """The hostfile's slots, and DeepSpeed's option that says which of them are used: device numbers, host by host."""
    included, begin = [], 0
    for host, count in slots.items():
        mine = devices[begin : begin + count]
        included.append(f"{host}:{','.join(map(str, mine))}")
        begin += count
    return dict.fromkeys(slots, max(devices) + 1), ("--include", "@".join(included))


def _with_launcher(place: Place, region: str, worker: WorkerConfig) -> World:
    master = worker.hosts[0].host
    slots = {h.host: h.slots for h in worker.hosts}
    files = {hosts_path(worker.name): _hostfile(slots)}
    ranks_find_each_other = {"MASTER_ADDR": master, "MASTER_PORT": str(place.master_port)}
    shared_env = {**ranks_find_each_other, **worker.env}
    arguments = worker.launcher_args
    if worker.launcher == "slurm":  # srun hands its own environment on
        env = shared_env
        if len(set(slots.values())) > 1:
            raise ConfigError(f"worker {worker.name!r}: slurm needs the same slots on every host, not {slots}")
        per_node = next(iter(slots.values()))
        layout = f"--nodes={len(slots)} --ntasks-per-node={per_node} --nodelist={','.join(slots)}"
        arguments = f"{layout} {arguments}".strip()
    else:
        env_file = f"hosts/{worker.name}.env"
        files[env_file] = _env_file(worker.name, shared_env)
        env = {"DS_ENV_FILE": str(place.folder / env_file)}
    command = (
        *_deepspeed(place, worker, master),
        *("--launcher", worker.launcher, "--force_multi"),
        *(() if worker.launcher == "pdsh" else ("--no_ssh_check",)),
        *(("--launcher_args=" + arguments,) if arguments else ()),
        *_script(place, region, worker),
    )
    return World((Job(worker.name, command, env, region=region),), files)


def _deepspeed(place: Place, worker: WorkerConfig, master: str) -> tuple[str, ...]:
    return (
        deepspeed_program(),
        *("--hostfile", str(place.folder / hosts_path(worker.name))),
        *("--master_addr", master, "--master_port", str(place.master_port)),
    )


def deepspeed_program() -> str:
    beside = Path(sys.executable).with_name("deepspeed")
    return str(beside) if beside.exists() else (shutil.which("deepspeed") or "deepspeed")


def _script(place: Place, region: str, worker: WorkerConfig) -> tuple[str, ...]:
    resume = ("--resume",) if place.resume else ()
    run = str(place.folder / "run.json")
    return (str(SCRIPT), "--run", run, "--region", region, "--worker", worker.name, *resume)


def _on_cpu(worker: WorkerConfig) -> bool:
    return worker.env.get("DS_ACCELERATOR") == "cpu"


def _local_env(place: Place) -> dict[str, str]:
    network = {"GLOO_SOCKET_IFNAME": place.interface}  # the machine's own name may lead elsewhere
    if place.devices:
        network["NCCL_SOCKET_IFNAME"] = place.interface
        if place.interface != "lo":  # else NCCL passes by the emulated links, through memory
            network.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
        return network
    return {**network, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(place.threads)}


def _hostfile(slots: Mapping[str, int]) -> str:
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())


def _env_file(worker: str, env: Mapping[str, str]) -> str:
    for key, value in env.items():
        if not ENV_FILE_VALUE.fullmatch(value):
            raise ConfigError(
                f"worker {worker!r}: env.{key} = {value!r}: DeepSpeed's launchers pass no spaces, quotes, $ or \\"
            )
    return "".join(f"{key}={value}\n" for key, value in env.items())
