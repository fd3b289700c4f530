"""The crash explorer, for a moment: nothing breaks; and it would notice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.chaos.crash_points", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "said": done.stderr}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_acknowledged_is_lost_at_any_call_that_changes_a_file(found: dict[str, Any]) -> None:
    assert found["points"] > 0 and found["all"] > 1000
    assert found["broken"] == 0, found["said"]
    whose = {incarnation.partition(",")[0] for incarnation in found["incarnations"]}
    assert whose == {"region", "global", "checkpoint", "export", "prepare"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_would_notice_a_sync_that_is_missing(found: dict[str, Any]) -> None:
    assert found["noticed"] == 1
    assert "power at call" in found["said"]
