"""Each file of this folder, over each transport that it names, comes out as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.language import played, transports_of

FILES = sorted(Path(__file__).parent.glob("*.txt"))
PLAYS = [(file, transport) for file in FILES for transport in transports_of(file.read_text())]


@pytest.mark.parametrize(("file", "transport"), PLAYS, ids=[f"{f.stem}-{t}" for f, t in PLAYS])
def test_scenario(file: Path, transport: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    now = played(file.read_text(), transport, tmp_path)
    if request.config.option.rewrite:
        file.write_text(now)
    assert now == file.read_text()
