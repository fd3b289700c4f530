"""Heartbeats: the silent are taken for dead, the living are not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from geotrain.monitor.events import Trouble
from geotrain.net.transport import rpc
from geotrain.outer.messages import LeaseRequest
from geotrain.outer.server import leases
from tests.support.net_worlds import BUSY_S, Cluster, clusters, halves, outer, status_of, wait_for, whole

SILENT_S = 4.0  # twenty beats late, on a busy machine, they are not


@pytest.fixture
def make(tmp_path, monkeypatch) -> Iterator[Callable[..., Cluster]]:
    monkeypatch.setattr(rpc, "BEAT_S", SILENT_S / 20)
    monkeypatch.setattr(rpc, "REGION_BEAT_S", SILENT_S / 20)
    with clusters(tmp_path) as maker:
        yield maker


@pytest.mark.parametrize("dead_ranks", [1, 2])
def test_a_dead_workers_lease_returns_to_the_pool_and_is_trained(make, dead_ranks):
    """Also when only one of its ranks died. The idle but living keep theirs."""
    cluster = make(outer(), {"eu": {"a": halves, "b": whole}}, train_samples=12, silent_s=SILENT_S)
    dead, living = cluster.worker("a"), cluster.worker("b")
    dead.join()
    living.join()
    lost, held = dead.lease(), living.lease()
    for client in dead.clients[:dead_ranks]:
        client.close()
    lease_table = cluster.top.server.lease_table
    wait_for(lambda: (lost.start, lost.samples) in lease_table.pool)
    assert status_of(living.clients[0].address)["silent"] == ["a"]
    assert list(lease_table.open) == [held.lease]
    while (lease := living.lease()) is not None:
        living.train(lease)
    assert sorted(lease.start for lease in living.trained) == [0, 4, 8]
    for worker in (dead, living):
        worker.close()


def test_who_was_only_slow_goes_on(make):
    """Its data lies in the pool still: what it trained of it is counted, once, and nothing is skipped."""
    cluster = make(outer(updates_per_send=1), {"eu": {"a": whole, "b": whole}}, train_samples=12, silent_s=SILENT_S)
    slow, other = cluster.worker("a"), cluster.worker("b")
    slow.join()
    other.join()
    lease = slow.lease()
    detector = cluster.regions["eu"].service.failure_detector
    real = detector.heard
    detector.heard = lambda member, part: real(member, part) if member != "a" else None
    lease_table = cluster.top.server.lease_table
    wait_for(lambda: lease_table.pool)
    detector.heard = real
    wait_for(lambda: not detector.silent)
    slow.train(lease)
    wait_for(lambda: lease_table.committed_samples == 4 and not lease_table.pool)
    slow.leave()
    while (taken := other.lease()) is not None:
        other.train(taken)
    other.leave()
    wait_for(lambda: cluster.top.server.finished)
    assert sorted(t.start for t in other.trained) == [4, 8]
    assert lease_table.committed_samples == 12 and lease_table.repeated_samples == 0
    for worker in (slow, other):
        worker.close()


def test_who_beats_but_trains_no_more_loses_its_leases(make, monkeypatch):
    """By its own measured step; those who train keep theirs. What it trains all the same is counted, once."""
    monkeypatch.setattr(leases, "LEAST_PATIENCE_S", 0.0)
    cluster = make(outer(updates_per_send=1), {"eu": {"a": whole, "b": whole}}, train_samples=20, silent_s=SILENT_S)
    hangs, trains = cluster.worker("a"), cluster.worker("b")
    lease_table, region = cluster.top.server.lease_table, cluster.regions["eu"]
    told = []
    region.server_thread.write_event = told.append
    for worker in (hangs, trains):
        worker.join()
        worker.train(worker.lease())
    kept = trains.clients[0].lease(LeaseRequest("b", trains.job, 100.0)).result(BUSY_S)
    lost = hangs.clients[0].lease(LeaseRequest("a", hangs.job, 0.1)).result(BUSY_S)
    assert lost.steps == 2 and region.server.patience_s("a") == 10 * 2 * 0.1
    wait_for(lambda: (lost.start, lost.samples) in lease_table.pool)
    assert region.server.members["a"].silent and not region.service.failure_detector.silent
    trouble = wait_for(lambda: [event.what for event in told if isinstance(event, Trouble)])
    assert trouble[0].startswith("a: lives, but has sent nothing for ")
    assert list(lease_table.open) == [kept.lease]
    hangs.train(lost)
    wait_for(lambda: not lease_table.pool)
    trains.train(kept)
    while (lease := trains.lease()) is not None:
        trains.train(lease)
    for worker in (hangs, trains):
        worker.leave()
    wait_for(lambda: cluster.top.server.finished)
    assert lease_table.committed_samples == 20 and lease_table.repeated_samples == 0
    for worker in (hangs, trains):
        worker.close()


def test_a_busy_server_thread_makes_nobody_dead(make):
    """Heartbeats that came are heard, however long the server's thread works on something else."""
    cluster = make(outer(), {"eu": {"a": halves}}, train_samples=12, silent_s=SILENT_S)
    worker = cluster.worker("a")
    worker.join()
    lease = worker.lease()
    region = cluster.regions["eu"]
    busy = asyncio.run_coroutine_threadsafe(
        region.server_thread.read(lambda: time.sleep(1.5 * SILENT_S)), region.loop.loop
    )
    busy.result(BUSY_S)
    region.loop.do(region.server_thread.read(lambda: None))  # what was said meanwhile has been handled, too
    assert not region.service.failure_detector.silent
    assert not region.server.members["a"].silent
    assert list(cluster.top.server.lease_table.open) == [lease.lease] and not cluster.top.server.lease_table.pool
    worker.close()


def test_a_server_that_was_stopped_itself_blames_nobody(make):
    cluster = make(outer(), {"eu": {"a": whole}}, silent_s=SILENT_S)
    worker = cluster.worker("a")
    worker.join()
    region = cluster.regions["eu"]
    region.loop.loop.call_soon_threadsafe(lambda: time.sleep(1.5 * SILENT_S))
    time.sleep(1.5 * SILENT_S + SILENT_S / 4)
    assert not region.service.failure_detector.silent
    worker.close()
