"""A worker whose host is lost is formed anew of the others, and of all again when the host is back: behind a real
sshd, whose hosts are this machine by several names."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from geotrain.checkpoint.folders import manifests
from tests.support.healing import BUSY_S, ENOUGH, ENV, EXPERTS, HOSTS, Launched, geotrain, hosts_by_ssh
from tests.support.process_trees import new_mark
from tests.support.slurm import slurm
from tests.support.small_runs import BATCH, prepare_text, status


@pytest.fixture
def ssh(tmp_path: Path, free_port: int) -> Iterator[dict[str, str]]:
    with hosts_by_ssh(tmp_path, free_port) as mark:
        yield mark


@pytest.mark.long("launch")
@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("own", ["run/checkpoints", None], ids=["own disks", "shared"])
def test_a_lost_host_leaves_its_worker_and_comes_back(tmp_path: Path, free_port: int, own: str | None) -> None:
    """With its disk, where it has one of its own."""
    run = Launched(tmp_path, ENOUGH, {"rule": {"name": "halos"}}, HOSTS, checkpoint={"every_jobs": 1})
    with hosts_by_ssh(tmp_path, free_port, own and tmp_path / own) as ssh, run.running():
        run.happens(lambda: run.jobs() > 2)
        run.lose(HOSTS[1])
        run.happens(lambda: len(run.events("WorkerFormed")) == 1)
        saved = manifests(tmp_path / (f"disks/{HOSTS[0]}" if own else "run/checkpoints") / "eu-0")
        assert saved[0][0]["extra"]["job"] >= run.jobs() - 1, "one job is lost at most"
        for place in (tmp_path / f"disks/{HOSTS[1]}").glob("*"):
            shutil.rmtree(place)
        (formed,) = run.events("WorkerFormed")
        assert formed["hosts"] == [HOSTS[0]] and formed["why"] == f"without {HOSTS[1]}: exit code 255"
        run.trains_on()
        (tmp_path / "lost").unlink()
        run.happens(lambda: len(run.events("WorkerFormed")) == 2)
        assert run.events("WorkerFormed")[1]["hosts"] == list(HOSTS)
        run.trains_on()
        run.stops()
        run.is_whole(ssh)
    assert "without its saved state" not in run.said


@pytest.mark.long("launch")
@pytest.mark.slow
@pytest.mark.root
def test_hosts_are_cordoned_and_freeze_while_the_global_server_is_away(tmp_path: Path, ssh: dict[str, str]) -> None:
    """Under ACCO. The checkpoint is of two hosts, then of one, then of two again."""
    acco: dict[str, Any] = {
        "checkpoint": {"every_jobs": 1},
        "acco": {},
        "monitor": {"hang_s": 20.0, "verified_share": 0.2},
    }
    run = Launched(tmp_path, 600 * BATCH, {"rule": {"name": "halos"}}, HOSTS, **acco)
    with run.running() as launcher:
        run.happens(lambda: run.jobs() > 2)
        geotrain("cordon", str(tmp_path / "run"), HOSTS[0], "--why", "a fan is loud")
        run.happens(lambda: len(run.events("WorkerFormed")) == 1)
        run.trains_on()
        said = geotrain("status", str(tmp_path / "run"), "--once")
        assert f"eu-0 is formed of {HOSTS[1]}" in said and f"{HOSTS[0]} is cordoned: a fan is loud" in said
        geotrain("uncordon", str(tmp_path / "run"), HOSTS[0])
        run.happens(lambda: len(run.events("WorkerFormed")) == 2)
        run.trains_on()
        assert not run.events("ProcessDied"), run.said  # no step was lost
        *_, server = run.processes("global")  # behind its guard
        server.suspend()
        run.lose(HOSTS[1], signal.SIGSTOP)
        run.happens(lambda: len(run.events("WorkerFormed")) == 3)
        assert run.events("WorkerFormed")[2]["hosts"] == [HOSTS[0]]
        server.resume()
        run.trains_on()
        assert launcher.wait(BUSY_S) == 0, run.said
    assert status(run.files[0], "global")["complete"]
    for process in run.processes(f"eu-0@{HOSTS[1]}"):
        process.kill()
    run.is_whole(ssh)


def with_code(run: Launched, code: str) -> None:
    """Let the worker's ranks run that code as they start."""
    (run.folder / "code").mkdir()
    (run.folder / "code/sitecustomize.py").write_text(code)
    run.worker(env={**ENV, "PYTHONPATH": str(run.folder / "code")})


