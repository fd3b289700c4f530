"""Members, parts, exactly once, layouts, leases, state."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from geotrain.config import codec_config
from geotrain.outer.codec import NonFiniteError
from geotrain.outer.messages import MemberSilent, Refused
from tests.support.outer_world import (
    FakeWorker,
    World,
    config,
    halves,
    make,
    parameter_map,
    random_deltas,
    saved_and_loaded,
    say_again,
    whole,
)


def test_progress_that_is_not_finite_is_refused_by_the_parameters_name():
    world = make(config(up=codec_config("int4")), chunk_elements=40)
    region = world.regions["eu"]
    [*_, (name, last)] = world.parameter_map.split(0, region.weights(0))
    region.store.vectors[1].x[-last.numel()] = float("inf")
    with pytest.raises(NonFiniteError, match=f"region eu: parameter {name}: holds infinities"):
        region.store.send_up(0, 1, {})


def test_an_answer_is_kept_until_every_part_has_adopted_it() -> None:
    """By an update of another fragment, too: else a region would hold all weights once for each of its workers."""
    world = make(config(), halves, fragments=1)
    region, worker = world.regions["eu"], world.workers["a"][1]
    for answered in range(len(region.numbers)):  # its join's
        world.weights("a", {answered: 0})
    held = region.store.members["a"].answers
    assert sorted(held) == [*region.numbers]
    deltas = random_deltas(world, 1)

    def update(fragment: int, *adopted: tuple[int, ...]) -> None:
        for part, each in zip(worker.parts({fragment: deltas[fragment]}), adopted, strict=True):
            world.tell("eu", dataclasses.replace(part, adopted=each))

    none = (0,) * len(region.numbers)
    update(0, none, ())
    assert sorted(held) == [*region.numbers], "a part has said nothing of it"
    update(1, none, none)
    assert sorted(held) == [0, 1], "the answers to these two updates; the joins' are adopted"
    update(1, (1, 1, *none[2:]), none)
    assert sorted(held) == [0, 1], "one part has adopted the answer to the update of fragment 0"
    update(1, (1, 2, *none[2:]), (1, 2, *none[2:]))
    assert sorted(held) == [1]
    with pytest.raises(Refused, match=r"update a/0\.1 was adopted before"):
        world.weights("a", {0: 1})
    with pytest.raises(Refused, match=f"adopted answers of 1 fragments; the run has {len(none)}"):
        update(1, (3,), (3,))


@pytest.mark.parametrize("down", ["bf16", "int4"])
def test_a_region_says_which_answers_it_has_merged(down: str) -> None:
    """Where weights go down as changes, the answer to a join stays: they are counted from it."""
    world = make(config(down=codec_config(down), updates_per_send=1), fragments=1)
    held = world.top.store.members["eu"].answers
    assert sorted(held) == [*world.top.numbers]
    for fragment in (0, 1):
        world.push("a", {fragment: random_deltas(world, 1)[fragment]})
        sent = world.deliver_up("eu")
        assert sent is not None and sent.adopted[:2] == (fragment, 0), "fragment 1 is on its way"
        world.settle("eu")
    assert sorted(held) == ([1] if down == "bf16" else [*world.top.numbers][1:])


def test_a_loaded_region_sends_the_same_numbers_for_people():
    """An update in flight is part of the state: its metrics are of all workers, also of one that was silent since."""
    lay = parameter_map()
    workers = {"eu": [FakeWorker(name, lay, whole(lay)) for name in "ab"]}
    world = World(config(updates_per_send=1), workers, [torch.zeros(64)], lay)

    def update(name: str, loss: float):
        [part] = world.workers[name][1].parts(random_deltas(world, ord(name)))
        return dataclasses.replace(part, metrics={"loss": loss})

    world.tell("eu", update("b", 4.0))
    world.settle("eu")
    old = world.regions["eu"]
    new = saved_and_loaded(world, "eu")
    new.incarnation = old.incarnation
    say_again(old, new)
    part = update("a", 2.0)
    for region in (old, new):
        region.handle(part)
    assert old.state()[1] == new.state()[1]
    assert [sent.metrics["loss"] for sent in new.uplink.in_flight.values()] == [3.0]


def test_who_was_silent_is_silent_when_it_is_loaded_whatever_parts_it_had_sent():
    """A part is a sign of life; those that are held are older than the silence."""
    world = make(config(), halves)
    old, [part, _] = world.regions["eu"], world.workers["a"][1].parts(random_deltas(world, 1))
    old.handle(part)
    old.handle(MemberSilent("a", part.incarnation))
    new = saved_and_loaded(world, "eu")
    say_again(old, new)
    assert new.members["a"].fragments[0].arriving.keys() == {part.part}
    assert old.members["a"].silent and new.members["a"].silent
