"""Asks one host by a command there, and brings the run's files to it."""

from __future__ import annotations

import io
import shlex
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geotrain.launch.launchers.base import HostLauncher

# Each file gets its name when it is whole, since hosts that do share a file system may be reading it.
_TAKE = """
mkdir -p {folder}/hosts && new=$(mktemp -d {folder}/.new.XXXXXX) && trap 'rm -rf "$new"' EXIT &&
tar -xf - -C "$new" || exit
for name in {names}; do mv -f "$new/$name" {folder}/"$name" || exit; done
for file in {data}; do test -r "$file" || {{ echo "cannot read $file" >&2; exit 1; }}; done
"""


def bring_files(
    launcher: HostLauncher, host: str, folder: Path, hostfiles: Sequence[str], data: Sequence[str], within_s: float
) -> str:
    """Bring run.json, cluster.json and hostfiles to the run's folder on a host, and see that it can read these data.
    Returns why that failed, or ""."""
    packed, names = io.BytesIO(), ["run.json", "cluster.json", *hostfiles]
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in names:
            archive.add(folder / name, name)
    script = _TAKE.format(folder=shlex.quote(str(folder)), names=shlex.join(names), data=shlex.join(data))
    return ask(launcher.on_host(host, ("sh", "-c", script)), within_s, input=packed.getvalue())[1]


def ask(command: Sequence[str], within_s: float, **more: Any) -> tuple[str, str]:
    """Run a command; returns what it printed, and why it failed; "": it did not. more: for `subprocess.run`."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=within_s, **more)
    except OSError as error:
        return "", str(error)
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), f"no answer within {within_s:g} s"
    why = ""
    # Where a program is missing or fails, its own words stand last; ssh itself says one line.
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1].strip() if lines else f"exit code {done.returncode}"
    return done.stdout.decode(errors="replace"), why
