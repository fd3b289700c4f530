"""The benchmark beside rivals: all train the same samples at the same rate, and what its marks are read as."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.rivals import __main__ as main
from benchmarks.rivals.__main__ import add_times, command, judged
from benchmarks.rivals.methods import METHODS, OUTER, TITLES
from benchmarks.rivals.report import cells
from benchmarks.rivals.runs import Setting, figures, processor_figures, task_of, time_to
from benchmarks.rivals.task import BATCH, LENGTH, LOCAL_STEPS, REGIONS, new_model, rate_at, samples_of
from geotrain.config import RunConfig
from geotrain.config.block import parse
from geotrain.outer.messages import Lease, LeaseRequest
from geotrain.outer.server.leases import LeaseTable
from geotrain.worker.schedule import schedule_step

ROUNDS = 3


def test_rivals_train_what_our_rounds_deal_at_the_same_place_of_the_schedule() -> None:
    steps = ROUNDS * LOCAL_STEPS
    data = {"train_samples": steps * len(REGIONS) * BATCH, "samples_per_step": BATCH}
    outer = {"local_steps": LOCAL_STEPS, **OUTER["ours-blocking"]}
    run = parse(RunConfig, {"name": "r", "model": {"weights": "w"}, "data": data, "outer": outer}, "run")
    coordinator = LeaseTable(run.data.train_samples, BATCH, LOCAL_STEPS, rounds=REGIONS)
    for worker, region in enumerate(REGIONS):
        theirs = list(samples_of(worker, steps))
        for job in range(ROUNDS):
            lease = coordinator.grant(LeaseRequest(region, job + 1))
            assert isinstance(lease, Lease)
            mine = range(job * LOCAL_STEPS, (job + 1) * LOCAL_STEPS)
            assert (theirs[mine.start].start, theirs[mine.stop - 1].stop) == (
                lease.start,
                lease.start + lease.samples,
            )
            ours = [schedule_step(run, len(REGIONS), lease, s) / run.total_steps for s in range(lease.steps)]
            assert ours == pytest.approx([step / steps for step in mine])


def test_the_rate_warms_up_and_falls() -> None:
    rates = [rate_at(progress, 3e-3) for progress in (0.0, 0.05, 0.1, 1.0)]
    assert rates == pytest.approx([0.0, 1.5e-3, 3e-3, 3e-4])


def write_marks(folder: Path, region: str) -> None:
    """Four steps that work for 0.1 s and wait for as long; alone a step takes 0.08 s."""
    marks: list[dict[str, Any]] = [
        {"what": "alone", "at_s": 0.0, "seconds": [0.08, 0.08, 0.08], "cpu_s": 0.05},
        {"what": "begin", "at_s": 1.0, "bytes": 500, "thread_s": 0.3},
    ]
    for i in range(4):
        marks.append({"what": "step", "number": i + 1, "thread_s": 0.4 + 0.1 * i, "at_s": 1.2 + 0.2 * i})
    marks.append({"what": "end", "at_s": 1.8, "bytes": 500 + 4 * BATCH * LENGTH * 3})
    (folder / f"{region}.jsonl").write_text("".join(json.dumps(mark) + "\n" for mark in marks))


def test_figures_of_a_run_from_its_marks(tmp_path: Path) -> None:
    for region in REGIONS:
        write_marks(tmp_path, region)
    found = figures(tmp_path, Setting(0.02, 100.0, 4, 4, 3))
    assert found == pytest.approx(
        {"utilization": 0.4, "standing_still": 0.5, "bytes_per_token": 3.0, "step_ms": 200.0, "alone_step_ms": 80.0}
    )
    later = figures(tmp_path, Setting(0.02, 100.0, 4, 4, 3, first=2))
    assert later["step_ms"] == pytest.approx(200.0) and later["utilization"] == pytest.approx(0.4)
    used = processor_figures(tmp_path, {"train-eu": 0.2, "train-us": 0.2, "global": 0.04}, 4)
    assert used["processor_ms"] == pytest.approx(55.0) and used["processor_servers_ms"] == pytest.approx(5.0)
    assert used["processor_alone_ms"] == pytest.approx(50.0)


def test_time_to_a_loss_is_read_between_points() -> None:
    curve = [(1.0, 5.0), (2.0, 4.0), (4.0, 3.0)]
    assert time_to(curve, 3.5) == pytest.approx(3.0)
    assert time_to(curve, 3.0) == pytest.approx(4.0)
    assert time_to(curve, 2.9) is None


def test_what_exchanges_every_step_has_its_loss_from_a_run_without_a_slow_link() -> None:
    fast = {"step_ms": 10.0, "loss": 2.0, "curves": [[(1.0, 4.0), (2.0, 2.0)]]}
    found: dict[str, Any] = {
        "ddp": {"slow_link": {"step_ms": 100.0}, "no_link": fast},
        "torchft-diloco": {"slow_link": {"step_ms": 20.0, "loss": 3.0, "curves": [[(1.0, 5.0), (4.0, 3.0)]]}},
        "ours-blocking": {"slow_link": {"step_ms": 20.0, "loss": 2.997, "curves": [[(1.0, 5.0), (3.0, 2.997)]]}},
        "hivemind": {"slow_link": {"fault": "it did not start"}},
    }
    add_times(found)
    assert found["target_loss"] == 3.0
    assert found["ddp"]["slow_link"]["seconds_to_loss"] == pytest.approx(15.0)
    assert found["torchft-diloco"]["slow_link"]["seconds_to_loss"] == pytest.approx(4.0)
    assert "seconds_to_loss" not in found["hivemind"]["slow_link"]
    assert judged(found) == pytest.approx(
        {"same_algorithm_loss_ratio": 0.999, "best_over_best_rival_loss": 2.997 / 2.0}
    )
    assert cells(found["ddp"], "slow_link")[-2:] == ["2.0000", "15.0"]
    assert set(METHODS) == {"alone", *TITLES}


def test_a_link_takes_as_many_steps_whatever_the_machine() -> None:
    bits = 32 * sum(parameter.numel() for parameter in new_model().parameters())
    for step_s in (0.01, 0.08):
        options = command().parse_args(["--links", "slow", "fast", "--methods", "ours", "--rate", "1e-3"])
        settings = {name: setting for _, name, setting in main.parts(options, step_s)}
        for name, steps in (("slow_link", 45), ("fast_link", 4.5)):
            assert bits / (settings[name].gbps * 1e9) == pytest.approx(steps * step_s)
            assert settings[name].rtt_ms == pytest.approx(2000 * step_s)
        assert settings["cut"].gbps == settings["fast_link"].gbps
        place: Any = SimpleNamespace(addresses={})
        tasks = [task_of("ours", Path("run"), Path("data"), setting, 0, place) for setting in settings.values()]
        assert {task.rate for task in tasks} == {1e-3}


def call(*arguments: str) -> argparse.Namespace:
    found: argparse.Namespace = command().parse_args(["--methods", "torchft-diloco", "ours", *arguments])
    return found


def test_a_part_that_fails_is_told_and_the_next_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []

    def run(method: str, folder: Path, *_: Any) -> dict[str, Any]:
        done.append((method, folder.name))
        if method == "ours" and len(done) < 3:
            raise FileNotFoundError("no such trainer")
        return {"loss": 2.0, "step_ms": 1.0}

    def fault(method: str, what: str, *_: Any) -> dict[str, Any]:
        done.append((method, what))
        return {"lost_s.eu": 0.0, "lost_s.us": 1.0}

    monkeypatch.setattr(main, "OWN", tmp_path)
    monkeypatch.setattr(main, "prepare", lambda *_: tmp_path)
    monkeypatch.setattr(main, "step_s_alone", lambda *_: 0.05)
    monkeypatch.setattr(main, "repeated", run)
    monkeypatch.setattr(main, "faulted", fault)
    found = main.measure(tmp_path, call("--minutes", "0"), tmp_path, "")
    assert not done and found["ours"]["slow_link"] == found["ours"]["kill"] == {"fault": main.LEFT_OUT}
    first = main.measure(tmp_path, call("--faults", "cut"), tmp_path, "")
    assert first["ours"]["slow_link"]["fault"] == "FileNotFoundError: no such trainer"
    assert first["torchft-diloco"]["slow_link"]["loss"] == 2.0 and first["ours"]["cut"]["lost_s.us"] == 1.0
    again = main.measure(tmp_path, call("--faults", "cut", "--go-on"), tmp_path, "")
    assert again["ours"]["slow_link"]["loss"] == 2.0
    whole = [("torchft-diloco", "torchft-diloco-slow_link"), ("ours", "ours-slow_link")]
    assert done == [*whole, ("torchft-diloco", "cut"), ("ours", "cut"), whole[1]]
    missing = main.measure(tmp_path, call("--faults"), None, "pip: no network")
    assert missing["torchft-diloco"]["slow_link"] == {"fault": "pip: no network"} and done[-1] == whole[1]
