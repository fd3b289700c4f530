"""Answers that wait for the deltas of others, over sockets: by the clocks of processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from geotrain.config import FragmentConfig
from geotrain.config.outer import OverlapConfig
from geotrain.outer.events import UpdateStage
from tests.support.net_worlds import BUSY_S, Cluster, FakeWorker, Running, outer, status_of, wait_for, whole

LONG_S = 1000.0  # so much is never waited for here


class Steps:
    """A cluster of one worker in each of two regions, and one fragment."""

    def __init__(self, make: Callable[..., Cluster]) -> None:
        about: Any = {"updates_per_send": 4, "overlap": OverlapConfig(steps=1, adopt="rebase")}
        config = outer("region_momentum", answers="wait", fragments=FragmentConfig(), **about)
        self.cluster = make(config, {"eu": {"a": whole}, "us": {"c": whole}}, 1000)
        self.workers = {name: self.cluster.joined(name) for name in "ac"}

    def sends(self, name: str, need_s: float) -> Future[Any]:
        """Send a worker's next update. Returns its answer, which is to come."""
        worker = self.workers[name]
        lease = worker.lease()
        assert lease is not None
        (part,) = worker.parts(lease, 0)
        (client,) = worker.clients
        client.push(replace(part, need_s=need_s)).result(BUSY_S)
        worker.sequences[0], worker.job = part.sequence + 1, worker.job + 1
        return client.pull(0, part.sequence)

    def adopts(self, worker: str, answer: Future[Any]) -> None:
        self.workers[worker].take([answer.result(BUSY_S)])

    def waits(self) -> list[tuple[str, str]]:
        return [(wait["what"], wait["whom"]) for wait in status_of(self.cluster.top.address)["waits"]]


@pytest.fixture
def steps(make: Callable[..., Cluster]) -> Steps:
    return Steps(make)


def stages(running: Running) -> list[str]:
    return [event.stage for event in running.events if isinstance(event, UpdateStage)]


def test_an_answer_waits_for_the_others_until_it_is_due(steps: Steps) -> None:
    first = steps.sends("a", LONG_S)
    wait_for(lambda: steps.waits() == [("delta", "us")])
    (wait,) = status_of(steps.cluster.top.address)["waits"]
    left_s = float(wait["text"].partition("waits, ")[2].partition(" s left")[0])
    assert 0.2 * LONG_S < left_s <= 0.25 * LONG_S, "half is for travel that nobody knows, on each of two links"
    assert not first.done()
    second = steps.sends("c", LONG_S)
    steps.adopts("a", first), steps.adopts("c", second)
    assert steps.workers["a"].versions == steps.workers["c"].versions and not steps.waits()
    assert stages(steps.cluster.top) == ["waits", "answered", "answered"]
    region = steps.cluster.regions["eu"].region_client
    assert region is not None and region.travel.off(LONG_S, 0) > 0.9 * LONG_S, "the wait is no travel"
    third = steps.sends("a", 0.5)  # now c sends nothing
    steps.adopts("a", third)
    assert stages(steps.cluster.top)[3:] == ["waits", "answered"]


def test_the_deadline_of_an_answered_update_is_not_that_of_the_next(steps: Steps) -> None:
    until_s = time.monotonic() + 2.0
    first, second = steps.sends("a", 2.0), steps.sends("c", 2.0)
    steps.adopts("a", first), steps.adopts("c", second)
    third = steps.sends("a", LONG_S)
    wait_for(lambda: time.monotonic() > until_s + 1.0)
    assert not third.done()


def test_who_waits_since_before_a_restart_is_answered_at_once(steps: Steps) -> None:
    first = steps.sends("a", LONG_S)
    wait_for(lambda: steps.waits() == [("delta", "us")])
    steps.cluster.restart_top()
    steps.adopts("a", first)


def test_a_region_that_restarts_needs_its_answers_at_once(steps: Steps) -> None:
    first = steps.sends("a", LONG_S)
    wait_for(lambda: steps.waits() == [("delta", "us")])
    steps.cluster.top.kill()
    steps.cluster.restart("eu")
    steps.cluster.top = steps.cluster.top.again()
    steps.adopts("a", first)


def test_a_worker_sends_what_its_update_and_answer_travel_less(steps: Steps) -> None:
    """The region waits for its half of what is left; here for one of two workers that sends nothing."""
    worker: FakeWorker = steps.workers["a"]
    steps.adopts("a", steps.sends("a", 0.0))
    (client,) = worker.clients
    assert 0.0 < 10.0 - client._travel.off(10.0, 0) < BUSY_S
