"""Completes a rank's environment before torch is loaded and CUDA starts: both read it once."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from geotrain.config import ConfigError
from geotrain.launch.host_facts import read_gpus, visible
from geotrain.launch.launchers.base import Launcher
from geotrain.launch.networks import interface_to

BLACKWELL = (10, 0)  # the lowest compute capability of its kind
# What equal bits need of the libraries: cuBLAS with a workspace of its own for each stream (as torch demands), no
# sums inside NVLink's switches, whose order is not given, and of Transformer Engine the attention without atomics.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "^NVLS,NVLSTree",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def rank_environment(env: Mapping[str, str], launcher: Launcher) -> dict[str, str]:
    """Translate what the ranks' launcher has put into `env` to torch's variables, for those that are not there.

    Where a task sees one device only, as Slurm with `--gpus-per-task=1` has it, that device is number 0 to it. Of
    ranks that share a device the launcher names it again for each: CUDA would then show none.
    """
    found = {
        ours: env[theirs] for ours, theirs in launcher.rank_variables.items() if ours not in env and theirs in env
    }
    given = env.get("CUDA_VISIBLE_DEVICES", "")
    if given != (visible := ",".join(dict.fromkeys(given.split(",")))):
        found["CUDA_VISIBLE_DEVICES"] = visible
    if visible and "," not in visible and {**env, **found}.get("LOCAL_RANK", "0") != "0":
        found["LOCAL_RANK"] = "0"
    return found


def library_settings(
    env: Mapping[str, str],
    *,
    cores: int,
    ranks_here: int,
    tensor_parallel: int,
    overlaps_steps: bool,
    capability: tuple[int, int] | None = None,
    deterministic: bool = False,
    traces: Path | None = None,
    extensions: Path | None = None,
) -> dict[str, str]:
    """Choose settings of CUDA, torch and gloo that are not in `env`.

    cores: that this process may use. ranks_here: the worker's on this machine, which share them. overlaps_steps:
    whether the run uses ACCO. capability: of the devices here (`capability_here`). deterministic:
    `precision.deterministic_mode`. traces: a folder in which torch leaves the last collectives of a rank that hangs
    (its flight recorder, of NCCL); None: where torch has it. extensions: where torch compiles extensions; None: where
    torch does, for all processes of this user. MASTER_ADDR in `env` decides which network interface the
    ranks use. Raises ConfigError if `env` contradicts what is asked for.
    """
    wanted = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks_here)),  # torch's default is all cores, for every rank
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # less memory is lost between blocks of changing sizes
    }
    # Before Blackwell, with a single queue the device starts kernels in the order of their launch, so Megatron-core's
    # tensor-parallel collectives start before the compute that hides them. With ACCO, collectives of another thread
    # would stand in that queue before compute and hold it up; so there CUDA keeps its default of 8 queues. Blackwell
    # keeps the order without that: there more streams than queues would wait for each other for nothing.
    if capability is not None and capability >= BLACKWELL:
        wanted["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    elif tensor_parallel > 1 and not overlaps_steps:
        wanted["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    # gloo takes the address that this machine's name resolves to, which on many systems nobody else can reach.
    if (master := env.get("MASTER_ADDR")) and (interface := interface_to(master)) is not None:
        wanted["GLOO_SOCKET_IFNAME"] = interface
    if capability is not None and traces is not None:
        wanted["TORCH_FR_DUMP_TEMP_FILE"] = str(traces / "collectives-rank-")
    if extensions is not None:
        wanted["TORCH_EXTENSIONS_DIR"] = str(extensions)
    if deterministic:
        wanted |= DETERMINISTIC
        _check_deterministic(env)
    return {name: value for name, value in wanted.items() if name not in env}


def capability_here(env: Mapping[str, str]) -> tuple[int, int] | None:
    """The lowest compute capability of the GPUs that this process may see, by NVML: CUDA must not be asked,
    since it then reads its settings. None: there are none, or nobody knows."""
    if env.get("DS_ACCELERATOR") == "cpu":
        return None
    gpus = visible(read_gpus()[0], env.get("CUDA_VISIBLE_DEVICES"))
    return min((gpu.capability for gpu in gpus if gpu.capability), default=None)


def extensions_of(folder: Path) -> Path:
    """Name a folder inside this one that only the ranks which one launcher has started on this host share.

    Torch's compiler of extensions, by which DeepSpeed compiles its kernels, locks by a file: one that was killed
    leaves it, and every later start would wait for it without end.
    """
    parent = psutil.Process(os.getppid())
    return folder / "extensions" / f"{socket.gethostname()}-{parent.pid}-{parent.create_time():.0f}"


def _check_deterministic(env: Mapping[str, str]) -> None:
    workspace, algorithms = env.get("CUBLAS_WORKSPACE_CONFIG"), env.get("NCCL_ALGO", "^")
    wrong = {
        "CUBLAS_WORKSPACE_CONFIG": workspace not in (None, ":4096:8", ":16:8"),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": env.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0") != "0",
        "NCCL_ALGO": "NVLS" in algorithms and not algorithms.startswith("^"),
    }
    if names := [name for name, is_wrong in wrong.items() if is_wrong]:
        named = ", ".join(f"{name} = {env[name]!r}" for name in names)
        raise ConfigError(
            f"precision.deterministic_mode does not go with {named} in the worker's environment; take it out of there"
        )
