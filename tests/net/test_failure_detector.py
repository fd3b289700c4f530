"""The failure detector, in time that passes when a test says so: the silent count as dead, the living do not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from geotrain.config import LimitsConfig
from geotrain.monitor.events import Trouble
from geotrain.net.server import failure_detector
from geotrain.outer.events import Event
from geotrain.outer.messages import LeaseRequest, OperatorCommand, Refused, RunComplete
from tests.support.net_worlds import BUSY_S, Cluster, Running, halves, outer, status_of, wait_for, whole

SILENT_S = 1e6  # by the server's own clock nothing happens


class Hands:
    """Sets the clock of a server's failure detector, and lets it look."""

    def __init__(self, running: Running) -> None:
        self.running, self.now_s = running, 0.0
        self.detector = running.service.failure_detector
        self.detector.clock = lambda: self.now_s
        self.detector._heard_s = dict.fromkeys(self.detector._heard_s, 0.0)

    def passes(self, seconds: float, *heard: tuple[str, int], late_s: float = 0.0) -> None:
        """Let seconds pass, and the detector look. heard: ranks that were heard of at their end. late_s: for how long
        the server's process stood still."""
        self.now_s += seconds
        for rank in heard:
            self.detector.heard(*rank)
        self.running.loop.do(self.detector.look(self.now_s - late_s))

    def states(self) -> dict[str, str]:
        return {name: member["state"] for name, member in status_of(self.running.address)["members"].items()}

    @property
    def silent(self) -> set[str]:
        return {name for name, member in self.running.server.members.items() if member.silent}

    def waits(self) -> list[tuple[str, str]]:
        return [(wait["what"], wait["whom"]) for wait in status_of(self.running.address)["waits"]]


@pytest.fixture
def begin(make: Callable[..., Cluster]) -> Callable[..., tuple[Cluster, Hands]]:
    """Begins a run of one region, with workers a (two ranks) and b."""

    def begun(samples: int = 12, **settings: object) -> tuple[Cluster, Hands]:
        cluster = make(
            outer(updates_per_send=1, **settings), {"eu": {"a": halves, "b": whole}}, samples, silent_s=SILENT_S
        )
        return cluster, Hands(cluster.regions["eu"])

    return begun


@pytest.mark.parametrize("heard", [[], [("a", 0)], [("a", 1)]])
def test_a_dead_workers_lease_returns_to_the_pool_and_is_trained(begin, heard):
    """Also when only one of its ranks died. The idle but living keep theirs."""
    cluster, hands = begin()
    dead, living = cluster.joined("a"), cluster.joined("b")
    lost, held = dead.lease(), living.lease()
    hands.passes(SILENT_S - 1, ("a", 0), ("a", 1), ("b", 0))
    hands.passes(SILENT_S - 1, *heard, ("b", 0))
    assert not hands.silent
    hands.passes(2, ("b", 0))
    assert hands.silent == {"a"}
    lease_table = cluster.top.server.lease_table
    wait_for(lambda: (lost.start, lost.samples) in lease_table.pool)
    assert hands.states() == {"a": "lost", "b": "up"}
    assert list(lease_table.open) == [held.lease]
    while (lease := living.lease()) is not None:
        living.train(lease)
    assert sorted(lease.start for lease in living.trained) == [0, 4, 8]


def test_who_was_only_slow_goes_on(begin):
    """Its data lies in the pool still: what it trained of it is counted, once, and nothing is skipped."""
    cluster, hands = begin()
    slow, other, lease_table = cluster.joined("a"), cluster.joined("b"), cluster.top.server.lease_table
    lease = slow.lease()
    hands.passes(SILENT_S + 1, ("b", 0))
    wait_for(lambda: lease_table.pool)
    hands.passes(1, ("a", 0), ("a", 1), ("b", 0))
    slow.train(lease)
    wait_for(lambda: lease_table.committed_samples == 4 and not lease_table.pool)
    slow.leave()
    while (taken := other.lease()) is not None:
        other.train(taken)
    other.leave()
    wait_for(lambda: cluster.top.server.finished)
    assert sorted(t.start for t in other.trained) == [4, 8]
    assert lease_table.committed_samples == 12


