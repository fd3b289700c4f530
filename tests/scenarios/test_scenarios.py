"""Plays each file of this folder over each transport that it names; it must come out as it stands.

`tests.support.scenario_language` says how a file is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.scenario_language import played, transports_of

FILES = sorted(Path(__file__).parent.glob("*.txt"))


def played_over(*transports: str) -> Any:
    """Runs a test with each file and transport."""
    plays = [(f, t) for f in FILES for t in transports_of(f.read_text()) if t in transports]
    return pytest.mark.parametrize(("file", "transport"), plays, ids=[f.stem for f, _ in plays])


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


@played_over("processes")
def test_as_processes(file: Path, transport: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    check(file, transport, tmp_path, request)
