"""Answers that wait for the deltas of others, and what ends that. Over sockets: tests/net/test_answer_timer.py."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from geotrain.common.names import GLOBAL
from geotrain.config.outer import OverlapConfig
from geotrain.outer.messages import (
    Answer,
    AnswersDue,
    AnswerWanted,
    Leave,
    MemberSilent,
    Message,
    OperatorCommand,
    UpdatePart,
)
from geotrain.outer.server.answer_times import AnswerTimes
from geotrain.outer.travel import Travel
from tests.support import outer_world
from tests.support.outer_world import FakeWorker, World, parameter_map, saved_and_loaded, start_vector, whole

OVERLAP = OverlapConfig(steps=4, adopt="rebase")


class Waiting(World):
    """Workers a and b of region eu, c of us, d of ap; one fragment. handled: all that servers were told."""

    def __init__(self, answers: str = "wait") -> None:
        shape = parameter_map()
        workers = {n: FakeWorker(n, shape, whole(shape)) for n in "abcd"}
        regions = {"eu": [workers["a"], workers["b"]], "us": [workers["c"]], "ap": [workers["d"]]}
        config = outer_world.config(
            "region_momentum", answers=answers, overlap=OVERLAP, updates_per_send=4, merge_alpha=0.5
        )
        super().__init__(config, regions, [start_vector()], shape)

    def sends(self, worker: str, need_s: float = 1.0) -> None:
        """A worker's next update comes to its region."""
        region, fake = self.workers[worker]
        (part,) = fake.parts({0: torch.full((64,), 0.01 * ord(worker))})
        self.tell(region, replace(part, need_s=need_s))

    def goes_up(self, region: str, need_s: float = 1.0) -> None:
        """A region's next update comes to the global server."""
        update = self.up[region].popleft()
        assert isinstance(update, UpdatePart)
        self.tell(GLOBAL, replace(update, need_s=need_s))

    def exchange(self, region: str, need_s: float = 1.0) -> None:
        """All workers of a region send, and it does."""
        for worker in self.names[region]:
            self.sends(worker)
        self.goes_up(region, need_s)

    def version(self, region: str) -> int | None:
        """The version with which the global server has answered the region's last update; None: not yet."""
        return self.top.members[region].fragments[0].version

    @property
    def waiting(self) -> list[str]:
        return [*self.top.answers.held(0)]


def test_all_are_answered_when_all_at_work_have_sent() -> None:
    world = Waiting()
    world.exchange("eu")
    world.exchange("us")
    assert world.waiting == ["eu", "us"] and world.top.status()["awaited"] == ["ap"]
    assert world.version("eu") is None and world.top.versions == [2], "each is applied on arrival"
    world.exchange("ap")
    assert [world.version(name) for name in ("eu", "us", "ap")] == [3, 3, 3]
    assert world.waiting == world.top.status()["awaited"] == []


def test_one_is_answered_when_its_answer_is_due_and_who_comes_later_waits_anew() -> None:
    world = Waiting()
    world.exchange("eu")
    world.exchange("us")
    world.tell(GLOBAL, AnswersDue(("eu",), 0))
    assert (world.version("eu"), world.version("us"), world.waiting) == (2, None, ["us"])
    world.tell(GLOBAL, AnswersDue(("eu",), 0))  # once more: it waits no more
    world.exchange("ap")
    assert world.waiting == ["ap", "us"], "eu is at work on its next"
    assert world.deliver_down("eu", world.regions["eu"].uplink.in_flight[0])
    world.exchange("eu")
    assert [world.version(name) for name in ("eu", "us", "ap")] == [4, 4, 4]


def test_who_needs_it_now_waits_for_nobody() -> None:
    world = Waiting()
    world.exchange("eu", need_s=0.0)
    assert world.version("eu") == 1 and not world.waiting


@pytest.mark.parametrize("goes", [Leave("ap"), MemberSilent("ap", "life-1"), OperatorCommand("expel", "ap")])
def test_who_is_at_work_no_more_is_not_waited_for(goes: Message) -> None:
    world = Waiting()
    world.exchange("eu")
    world.exchange("us")
    world.tell(GLOBAL, goes)
    assert (world.version("eu"), world.version("us")) == (2, 2)


def test_who_waits_and_dies_does_not_hold_the_others() -> None:
    world = Waiting()
    world.exchange("eu")
    world.tell(GLOBAL, MemberSilent("eu", "life-1"))
    world.exchange("us")
    world.exchange("ap")
    assert (world.version("us"), world.version("ap")) == (3, 3)


def test_a_new_incarnation_of_who_waits_is_answered_at_once() -> None:
    world = Waiting()
    world.exchange("eu")
    world.regions["eu"].incarnation = "life-2"
    world.tell(GLOBAL, world.regions["eu"].join_message())
    world.tell(GLOBAL, AnswerWanted("eu", "life-2", 0, 0))
    assert world.version("eu") == 1 and not world.waiting


def test_who_waits_does_so_after_a_restart_until_the_new_process_says_that_it_is_due() -> None:
    world = Waiting()
    world.exchange("eu")
    world.top = saved_and_loaded(world, GLOBAL)
    world.tell(GLOBAL, world.regions["eu"].join_message())
    assert world.waiting == ["eu"] and not world.deliver_down("eu", world.regions["eu"].uplink.in_flight[0])
    world.tell(GLOBAL, AnswersDue(("eu",), 0))
    assert world.deliver_down("eu", world.regions["eu"].uplink.in_flight[0])