@pytest.mark.parametrize("says_s", [0.1, 1e6])
def test_who_beats_but_trains_no_more_loses_its_leases(begin, monkeypatch, says_s):
    """By the times that the server has seen, whatever the worker says; those who train keep theirs. What it trains
    all the same is counted, once."""
    monkeypatch.setattr(failure_detector, "LEAST_PATIENCE_S", 0.0)
    cluster, hands = begin(28)
    hangs, trains, region = cluster.joined("a"), cluster.joined("b"), cluster.regions["eu"]
    lease_table, alive = cluster.top.server.lease_table, (("a", 0), ("a", 1), ("b", 0))
    for _ in range(2):
        given = [(worker, worker.lease()) for worker in (hangs, trains)]
        hands.passes(1, *alive)
        for worker, lease in given:
            worker.train(lease)
        hands.passes(1, *alive)
    lost = hangs.clients[0].lease(LeaseRequest("a", hangs.job, says_s)).result(BUSY_S)
    kept = trains.lease()
    for _ in range(11):
        hands.passes(1, *alive)
        assert len(lease_table.open) == 2
    trains.train(kept)
    kept = trains.lease()
    hands.passes(1, *alive)
    wait_for(lambda: (lost.start, lost.samples) in lease_table.pool)
    assert region.server.members["a"].silent
    trouble = [event.what for event in region.events if isinstance(event, Trouble)]
    assert trouble == ["a: lives, but has sent nothing for 11 s; its leases go to others"]
    assert list(lease_table.open) == [kept.lease]
    hangs.train(lost)
    wait_for(lambda: not lease_table.pool)
    trains.train(kept)
    while (lease := trains.lease()) is not None:
        trains.train(lease)
    for worker in (hangs, trains):
        worker.leave()
    wait_for(lambda: cluster.top.server.finished)
    assert lease_table.committed_samples == 28


def test_a_busy_server_thread_makes_nobody_dead(begin):
    """Heartbeats that came while the server's thread worked on something else are heard before it judges."""
    cluster, hands = begin()
    lease, region = cluster.joined("a").lease(), cluster.regions["eu"]
    may_go_on, waits = threading.Event(), hands.running.server_thread.read
    busy = asyncio.run_coroutine_threadsafe(waits(lambda: may_go_on.wait(BUSY_S)), region.loop.loop)
    hands.now_s = SILENT_S + 1
    judged = asyncio.run_coroutine_threadsafe(hands.detector.look(hands.now_s), region.loop.loop)
    region.loop.do(asyncio.sleep(0))  # it waits for the thread by now
    for part in (0, 1):
        hands.detector.heard("a", part)
    may_go_on.set()
    judged.result(BUSY_S), busy.result(BUSY_S)
    assert not hands.silent
    assert list(cluster.top.server.lease_table.open) == [lease.lease] and not cluster.top.server.lease_table.pool


def test_a_server_that_was_stopped_itself_blames_nobody(begin):
    cluster, hands = begin()
    cluster.joined("a")
    hands.passes(2 * SILENT_S, late_s=1.9 * SILENT_S)
    assert not hands.silent
    hands.passes(SILENT_S)
    assert hands.silent == {"a"}


def test_a_worker_that_died_while_its_server_was_away_is_noticed(begin):
    """It counts as heard of when the server looks first; a worker that never came is not waited for."""
    cluster, _ = begin()
    lost = cluster.joined("a").lease()
    cluster.restart("eu")
    hands = Hands(cluster.regions["eu"])
    hands.passes(1)
    hands.passes(SILENT_S)
    assert hands.silent == {"a"}
    wait_for(lambda: (lost.start, lost.samples) in cluster.top.server.lease_table.pool)


