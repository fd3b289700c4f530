"""`slurm`: all ranks by srun, inside a job or as a job of its own. srun must be installed on the machine that starts
the worker; Slurm ends all ranks when srun gets SIGTERM."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import ClassVar

from geotrain.config import ConfigError, WorkerConfig
from geotrain.launch.launchers.base import Inquiry, WorkerCommands, WorkerPlace, WorldLauncher, regions_of

QUEUE_S = 30.0  # for nodes that are in use
END_S = 40.0  # srun waits 32 s for a node that does not answer; without srun the others would stay allocated


class Slurm(WorldLauncher):
    """Starts and asks all hosts of a worker at once by srun, which hands its own environment on to the ranks."""

    name = "slurm"
    rank_variables: ClassVar = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    queue_s = QUEUE_S
    rank_failed = re.compile(rb"srun: error: \S+: tasks? [-\d,]+: ")
    end_s = END_S

    def commands(self, place: WorkerPlace, region: str, worker: WorkerConfig) -> WorkerCommands:
        if len(regions_of(region, worker)) > 1:
            raise ConfigError(
                f"worker {worker.name!r}: Slurm numbers hosts in its own order, but which rank is where matters to a "
                "worker that spans regions; use launcher 'ssh' or 'pdsh'"
            )
        slots = {host.host: host.slots for host in worker.hosts}
        if len(set(slots.values())) > 1:
            raise ConfigError(f"worker {worker.name!r}: slurm needs the same slots on every host, not {slots}")
        arguments = f"{_nodes(list(slots), worker.hosts[0].slots)} {worker.launcher_args}".strip()
        return super().commands(place, region, worker.model_copy(update={"launcher_args": arguments}))

    def hand_on(
        self, place: WorkerPlace, worker: WorkerConfig, env: Mapping[str, str]
    ) -> tuple[Mapping[str, str], dict[str, str]]:
        return env, {}

    def inquiry(self, worker: WorkerConfig, hosts: Sequence[str], command: Sequence[str]) -> Inquiry | None:
        arguments = shlex.split(worker.launcher_args)
        line = ("srun", *_nodes(hosts, 1).split(), *arguments, f"--immediate={self.queue_s:.0f}", *command)
        return Inquiry(self, tuple(hosts), line, worker.env)

    def host_of(self, inquiry: Inquiry, line: str, own_name: str) -> str:
        return own_name  # which is Slurm's name of the node


LAUNCHERS = (Slurm(),)


def _nodes(hosts: Sequence[str], tasks: int) -> str:
    """srun's options for so many tasks on each of these hosts."""
    return f"--nodes={len(hosts)} --ntasks-per-node={tasks} --nodelist={','.join(hosts)}"
