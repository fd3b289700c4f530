"""Heartbeats: the silent are taken for dead, the living are not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from geotrain.net import calls
from tests.net.net_worlds import Cluster, clusters, halves, outer, wait_for, whole

SILENT_S = 2.0


@pytest.fixture
def make(tmp_path, monkeypatch) -> Iterator[Callable[..., Cluster]]:
    monkeypatch.setattr(calls, "BEAT_S", SILENT_S / 10)
    monkeypatch.setattr(calls, "REGION_BEAT_S", SILENT_S / 10)
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
    book = cluster.top.server.book
    wait_for(lambda: (lost.start, lost.samples) in book.pool, 10 * SILENT_S)
    assert living.clients[0].status()["silent"] == ["a"]
    assert list(book.open) == [held.lease]
    while (lease := living.lease()) is not None:
        living.train(lease)
    assert sorted(lease.start for lease in living.trained) == [0, 4, 8]
    for worker in (dead, living):
        worker.close()


def test_who_was_only_slow_goes_on(make):
    """Its data went to others: what it trained of it is not counted, and nothing is skipped."""
    cluster = make(outer(updates_per_send=1), {"eu": {"a": whole, "b": whole}}, train_samples=12, silent_s=SILENT_S)
    slow, other = cluster.worker("a"), cluster.worker("b")
    slow.join()
    other.join()
    lease = slow.lease()
    pulse = cluster.regions["eu"].service.pulse
    real = pulse.heard
    pulse.heard = lambda member, part: real(member, part) if member != "a" else None
    book = cluster.top.server.book
    wait_for(lambda: book.pool, 10 * SILENT_S)
    pulse.heard = real
    wait_for(lambda: not pulse.silent, 10 * SILENT_S)
    slow.train(lease)
    assert not book.open and book.committed_samples == 0
    slow.leave()
    while (taken := other.lease()) is not None:
        other.train(taken)
    other.leave()
    wait_for(lambda: cluster.top.server.finished)
    assert sorted(t.start for t in other.trained) == [0, 4, 8]
    assert book.committed_samples == 12
    for worker in (slow, other):
        worker.close()


def test_a_server_that_was_stopped_itself_blames_nobody(make):
    cluster = make(outer(), {"eu": {"a": whole}}, silent_s=SILENT_S)
    worker = cluster.worker("a")
    worker.join()
    region = cluster.regions["eu"]
    region.loop.loop.call_soon_threadsafe(lambda: time.sleep(2 * SILENT_S))
    time.sleep(2 * SILENT_S + SILENT_S / 2)
    assert not region.service.pulse.silent
    worker.close()
