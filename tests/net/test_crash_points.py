"""The crash explorer, for a moment: nothing breaks; and it would notice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def explored(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.crash_points", "--quick", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = {**json.loads(done.stdout.splitlines()[-1]), "said": done.stderr}
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_acknowledged_is_lost_at_any_call_that_changes_a_file() -> None:
    found = explored()
    assert found["points"] > 0 and found["all"] > 1000
    assert found["broken"] == 0, found["said"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_would_notice_a_sync_that_is_missing() -> None:
    found = explored("--forget-syncs")
    assert found["broken"] > 0
    assert "power at call" in found["said"]
