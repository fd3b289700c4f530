"""Programs that stand in for those that GeoTrain calls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Hosts are this machine, where $HERE, if it is set, is another folder: $HERE-<host>. "gone" is not there, "silent"
# does not answer, and "bare" has no GeoTrain. Each call's host is noted in the program's folder.
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
host=$1; shift
echo "$host" >> "${0%/*}/hosts.txt"
[[ $host == gone ]] && { echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255; }
[[ $host == bare ]] && { echo "python: No module named 'geotrain'" >&2; exit 1; }
[[ $host == silent ]] && exec sleep 60
[[ $HERE ]] && mkdir -p "$HERE-$host" && exec bash -c "${*//$HERE/$HERE-$host}"
exec bash -c "$*"
"""


def program(path: Path, text: str) -> None:
    """Write a program, and its folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def stand_in(patch: pytest.MonkeyPatch, path: Path, text: str) -> None:
    """Write a program that is found before any other of its name."""
    program(path, text)
    patch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
