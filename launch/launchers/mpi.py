"""`openmpi`, `mpich`, `impi`: all ranks by mpirun of that MPI, which must be installed on all hosts of the worker."""

from __future__ import annotations

from typing import ClassVar

from geotrain.launch.launchers.base import WorldLauncher


class Mpirun(WorldLauncher):
    """Starts all ranks by DeepSpeed's launcher for an MPI. Its hosts are not asked: MPIs start processes in ways of
    their own."""

    def __init__(self, name: str) -> None:
        self.name = name


class OpenMpi(Mpirun):
    """Starts ranks under Open MPI, which does not set torch's variables; DeepSpeed sets them for the other MPIs."""

    takes_ipv6 = True
    rank_variables: ClassVar = {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    }


LAUNCHERS = (OpenMpi("openmpi"), Mpirun("mpich"), Mpirun("impi"))
