"""`local`: ranks on the machine that starts them. A worker that spans regions has one host, this machine, in each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from geotrain.config import ConfigError, WorkerConfig
from geotrain.launch.launchers.base import Launcher, WorkerCommands, WorkerPlace, one_command_each, regions_of


class Local(Launcher):
    """Starts ranks here, on the devices that `WorkerPlace` names or on the CPU. Nobody is asked for facts: this
    process reads its own machine's (`geotrain.launch.host_check`)."""

    name = "local"
    on_this_machine = True

    def commands(self, place: WorkerPlace, region: str, worker: WorkerConfig) -> WorkerCommands:
        if len(regions_of(region, worker)) < len(worker.hosts):
            raise ConfigError(
                f"worker {worker.name!r}: launcher 'local' starts ranks on one machine a region, but hosts has "
                f"{len(worker.hosts)} entries; keep one a region, or use 'ssh', 'pdsh', 'slurm' or an MPI"
            )
        slots = {host.host: host.slots for host in worker.hosts}
        if len(slots) == 1:
            slots = {"localhost": worker.ranks}
        devices: dict[str, Sequence[int]] = {host: range(count) for host, count in slots.items()}
        env = {"GLOO_SOCKET_IFNAME": place.interface}  # gloo would choose by the machine's name
        if place.devices:
            env["NCCL_SOCKET_IFNAME"] = place.interface
            # With emulated links, NCCL would otherwise go through the machine's memory, past the links.
            if place.interface != "lo":
                env.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
            free = iter(place.devices)
            devices = {host: list(islice(free, count)) for host, count in slots.items()}
        else:
            env.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS=str(place.threads))
        with_network = worker.model_copy(update={"env": {**env, **worker.env}})
        return one_command_each(place, region, with_network, devices, here=True)


LAUNCHERS = (Local(),)
