"""Worlds with trouble in them, at scale, and with real training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.studies.claims.exchange import world_for
from benchmarks.studies.environments import HALOS, load_environment, one_block
from benchmarks.studies.learner.training import Curve, Study, training_task
from geotrain.config import OuterConfig, codec_config, load_run, parse
from geotrain.outer import worker
from geotrain.outer.codec import make_codec
from geotrain.outer.server.answer_times import AnswerTimes
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import RegionSpec, WorkerSpec, WorldSpec
from geotrain.simulate.world import VirtualWorld, timing_task
from geotrain.staging.cuda import CudaStaging
from tests.support.cuda_stand_in import Cuda

ROOT = Path(__file__).parents[2]
ENVIRONMENT = load_environment(HALOS)
BASELINES = {p.stem: load_run(p).outer for p in sorted((ROOT / "configs/runs/baselines").glob("*.json"))}
OURS = BASELINES["region-momentum"]


def timed(outer: OuterConfig, world: WorldSpec, steps: int = 2000) -> dict:
    return VirtualWorld(world, timing_task(outer, one_block(10**8), steps, 1)).run()


def two_regions(**link) -> WorldSpec:
    def region(name: str, speeds: tuple[float, ...]) -> RegionSpec:
        workers = tuple(WorkerSpec(f"{name}-{i}", s) for i, s in enumerate(speeds))
        return RegionSpec(name, workers, LinkSpec(**{"gbps": 1.0, "latency_s": 0.05, **link}))

    return WorldSpec((region("eu", (1.0, 1.3)), region("us", (0.9, 2.0))))


def with_away(world: WorldSpec, away: dict[str, tuple[tuple[float, float], ...]]) -> WorldSpec:
    return replace(
        world,
        regions=tuple(
            replace(r, workers=tuple(replace(w, away=away.get(w.name, ())) for w in r.workers)) for r in world.regions
        ),
    )


@pytest.mark.parametrize("late", ["continue", "wait"])
@pytest.mark.parametrize(
    "world",
    [
        two_regions(),
        two_regions(gbps=0.05),
        two_regions(outages=tuple((t, t + 4.0) for t in range(40, 900, 45))),
        with_away(two_regions(), dict.fromkeys(("us-0", "us-1"), ((200.0, 700.0),))),
    ],
)
def test_answers_that_wait_hold_nobody_up(world: WorldSpec, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where others are slow or dead, or answers come too late anyway."""
    held, news = list[object](), AnswerTimes.news

    def noted(times: AnswerTimes) -> Any:
        held.extend(found := news(times))
        return found

    monkeypatch.setattr(AnswerTimes, "news", noted)

    def run(answers: str) -> dict:
        overlap = {"steps": 10, "late": late, "adopt": "rebase"}
        rule = {"name": "region_momentum", "answers": answers}
        block = {"rule": rule, "local_steps": 32, "overlap": overlap, "lease_reserve": 0}
        return timed(parse(OuterConfig, block, answers), world, 4000)

    merged, count = run("merged"), len(held)
    waiting = run("wait")
    assert count == 0 < len(held)
    assert waiting["utilization"] >= merged["utilization"] - 0.003
    assert waiting["committed_steps"] == 4000 and waiting["finished"]


@pytest.mark.parametrize("method", ["region-momentum", "diloco-fair", "async-local-sgd"])
def test_a_run_ends_when_everyone_has_left(method):
    """A death that would have come later changes nothing; who is away at the end is waited for."""
    undisturbed = timed(BASELINES[method], two_regions(), 1200)
    spans = dict.fromkeys(("eu-0", "us-1"), ((10_000.0, 10_100.0),))
    assert timed(BASELINES[method], with_away(two_regions(), spans), 1200) == undisturbed
    last_s = undisturbed["seconds"] - 30.0
    spans = {"eu-0": ((last_s, 1000.0), (5000.0, 6000.0))}
    assert 1000 < timed(BASELINES[method], with_away(two_regions(), spans), 1200)["seconds"] < 1200


@pytest.mark.parametrize("method", ["region-momentum", "diloco-fair", "async-local-sgd", "streaming-diloco"])
def test_what_is_lost_is_what_was_trained_and_not_committed(method):
    """To the second, with deltas that travel for long and die on their way. Nothing is left untrained."""
    world = two_regions(gbps=0.2)
    equal = tuple(
        replace(r, local=LinkSpec(0.5), workers=tuple(replace(w, step_s=1.0) for w in r.workers))
        for r in world.regions
    )
    away = {"eu-0": tuple((t, t + 7.0) for t in (31.3, 60.9, 90.1, 131.0, 170.6)), "us-1": ((83.3, 99.0),)}
    dying = VirtualWorld(
        with_away(replace(world, regions=equal), away), timing_task(BASELINES[method], one_block(10**8), 1200, 1)
    )
    report = dying.run()
    lease_table = dying.top.server.lease_table
    assert report["finished"] and not lease_table.open and not lease_table.pool
    assert report["lost_s"] > 1 and report["committed_steps"] >= 1200 * 0.9
    trained_s = sum(w.trained_s for w in dying.workers.values())
    assert trained_s - report["lost_s"] == pytest.approx(report["committed_steps"], abs=1e-6)


