"""What a server waits for, from its status. Real servers' are in tests/scenarios/waits.txt and tests/net."""

from __future__ import annotations

from typing import Any

import pytest

from geotrain.outer.server.waits import MOST_WAITS, Wait, WaitTable, waits

UP = {"state": "up", "phase": "present", "left": False, "leases": 1, "owed": [], "fault": ""}
LEFT = {**UP, "state": "left", "phase": "left", "left": True, "leases": 0}
BOTH = {"over": False, "finished": False, "silent_limit_s": 600.0, "members": {"a": UP, "b": UP}}
TOP = {
    **BOTH, "phase": "running", "draining": [],
    "train_samples": 64, "dispatched_samples": 32, "committed_samples": 16,
    "returned_samples": 0,
}  # fmt: skip
REGION = {**BOTH, "connected": True, "wanted": [], "gone": False, "in_flight": 1, "global_versions": [3]}


def a(**facts: Any) -> dict[str, Any]:
    return {"members": {"a": {**UP, **facts}, "b": UP}}


@pytest.mark.parametrize(
    ("status", "changes", "found"),
    [
        (TOP, {}, []),
        (REGION, {}, []),
        (TOP, {"full": "no space left"}, [("room", "")]),
        (TOP, {"shards": [{"shard": 0, "up": True}, {"shard": 1, "up": False}]}, [("shard", "shard 1")]),
        (TOP, {"phase": "ended", "finished": True, "over": True, "doing": "its last snapshot"}, [("end", "")]),
        (TOP, {"phase": "paused"}, [("resume", "")]),
        (TOP, {"phase": "stopping"}, [("last jobs", "a"), ("last jobs", "b")]),
        (TOP, {"draining": ["b"]}, [("last jobs", "b")]),
        (TOP, {"draining": ["a"], **a(leases=0)}, [("farewell", "a")]),
        (TOP, {"dispatched_samples": 64}, [("last jobs", "a"), ("last jobs", "b")]),
        (TOP, {"dispatched_samples": 64, "returned_samples": 8}, []),
        (TOP, a(state="away", phase="new"), [("join", "a")]),
        (TOP, {"over": True, **a(state="away", phase="new")}, [("last jobs", "b")]),
        (TOP, {"over": True, **a(state="away", phase="stopped")}, [("join", "a"), ("last jobs", "b")]),
        (TOP, a(state="cut off"), [("lease", "a")]),
        (TOP, a(state="cut off", leases=0), []),
        (TOP, {"over": True, **a(state="cut off", leases=0)}, [("farewell", "a"), ("last jobs", "b")]),
        (TOP, a(state="quarantined", leases=0), [("quarantine", "a")]),
        (TOP, {"members": {"a": {**UP, "state": "lost", "leases": 0}, "b": LEFT}}, [("worker", "")]),
        (TOP, {"over": True, "members": {"a": {**UP, "state": "lost", "leases": 0}, "b": LEFT}}, []),
        (TOP, a(owed=[0]), [("round", "b")]),
        (TOP, {"members": {"a": {**UP, "owed": [0]}, "b": LEFT}}, []),
        (REGION, {"in_rounds": False, **a(owed=[0])}, []),
        (REGION, {"members": {name: {**UP, "owed": [0]} for name in "ab"}}, [("round", "global")]),
        (TOP, {"in_rounds": False, "awaited": ["b"], "due_s": 0.84, **a(owed=[0])}, [("delta", "b")]),
        (TOP, {"in_rounds": True, "awaited": ["b"], "due_s": None}, [("round", "b")]),
        (REGION, {"connected": False}, [("link", "global")]),
        (REGION, {"wanted": ["b"]}, [("data", "b")]),
        (REGION, {"members": {"a": LEFT, "b": LEFT}}, [("answer", "global")]),
        (REGION, {"members": {"a": LEFT, "b": LEFT}, "in_flight": 0, "gone": True}, [("farewell", "global")]),
    ],
)  # fmt: skip
def test_what_is_waited_for(status: dict[str, Any], changes: dict[str, Any], found: list[tuple[str, str]]) -> None:
    assert [(wait.what, wait.whom) for wait in waits({**status, **changes})] == found


def test_each_lasts_since_it_was_seen_first_and_there_is_a_bound() -> None:
    table, lease = WaitTable(), Wait("lease", "a", "2 leases")
    assert table.as_json([lease], 10.0)[0]["since_s"] == 10.0
    fewer = Wait("lease", "a", "1 lease")
    told = table.as_json([Wait("join", "b", "b"), fewer], 20.0)
    assert [(wait["whom"], wait["text"], wait["since_s"]) for wait in told] == [
        ("a", "1 lease", 10.0),
        ("b", "b", 20.0),
    ]
    assert table.as_json([], 30.0) == []
    assert table.as_json([lease], 40.0)[0]["since_s"] == 40.0, "it is another time"
    many = table.as_json([Wait("join", f"w{i}", "") for i in range(1000)], 50.0)
    assert len(many) == MOST_WAITS + 1 and many[-1]["text"] == f"{1000 - MOST_WAITS} things more"
