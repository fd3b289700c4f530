"""Each rule against a plain numpy transcription of its pseudo-code, over traces with updates in flight."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geotrain.config import MomentumConfig
from geotrain.outer.messages import Leave
from geotrain.outer.rules import momentum_decay, updates_in_run
from geotrain.outer.rules.region_momentum import momentum_gain
from tests.support.outer_world import FakeWorker, World, config, parameter_map, start_vector, whole

N_TRACE = 60


class NumpyHalos:
    """algorithms.md §1, in float64; `travel` arrivals pass between a send and its answer."""

    def __init__(self, x, lr, beta, n):
        self.x, self.m, self.acc, self.k = x.copy(), 0 * x, 0 * x, 0
        self.lr, self.beta, self.n = lr * n, beta, n

    def on_delta(self, d):
        self.k += 1
        self.acc = self.acc + d
        if self.k % self.n == 0:
            self.m = self.beta * self.m + self.acc / self.n
            self.x = self.x - self.lr * (self.beta * self.m + d / self.n)
            self.acc = 0 * d
        else:
            self.x = self.x - self.lr * d / self.n


def numpy_trace(deltas, x0, ledger, travel, momentum_rule=None):
    """One region and a global server; returns region and global weights after every delta."""
    region = NumpyHalos(x0, 0.2, 0.9, 4)
    top = NumpyHalos(x0, 0.15, 0.5, 2)
    base, since, flight, m = x0.copy(), 0, None, 0 * x0
    history = []
    for d in deltas:
        if momentum_rule:
            k, c, w, _ = momentum_rule
            m = k * m + (1 - k) * d
            region.x = region.x - w * (d + c * m)
        else:
            region.on_delta(d)
        since += 1
        if since >= 3 and flight is None:
            flight, sent, delta = 0, region.x.copy(), base - region.x
            since = 0
        elif flight is not None:
            flight += 1
        if flight is not None and flight == travel:
            if momentum_rule:
                top.x = top.x - momentum_rule[3] * delta
            else:
                top.on_delta(delta)
            if ledger:
                pending = sent - region.x
                base = 0.75 * sent + 0.25 * top.x
                region.x = base - pending
            else:
                region.x = 0.75 * region.x + 0.25 * top.x
                base, since = region.x.copy(), 0
            flight = None
        history.append((region.x.copy(), top.x.copy()))
    return history


def real_trace(cfg, deltas, x0, travel, decay=None):
    lay = parameter_map()
    world = World(cfg, {"eu": [FakeWorker("a", lay, whole(lay))]}, [torch.tensor(x0, dtype=torch.float32)], lay,
                  momentum_decay=decay)  # fmt: skip
    history, flight = [], None
    for d in deltas:
        world.push("a", {0: torch.tensor(d, dtype=torch.float32)})
        if flight is not None:
            flight[1] += 1
        elif world.up["eu"]:
            flight = [world.up["eu"][0], 0]
        if flight is not None and flight[1] == travel:
            sent = world.deliver_up("eu")
            assert sent is flight[0]
            assert world.deliver_down("eu", sent)
            flight = None
        history.append((world.regions["eu"].weights(0).numpy().copy(), world.top.weights(0).numpy().copy()))
    return history, world


@pytest.mark.parametrize("travel", [0, 1, 2])
@pytest.mark.parametrize("ledger", [False, True])
def test_halos_equals_its_transcription(ledger, travel):
    rng = np.random.default_rng(7)
    deltas, x0 = rng.normal(size=(N_TRACE, 64)), start_vector().double().numpy()
    want = numpy_trace(deltas, x0, ledger, travel)
    got, world = real_trace(config(ledger=ledger), deltas, x0, travel)
    for (want_region, want_top), (region, top) in zip(want, got, strict=True):
        np.testing.assert_allclose(region, want_region, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(top, want_top, rtol=2e-5, atol=2e-5)
    assert world.top.fragments[0].version > 5


def test_a_momentum_of_few_updates_weighs_less():
    assert [momentum_gain(1.0, momentum_decay(updates, 0.1)) for updates in (1e4, 205.0)] == [1.0, 1.0]
    assert momentum_gain(2.0, momentum_decay(100.0, 0.1)) == pytest.approx(1.05, abs=0.01)
    newest = [momentum_gain(1.0, k) * (1 - k) for k in (momentum_decay(u, 0.1) for u in (1.0, 5.0, 40.0, 205.0))]
    assert newest == pytest.approx([0.05] * 4, abs=0.003)


@pytest.mark.parametrize(("decay", "gain"), [(0.95, 3.0), (0.9, 1.5)])  # 3 is halved where updates are few
def test_momentum_rule_equals_its_transcription(decay, gain):
    rng = np.random.default_rng(8)
    deltas, x0 = rng.normal(size=(N_TRACE, 64)) / 10, start_vector().double().numpy()
    want = numpy_trace(deltas, x0, True, 2, momentum_rule=(decay, gain, 1.0, 1.0))
    cfg = config(rule="region_momentum", gain=3.0)
    got, _ = real_trace(cfg, deltas, x0, 2, decay=decay)
    for (want_region, want_top), (region, top) in zip(want, got, strict=True):
        np.testing.assert_allclose(region, want_region, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(top, want_top, rtol=2e-5, atol=2e-5)


def test_momentum_spans_a_share_of_the_run_whatever_its_length():
    """A delta's weight in m has fallen to 1/e when that share of the region's updates has followed it."""
    for updates in (200.0, 5000.0):
        assert momentum_decay(updates, 0.2) ** (0.2 * updates) == pytest.approx(np.exp(-1))
    assert momentum_decay(1.0, 0.1) == pytest.approx(np.exp(-1)), "a run of few updates keeps some momentum"


def test_a_regions_updates_are_its_share_of_the_runs_jobs():
    assert updates_in_run(600, 4, workers=3, all_workers=12) == 9600 / 16 / 4 / 4


def test_the_published_rule_loses_what_travelled_and_the_ledger_does_not():
    """Plain averaging (buffer 1, no momentum, lr 1) makes it visible: with the ledger the global weights end where
    all deltas lead; without it the updates committed while one travelled are missing, and are counted."""
    plain = MomentumConfig(lr_per_update=1.0, beta=0.0, buffer=1)
    rng = np.random.default_rng(9)
    deltas, x0 = rng.normal(size=(12, 64)), start_vector().double().numpy()
    for ledger, lost in ((True, 0), (False, 6)):
        cfg = config(ledger=ledger, merge_alpha=1.0, region=plain, **{"global": plain})
        _, world = real_trace(cfg, deltas, x0, travel=3)
        region = world.regions["eu"]
        world.tell("eu", Leave("a"))
        while update := world.deliver_up("eu"):
            assert world.deliver_down("eu", update)
        everything = x0 - deltas.sum(axis=0)
        error = np.abs(world.top.weights(0).numpy() - everything).max()
        assert (error < 1e-4) == ledger
        assert (region.lost_updates > 0) == (lost > 0)


def test_sync_is_diloco():
    """Two regions, three workers: the mean over workers, then Nesterov; every worker gets the same weights."""
    lay, rng, x0 = parameter_map(), np.random.default_rng(3), start_vector()
    workers = {n: FakeWorker(n, lay, whole(lay)) for n in "abc"}
    world = World(
        config(rule="sync", lr=0.7, momentum=0.9),
        {"eu": [workers["a"], workers["b"]], "us": [workers["c"]]},
        [x0],
        lay,
    )
    x, m = x0.double().numpy(), np.zeros(64)
    for step in range(1, 6):
        deltas = {n: rng.normal(size=64) for n in "abc"}
        for n in "cab":
            assert world.push(n, {0: torch.tensor(deltas[n], dtype=torch.float32)}) is None
        updates = {r: world.deliver_up(r) for r in ("us", "eu")}
        for r, update in updates.items():
            assert update is not None
            assert world.deliver_down(r, update)
        mean = sum(deltas.values()) / 3
        m = 0.9 * m + mean
        x = x - 0.7 * (mean + 0.9 * m)
        for n in "abc":
            got = world.weights(n, step, (0,))
            assert got is not None
            np.testing.assert_allclose(got[0].numpy(), x, rtol=1e-5, atol=1e-5)
    assert world.top.fragments[0].version == 5


def test_sync_gives_the_same_bits_whatever_the_order_of_arrival():
    results = []
    for order in ("abc", "cab", "bca"):
        lay, gen = parameter_map(), torch.Generator().manual_seed(5)
        deltas = {n: torch.randn(64, generator=gen) for n in "abc"}
        regions = {"eu": [FakeWorker(n, lay, whole(lay)) for n in "ab"], "us": [FakeWorker("c", lay, whole(lay))]}
        world = World(config(rule="sync"), regions, [start_vector()], lay)
        for n in order:
            world.push(n, {0: deltas[n]})
        for r in ("eu", "us") if order == "abc" else ("us", "eu"):
            world.deliver_up(r)
        results.append(world.top.weights(0).clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
