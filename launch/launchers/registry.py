"""Finds launchers by the name that a worker's `launcher` gives in the cluster file.

Each file of this folder lists its own in LAUNCHERS. Other packages register a subclass of `Launcher` under its name,
as an entry point of the group "geotrain.launchers" (docs/extending.md).
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path

from geotrain.common.entry_points import registered
from geotrain.config import ConfigError, WorkerConfig
from geotrain.config.block import nearest
from geotrain.launch.launchers.base import Launcher, WorkerCommands, WorkerPlace


@cache
def launchers() -> dict[str, Launcher]:
    """The launchers of this folder, by name."""
    names = [f"{__package__}.{module.name}" for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    found = (getattr(import_module(name), "LAUNCHERS", ()) for name in names if name != __name__)
    return {launcher.name: launcher for each in found for launcher in each}


def launcher_of(worker: WorkerConfig) -> Launcher:
    """The launcher that starts this worker. Raises ConfigError, with the nearest name, where there is none."""
    name = worker.launcher
    if name in launchers():
        return launchers()[name]
    try:
        kind = registered("geotrain.launchers", name, Launcher)  # type: ignore[type-abstract]
    except ValueError as error:
        raise ConfigError(f"worker {worker.name!r}: launcher: {error}") from None
    if kind is None:
        raise ConfigError(f"worker {worker.name!r}: launcher = {name!r}: {nearest(name, launchers())}")
    return kind()


def worker_commands(place: WorkerPlace, region: str, worker: WorkerConfig) -> WorkerCommands:
    """Make the commands that start a worker of this region. Raises ConfigError if its launcher cannot start it.

    Ranks are numbered in the order of the worker's hosts, whatever regions they are in: by that order `geotrain plan`
    decides which pipeline stage is computed where.
    """
    hosts = [host.host for host in worker.hosts]
    if len(set(hosts)) < len(hosts):
        raise ConfigError(f"worker {worker.name!r}: hosts names a host twice ({', '.join(hosts)}); add up its slots")
    return launcher_of(worker).commands(place, region, worker)
