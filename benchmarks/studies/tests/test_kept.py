"""Runs of a study that are ended and go on: the same row, to the last digit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import benchmarks.studies.claims.kept as keeping
from benchmarks.studies.claims.kept import Keeper, Kept, Spent
from benchmarks.studies.claims.methods import METHODS, OURS, OURS_2BIT, SYNCHRONOUS, muon
from benchmarks.studies.claims.runs import Job, run
from benchmarks.studies.learner.model import SmallLM, small_architecture
from geotrain.parameters.parameter_map import canonical_parameters

ROOT = Path(__file__).parents[3]
TINY = {"hidden": 16, "layers": 1, "heads": 2, "ffn": 32, "batch": 1, "length": 16}
OF_THE_MACHINE = ("cpu_s", "wall_s")


class Stopped(Exception):
    pass


def job(method: str, steps: int = 160, world: str = "published") -> Job:
    return Job(method, {"lr": 0.01, **METHODS[method].published()}, world, 0, steps, TINY, points=8)


def result(row: dict) -> dict:
    return {name: value for name, value in row.items() if name not in OF_THE_MACHINE}


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call with n: every run of this test is ended after so many states."""

    def stops(every: int) -> None:
        count, save = iter(range(1, 10**6)), Kept.save

        def counted(self: Kept, *args) -> None:
            save(self, *args)
            if next(count) % every == 0:
                raise Stopped

        monkeypatch.setattr(Kept, "save", counted)

    return stops


