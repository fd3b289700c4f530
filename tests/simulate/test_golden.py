"""Whole runs against plain numpy: order of events, versions and weights under a scripted schedule.

Workers descend deterministic bowls: one inner step moves θ a twentieth of the way to the worker's own target. The
reference below knows nothing of messages, sequences or parts: it is algorithms.md's pseudo-code on a list of events.
"""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch

from geotrain.config import MomentumConfig, OuterConfig, OverlapConfig, codec_config, rule_config
from geotrain.outer.worker import OwnedSlices, WorkerRank
from geotrain.parameters.parameter_map import StridedSlice
from geotrain.plan.model.sizes import Sizes
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import RegionSpec, WorkerSpec, WorldSpec
from geotrain.simulate.world import VirtualTask, VirtualWorld
from tests.support.outer_world import parameter_map

FP32 = codec_config("fp32")
SIZE, STEPS_A_JOB, SAMPLES = 64, 3, 240
SECOND = 10**9 // 8  # bytes that take a second at 1 Gbit/s
# step times and bandwidths without common divisors: no two events meet, so their order is the schedule's alone
WORKERS = {"eu": {"a": 1.0, "b": 1.37}, "us": {"c": 0.83}}
LINK_S = {"eu": 2.11, "us": 4.3}
LOCAL_S = 0.217


def target(name: str) -> np.ndarray:
    return np.random.default_rng(ord(name)).normal(size=SIZE)


class Bowl:
    """A learner whose step is known in closed form."""

    every_step = True

    def __init__(self, spec: WorkerSpec, outer: OuterConfig) -> None:
        self.goal = torch.tensor(target(spec.name), dtype=torch.float32)
        self.outer, self.flat = outer, torch.zeros(SIZE)

    def born(self) -> None:
        chunks, offset = [], 0
        for p in parameter_map().parameters:
            chunks.append(
                OwnedSlices((StridedSlice(0, p.numel, parameter=p.name),), self.flat[offset : offset + p.numel], True)
            )
            offset += p.numel
        self.rank = WorkerRank(parameter_map(), self.outer, chunks)
        self.pushes, self.holds = self.rank.pushes, self.rank.holds
        self.make_delta, self.on_weights = self.rank.make_delta, self.rank.on_weights
        self.when_made, self.parameters = self.rank.when_made, self.rank.parameters

    def train(self, lease, first, steps) -> None:
        for _ in range(steps):
            self.flat.lerp_(self.goal, 0.05)

    def job_done(self, lease):
        return {}


