"""The one entry to the state machines: what it refuses, what it sends, what it reports, and what it checks once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from geotrain.config import LimitsConfig
from geotrain.outer.events import Joined, Left, Merged, Quarantined, SentUp, UpdateApplied, UpdateRefused, UpdateStage
from geotrain.outer.messages import Leave, Refused, UpdatePart, UpdateRejected
from geotrain.outer.server import intake
from geotrain.outer.server.server import Handled
from tests.support.outer_world import config, halves, make, random_deltas


@pytest.fixture
def checked(monkeypatch) -> list[tuple[int, int]]:
    """(sequence, part) of every update that was checked in full."""
    seen: list[tuple[int, int]] = []
    real = intake.check_part

    def counting(part: UpdatePart, *others: Any) -> None:
        seen.append((part.sequence, part.part))
        real(part, *others)

    monkeypatch.setattr(intake, "check_part", counting)
    return seen


def test_an_admitted_update_is_not_checked_again(checked) -> None:
    world = make(config(), cut_a=halves)
    region, worker = world.regions["eu"], world.workers["a"][1]
    for admit in (True, False):  # from a socket; from a journal, or in the simulator
        parts = worker.parts(random_deltas(world, 1))
        if admit:
            assert all(region.intake.admit(part) for part in parts)
        assert [region.handle(part).reply for part in parts] == [False, True]
    assert checked == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_only_what_was_admitted_passes_unchecked(checked) -> None:
    """Another update, a second use, a rank that has joined again: each is checked."""
    world = make(config(), cut_a=halves)
    region, worker = world.regions["eu"], world.workers["a"][1]
    good, other = worker.parts(random_deltas(world, 1))
    assert region.intake.admit(good)
    short = dataclasses.replace(good.deltas[0], payload=good.deltas[0].payload[:-1])
    with pytest.raises(Refused, match="its slices need"):
        region.handle(dataclasses.replace(good, deltas=(short,)))
    assert region.intake.admit(good)
    assert region.handle(good).reply is False
    checked.clear()
    assert region.handle(good).reply is False  # a retry of half an update
    assert checked == [(1, 0)]
    assert region.intake.admit(other)
    region.handle(worker.joins(world.identity)[1])  # this rank joined again: its slices may be others now
    checked.clear()
    assert region.handle(other).reply is True
    assert checked == [(1, 1)]


def test_a_lease_that_an_update_names_twice_counts_once() -> None:
    world = make(config(), train_samples=64)
    lease = world.lease("a")
    assert lease is not None
    [part] = world.workers["a"][1].parts(random_deltas(world, 1), (lease.lease, lease.lease))
    answered, applied = world.regions["eu"].handle(part).events
    assert answered == UpdateStage("a/0.1", "answered")
    assert isinstance(applied, UpdateApplied) and applied.samples == lease.samples


def test_what_happened_is_reported_in_order() -> None:
    world = make(config(updates_per_send=2, limits=LimitsConfig(strikes=1)), train_samples=64)
    region, worker = world.regions["eu"], world.workers["a"][1]
    lease = world.lease("a")
    assert lease is not None
    assert world.push("a", random_deltas(world, 1), (lease.lease,)) is not None
    [part] = worker.parts(random_deltas(world, 2))
    handled = region.handle(dataclasses.replace(part, metrics={"loss": 2.5, "lr": float("nan")}))
    _, applied, sent = handled.events
    assert isinstance(applied, UpdateApplied) and isinstance(sent, SentUp)
    size = len(part.deltas[0].payload)
    assert (applied.member, applied.sequence, applied.versions, applied.samples) == ("a", 2, [2], 0)
    assert (applied.loss, applied.metrics, applied.payload_bytes) == (2.5, {"loss": 2.5}, size)
    assert applied.tokens is None and applied.delta_norm and applied.staleness == 1
    assert sent == SentUp(0, 1, 2, size) and [send.message.sequence for send in handled.sends] == [1]
    top = world.top.handle(handled.sends[0].message)
    _, merged = top.events
    assert isinstance(merged, UpdateApplied)
    assert (merged.member, merged.samples, merged.tokens) == ("eu", lease.samples, lease.samples)
    answer = world.top.answer("eu", "life-1", 0, 0, 1)
    assert answer is not None
    assert region.handle(answer).events == (Merged(0, 1, [1], size),)
    assert region.handle(answer) == Handled(None)  # a second copy: nothing happens
    for seed in (3, 4):
        world.push("a", random_deltas(world, seed))
    assert region.uplink.in_flight and region.handle(answer) == Handled(None), "it is of another than is on its way"
    refused = region.handle(UpdateRejected("a", "life-1", "wild")).events
    assert refused == (UpdateRefused("a", "wild", 1), Quarantined("a", "wild"))
    assert world.top.handle(Leave("us")).events == (Left("us"),)
    join = world.workers["b"][1].joins(world.identity, "life-2")[0]
    assert world.regions["us"].handle(join).events == (Joined("b", 0, "life-2"),)


def test_a_worker_need_not_wait_for_what_its_update_sends_up() -> None:
    """`take` has applied the update and frozen its answer; `go_on` sends up, and nothing the second time."""
    world, other = make(config(updates_per_send=1)), make(config(updates_per_send=1))
    region, worker = world.regions["eu"], world.workers["a"][1]
    [part] = worker.parts(random_deltas(world, 1))
    taken = region.take(part)
    assert taken.reply is True
    assert [type(event) for event in taken.events] == [UpdateStage, UpdateApplied]
    assert not [send for send in taken.sends if isinstance(send.message, UpdatePart)]
    assert region.answer("a", part.incarnation, 0, 0, 1) is not None
    assert (region.uplink.sequences, region.status()["in_flight"]) == ([0], 1)
    rest = region.go_on()
    assert [send.message.sequence for send in rest.sends if isinstance(send.message, UpdatePart)] == [1]
    assert [type(event) for event in rest.events] == [SentUp]
    assert region.status()["in_flight"] == 1
    assert region.go_on() == Handled(None)
    [same] = other.workers["a"][1].parts(random_deltas(other, 1))
    handled = other.regions["eu"].handle(same)
    assert (handled.reply, handled.sends) == (True, taken.sends + rest.sends)