@pytest.mark.parametrize(
    ("of", "every"),
    [
        (job(muon(OURS_2BIT)), 5),  # momentum, ledger, coded changes both ways
        (job(OURS, world="workers-dying"), 9),  # 4 bits; lives that end and begin
        (job(muon(SYNCHRONOUS)), 4),
        (job("diloco-fair", 600), 3),  # rounds: deltas that wait for others
        (job("async-local-sgd", world="late-join"), 12),  # flat; workers that are not there yet
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
import benchmarks.studies.claims.kept as keeping
from benchmarks.studies.claims.runs import Job, run

def write(self, part, states=[0]):
    states[0] += self.bytes == 0
    if states[0] == 5 and self.bytes > 20_000:
        os.kill(os.getpid(), signal.SIGKILL)
    return of_its_own(self, part)

of_its_own, keeping._Summed.write = keeping._Summed.write, write
run(Job(**json.loads(sys.argv[1])), None, Path(sys.argv[2]), every_s=0)
"""


def test_a_run_killed_while_its_state_is_written_goes_on_with_the_one_before(tmp_path, capsys):
    of = job(muon(OURS_2BIT))
    command = [sys.executable, "-c", KILLED, json.dumps(asdict(of)), str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(list(tmp_path.glob("*.state"))) == 2  # a whole one, and a part
    assert result(run(of, states=tmp_path, every_s=0)) == result(run(of))
    assert "goes on at" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.state"))) == 1


def state_of(folder: Path, stops: Callable[[int], None], of: Job) -> tuple[Path, Path]:
    """(the state's description, the state) of a run that was ended."""
    stops(1)
    with pytest.raises(Stopped):
        run(of, states=folder, every_s=0)
    (about,), (body,) = folder.glob("*.json"), folder.glob("*.state")
    return about, body


def damage(about: Path, body: Path) -> None:
    content = bytearray(body.read_bytes())
    content[len(content) // 2] ^= 1
    body.write_bytes(content)


def cut_short(about: Path, body: Path) -> None:
    os.truncate(body, body.stat().st_size - 1)


def no_json(about: Path, body: Path) -> None:
    about.write_text("{")


def of_another_run(about: Path, body: Path) -> None:
    about.write_text(json.dumps(json.loads(about.read_text()) | {"key": "another"}))


def missing(about: Path, body: Path) -> None:
    body.unlink()


@pytest.mark.parametrize("how", [damage, cut_short, no_json, of_another_run, missing], ids=lambda how: how.__name__)
def test_a_state_that_is_none_is_told_and_the_run_begins_anew(how, stops, tmp_path, capsys):
    of = job(muon(SYNCHRONOUS), steps=64)
    how(*state_of(tmp_path, stops, of))
    assert result(run(of, states=tmp_path)) == result(run(of))
    out = capsys.readouterr().out
    assert "the run begins anew" in out and "goes on" not in out


def test_what_other_code_wrote_is_left_alone(stops, tmp_path, capsys, monkeypatch):
    of = job(muon(SYNCHRONOUS), steps=64)
    about, body = state_of(tmp_path, stops, of)
    monkeypatch.setattr(keeping, "code", lambda: "0123456789ab")
    assert result(run(of, states=tmp_path)) == result(run(of))
    assert "other code" in capsys.readouterr().out and about.exists() and body.exists()


def test_two_processes_are_not_at_one_run(tmp_path):
    with Kept(tmp_path, "key"), pytest.raises(BlockingIOError, match="another process"), Kept(tmp_path, "key"):
        pass
    with Kept(tmp_path, "key"):
        pass


def test_a_full_disk_ends_no_run(tmp_path, monkeypatch):
    told: list[str] = []
    with Kept(tmp_path, "key", told.append) as kept:
        kept.save(1, {})
        with monkeypatch.context() as full:
            full.setattr(keeping._Summed, "write", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
            kept.save(2, {})
        assert "No space left" in told[0] and kept.load() == 1
        kept.drop()
    assert not list(tmp_path.iterdir())


def test_a_state_is_kept_when_it_is_time_and_may_be(tmp_path, monkeypatch):
    now_s, may = [0.0], [True]
    monkeypatch.setattr(keeping.time, "monotonic", lambda: now_s[0])
    with Kept(tmp_path, "key") as kept:
        saved: list[float] = []

        def save(what: object, about: object) -> None:
            saved.append(now_s[0])
            now_s[0] += 30  # a slow disk

        monkeypatch.setattr(kept, "save", save)
        keeper = Keeper(kept, 300, lambda: may[0], lambda: (1, {}))
        for now_s[0] in (299, 300, 301, 600, 929, 931):
            may[0] = now_s[0] != 300
            keeper.look()
        assert saved == [301, 931]  # not more than a twentieth of the time
        monkeypatch.setattr(keeper, "_parent", type("Ended", (), {"is_alive": lambda self: False})())
        with pytest.raises(SystemExit):
            keeper.look()


def test_a_row_tells_of_all_its_machines(monkeypatch):
    machines = iter(("a core", "a core", "another"))
    monkeypatch.setattr(keeping, "hardware", lambda: next(machines))
    spent = Spent()
    for _ in range(3):
        spent = spent.with_sitting(time.process_time() - 5, time.perf_counter() - 10)
    assert spent.hardware == ("a core", "another")
    assert spent.cpu_s >= 15 and spent.wall_s >= 30


def test_a_model_that_was_kept_still_has_its_parts_in_two_vectors(tmp_path):
    """What the compiled functions hold is made anew around them."""
    architecture = small_architecture(16, 1, 2, 32, 16)
    numel = sum(p.numel for p in canonical_parameters(architecture))
    model = SmallLM(architecture, torch.linspace(-1, 1, numel))
    tokens = torch.arange(34).view(2, 17)
    shared = model.flat[:100]
    torch.save((model, shared), tmp_path / "model")
    again, part = torch.load(tmp_path / "model", weights_only=False)
    assert again.backward(tokens) == model.backward(tokens) and torch.equal(again.gradient, model.gradient)
    again.masters["model.norm.weight"].zero_()
    assert not again.flat[-16:].any() and torch.equal(again.flat[:-16], model.flat[:-16])
    part.fill_(7.0)
    assert bool((again.flat[:100] == 7).all())