def test_a_worker_is_as_its_server_heard_of_it(begin):
    """From its first join to its goodbye. A join's first words age: they say nothing of ranks that beat."""
    cluster, hands = begin()
    alive, missed_s = (("a", 0), ("a", 1)), hands.detector.missed_s
    wait_for(lambda: hands.waits() == [("join", "a"), ("join", "b")])  # it has joined the global server itself
    assert hands.states() == {"a": "away", "b": "away"}
    worker = cluster.joined("a")
    hands.now_s += 10 * missed_s  # and the detector has not looked
    for rank in alive:
        hands.detector.heard(*rank)
    assert hands.states() == {"a": "up", "b": "away"}
    worker.train(worker.lease())
    lease = worker.lease()
    hands.passes(missed_s, ("a", 0))
    assert hands.states()["a"] == "cut off" and ("lease", "a") in hands.waits()
    hands.passes(SILENT_S, ("a", 0))
    assert hands.states()["a"] == "lost" and ("lease", "a") not in hands.waits()
    hands.passes(1, *alive)
    assert hands.states()["a"] == "stalled", "its data went to others"
    worker.train(lease)
    assert hands.states()["a"] == "up"
    worker.leave()
    hands.passes(SILENT_S)
    assert hands.states() == {"a": "left", "b": "away"}
    assert hands.waits() == [("join", "b")]


def test_a_region_is_as_the_global_server_heard_of_it(begin):
    cluster, _ = begin()
    hands, region = Hands(cluster.top), cluster.regions["eu"]
    worker = cluster.joined("a")

    def is_now(state: str, *waits: tuple[str, str]) -> None:
        wait_for(lambda: (hands.states(), hands.waits()) == ({"eu": state}, list(waits)))

    is_now("up")
    lease = worker.lease()
    hands.running.loop.do(hands.running.server_thread.say(OperatorCommand("pause")))
    is_now("up", ("resume", ""))
    worker.train(lease)
    is_now("paused", ("resume", ""))
    hands.running.loop.do(hands.running.server_thread.say(OperatorCommand("resume")))
    lease = worker.lease()
    is_now("up")
    region.kill()
    hands.passes(hands.detector.missed_s)
    is_now("cut off", ("lease", "eu"))
    hands.passes(SILENT_S)
    is_now("lost", ("worker", ""))
    cluster.regions["eu"] = region.again()
    is_now("up")
    again = cluster.joined("a", "life-2")
    while (lease := again.lease()) is not None:
        again.train(lease)
    is_now("up", ("farewell", "eu"))
    again.leave()
    is_now("left")


def test_a_quarantine_ends_after_its_time(begin):
    cluster, hands = begin(limits=LimitsConfig(strikes=1, quarantine_s=600.0))
    worker = cluster.joined("b")
    with pytest.raises(Refused, match="no worker comes to job -1"):
        worker.clients[0].lease(LeaseRequest("b", -1)).result(BUSY_S)
    member = cluster.regions["eu"].server.members["b"]
    hands.passes(1, ("b", 0))
    hands.passes(599, ("b", 0))
    assert member.quarantined and hands.states()["b"] == "quarantined" and ("quarantine", "b") in hands.waits()
    with pytest.raises(Refused, match="b is quarantined after 1 refused updates"):
        cluster.joined("b", "life-2")
    hands.passes(1, ("b", 0))
    assert not member.quarantined
    with pytest.raises(Refused, match=r"this incarnation of it may say no more .*; start it anew"):
        cluster.joined("b")
    assert cluster.joined("b", "life-3").lease() is not None


def test_who_stays_when_all_is_trained_does_not_hold_the_end(begin):
    """It beats, and neither asks for more nor leaves. Nothing is said of who has left."""
    cluster, hands = begin(4)
    said: list[Event] = []
    hands.running.server_thread.write_event = said.append
    stays, trains, alive = cluster.joined("a"), cluster.joined("b"), (("a", 0), ("a", 1))
    trains.train(trains.lease())
    assert trains.lease() is None
    trains.leave()
    wait_for(lambda: cluster.top.server.over)
    hands.running.loop.do(hands.running.server_thread.say(RunComplete()))
    hands.passes(1, *alive)
    hands.passes(failure_detector.LEAST_PATIENCE_S, *alive)
    assert not cluster.top.server.finished
    hands.passes(1, *alive)
    wait_for(lambda: cluster.top.server.finished)
    assert stays.sequence == 1
    assert [event.what[:8] for event in said if isinstance(event, Trouble)] == ["a: lives"]
