"""The real servers against the specification, through random lives: every rule and codec, deaths of workers and of
servers, silence, reserve, pause, drain, offences, refusals for good. At the end of each, all data is trained and the
run ends.

GEOTRAIN_SPECIFICATION=1000 plays so many lives of several hundred steps, in place of the few in `make test`.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from geotrain.config import LimitsConfig, MomentumConfig, codec_config
from geotrain.outer.leases import LeaseBook
from geotrain.outer.messages import (
    GLOBAL,
    LiftQuarantine,
    MemberSilent,
    OperatorCommand,
    RunComplete,
    UpdateRejected,
)
from geotrain.outer.rules import rule as rules
from tests.support.outer_configs import outer_config
from tests.support.specified_world import REGIONS, SpecifiedWorld

LIVES = int(os.environ.get("GEOTRAIN_SPECIFICATION", "0"))
NAMES = st.sampled_from("abc")
PLACES = st.sampled_from(list(REGIONS))
GOOD = (10 * ["turn"], 3 * ["ask", "train", "leases", "update", "pull", "leave"], 2 * ["early"])
STEPS = [
    *(step for steps in GOOD for step in steps),
    *("snapshot", "die", "die half way", "early, then die", "silent", "slow", "region silent", "restart"),
    *("refuse", "offend", "pardon", "pause", "resume", "resume", "drain"),
]
NESTEROV = MomentumConfig(lr_per_update=0.2, beta=0.9, buffer=3)


class Lives(RuleBasedStateMachine):
    world: SpecifiedWorld

    @initialize(
        name=st.sampled_from(["halos", "published", "region_momentum", "sync"]),
        up=st.sampled_from(["fp32", "bf16", "int8", "int4"]),
        down=st.sampled_from(["fp32", "bf16", "int4"]),
        every=st.integers(1, 3),
        reserve=st.integers(0, 2),
        samples=st.integers(4, 24),
        layers=st.sampled_from([None, 1]),
    )
    def begin(
        self, name: str, up: str, down: str, every: int, reserve: int, samples: int, layers: int | None
    ) -> None:
        chosen: dict[str, Any] = {"updates_per_send": every, "lease_reserve": reserve}
        if name == "published":
            chosen["ledger"] = False
        if name in ("halos", "published"):
            chosen |= {"region": NESTEROV, "global": NESTEROV}
        name = "halos" if name == "published" else name
        self.world = SpecifiedWorld(
            outer_config(
                name,
                up=codec_config(up),
                down=codec_config(down),
                local_steps=2,
                limits=LimitsConfig(norm_deviations=None, offences=2, offence_window=4),
                **({} if name == "sync" else chosen),
            ),
            samples,
            layers,
        )
        for worker in self.world.workers:
            self.world.join(worker, anew=True)

    @rule(what=st.sampled_from(STEPS), name=NAMES, place=PLACES, server=st.sampled_from([GLOBAL, *REGIONS]))
    def step(self, what: str, name: str, place: str, server: str) -> None:
        world, worker = self.world, self.world.workers[name]
        match what:
            case "turn":  # everything that one job of a worker needs
                self.turn(name)
            case "ask":
                world.ask(name)
            case "train":
                world.train(name)
            case "early":
                world.train(name, early=True)
            case "early, then die":
                world.train(name, early=True)
                world.join(name, anew=True)
            case "slow":  # taken for dead, and training all the same
                world.tell(worker.region, MemberSilent(name, worker.incarnation))
                world.deliver_leases(worker.region)
                world.train(name)
            case "leases":
                world.deliver_leases(place)
            case "update":
                world.deliver_update(place)
            case "pull":
                world.pull(place)
            case "leave":
                world.leave(name)
            case "snapshot":
                world.snapshot(server)
            case "die":
                world.join(name, anew=True)
            case "die half way":
                world.train(name, ranks=1)
                world.join(name, anew=True)
            case "silent":
                world.tell(worker.region, MemberSilent(name, worker.incarnation))
            case "region silent":
                world.region_falls_silent(place)
            case "restart":
                world.restart(server)
            case "refuse":
                world.refuse(place)
            case "offend":
                if world.tell(worker.region, UpdateRejected(name, worker.incarnation, "an offence")):
                    worker.alive = False
            case "pardon":
                world.tell(worker.region, LiftQuarantine(name))
            case "pause" | "resume":
                world.tell(GLOBAL, OperatorCommand(what))
            case "drain":
                world.drain(place)

    def turn(self, name: str) -> None:
        world = self.world
        place = world.workers[name].region
        world.ask(name)
        world.deliver_leases(place)
        world.train(name)
        world.deliver_update(place)
        world.pull(place)

    @invariant()
    def it_is_as_specified(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Nothing more goes wrong: the run ends, with all data trained."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.tell(GLOBAL, OperatorCommand("resume"))
        for name, worker in world.workers.items():
            world.tell(worker.region, LiftQuarantine(name))
            if not worker.alive and not worker.left:
                world.join(name, anew=True)
        for _ in range(40 * world.samples):
            for name in world.workers:
                world.ask(name)
                world.train(name)
                world.leave(name)
            for place in REGIONS:
                world.deliver_leases(place)
                world.deliver_update(place)
                world.pull(place)
                if world.top.over and not world.region(place).over:
                    world.tell(place, RunComplete())
            world.check()
            if world.top.finished and all(world.region(place).done for place in REGIONS):
                break
        assert world.top.finished, world.top.status()
        committed = world.spec.ledger.committed
        # Of a synchronous run the samples that make no whole round are left over; of a drained region what came back
        # after all others had left.
        left_over = not world.top.book.open if world.top.rule.in_rounds else bool(world.top.draining)
        assert committed == world.samples or left_over
        super().teardown()


def explored(lives: int, steps: int) -> None:
    profile = settings(
        max_examples=lives,
        stateful_step_count=steps + 1,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=not LIVES,
    )
    run_state_machine_as_test(Lives, settings=profile)


def test_the_servers_do_what_is_specified() -> None:
    explored(LIVES or 40, 400 if LIVES else 40)


# ------------------------------------------------------------------------------- it would notice if they did not


SLOW = [("ask", "c"), ("leases", "c"), ("slow", "c"), *(4 * [("update", "c"), ("pull", "c")])]
SEEDED: dict[str, tuple[Any, str, list[tuple[str, str]]]] = {
    "leases of the dead are kept": (
        patch.object(LeaseBook, "release", lambda book, leases: None),
        "halos",
        [("ask", "a"), ("leases", "a"), ("silent", "a"), ("leases", "a")],
    ),
    "what came back is not counted": (
        patch.object(LeaseBook, "_withdraw", lambda book, start, samples: 0), "region_momentum", SLOW
    ),
    "pending updates are forgotten": (
        patch.object(rules.AsyncRegion, "may_send", lambda self, v, flush: v.counts["pending"] >= self.every + 2),
        "halos",
        [("turn", "a")],
    ),
}  # fmt: skip


def played(name: str, steps: list[tuple[str, str]]) -> None:
    """These steps of those workers or of their regions, and then to the end of the run."""
    lives = Lives()
    lives.begin(name, "fp32", "fp32", 1, 1, 12, 1)
    for what, worker in steps:
        lives.step(what, worker, lives.world.workers[worker].region, GLOBAL)
        lives.it_is_as_specified()
    lives.teardown()


@pytest.mark.parametrize("fault", SEEDED)
def test_a_fault_is_found(fault: str) -> None:
    seeded, name, steps = SEEDED[fault]
    played(name, steps)  # without it, all is well
    with seeded, pytest.raises(AssertionError):
        played(name, steps)
