"""An update's way from events: its stages in order of time, and where a stuck one is held."""

from __future__ import annotations

import dataclasses

import pytest

from geotrain.commands.logs import shown
from geotrain.common.names import GLOBAL
from geotrain.monitor.events import Acknowledged, Record
from geotrain.monitor.update_trace import RunFacts, UpdateTrace, trace
from geotrain.outer.events import (
    Event,
    LeaseBegun,
    Merged,
    SentUp,
    StartedOver,
    UpdateApplied,
    UpdateEncoded,
    UpdateRefused,
    UpdateStage,
)

FACTS = RunFacts(lambda member: GLOBAL if member == "eu" else "eu", updates_per_send=2)


def applied(member: str, sequence: int, version: int = 3, fragment: int = 0) -> UpdateApplied:
    return UpdateApplied(member, fragment, sequence, 1, [version, version], 1, 8, 100, 2.5, {})


WORKER = (
    (1.0, LeaseBegun("eu-0", 4, 34, 100, 50)),
    (2.0, UpdateEncoded("eu-0/0.17", 4, [34], 800)),
    (2.1, UpdateStage("eu-0/0.17", "sent")),
    (2.4, Acknowledged("eu-0", "x", 0, 17)),
    (2.6, UpdateStage("eu-0/0.17", "adopted")),
)
REGION = (
    (2.2, UpdateStage("eu-0/0.17", "arrived")),
    (2.3, UpdateStage("eu-0/0.17", "answered")),
    (2.3, applied("eu-0", 17)),
    (5.0, applied("eu-1", 9)),
    (5.1, SentUp(0, 5, 2, 900)),
    (6.0, Acknowledged("eu", "y", 0, 5)),
    (7.0, Merged(0, 5, [7], 900)),
)
TOP = ((5.5, UpdateStage("eu/0.5", "answered")), (5.5, applied("eu", 5, version=7)))


def told(source: str, *events: tuple[float, Event]) -> list[Record]:
    return [Record(time_s, source, event) for time_s, event in events]


def way(worker: int, region: int, top: int, facts: RunFacts = FACTS) -> UpdateTrace:
    """The way after so many events of each."""
    logs = {"eu-0": told("eu-0", *WORKER[:worker]), "eu": told("eu", *REGION[:region])}
    return trace("eu-0/0.17", {**logs, GLOBAL: told(GLOBAL, *TOP[:top])}, facts)


def test_the_whole_way_in_order_of_time() -> None:
    found = way(5, 7, 2)
    assert [(step.time_s, step.where, step.what) for step in found.steps] == [
        (1.0, "eu-0", "begins lease 34 (job 4, samples 100 to 149)"),
        (2.0, "eu-0", "encoded: 800 bytes of rank 0"),
        (2.1, "eu-0", "sending begins"),
        (2.2, "eu", "first part arrived (eu-0/0.17)"),
        (2.3, "eu", "journaled and applied eu-0/0.17: version 3, staleness 1"),
        (2.3, "eu", "answer frozen (eu-0/0.17)"),
        (2.4, "eu-0", "acknowledged"),
        (2.6, "eu-0", "answer adopted"),
        (5.1, "eu", "sent up as eu/0.5: 2 updates, 900 bytes"),
        (5.5, GLOBAL, "journaled and applied eu/0.5: version 7, staleness 1"),
        (5.5, GLOBAL, "answer frozen (eu/0.5)"),
        (6.0, "eu", "acknowledged"),
        (7.0, "eu", "merged the answer to eu/0.5: global version 7"),
    ]
    assert found.held == []
    lines = list(shown(found))
    assert lines[0] == "eu-0/0.17" and lines[-1].startswith("arrived: ")
    assert lines[2].endswith("   +1.000 s  eu-0    encoded: 800 bytes of rank 0")


