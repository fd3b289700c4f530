"""`pdsh`: all ranks by DeepSpeed's launcher over the program pdsh, which must be installed on the machine that starts
the worker, with its ssh module."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from geotrain.config import WorkerConfig
from geotrain.launch.launchers.base import Inquiry, WorldLauncher, with_settings


class Pdsh(WorldLauncher):
    """Starts and asks all hosts of a worker at once by pdsh, as DeepSpeed calls it."""

    name = "pdsh"
    takes_ipv6 = True
    rank_failed = re.compile(rb"pdsh@\S+: \S+: ssh exited with exit code ")
    options = ()  # DeepSpeed checks ssh before it calls pdsh

    def inquiry(self, worker: WorkerConfig, hosts: Sequence[str], command: Sequence[str]) -> Inquiry | None:
        script = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(with_settings(worker.env, command))}"
        arguments = shlex.split(worker.launcher_args)
        line = ("pdsh", "-S", "-f", "1024", "-w", ",".join(hosts), *arguments, script)
        return Inquiry(self, tuple(hosts), line, {"PDSH_RCMD_TYPE": "ssh"})

    def host_of(self, inquiry: Inquiry, line: str, own_name: str) -> str:
        return line.partition(": ")[0].strip()  # pdsh puts the host's name before its lines


LAUNCHERS = (Pdsh(),)
