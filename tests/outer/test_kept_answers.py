"""How long a server keeps the weights it has answered with: until all parts have adopted them, and not longer."""

from __future__ import annotations

from dataclasses import replace

import torch

from geotrain.config import codec_config
from geotrain.outer.messages import UpdatePart
from tests.support.outer_world import World, config, halves, make


def push(world: World, fragment: int, *adopted: int) -> list[UpdatePart]:
    """An update of one fragment by worker a. adopted: what each of its parts says."""
    worker = world.workers["a"][1]
    delta = torch.ones(world.parameter_map.fragments[fragment].numel)
    parts = [replace(p, adopted=a) for p, a in zip(worker.parts({fragment: delta}), adopted, strict=True)]
    for part in parts:
        world.tell("eu", part)
    return parts


def test_an_answer_is_kept_until_every_part_has_adopted_it() -> None:
    world = make(config(updates_per_send=100), cut_a=halves, fragments=1)
    kept = world.regions["eu"].members["a"].answers
    given = {}
    for sequence, adopted in enumerate(((0, 0), (0, 0), (2, 1)), start=1):
        push(world, sequence - 1, *adopted)
        given[sequence] = world.weights("a", sequence, (sequence - 1,))
    assert set(kept) == {2, 3}  # one part has adopted answer 2; the other may ask for it again, as its reply was lost
    again = world.weights("a", 2, (1,))
    assert again is not None and torch.equal(again[1], given[2][1])
    parts = push(world, 3, 3, 3)
    assert set(kept) == {4}
    for part in parts:  # the acknowledgement was lost: nothing changes
        world.tell("eu", part)
    assert set(kept) == {4}


def test_a_region_says_what_it_has_merged_without_a_gap_also_when_it_sends_again() -> None:
    world = make(config(updates_per_send=1), fragments=1)
    region, top = world.regions["eu"], world.top.members["eu"]
    for fragment in (0, 1, 2):
        push(world, fragment, 0)
    updates = {n: world.deliver_up("eu") for n in (1, 2, 3)}
    assert [update.adopted for update in updates.values() if update] == [0, 0, 0]
    assert set(top.answers) == {1, 2, 3}
    assert updates[2] and world.deliver_down("eu", updates[2])  # answers of fragments come in any order
    push(world, 1, 0)
    fourth = world.deliver_up("eu")
    assert fourth and fourth.adopted == 0 and {1, 3} < set(top.answers)
    assert updates[1] and world.deliver_down("eu", updates[1])
    again = [send.message for send in region.resend()]
    assert [(u.sequence, u.adopted) for u in again if isinstance(u, UpdatePart)] == [(3, 2), (4, 2)]
    push(world, 0, 0)
    fifth = world.deliver_up("eu")
    assert fifth and fifth.adopted == 2 and set(top.answers) == {3, 4, 5}


def test_the_answer_to_a_join_is_whole_although_the_server_knows_what_the_member_was_sent() -> None:
    """Its fingerprints may be right, and yet it asks to begin anew: a change would be of what it has given up."""
    world = make(config(updates_per_send=1, down=codec_config("int8")))
    push(world, 0, 0)
    update = world.deliver_up("eu")
    assert update and world.deliver_down("eu", update)
    join = replace(world.regions["eu"].join_message(), incarnation="life-2")
    assert all(join.mirrors)
    world.top.handle(join)
    answer = world.top.answer("eu", "life-2", 0, 0, (0,))
    assert answer and [weights.increment for weights in answer.weights] == [False]
