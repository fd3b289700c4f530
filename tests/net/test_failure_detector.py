"""The failure detector, in time that passes when a test says so. What it makes of workers is told in
tests/scenarios/silence.txt."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from math import inf
from statistics import median_low

import pytest

from geotrain.monitor.events import Trouble
from geotrain.net.server import failure_detector
from geotrain.net.server.server_thread import ServerThread
from geotrain.outer.events import Event
from geotrain.outer.messages import NotJoined, OperatorCommand, Refused, RunComplete, UpdateRejected
from tests.support.net_worlds import BUSY_S, Cluster, Running, halves, outer, status_of, wait_for, whole

SILENT_S = 1e6  # by the server's own clock nothing happens


class Hands:
    """Sets the clock of a server's failure detector, and lets it look."""

    def __init__(self, running: Running) -> None:
        self.running, self.now_s = running, 0.0
        self.detector = running.service.failure_detector
        self.detector.clock = lambda: self.now_s
        self.detector._alive_s = dict.fromkeys(self.detector._alive_s, 0.0)

    def passes(self, seconds: float, *heard: tuple[str, int], late_s: float = 0.0) -> None:
        """Let seconds pass, and the detector look. heard: ranks that were heard of at their end. late_s: for how long
        the server's process stood still."""
        self.now_s += seconds
        for rank in heard:
            self.detector.note_alive(*rank)
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
        hands.detector.note_alive("a", part)
    may_go_on.set()
    judged.result(BUSY_S), busy.result(BUSY_S)
    assert not hands.silent
    assert list(cluster.top.server.lease_table.open) == [lease.lease] and not cluster.top.server.lease_table.pool


def test_a_rank_that_waits_for_its_workers_others_is_heard(begin):
    """Its beats are refused until all have joined, and are signs of life all the same."""
    cluster, hands = begin()
    worker = cluster.worker("a")
    first = worker.clients[0]
    first.join(worker.joins()[0])
    hands.now_s = SILENT_S - 1
    for part, kind in ((1, NotJoined), (0, Refused)):
        with pytest.raises(kind):
            first._start(first._link.beat(part)).result(BUSY_S)
    hands.passes(2.0)
    assert not hands.silent


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
    assert set(stays.sequences) == {1}
    assert [event.what[:8] for event in said if isinstance(event, Trouble)] == ["a: lives"]


def test_a_look_asks_the_servers_thread_once_for_all_members(begin):
    cluster, hands = begin()
    cluster.joined("a").lease(), cluster.joined("b").lease()
    thread, asked = hands.running.server_thread, []

    async def counted(call: Callable[[], object]) -> object:
        asked.append(call)
        return await ServerThread.read(thread, call)

    thread.read = counted
    hands.passes(1, ("a", 0), ("a", 1), ("b", 0))
    assert len(asked) == 1


def test_of_a_members_own_times_no_more_is_believed_than_ten_times_the_others(begin):
    _, hands = begin()
    dice, detector = random.Random(0), hands.detector
    for count in (1, 2, 2, 3, 4, 5, 5, 6, 7):
        usual = {f"w{i}": dice.choice([1.0, 2.0, 30.0, 400.0]) for i in range(count)}
        detector._usual_s, detector._sorted_s = usual, sorted(usual.values())
        for name in (*usual, "new"):
            others = [usual_s for who, usual_s in usual.items() if who != name]
            most_s = failure_detector.FAR * median_low(others) if others else inf
            assert detector.usual_s(name, 5.0) == min(usual.get(name, max(usual.values())), most_s)


def test_a_quarantine_ends_after_its_time_and_an_expulsion_only_by_the_operator(begin):
    cluster, hands = begin()
    server, say = hands.running.server, hands.running.server_thread.say
    for name in "ab":
        cluster.joined(name)
    hands.running.loop.do(say(OperatorCommand("expel", "a")))
    for _ in range(server.core.limits.strikes):
        hands.running.loop.do(say(UpdateRejected("b", server.members["b"].incarnation, "it is bad")))

    def quarantined(after_s: float) -> list[str]:
        hands.passes(after_s)
        return [name for name, member in server.members.items() if member.quarantined]

    assert quarantined(0.0) == quarantined(server.core.limits.quarantine_s - 1.0) == ["a", "b"]
    assert quarantined(1.0) == ["a"] == quarantined(SILENT_S / 2)
