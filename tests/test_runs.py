"""Whole runs of real processes: several workers a region, starting from a checkpoint, failing well."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from geotrain.canonical import architecture_from_hf, canonical_parameters
from geotrain.evaluate import evaluate
from geotrain.export import export_run, write_checkpoint
from tests.small_runs import BATCH, LOCAL_STEPS, MODEL, launch, launched, losses, prepare_text, status, write_files

SAMPLES = 24 * LOCAL_STEPS * BATCH
HALOS = {"rule": "halos", "updates_per_send": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    prepare_text(folder)
    generator = torch.Generator().manual_seed(4)
    parameters = canonical_parameters(architecture_from_hf(MODEL))
    tensors = [(p.name, torch.randn(p.shape, generator=generator) * 0.05 + (p.init == "ones")) for p in parameters]
    write_checkpoint(tensors, MODEL, folder / "checkpoint", dtype="float32")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_several_workers_a_region_from_a_checkpoint(folder: Path) -> None:
    model = {"config": MODEL, "init_from": str(folder / "checkpoint")}
    files = write_files(folder, "several", SAMPLES, {"eu": [1, 1], "us": [1]}, HALOS, model=model)
    launched(files)
    top = status(files[0], "global")
    assert top["committed_samples"] == top["train_samples"] == SAMPLES and top["open_leases"] == 0
    jobs = losses(files[0])
    assert {worker for worker, _ in jobs} == {"eu-0", "eu-1", "us-0"}
    assert len(jobs) == SAMPLES // (LOCAL_STEPS * BATCH)
    export_run(folder / "several", folder / "export", "float32")
    before, after = (
        evaluate(path, folder / "data" / "train", 32, 16) for path in (folder / "checkpoint", folder / "export")
    )
    assert after < before
    first = min(loss for (_, job), loss in jobs.items() if job == 1)
    assert first == pytest.approx(before, rel=0.1)  # it began where the checkpoint was


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """64 KiB, mounted in a folder."""
    assert os.geteuid() == 0, "mounting a file system needs root"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "geotrain-test", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk_while_checkpointing(folder: Path, tiny_disk: Path) -> None:
    checkpoint = {"folder": str(tiny_disk), "every_jobs": 1}
    files = write_files(folder, "full", SAMPLES, {"eu": [1]}, HALOS, checkpoint=checkpoint)
    done = launch(files)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert str(tiny_disk) in said and "No space left on device" in said
    assert "Traceback" not in said
    assert not [path for path in tiny_disk.rglob("*") if path.is_file()]
