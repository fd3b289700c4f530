"""Plays each file of this folder over each transport that it names; it must come out as it stands.

`tests.support.scenario_language` says how a file is written.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.recorded_world import frozen
from tests.support.scenario_language import played, transports_of
from tests.support.scenario_worlds import InMemory

FILES = sorted(Path(__file__).parent.glob("*.txt"))
HASH_SEEDS = "3", "6"  # in processes of these two, sets of the names used here have opposite orders


def plays(*transports: str) -> list[tuple[Path, str]]:
    return [(f, t) for f in FILES for t in transports_of(f.read_text()) if t in transports]


def played_over(*transports: str) -> Any:
    """Runs a test with each file and transport."""
    ids = [f.stem for f, _ in plays(*transports)]
    return pytest.mark.parametrize(("file", "transport"), plays(*transports), ids=ids)


def check(file: Path, transport: str, folder: Path, request: pytest.FixtureRequest) -> None:
    now = played(file.read_text(), transport, folder)
    if request.config.option.rewrite:
        file.write_text(now)
    assert now == file.read_text()


@played_over("memory", "messages")
def test_in_memory(file: Path, transport: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    check(file, transport, tmp_path, request)


@played_over("sockets")
def test_over_sockets(file: Path, transport: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    check(file, transport, tmp_path, request)


def states() -> str:
    """A digest of all states that servers come to in the stories that are told in memory."""
    found, rest = hashlib.sha256(), InMemory.rest

    def noted(world: InMemory) -> None:
        rest(world)
        for server in (world.world.top, *world.world.regions.values()):
            tensors, plain = frozen(server)
            found.update(plain.encode() + b"".join(x.numpy().tobytes() for x in tensors.values()))

    with patch.object(InMemory, "rest", noted), TemporaryDirectory() as folder:
        for number, (file, transport) in enumerate(plays("memory", "messages")):
            (place := Path(folder) / str(number)).mkdir()
            played(file.read_text(), transport, place)
    return found.hexdigest()


@pytest.mark.long("geotrain/outer", "tests/scenarios")
def test_no_state_depends_on_the_order_of_a_set() -> None:
    """Which differs from process to process: a snapshot would differ from what a replay gives, and what is dropped
    first as the oldest would be another."""
    command = [sys.executable, "-c", f"from {__name__} import states; print(states())"]
    plays = [
        subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
        )
        for seed in HASH_SEEDS
    ]
    one, other = (play.communicate(timeout=600)[0] for play in plays)
    assert one and one == other
