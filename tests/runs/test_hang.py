"""A rank of a launched run hangs: it is told within a minute, and its worker is started again and trains on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.process_trees import until
from tests.support.small_runs import prepare_text, status, write_files

STEPS, BATCH = 80, 4
BUSY_S = 500.0  # until ranks have joined, on a busy machine
WITHIN_S = 120.0  # twice what is promised, for a busy machine; a collective waits for ten minutes


def rank_of(launcher: int, number: int) -> psutil.Process:
    """The process of this rank."""
    for process in psutil.Process(launcher).children(recursive=True):
        if "pretrain.py" in " ".join(process.cmdline()) and process.environ().get("RANK") == str(number):
            return process
    raise AssertionError(f"no rank {number} is there")


@pytest.mark.slow
@pytest.mark.long("geotrain/worker", "launch")
def test_a_stopped_rank_is_told_and_its_worker_started_again(tmp_path: Path) -> None:
    prepare_text(tmp_path)
    files = write_files(tmp_path, "run", STEPS * BATCH, {"eu": [2]}, {}, min_step_s=0.2)

    def events(source: str, kind: str) -> list[dict[str, Any]]:
        log = tmp_path / f"run/events/{source}.jsonl"
        lines = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
        return [event for event in lines if event["event"] == kind]

    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "geotrain", "launch", *map(str, files)]
    launcher = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert until(lambda: len(events("eu-0", "JobTrained")) > 3, BUSY_S)
        begin_s = time.time()
        rank_of(launcher.pid, 1).send_signal(signal.SIGSTOP)
        assert until(lambda: bool(events("eu-0", "Trouble")), WITHIN_S)
        told = events("eu-0", "Trouble")[0]
        assert told["what"].startswith("hangs: rank 1 (") and "its process does not answer" in told["what"]
        assert told["time_s"] - begin_s < WITHIN_S
        assert launcher.wait(BUSY_S) == 0
    finally:
        launcher.terminate()
        launcher.wait(60.0)
    assert [death["group"] for death in events("launcher", "ProcessDied")] == ["eu-0"]
    assert status(files[0], "global")["committed_samples"] == STEPS * BATCH
