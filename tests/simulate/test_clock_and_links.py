"""Virtual time and virtual links, by hand-computed arrivals."""

from __future__ import annotations

import pytest

from geotrain.simulate.clock import Clock, Promise, VirtualProcess
from geotrain.simulate.links import LinkSpec, Pipe

GB = 10**9 // 8  # bytes that take a second at 1 Gbit/s


def test_events_happen_in_order_of_time_and_then_of_their_making():
    clock, seen = Clock(), []
    for name, at in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        clock.at(at, seen.append, name)
    clock.at(1.0, lambda: clock.after(0.0, seen.append, "later"))
    clock.run(until_s=1.5)
    assert seen == ["a", "b", "later"] and clock.now == 1.0
    clock.run()
    assert seen[-1] == "c" and clock.events == 5
    with pytest.raises(ValueError, match=r"virtual time is 2\.0"):
        clock.at(1.0, seen.append, "too late")


def test_a_process_sleeps_and_waits_until_it_is_killed():
    clock, seen, promise = Clock(), [], Promise()

    def script(name):
        yield 1.0
        seen.append((name, (yield promise), clock.now))
        seen.append((name, (yield promise), clock.now))  # kept long ago: no waiting

    process = VirtualProcess(clock, script("a"))
    clock.at(3.0, promise.keep, "x")
    clock.run()
    assert seen == [("a", "x", 3.0), ("a", "x", 3.0)] and process.dead
    with pytest.raises(RuntimeError, match="has not happened"):
        Promise().result()
    victim = VirtualProcess(clock, script("b"))
    clock.at(3.5, victim.kill)
    clock.run()
    assert len(seen) == 2


def test_a_shared_link_queues_and_others_do_not():
    shared, own = Pipe(LinkSpec(1.0, 0.5)), Pipe(LinkSpec(1.0, 0.5, shared=False))
    assert [shared.arrival(0.0, 2 * GB, m) for m in "ab"] == [2.5, 4.5]
    assert [own.arrival(0.0, 2 * GB, m) for m in "ab"] == [2.5, 2.5]
    assert own.arrival(0.0, GB, "a") == 3.5  # a sender's own messages queue
    assert shared.control_arrival(0.0) == 0.5  # a few bytes slip in
    assert shared.usage.sent_bytes == 4 * GB and shared.usage.busy_s == 4.0


def test_an_outage_stops_the_service():
    pipe = Pipe(LinkSpec(1.0, outages=((1.0, 5.0), (6.0, 7.0))))
    assert pipe.arrival(0.0, 2 * GB, "a") == 6.0 + 0.0  # one second before, one after
    assert pipe.arrival(0.0, GB, "a") == 8.0  # begins at 6, where the next outage waits
    assert pipe.control_arrival(2.0) == 5.0
    with pytest.raises(ValueError, match="in order"):
        LinkSpec(1.0, outages=((5.0, 6.0), (1.0, 2.0)))
