"""Whole runs of real processes: several workers a region, starting from a checkpoint, failing well."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from geotrain.commands.evaluate import evaluate
from geotrain.export import export_run
from tests.support.disks import small_disk
from tests.support.small_runs import (
    BATCH,
    LOCAL_STEPS,
    MODEL,
    launch,
    launched,
    losses,
    prepare_text,
    status,
    write_files,
)

SAMPLES = 24 * LOCAL_STEPS * BATCH
HALOS = {"rule": {"name": "halos", "updates_per_send": 2}}
SYNC = {"rule": {"name": "sync"}}  # every worker takes part in every round, however late it started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With prepared text, and a run of three workers, over mutual TLS, that ended, and its export."""
    folder = tmp_path_factory.mktemp("runs")
    prepare_text(folder)
    workers = {"eu": [1, 1], "us": [1]}
    launched(write_files(folder, "several", SAMPLES, workers, SYNC, certificates=folder / "certificates"))
    export_run(folder / "several", folder / "export", "float32")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_several_workers_a_region_over_tls(folder: Path) -> None:
    run_file = folder / "several.json"
    top = status(run_file, "global")
    assert top["committed_samples"] == top["train_samples"] == SAMPLES and top["open_leases"] == 0
    jobs = losses(run_file)
    assert {worker for worker, _ in jobs} == {"eu-0", "eu-1", "us-0"}
    assert len(jobs) == SAMPLES // (LOCAL_STEPS * BATCH)
    exported = evaluate(folder / "export", folder / "data" / "train", 32, 16)
    assert exported < 0.8 * max(jobs.values())


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """64 KiB, mounted in a folder."""
    with small_disk(tmp_path, "64k") as folder:
        yield folder


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk_while_checkpointing_a_run_that_began_from_an_export(folder: Path, tiny_disk: Path) -> None:
    checkpoint = {"folder": str(tiny_disk), "every_jobs": 1}
    model = {"config": MODEL, "init_from": str(folder / "export")}
    files = write_files(folder, "full", SAMPLES, {"eu": [1]}, HALOS, restarts=0, checkpoint=checkpoint, model=model)
    done = launch(files)
    said = done.stdout + done.stderr + (folder / "full" / "logs" / "eu-0.log").read_text()
    assert done.returncode == 0, said
    top = status(files[0], "global")
    assert top["committed_samples"] == SAMPLES
    assert losses(files[0])["eu-0", 1] < 0.85 * math.log(MODEL["vocab_size"])  # what untrained weights begin with
    told = (folder / "full" / "events" / "eu-0.jsonl").read_text()
    for words in (str(tiny_disk), "No space left on device", "training goes on without this checkpoint"):
        assert words in said and words in told
    assert "Traceback" not in said
    assert not [path for path in tiny_disk.rglob("*") if path.is_file()]
