"""A run of real processes, stopped half-way and resumed: the same bits on the same layout, equal loss on another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.small_runs import BATCH, LOCAL_STEPS, launched, losses, prepare_text, status, weights, write_files

ROUNDS = 12
SAMPLES_PER_ROUND = 2 * LOCAL_STEPS * BATCH  # two workers


def files(folder: Path, name: str, rounds: int, us_ranks: int = 1) -> tuple[Path, Path]:
    return write_files(
        folder, name, rounds * SAMPLES_PER_ROUND, {"eu": [1], "us": [us_ranks]}, {"rule": {"name": "sync"}}
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """straight: 12 rounds. stopped: 6, then 6 more. other: the same 6, then 6 more with two ranks in `us`."""
    folder = tmp_path_factory.mktemp("resume")
    prepare_text(folder)
    launched(files(folder, "straight", ROUNDS))
    launched(files(folder, "stopped", ROUNDS // 2))
    shutil.copytree(folder / "stopped", folder / "other")
    launched(files(folder, "stopped", ROUNDS), "--resume")
    launched(files(folder, "other", ROUNDS, us_ranks=2), "--resume")
    return {name: folder / f"{name}.json" for name in ("straight", "stopped", "other")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_six_and_six_rounds_are_twelve_bitwise(runs: dict[str, Path]) -> None:
    straight, stopped = weights(runs["straight"]), weights(runs["stopped"])
    assert straight.keys() == stopped.keys() and len(straight) > 20
    for name, tensor in straight.items():
        assert torch.equal(tensor, stopped[name]), name
    assert losses(runs["stopped"]) == losses(runs["straight"])
    assert len(losses(runs["straight"])) == 2 * ROUNDS
    for server in ("global", "eu", "us"):
        members = status(runs["stopped"], server)["members"]
        assert {member["restarts"] for member in members.values()} == {0}, "it had ended; nobody was restarted"


@pytest.mark.slow
def test_another_data_parallel_size_resumes_with_equal_loss(runs: dict[str, Path]) -> None:
    straight, other = losses(runs["straight"]), losses(runs["other"])
    assert other.keys() == straight.keys()
    for job, loss in straight.items():
        assert other[job] == pytest.approx(loss, rel=1e-4), job
    assert min(straight.values()) < 0.9 * max(straight.values())
