"""Looks at what this machine has, and assigns its devices to `local` workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle, islice

from geotrain.common.names import SHARE_DEVICES
from geotrain.config import ConfigError, WorkerConfig
from geotrain.launch.launchers.registry import launcher_of

Assigned = tuple[tuple[int, ...], int]  # device numbers, and CPU threads a rank


@dataclass(frozen=True)
class HostMachine:
    """A machine's CPU cores and the numbers of its CUDA devices, for `local` workers. Without devices, ranks use the
    CPU. shares: whether ranks may share a device, whatever their worker's environment says."""

    cores: int
    devices: tuple[int, ...] = ()
    shares: bool = False


def this_machine() -> HostMachine:
    """Look at this machine. DS_ACCELERATOR=cpu in the environment hides its devices.

    Raises ConfigError if devices cannot be used, and if CUDA_VISIBLE_DEVICES does not name them by number.
    """
    cores = len(os.sched_getaffinity(0))
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return HostMachine(cores)
    from geotrain.kernels.devices import cuda_devices  # here, because torch takes seconds

    visible, shares = os.environ.get("CUDA_VISIBLE_DEVICES"), SHARE_DEVICES in os.environ
    count = cuda_devices()
    if visible is None or count == 0:
        return HostMachine(cores, tuple(range(count)), shares)
    try:
        return HostMachine(cores, tuple(int(number) for number in visible.split(","))[:count], shares)
    except ValueError:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES = {visible!r}: DeepSpeed's launcher takes devices by number only, as in 0,1"
        ) from None


def assign_devices(workers: Mapping[str, WorkerConfig], machine: HostMachine) -> dict[str, Assigned]:
    """Give every `local` worker on this machine its devices and the CPU threads of each rank; by worker's name.

    workers: by name; those that span regions with their hosts on this machine only. Raises ConfigError if there are
    devices, but not enough, and a worker may not share them; if all may, each rank gets the next one in turn.
    """
    local = {name: w for name, w in workers.items() if launcher_of(w).on_this_machine}
    on_devices = {
        name: w.ranks for name, w in local.items() if machine.devices and w.env.get("DS_ACCELERATOR") != "cpu"
    }
    shared = machine.shares or all(SHARE_DEVICES in local[name].env for name in on_devices)
    if sum(on_devices.values()) > len(machine.devices) and not shared:
        wishes = ", ".join(f"{name} {ranks}" for name, ranks in on_devices.items())
        raise ConfigError(
            f"the local workers want {sum(on_devices.values())} CUDA devices ({wishes}), this machine has "
            f"{len(machine.devices)}; lower their slots, set DS_ACCELERATOR=cpu in a worker's env, or "
            f"{SHARE_DEVICES}=1 for all of them: their ranks then share devices"
        )
    threads = max(1, machine.cores // max(1, sum(w.ranks for w in local.values())))
    free = cycle(machine.devices)
    return {name: (tuple(islice(free, on_devices.get(name, 0))), threads) for name in local}