@pytest.mark.parametrize(
    ("worker", "region", "top", "held"),
    [
        (0, 0, 0, "eu-0 has not made eu-0/0.17; it has made none"),
        (2, 0, 0, "in eu-0: waits until earlier updates are acknowledged by eu"),
        (3, 1, 0, "at eu: waits for the parts of the other ranks of eu-0"),
        (5, 3, 0, "in eu, fragment 0: waits for 2 updates, and has 1"),
        (5, 5, 0, "taken by global, whose events are not here: they lie on its machine"),
        (5, 6, 2, "the answer to eu/0.5 is made by global, and not adopted by eu"),
        (4, 7, 2, "the answer to eu-0/0.17 is made by eu, and not adopted by eu-0"),
    ],
)
def test_where_it_is_held(worker: int, region: int, top: int, held: str) -> None:
    assert way(worker, region, top).held == [held]


def test_what_an_answer_waits_for_is_told() -> None:
    top = told(GLOBAL, (5.5, applied("eu", 5)), (5.5, UpdateStage("eu/0.5", "waits")))
    found = trace("eu-0/0.17", {"eu-0": told("eu-0", *WORKER), "eu": told("eu", *REGION[:5]), GLOBAL: top}, FACTS)
    assert found.held == [
        "the answer to eu/0.5 is not made: global waits for the deltas of other members, or its deadline"
    ]
    assert found.steps[-1].what == "waits for the deltas of others, as long as its answer comes in time (eu/0.5)"


def test_a_link_that_is_down_holds_what_is_not_acknowledged() -> None:
    logs = {"eu-0": told("eu-0", *WORKER[:3]), "eu": told("eu", (1.5, applied("eu-0", 16)))}
    [held] = trace("eu-0/0.17", logs, FACTS).held
    assert held == "between eu-0 and eu: sent and not acknowledged; eu last wrote an event 0.6 s before that"


def test_an_update_waits_for_the_one_before_it() -> None:
    before = ((1.0, applied("eu-1", 8)), (1.1, SentUp(0, 4, 2, 900)))
    logs = {"eu-0": told("eu-0", *WORKER), "eu": told("eu", *before, *REGION[:3])}
    logs[GLOBAL] = told(GLOBAL, (0.5, applied("eu", 3)))
    [held] = trace("eu-0/0.17", logs, FACTS).held
    between = "between eu and global: sent and not acknowledged; global last wrote an event 0.6 s before that"
    assert held == f"in eu, fragment 0: waits for eu/0.4 before it ({between})"
    merged = {**logs, "eu": [*logs["eu"], *told("eu", (3.0, Merged(0, 4, [6], 900)))]}
    assert trace("eu-0/0.17", merged, FACTS).held == ["in eu, fragment 0: waits for 2 updates, and has 1"]
    plain = dataclasses.replace(FACTS, ledger=False)
    [lost] = trace("eu-0/0.17", merged, plain).held
    assert lost == "in no update: eu merged the answer to eu/0.4 without the ledger"


def test_refused_dropped_and_unknown_updates() -> None:
    refused = told("eu", (1.5, applied("eu-0", 16)), (2.2, UpdateRefused("eu-0", "not finite", 1)))
    logs = {"eu-0": told("eu-0", *WORKER[:3]), "eu": refused}
    assert trace("eu-0/0.17", logs, FACTS).held == ["refused by eu: not finite"]
    dropped = {**logs, "eu": told("eu", *REGION[:3], (3.0, StartedOver("wild")))}
    assert trace("eu-0/0.17", dropped, FACTS).held[0] == "dropped: eu started over: wild"
    assert trace("eu-0/0.17", {"eu": []}, FACTS).held == [
        "not applied by eu, and no events of eu-0 are here: they lie on its machine"
    ]
    with pytest.raises(ValueError, match=r"write MEMBER/FRAGMENT\.NUMBER, as in eu-0/2\.17"):
        trace("eu-0", {}, FACTS)


def test_other_fragments_updates_are_others() -> None:
    """Though they have the same number."""
    others = (2.2, applied("eu-0", 17, fragment=1)), (3.0, SentUp(1, 5, 1, 9)), (3.1, Merged(1, 5, [0, 7], 900))
    logs = {"eu-0": told("eu-0", *WORKER), "eu": told("eu", *others, *REGION[:3])}
    assert trace("eu-0/0.17", logs, FACTS).held == ["in eu, fragment 0: waits for 2 updates, and has 1"]
    [step] = [step for step in trace("eu-0/1.17", logs, FACTS).steps if "sent up" in step.what]
    assert step.what.startswith("sent up as eu/1.5:")
