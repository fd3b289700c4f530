"""Each rule against a plain numpy transcription of its pseudo-code, over traces with updates in flight."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geotrain.config import MomentumConfig, RegionMomentumConfig
from geotrain.outer.messages import Leave
from geotrain.outer.rules.region_momentum import MomentumRegion, momentum_decay, momentum_gain, updates_in_run
from tests.support.outer_world import FakeWorker, World, config, parameter_map, start_vector, whole


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


def test_a_momentum_of_few_updates_weighs_less():
    assert [momentum_gain(1.0, momentum_decay(updates, 0.1)) for updates in (1e4, 205.0)] == [1.0, 1.0]
    assert momentum_gain(2.0, momentum_decay(100.0, 0.1)) == pytest.approx(1.05, abs=0.01)
    newest = [momentum_gain(1.0, k) * (1 - k) for k in (momentum_decay(u, 0.1) for u in (1.0, 5.0, 40.0, 205.0))]
    assert newest == pytest.approx([0.05] * 4, abs=0.003)
    config, k = RegionMomentumConfig(name="region_momentum"), momentum_decay(5.0, 0.1)
    merged, waits = (MomentumRegion(config, k, answers).gain for answers in ("merged", "wait"))
    assert merged == momentum_gain(1.0, k) and waits == pytest.approx(merged * 20 / 7)


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
        assert (region.uplink.lost_updates > 0) == (lost > 0)


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
