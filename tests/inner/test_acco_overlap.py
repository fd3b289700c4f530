"""ACCO's communication runs beside compute, by what waits for what."""

from __future__ import annotations

import time
from typing import Any

import pytest

from geotrain.config import ParallelConfig
from tests.support.inner_worlds import QWEN_2, deepspeed_block, micro_batches, run_world, start, stop, train

CODED = {"zero_optimization": {"stage": 1, "gradient_bits": 8, "weight_bits": 4}}
JOBS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "exact": ("exact", {}, ["predict", "commit"]),
    "delayed": ("delayed", {}, ["commit"]),
    "delayed, coded": ("delayed", CODED, ["commit"]),
}


def beside_compute(form: str, more: dict[str, Any]) -> list[str]:
    """The communication thread's jobs, each of which ended only once micro-batches had been computed, from begin to
    end, beside it.

    No time is compared: where the engine waits for a job before it computes, the job waits for the engine, and its
    deadline ends the training."""
    engine = start(QWEN_2, ParallelConfig(), deepspeed_block(1) | more, acco=form)
    ended: list[str] = []
    train(engine, range(2))
    engine.settle()
    thread, start_job = engine.optimizer.communication, engine.optimizer.communication.start
    schedule, begun_s = engine._run_schedule, []  # of what has been computed

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        loss = schedule(*args, **kwargs)
        begun_s.append(begin_s)
        return loss

    def start_held(job: Any) -> Any:
        submitted, what = (
            time.perf_counter(),
            {"_prediction_job": "predict", "_commit_job": "commit"}[job.func.__name__],
        )

        def held() -> Any:
            result = job()
            deadline = time.monotonic() + 60
            while not any(begin_s > submitted for begin_s in list(begun_s)):
                assert time.monotonic() < deadline, f"no micro-batch was computed beside {what}"
                time.sleep(0.001)
            ended.append(what)
            return result

        return start_job(held)

    thread.start, engine._run_schedule = start_held, timed
    for step in range(2, 5):  # no result is asked for: that would settle
        engine.train_step(micro_batches(engine, step), step)
    thread.start = start_job
    train(engine, range(5, 6))  # the last commit's compute
    stop(engine)
    return ended


def every_form() -> dict[str, list[str]]:
    return {name: beside_compute(form, more) for name, (form, more, _) in JOBS.items()}


@pytest.mark.slow
def test_all_communication_runs_beside_compute() -> None:
    for ended in run_world(2, every_form):
        assert ended == {name: jobs * 3 for name, (*_, jobs) in JOBS.items()}
