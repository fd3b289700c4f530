"""The crash explorer: nothing breaks, at some points or at all; and it would notice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.drawn import seed_of

ROOT = Path(__file__).parents[3]
WHOLE = pytest.mark.long("tests/chaos/crash_points", "geotrain/checkpoint", "geotrain/common", "geotrain/net/storage")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("points", [12, pytest.param(400, marks=WHOLE)])
def test_nothing_acknowledged_is_lost_at_any_call_that_changes_a_file(
    points: int, request: pytest.FixtureRequest
) -> None:
    """At those that the commit draws, or CRASH_SEED; with `--all` the second case takes all of them."""
    everything = points == 400 and request.config.option.all
    words = ["--all"] if everything else ["--points", str(points), "--seed", str(seed_of("CRASH_SEED"))]
    command = [sys.executable, "-m", "tests.chaos.crash_points", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["points"] == (found["all"] if everything else points) and found["all"] > 1000
    assert found["broken"] == 0, (words, done.stderr)
    whose = {incarnation.partition(",")[0] for incarnation in found["incarnations"]}
    assert whose == {"region", "global", "checkpoint", "export", "prepare"}
    assert found["noticed"] == 1 and "power at call" in done.stderr  # a sync that is missing