def simulate(
    outer: OuterConfig, momentum_decay: float | None = None
) -> tuple[list[tuple[float, int, np.ndarray]], VirtualWorld]:
    """(time, version, weights) after each update of the global server."""
    regions = tuple(
        RegionSpec(
            r,
            tuple(WorkerSpec(w, step_s) for w, step_s in workers.items()),
            LinkSpec(1.0 / LINK_S[r], shared=False),
            LinkSpec(1.0 / LOCAL_S, shared=False),
        )
        for r, workers in WORKERS.items()
    )
    sizes = Sizes(outer, (SECOND // 4,))  # fp32: a second at 1 Gbit/s
    task = VirtualTask(outer, sizes, parameter_map(), (torch.zeros(SIZE),), SAMPLES, 1, lambda spec: Bowl(spec,
                       outer),
                       momentum_decay=momentum_decay)  # fmt: skip
    trace: list[tuple[float, int, np.ndarray]] = []

    def watch(world: VirtualWorld) -> None:
        server = world.top.server
        trace.append((world.clock.now, server.versions[0], server.weights(0).numpy().copy()))

    world = VirtualWorld(WorldSpec(regions), task, watch)
    world.run()
    return trace, world


class Reference:
    """algorithms.md §1 on an event list, in float64."""

    def __init__(
        self, rule: str, ledger: bool, overlap: bool, every: int, alpha: float, merged: bool = False
    ) -> None:
        self.rule, self.ledger, self.overlap, self.every, self.alpha = rule, ledger, overlap, every, alpha
        self.waits = merged  # workers are answered when their deltas have been merged
        self.events: list = []
        self.count = 0
        self.top = {"x": np.zeros(SIZE), "m": np.zeros(SIZE), "acc": np.zeros(SIZE), "n": 0}
        self.regions = {
            r: {"x": np.zeros(SIZE), "base": np.zeros(SIZE), "m": np.zeros(SIZE), "acc": np.zeros(SIZE), "n": 0,
                "cnt": 0, "flying": False, "sent": None, "ask": [], "asked": []}
            for r in WORKERS
        }  # fmt: skip
        self.trace: list[tuple[float, int, np.ndarray]] = []
        self.given = 0
        self.over_s = float("inf")  # when the first worker found no data

    def at(self, time_s, call, *args) -> None:
        self.count += 1
        heapq.heappush(self.events, (time_s, self.count, call, args))

    def run(self):
        for r, workers in WORKERS.items():
            for w, step_s in workers.items():
                state = {"r": r, "goal": target(w), "step_s": step_s, "x": np.zeros(SIZE), "anchor": np.zeros(SIZE),
                         "at_push": None, "answer": None, "jobs": 0}  # fmt: skip
                self.at(LINK_S[r] + LOCAL_S, self.job, state)  # the first weights come down both links
        while self.events:
            self.now, _, call, args = heapq.heappop(self.events)
            call(*args)
        return self.trace

    def job(self, w) -> None:
        if self.given >= SAMPLES:
            self.over_s = min(self.over_s, self.now)
            return
        self.given += STEPS_A_JOB
        self.at(self.now + w["step_s"], self.step, w, 1)

    def step(self, w, i) -> None:
        w["x"] = w["x"] + 0.05 * (w["goal"] - w["x"])
        if w["answer"] is not None:
            self.adopt(w)
        if i < STEPS_A_JOB:
            self.at(self.now + w["step_s"], self.step, w, i + 1)
        elif w["at_push"] is not None:  # the last answer is not here yet: this progress goes with the next delta
            self.job(w)
        else:
            delta, w["at_push"] = w["anchor"] - w["x"], w["x"].copy()
            self.at(self.now + LOCAL_S, self.region, w, delta)
            if self.overlap:
                self.job(w)

    def adopt(self, w) -> None:
        x_r, w["answer"] = w["answer"], None
        w["x"] = x_r + (w["x"] - w["at_push"]) if self.overlap else x_r.copy()
        w["anchor"], w["at_push"] = x_r.copy(), None

    def nesterov(self, s, d, lr, beta, n) -> None:
        s["n"] += 1
        s["acc"] = s["acc"] + d
        if s["n"] % n == 0:
            s["m"] = beta * s["m"] + s["acc"] / n
            s["x"] = s["x"] - lr * n * (beta * s["m"] + d / n)
            s["acc"] = np.zeros(SIZE)
        else:
            s["x"] = s["x"] - lr * n * d / n

    def region(self, w, d) -> None:
        s = self.regions[w["r"]]
        if self.rule == "region_momentum":
            s["m"] = 0.9 * s["m"] + 0.1 * d
            gain = 3.0 / (20 * 0.1)  # the momentum averages over ten updates
            s["x"] = s["x"] - (d + gain * s["m"]) / len(WORKERS[w["r"]])
        else:
            self.nesterov(s, d, 0.3, 0.5, 3)
        s["cnt"] += 1
        if self.waits:
            s["ask"].append(w)
        self.maybe_send(w["r"])
        if not self.waits:
            self.answer(s, [w])

    def answer(self, s, workers) -> None:
        while workers:
            self.at(self.now + LOCAL_S, self.answered, workers.pop(0), s["x"].copy())

    def answered(self, w, x) -> None:
        w["answer"] = x
        if not self.overlap:
            self.adopt(w)
            self.job(w)

    def maybe_send(self, r) -> None:
        s = self.regions[r]
        if s["cnt"] >= self.every and not s["flying"]:
            s.update(cnt=0, flying=True, sent=s["x"].copy(), asked=s["ask"], ask=s["asked"])
            self.at(self.now + LINK_S[r], self.global_, r, s["base"] - s["x"])

    def global_(self, r, d) -> None:
        g = self.top
        if self.rule == "region_momentum":
            g["x"] = g["x"] - d / len(WORKERS)
            g["n"] += 1
        else:
            self.nesterov(g, d, 0.4, 0.3, 2)
        self.trace.append((self.now, g["n"], g["x"].copy()))  # type: ignore[attr-defined]
        self.at(self.now + LINK_S[r], self.merged, r, g["x"].copy())  # type: ignore[attr-defined]

    def merged(self, r, x_g) -> None:
        s = self.regions[r]
        s["flying"] = False
        if self.ledger:
            pending = s["sent"] - s["x"]
            s["base"] = (1 - self.alpha) * s["sent"] + self.alpha * x_g
            s["x"] = s["base"] - pending
        else:
            s["x"] = (1 - self.alpha) * s["x"] + self.alpha * x_g
            s["base"], s["cnt"] = s["x"].copy(), 0
        if self.waits:
            self.answer(s, s["asked"])
        self.maybe_send(r)


OVERLAP = OverlapConfig(steps=1, late="continue", adopt="rebase")


@pytest.mark.parametrize(
    ("rule", "ledger", "overlap", "merged"),
    [
        ("halos", False, False, False), ("halos", True, False, False), ("halos", True, True, False),
        ("region_momentum", True, True, False), ("region_momentum", True, True, True),
    ],
)  # fmt: skip
def test_a_run_equals_its_pseudo_code(rule, ledger, overlap, merged):
    when = {} if merged else {"updates_per_send": 2, "merge_alpha": 0.5}
    region = MomentumConfig(lr_per_update=0.3, beta=0.5, buffer=3)
    top = MomentumConfig(lr_per_update=0.4, beta=0.3, buffer=2)
    rules = {
        "halos": rule_config("halos", ledger=ledger, region=region, **{"global": top}, **when),
        "region_momentum": rule_config(
            "region_momentum", gain=3.0, answers="merged" if merged else "at_once", **when
        ),
    }
    outer = OuterConfig(
        rule=rules[rule], local_steps=STEPS_A_JOB, up=FP32, down=FP32, local=FP32,
        overlap=OVERLAP if overlap else OverlapConfig(),
    )  # fmt: skip
    got, world = simulate(outer, momentum_decay=0.9)
    every, alpha = (1, 1.0) if merged else (2, 0.5)
    reference = Reference(rule, ledger, overlap, every, alpha, merged)
    want = reference.run()
    if merged:  # what a worker has left then goes up once its last answer has come, which the reference leaves out
        want = [update for update in want if update[0] <= reference.over_s]
    assert len(want) >= 20
    # the reference does not flush at the end: what the world says beyond its trace is the flush
    assert len(want) <= len(got) <= len(want) + (9 if merged else 6)
    for (time_s, version, x), (want_time_s, want_version, want_x) in zip(got, want, strict=False):
        assert (time_s, version) == (pytest.approx(want_time_s, abs=1e-6), want_version)
        np.testing.assert_allclose(x, want_x, rtol=1e-4, atol=1e-5)
    assert world.top.server.finished
    if ledger:
        assert world.top.server.lease_table.committed_samples == SAMPLES
        assert world.report()["lost_updates"] == 0
    else:
        assert world.report()["lost_updates"] > 0


def test_synchronous_rounds_end_with_the_slowest():
    """Round k ends when the slowest worker's delta has gone up both links; everyone starts again on its way back."""
    outer = OuterConfig(rule=rule_config("sync", lr=0.7, momentum=0.9), local_steps=STEPS_A_JOB,
                        up=FP32, down=FP32, local=FP32)  # fmt: skip
    updates, _ = simulate(outer)
    got = [after for before, after in zip([(0.0, 0, None), *updates], updates, strict=False) if after[1] > before[1]]
    assert len(got) == SAMPLES // (3 * STEPS_A_JOB)
    start = {w: LINK_S[r] + LOCAL_S for r, names in WORKERS.items() for w in names}
    x, m = np.zeros(SIZE), np.zeros(SIZE)
    for round_, (time_s, version, weights) in enumerate(got, 1):
        at_region = {
            r: max(start[w] + STEPS_A_JOB * step_s for w, step_s in names.items()) + LOCAL_S
            for r, names in WORKERS.items()
        }
        applied = max(at_region[r] + LINK_S[r] for r in WORKERS)
        moved = [(1 - 0.95**STEPS_A_JOB) * (x - target(w)) for names in WORKERS.values() for w in names]
        mean = sum(moved) / 3
        m = 0.9 * m + mean
        x = x - 0.7 * (mean + 0.9 * m)
        assert (time_s, version) == (pytest.approx(applied, abs=1e-6), round_)
        start = {w: applied + LINK_S[r] + LOCAL_S for r, names in WORKERS.items() for w in names}
        np.testing.assert_allclose(weights, x, rtol=1e-4, atol=1e-4)
