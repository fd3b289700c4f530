"""A spike of the loss is told once, from whichever members' updates, and passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from geotrain.outer.events import LossSpike
from geotrain.outer.server.loss_watch import IN_A_ROW, LEAST, RECENT, LossWatch
from tests.support.outer_world import config, make, random_deltas

USUAL = [3.0 + 0.02 * (i % 5) for i in range(RECENT)]


def told(losses: list[float]) -> list[tuple[int, LossSpike]]:
    watch = LossWatch()
    found = [(number, watch.note(loss, number)) for number, loss in enumerate(losses)]
    assert all(spike.tokens == number - IN_A_ROW + 1 for number, spike in found if spike)
    return [(number, spike) for number, spike in found if spike]


@pytest.mark.parametrize(
    ("losses", "at"),
    [
        ([*USUAL, 4.0, 4.0, 4.0, 4.0, *USUAL], [RECENT + 2]),
        ([*USUAL, 4.0, 4.0, 3.0, 4.0, 4.0, *USUAL], []),  # never three in a row
        ([*USUAL, *[4.0] * 3, *USUAL, *[9.0] * 5], [RECENT + 2, 2 * RECENT + 5]),
        ([*USUAL, *[4.0] * RECENT, *[4.1] * 9], [RECENT + 2]),  # it has become the usual
        ([*USUAL, *[3.2] * 9], []),  # by less than a twentieth
        ([*USUAL, *[1.0] * 9], []),
        ([9.0 - i / 20 for i in range(120)], []),  # a run that learns
        ([3.0] * (LEAST - 1) + [9.0] * IN_A_ROW, []),  # nothing is usual yet
        ([3.0] * LEAST + [9.0] * IN_A_ROW, [LEAST + IN_A_ROW - 1]),
    ],
)
def test_when_it_is_told(losses: list[float], at: list[int]) -> None:
    assert [number for number, _ in told(losses)] == at


def test_what_it_says_while_it_lasts() -> None:
    watch = LossWatch()
    said: list[Any] = [watch.note(loss, 8) for loss in [*USUAL, 5.0, 6.0, 7.0]]
    assert said[-1] == LossSpike(loss=7.0, usual=3.04, tokens=8) and watch.spike == vars(said[-1])
    watch.note(3.0, 9)
    assert watch.spike is None


def test_the_global_server_hears_of_it_by_its_members_updates() -> None:
    world, events = make(config(updates_per_send=1)), list[Any]()
    real = world.top.handle

    def listening(message: Any) -> Any:
        handled = real(message)
        events.extend(handled.events)
        return handled

    world.top.handle = listening  # type: ignore[method-assign]
    for number, loss in enumerate([*USUAL[:LEAST], *[9.0] * 4, 3.0], 1):
        [part] = world.workers["a"][1].parts(random_deltas(world, number))
        world.tell("eu", dataclasses.replace(part, metrics={"loss": loss}))
        world.settle("eu")
        assert bool(world.top.status()["loss_spike"]) == (LEAST + IN_A_ROW <= number < LEAST + 5)
        if number == LEAST:  # what is usual outlives a restart
            world.top.load(*world.top.state())
    assert [event for event in events if isinstance(event, LossSpike)] == [LossSpike(9.0, 3.04, 0)]
