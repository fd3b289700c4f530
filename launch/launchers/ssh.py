"""`ssh`: one command a host, each over a connection of its own; and ssh for whatever else runs on other machines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from geotrain.launch.launchers.base import HostLauncher

SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")


class Ssh(HostLauncher):
    """Starts ranks by ssh, which must reach each host without a password."""

    name = "ssh"

    def on_host(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        return over_ssh(host, None, command)


LAUNCHERS = (Ssh(),)


def over_ssh(host: str, folder: str | None, command: Sequence[str]) -> tuple[str, ...]:
    """The command line that runs a command on another machine.

    folder: where it runs; None: the folder of the same path as this process's.
    """
    return (*SSH, "--", host, f"cd -- {shlex.quote(folder or str(Path.cwd()))} && exec {shlex.join(command)}")
