"""The crash explorer, for a moment: nothing breaks; and it would notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What it prints. It forks lives by the hundred, and now and then one of them never begins to move (docs/log.md):
    then it is begun again."""
    command = [sys.executable, "-m", "benchmarks.crash_points", "--quick"]
    for _ in range(4):
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as explorer:
            try:
                out, said = explorer.communicate(timeout=72)
            except subprocess.TimeoutExpired:
                os.killpg(explorer.pid, signal.SIGKILL)
                continue
        assert explorer.returncode == 0, said
        return {**json.loads(out.splitlines()[-1]), "said": said}
    raise TimeoutError("four explorers hung")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_acknowledged_is_lost_at_any_call_that_changes_a_file(found: dict[str, Any]) -> None:
    assert found["points"] > 0 and found["all"] > 1000
    assert found["broken"] == 0, found["said"]
    whose = {life.partition(",")[0] for life in found["lives"]}
    assert whose == {"region", "global", "checkpoint", "export", "prepare"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_would_notice_a_sync_that_is_missing(found: dict[str, Any]) -> None:
    assert found["noticed"] == 1
    assert "power at call" in found["said"]
