"""Runs of a study that are ended and go on: the same row, to the last digit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import benchmarks.studies.claims.kept as keeping
from benchmarks.studies.claims.kept import Kept, drop
from benchmarks.studies.claims.methods import METHODS, OURS, OURS_2BIT, SYNCHRONOUS, muon
from benchmarks.studies.claims.runs import Job, run
from benchmarks.studies.learner.training import Study, training_task
from geotrain.simulate.spec import WorkerSpec

ROOT = Path(__file__).parents[3]
TINY = {"hidden": 16, "layers": 1, "heads": 2, "ffn": 32, "batch": 1, "length": 16}
OF_THE_MACHINE = ("cpu_s", "wall_s")


class Stopped(Exception):
    pass


def job(method: str, steps: int = 160) -> Job:
    return Job(method, {"lr": 0.01, **METHODS[method].published()}, 0, steps, TINY, points=8)


def result(row: dict) -> dict:
    return {name: value for name, value in row.items() if name not in OF_THE_MACHINE}


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call with n: every run of this test is ended after so many states."""

    def stops(every: int) -> None:
        count, save_if_due = iter(range(1, 10**6)), Kept.save_if_due

        def counted(self: Kept, state: Callable[[], object]) -> None:
            save_if_due(self, state)
            if next(count) % every == 0:
                raise Stopped

        monkeypatch.setattr(Kept, "save_if_due", counted)

    return stops


@pytest.mark.parametrize(
    ("of", "every"),
    [
        (job(muon(OURS_2BIT)), 5),  # momentum, ledger, coded changes both ways
        (job(OURS), 3),  # 4 bits
        (job(muon(SYNCHRONOUS)), 4),
        (job("diloco-fair", 600), 3),  # rounds: deltas that wait for others
        (job("async-local-sgd"), 1),  # flat
    ],
    ids=lambda value: value.method if isinstance(value, Job) else "",
)
def test_a_run_that_was_ended_gives_the_same_row(of, every, stops, tmp_path, capsys):
    never = result(run(of))
    stops(every)
    told: list[list] = [[]]
    while True:
        try:
            row = run(of, told[-1].append, tmp_path, every_s=0)
            break
        except Stopped:
            told.append([])
    assert result(row) == never
    assert capsys.readouterr().out.count("goes on at") == len(told) - 1 >= 2
    assert [[p.time_s, p.committed_share, p.test] for p in told[-1]] == never["curve"]  # the former sittings' too
    for sitting in told[:-1]:
        assert sitting == told[-1][: len(sitting)]


KILLED = """
import json, os, signal, sys
from pathlib import Path
import torch
from benchmarks.studies.claims.runs import Job, run

def save(state, file, states=[0]):
    states[0] += 1
    if states[0] == 5:
        file.write(b"a part")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    of_its_own(state, file)

of_its_own, torch.save = torch.save, save
run(Job(**json.loads(sys.argv[1])), None, Path(sys.argv[2]), every_s=0)
"""


def test_a_run_killed_while_its_state_is_written_goes_on_with_the_one_before(tmp_path, capsys):
    of = job(muon(OURS_2BIT))
    command = [sys.executable, "-c", KILLED, json.dumps(asdict(of)), str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(list(tmp_path.iterdir())) == 2  # a whole one, and a part
    assert result(run(of, states=tmp_path, every_s=0)) == result(run(of))
    assert "goes on at" in capsys.readouterr().out
    drop(tmp_path, of.key)
    assert not list(tmp_path.glob("*.state"))


def test_what_other_code_wrote_is_not_used(stops, tmp_path, capsys, monkeypatch):
    of = job(muon(SYNCHRONOUS), steps=64)
    stops(1)
    with pytest.raises(Stopped):
        run(of, states=tmp_path, every_s=0)
    monkeypatch.undo()
    monkeypatch.setattr(keeping, "code", lambda: "0123456789ab")
    assert result(run(of, states=tmp_path)) == result(run(of)) and "goes on" not in capsys.readouterr().out


def test_a_state_is_saved_when_it_is_time_and_while_somebody_wants_the_result(tmp_path, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(keeping.time, "monotonic", lambda: now_s[0])
    kept, saved = Kept(tmp_path, "key", 300.0), []
    for now_s[0] in (299.0, 301.0, 600.0, 602.0):
        kept.save_if_due(lambda: saved.append(now_s[0]))
    assert saved == [301.0, 602.0]
    ended = type("Ended", (), {"is_alive": lambda self: False})()
    monkeypatch.setattr(keeping.multiprocessing, "parent_process", lambda: ended)
    with pytest.raises(SystemExit):
        kept.save_if_due(lambda: None)


def test_workers_that_were_kept_still_have_their_parts_in_the_stack(tmp_path):
    study = Study(1, hidden=16, layers=1, heads=2, ffn=32)
    fleet = training_task(study, job(SYNCHRONOUS).resolved.outer, 1).learner
    members = [fleet(WorkerSpec(name, 1.0)) for name in "ab"]
    members[1].born()
    torch.save(fleet, tmp_path / "fleet")
    again = torch.load(tmp_path / "fleet", weights_only=False)
    assert torch.equal(again.models.weights, fleet.models.weights)  # type: ignore[attr-defined]
    for master in again.members[1].rank.shards[0].masters:
        master.zero_()
    assert again.models.weights[0].all() and not again.models.weights[1].all()