def test_a_region_waits_for_all_its_workers_or_until_one_of_them_cannot_wait() -> None:
    world = Waiting()
    world.sends("a")
    assert not world.up["eu"] and world.regions["eu"].status()["awaited"] == ["b"]
    world.sends("b")
    assert len(world.up["eu"]) == 1
    world.goes_up("eu", 0.0)
    assert world.deliver_down("eu", world.regions["eu"].uplink.in_flight[0])
    assert world.weights("a", {0: 1}) is not None
    world.sends("a", need_s=0.0)
    assert len(world.up["eu"]) == 1 and not world.regions["eu"].answers.held(0)


def test_a_deadline_that_passes_while_an_update_is_in_flight_is_remembered() -> None:
    world, e = Waiting(), FakeWorker("e", parameter_map(), whole(parameter_map()))
    world.names["eu"] += ("e",)
    region = world.regions["eu"] = world.build("eu")
    world.connect("eu")
    world.workers["e"] = "eu", e
    for name in "abe":
        for join in world.workers[name][1].joins(world.identity):
            world.tell("eu", join)
    world.sends("a", need_s=0.0)
    world.sends("b")
    assert len(world.up["eu"]) == 1 and region.answers.held(0) == ("b",), (
        "one of each fragment is in flight at a time"
    )
    world.tell("eu", AnswersDue(("b",), 0))
    again = saved_and_loaded(world, "eu")
    assert not again.answers.held(0) and not region.answers.held(0)
    world.goes_up("eu", 0.0)
    assert world.deliver_down("eu", region.uplink.in_flight[0])
    assert len(world.up["eu"]) == 1, "it leaves as soon as it can, though e has not sent"


def test_a_replay_freezes_at_the_same_places() -> None:
    world, told = Waiting(), list[tuple[str, Message]]()
    tell = world.tell

    def noted(server: str, message: Message) -> Any:
        told.append((server, message))
        return tell(server, message)

    world.tell = noted  # type: ignore[method-assign]
    world.exchange("eu")
    world.exchange("us")
    world.tell(GLOBAL, AnswersDue(("us",), 0))
    world.exchange("ap", need_s=0.0)
    other = Waiting()
    other.sends("a"), other.sends("b"), other.sends("c"), other.sends("d")
    for server, message in told:
        if server == GLOBAL:
            other.top.handle(message)
    (mine, plain), (theirs, said) = world.top.state(), other.top.state()
    assert json.dumps(plain) == json.dumps(said)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert [other.version(name) for name in ("eu", "us", "ap")] == [None, 2, 3]


def test_other_rules_answer_as_they_did() -> None:
    world = Waiting("merged")
    world.sends("a")
    world.goes_up("eu", 0.0)
    assert world.version("eu") == 1 and not world.regions["eu"].answers.held(0)
    flat = outer_world.flat("region_momentum")
    (part,) = FakeWorker("a", parameter_map(), whole(parameter_map())).parts({0: torch.zeros(64)})
    flat.handle(replace(part, need_s=5.0))
    assert flat.members["a"].fragments[0].version == 1, "what a worker needs holds nobody in a flat run"


def test_a_sender_takes_off_the_longest_of_its_last_travels() -> None:
    now_s = [0.0]
    travel = Travel(lambda: now_s[0])

    def exchanges(fragment: int, sequence: int, took_s: float, held_s: float) -> float:
        """Returns the seconds that were left of ten."""
        sent = travel.leaves(UpdatePart("eu", "1", fragment, sequence, 0, ()), 10.0)
        now_s[0] += took_s
        travel.came(Answer(fragment, sequence, (), held_s=held_s))
        travel.came(Answer(fragment, 0, (), held_s=0.0))  # to a join
        return sent.need_s

    assert exchanges(0, 1, 7.0, 4.0) == 5.0, "half, as nothing has come back"
    assert exchanges(1, 1, 1.0, 0.0) == 7.0, "what another fragment took"
    assert exchanges(1, 2, 1.0, 0.0) == 9.0
    assert [exchanges(0, n, 1.0, 0.0) for n in range(2, 8)] == [7.0, 7.0, 7.0, 7.0, 9.0, 9.0]
    assert exchanges(0, 8, 20.0, 0.0) == 9.0 and exchanges(0, 9, 1.0, 0.0) == 0.0, "never less"


def test_a_region_holds_half_of_what_the_way_to_the_global_server_leaves() -> None:
    world, now_s = Waiting(), [0.0]
    region = AnswerTimes(world.regions["eu"], lambda: now_s[0])
    region.above = Travel(lambda: now_s[0])
    top = AnswerTimes(world.top, lambda: now_s[0])
    region.above.leaves(UpdatePart("eu", "1", 0, 1, 0, ()), 10.0)
    now_s[0] = 2.0
    region.above.came(Answer(0, 1, ()))
    world.sends("a", need_s=6.0)
    assert region.news() == [("a", 0, 2.0)] and region.news() == []
    now_s[0] = 3.0
    world.sends("b", need_s=6.0)
    assert region.news() == [], "all are there"
    assert region.left_s(world.regions["eu"].going_up(0), 0) == 5.0
    world.goes_up("eu", 3.0)
    assert top.news() == [("eu", 0, 3.0)]
    now_s[0] = 4.5
    assert top.held("eu", Answer(0, 1, ())).held_s == 1.5
    now_s[0] = 9.0
    assert top.held("eu", Answer(0, 1, ())).held_s == 1.5, "the same to all that ask"
    assert top.held("eu", Answer(0, 2, ())).held_s == 0.0
