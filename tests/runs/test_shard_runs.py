"""Whole runs whose servers have shards in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from geotrain.config import load_run
from tests.support.small_runs import launched, prepare_text, weights, write_files

SYNC = {"rule": {"name": "sync"}, "up": {"name": "int4"}}


@pytest.mark.slow
def test_two_regions_with_two_shards_each_train_the_same_weights(tmp_path: Path) -> None:
    """As with one process a server, bit for bit; a shard is killed on the way, and its launcher starts it again."""
    prepare_text(tmp_path)
    workers = {"eu": [1], "us": [1]}
    one = write_files(tmp_path, "one", 32, workers, SYNC)
    two = write_files(tmp_path, "two", 32, workers, SYNC, certificates=tmp_path / "certs", shards=2, min_step_s=0.2)
    launched(one)
    folder = load_run(two[0]).run_folder / "servers"
    killed: list[int] = []

    def kill() -> None:
        """Once its region has taken an update."""
        deadline_s = time.monotonic() + 120
        events, listening = folder / "eu" / "events.jsonl", folder / "eu.shard-1" / "listening.json"
        while time.monotonic() < deadline_s and not killed:
            time.sleep(0.1)
            with suppress(FileNotFoundError):
                if "UpdateApplied" in events.read_text():
                    killed.append(json.loads(listening.read_text())["pid"])
                    os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    launched(two)
    killer.join(120)
    assert killed
    found, wanted = weights(two[0]), weights(one[0])
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