def test_a_worker_that_ends_after_a_job_and_lives_again_loses_nothing():
    world = VirtualWorld(two_regions(), timing_task(OURS, one_block(10**8), 400, 1))
    worker, ends = world.workers["eu-0"], iter((False, True))
    worker.ends = lambda: next(ends, False)

    def lives_again() -> None:
        if worker.lives == 1 and world._lives["eu-0"][1].dead:
            world._begin_incarnation("eu-0")

    report = world.run(after_event=lives_again)
    assert report["finished"] and report["lost_s"] == 0 and worker.lives == 2
    assert report["trained_steps"] == report["committed_steps"]


def test_a_death_delays_a_synchronous_round_but_nobody_in_an_asynchronous_run():
    away = with_away(two_regions(), {"us-1": ((10.0, 500.0),)})
    for method, waits in (("diloco-fair", True), ("region-momentum", False)):
        world = VirtualWorld(away, timing_task(BASELINES[method], one_block(10**8), 10**6, 1))
        world.run(until_s=490.0)
        others = [w for name, w in world.workers.items() if name != "us-1"]
        busy = min(w.trained_s for w in others) / 490
        assert busy < 0.2 if waits else busy > 0.95


def test_a_region_may_join_late():
    late = {w.name: ((0.0, 100.0),) for w in two_regions().regions[1].workers}
    report = timed(OURS, with_away(two_regions(), late), 1200)
    assert report["finished"] and report["committed_steps"] == 1200


@pytest.mark.parametrize("method", ["diloco-fair", "diloco-dylu", "async-local-sgd", "region-momentum"])
def test_known_speeds_cut_the_first_jobs_as_all_others(method):
    """DyLU: nobody is given the fastest worker's H before all have told their speed."""

    def periods(known: bool) -> tuple[float, float]:
        outer = BASELINES[method]
        world = replace(world_for(method, outer, ENVIRONMENT), speeds_known=known)
        simulated = VirtualWorld(world, timing_task(outer, one_block(ENVIRONMENT.numel), 4000, 1))
        simulated.run()
        starts = simulated.workers["worker-0-0"].job_starts_s
        return starts[2] - starts[1], starts[6] - starts[5]

    second, sixth = periods(known=True)
    assert second == pytest.approx(sixth)
    second, sixth = periods(known=False)
    assert second > 1.5 * sixth


def test_bytes_on_a_link_are_the_codecs():
    """Every update goes up once and its answer comes down once, 4 bits and a scale each."""
    each = OURS.model_copy(update={"rule": OURS.rule.model_copy(update={"updates_per_send": 1})})
    report = timed(each, two_regions(), 400)
    coded = make_codec(codec_config("int4")).encoded_bytes(10**8)
    assert coded == pytest.approx(10**8 * (4 + 16 / 128) / 8, rel=1e-6)
    up, down = report["links"]["eu up"], report["links"]["eu down"]
    assert up["sent_bytes"] == up["messages"] * coded
    assert down["sent_bytes"] == up["messages"] * coded + 4 * 10**8  # and the first weights, plain
    assert report["links"]["eu local up"]["sent_bytes"] % (4 * 10**8) == 0


def test_training_is_real_and_repeatable():
    """Both rules learn English and Python from bytes in virtual seconds; twice the same bits."""
    study = Study(steps=192, hidden=16, layers=1, heads=2, ffn=32, batch=2, length=32)

    def losses(method: str) -> list[float]:
        curve = Curve(study, points=2, windows=16)
        world = VirtualWorld(
            ENVIRONMENT.world, training_task(study, BASELINES[method], ENVIRONMENT.numel), curve.watch
        )
        world.run()
        return [*(p.test for p in curve.points), curve.last(world, 1.0), curve.points[-1].test]

    first = losses("region-momentum")
    assert first == losses("region-momentum")
    assert first[-1] < first[0] < 5.5  # nats a byte: ln 256 = 5.55 knows nothing
    assert losses("halos")[-1] < 5.5


def test_workers_of_one_rank_take_coded_changes_from_the_global_server():
    """In a flat run; what several ranks hold copies of would drift."""
    study = Study(steps=192, hidden=16, layers=1, heads=2, ffn=32, batch=2, length=32)
    flat = BASELINES["async-local-sgd"].model_copy(update={"local_steps": 4})

    def last(codec: str) -> float:
        coded = codec_config(codec)
        outer = flat.model_copy(update={"up": coded, "down": coded})
        curve = Curve(study, points=2, windows=16)
        VirtualWorld(ENVIRONMENT.world, training_task(study, outer, 1), curve.watch).run()  # all messages are quick
        return curve.points[-1].test

    learnt, coded = (math.log(256) - last(codec) for codec in ("fp32", "int4"))  # nats a byte better than a guess
    assert learnt > 0.1 and coded != learnt
    assert coded == pytest.approx(learnt, rel=0.05)


def test_training_on_a_gpu_takes_the_same_virtual_time(monkeypatch):
    """There deltas become known on another thread, which must not touch the virtual clock."""
    study = Study(steps=64, hidden=16, layers=1, heads=2, ffn=32, batch=2, length=32)

    def run() -> tuple[dict, float]:
        world = VirtualWorld(ENVIRONMENT.world, training_task(study, OURS, ENVIRONMENT.numel))
        return world.run(), world.top.server.weights(0).sum().item()

    on_a_cpu = run()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(worker, "SynchronousStaging", lambda device: CudaStaging(device, Cuda()))
    assert run() == on_a_cpu