STANDS = """
import os, time
if os.environ.get("RANK") == "3":
    from geotrain.checkpoint.copies import CheckpointCopies
    move, moved = CheckpointCopies._move, []

    def stands(self, *given):
        moved.append(given)
        if len(moved) == 4 and not os.path.exists("{stands}"):
            open("{stands}", "x").close()
            time.sleep(1e6)
        return move(self, *given)

    CheckpointCopies._move = stands
"""


@pytest.mark.long("launch", "geotrain/checkpoint")
@pytest.mark.slow
@pytest.mark.root
def test_a_host_is_lost_while_its_checkpoint_is_copied(tmp_path: Path, free_port: int) -> None:
    """Of a pipeline: the other host has half of the layers' state of that checkpoint, and all of the one before."""
    run = Launched(tmp_path, ENOUGH, {"rule": {"name": "halos"}}, HOSTS, checkpoint={"every_jobs": 1})
    with_code(run, STANDS.format(stands=tmp_path / "stands"))
    run.worker(parallel={"pipeline": 2})
    with hosts_by_ssh(tmp_path, free_port, tmp_path / "run/checkpoints") as ssh, run.running():
        run.happens((tmp_path / "stands").exists)
        run.lose(HOSTS[1])
        run.happens(lambda: len(run.events("WorkerFormed")) == 1)
        run.trains_on()
        (tmp_path / "lost").unlink()
        run.happens(lambda: len(run.events("WorkerFormed")) == 2)
        run.trains_on()
        run.stops()
        run.is_whole(ssh)
    assert "without its saved state" not in run.said


@pytest.mark.long("launch")
@pytest.mark.slow
@pytest.mark.root
def test_a_node_of_slurm_is_lost_and_comes_back(tmp_path: Path) -> None:
    """Of a worker with experts, whose srun makes jobs of its own."""
    prepare_text(tmp_path)
    run = Launched(
        tmp_path, ENOUGH, {"rule": {"name": "halos"}}, HOSTS, checkpoint={"every_jobs": 1}, model={"config": EXPERTS}
    )
    run.worker(launcher="slurm", parallel={"expert": 2})
    mark = new_mark()
    with slurm(tmp_path / "slurm", *HOSTS) as nodes, mock.patch.dict(os.environ, nodes.env | mark), run.running():
        run.happens(lambda: run.jobs() > 2)
        nodes.lose(HOSTS[1])
        run.happens(lambda: len(run.events("WorkerFormed")) == 1)
        run.trains_on()
        nodes.start(HOSTS[1])
        run.happens(lambda: len(run.events("WorkerFormed")) == 2)
        run.trains_on()
        run.stops()
        run.is_whole(mark)
    assert [event["hosts"] for event in run.events("WorkerFormed")] == [[HOSTS[0]], [*HOSTS]]
    assert "without its saved state" not in run.said


FLIPS = """
import os
if os.environ.get("RANK") == "2":
    from geotrain.inner.engine import recompute
    bits = recompute.weight_bits

    def flipped(engine):
        next(engine.module.parameters()).data.view(-1)[:1].neg_()
        return bits(engine)

    recompute.weight_bits = flipped
"""


@pytest.mark.long("launch", "geotrain/worker")
@pytest.mark.slow
@pytest.mark.root
def test_the_host_of_a_rank_whose_weights_flip_is_cordoned(tmp_path: Path, ssh: dict[str, str]) -> None:
    keys: dict[str, Any] = {"checkpoint": {"every_jobs": 1}, "monitor": {"verified_share": 0.5}}
    run = Launched(tmp_path, 100 * BATCH, {"rule": {"name": "halos"}}, HOSTS, **keys)
    with_code(run, FLIPS)
    with run.running() as launcher:
        assert launcher.wait(BUSY_S) == 0, run.said
    (formed,) = run.events("WorkerFormed")
    assert formed["hosts"] == [HOSTS[0]] and "cordoned: device cpu: its weights are not those of" in formed["why"]
    found = {event["job"]: event["wrong_results"] for event in run.events("JobTrained", "eu-0")}
    assert found[1] == 0.0 and found[2] == 1.0, "it is found in the second job, which is the first that is verified"
    assert status(run.files[0], "global")["complete"]
