"""`ssh`: one command a host, each over a connection of its own; and ssh for whatever else runs on other machines."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from geotrain.launch.launchers.base import HostLauncher

SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")


class Ssh(HostLauncher):
    """Starts ranks by ssh, which must reach each host without a password."""

    name = "ssh"

    def on_host(self, host: str, command: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
        return over_ssh(host, None, command, env)


LAUNCHERS = (Ssh(),)


def over_ssh(
    host: str, folder: str | None, command: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The command line that runs a command on another machine.

    folder: where it runs; None: the folder of the same path as this process's.
    """
    settings = [f"{key}={value}" for key, value in (env or {}).items()]
    script = shlex.join(["exec", "env", *settings, *command] if settings else ["exec", *command])
    return (*SSH, "--", host, f"cd -- {shlex.quote(folder or str(Path.cwd()))} && {script}")
