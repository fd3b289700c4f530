"""`acco.balance`: chosen where replicas are unlike in speed, by what both ways reach as played."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from geotrain.commands.plan import played
from geotrain.plan.explain import alternatives, reasons
from geotrain.plan.inventory import Pins, PlanTask, Wish, pins_of
from geotrain.plan.model.loss import worth
from geotrain.plan.planner import Plan
from tests.support.plan_cases import holds, inventory, small_run, task

WISH = Wish(2e8)


def asked(pins: Pins | None = None, kind: str = "s", **acco: Any) -> PlanTask:
    hosts = {"a": [(1, "d"), (1, "d"), (1, kind), (1, kind)]}
    run = small_run(acco={"form": "delayed", **acco}, outer={"local_steps": 16})
    return task(run, inventory(hosts, s={"tflops": 40.0}), pins or Pins(outer=frozenset({"local_steps"})))


def worth_per_s(plan: Plan, forecast: dict[str, Any]) -> float:
    return forecast["tokens_per_s"] * worth(plan.expected_gap)


def test_replicas_of_unlike_speed_are_balanced_where_that_is_worth_more() -> None:
    free = asked()
    plan, forecast = played(free, WISH)
    holds(plan)
    (worker,) = plan.workers.values()
    assert plan.run.acco is not None and plan.run.acco.balance
    assert (worker.layout.kinds, worker.layout.replicas) in {("s+d", 4), ("d+s", 4)}
    assert any("a-0: acco.balance, since its replicas are unlike in speed" in reason for reason in reasons(plan))
    (off,) = (other for other in alternatives(plan) if other.decision == "acco.balance = false")
    # Without it all wait for the slow ones, which have 0.4 of the others' speed: 4 · 0.4 of 2 · (1 + 0.4).
    assert off.prediction.tokens_per_s == pytest.approx(1.6 / 2.8 * plan.prediction.tokens_per_s, rel=0.1)
    pinned, known = played(replace(free, pins=replace(free.pins, balance=False)), WISH)
    assert pinned.run.acco is not None and not pinned.run.acco.balance
    assert worth_per_s(plan, forecast) > worth_per_s(pinned, known)


def test_what_the_run_file_says_is_kept() -> None:
    said = [pins_of({"acco": acco}).balance for acco in ({"balance": False}, {"balance": True}, {}, None)]
    assert said == [False, True, None, None]
    assert asked().may_balance
    assert not asked(Pins(balance=True), balance=True).may_balance
    assert not asked(kind="d").may_balance, "like hosts have nothing to balance"
    plan, _ = played(asked(Pins(balance=True, outer=frozenset({"local_steps"})), balance=True), WISH)
    assert plan.run.acco is not None and plan.run.acco.balance
