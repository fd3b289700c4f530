"""What `StepProfiler` records, and what becomes of it on a disk that refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch

from geotrain.worker.profile import StepProfiler


def recorded(folder: Path, asked: dict[int, int], steps: int) -> tuple[list[Any], list[str]]:
    """Events and troubles of a worker of so many inner steps. asked: after which of them, for how many."""
    events: list[Any] = []
    troubles: list[str] = []
    profiler = StepProfiler(folder, "eu-0", 1, events.append, troubles.append)
    for step in range(steps + 1):
        if step:
            torch.ones(4, 4) @ torch.ones(4, 4)
        if step in asked:
            profiler.ask(asked[step])
        profiler.after_step((7, step) if step < steps else None)
    return events, troubles


def products(path: str) -> int:
    trace = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return sum(event["name"] == "aten::mm" for event in trace)


def test_as_many_steps_as_asked_for_are_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    events, troubles = recorded(folder, {1: 3, 2: 2, 9: 5}, 11)
    assert [(e.worker, e.rank, e.steps, Path(e.path).name) for e in events] == [
        ("eu-0", 1, 3, "eu-0-rank-1-job-7-step-1.json.gz"),
        ("eu-0", 1, 2, "eu-0-rank-1-job-7-step-4.json.gz"),  # asked for meanwhile
        ("eu-0", 1, 2, "eu-0-rank-1-job-7-step-9.json.gz"),  # no more steps came
    ]
    assert [products(e.path) for e in events] == [3, 2, 2] and not troubles
    assert len(list(folder.iterdir())) == 3


def test_training_goes_on_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "profiles").touch()
    events, (trouble,) = recorded(tmp_path / "profiles", {1: 2}, 5)
    assert not events and trouble.startswith("no trace of 2 inner steps: ")
