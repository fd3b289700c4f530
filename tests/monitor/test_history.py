"""The page's data: bounded, whole for a page that knows nothing, and only what is new for one that knows the rest."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from geotrain.config import ClusterConfig, RunConfig, parse
from geotrain.monitor import history
from geotrain.monitor.events import (
    LivenessChanged,
    MemberSampled,
    Record,
    Recovery,
    ShardSampled,
    SnapshotWritten,
    WaitsChanged,
)
from geotrain.monitor.history import History, PageFacts, facts
from geotrain.outer.events import Event, Joined, Steered, UpdateApplied, UpdateRefused, ValidationDone

FACTS = PageFacts(
    "r", 10, 8, 8000, ("all",), {n: {"region": n, "workers": 1, "gbps": None, "rtt_ms": None} for n in "ab"}
)


def merge(member: str, loss: float, tokens: int, staleness: int = 0) -> UpdateApplied:
    return UpdateApplied(member, 0, 1, 1, [1], staleness, 1, 1, loss, {}, 1.0, tokens)


def told(*events: Event, begin_s: float = 0.0) -> History:
    made = History(FACTS, "incarnation")
    for i, event in enumerate(events):
        made.on(Record(begin_s + i, "global", event))
    return made


def states(made: History) -> dict[str, str]:
    return {m["name"]: m["state"] for m in made.state(100)["members"]}


def test_states_of_a_member() -> None:
    """They are those that the server tells: a join, or a goodbye, is only a mark."""
    up, cut, lost, left = (LivenessChanged("a", state, 6.0) for state in ("up", "cut off", "lost", "left"))
    joined = Joined("a", 0, "x")
    assert states(told(joined)) == {"a": "away", "b": "away"}
    assert states(told(joined, up, LivenessChanged("b", "paused", 0))) == {"a": "up", "b": "paused"}
    assert states(told(up, Recovery(0)))["a"] == "away" and states(told(left, Recovery(0)))["a"] == "left"
    made = told(joined, up, Joined("a", 1, "x", False), cut, lost, up, left, Recovery(0), left)
    assert [mark[2] for mark in made.state(9)["marks"]] == ["joined", "lost", "lost", "found", "left", "start"]
    gone = told(up, cut, lost).state(9)["members"][0]
    assert (gone["state"], gone["since_s"]) == ("lost", 1.0), "since it was silent"


def test_a_region_without_workers_does_not_train_and_their_deaths_are_marked() -> None:
    up, of_regions = LivenessChanged("a", "up", 0.0), replace(FACTS, flat=False)

    def sampled(workers: float, lost: float) -> MemberSampled:
        return MemberSampled("a", 0.0, 0, 0, 0.0, 0.0, 0, {"workers": workers, "lost_workers": lost})

    made, seen = History(of_regions, "incarnation"), []
    for at_s, event in enumerate((up, sampled(0, 0), sampled(2, 0), sampled(1, 1), sampled(0, 2), sampled(2, 0))):
        made.on(Record(at_s, "global", event))
        seen.append(states(made)["a"])
    assert seen == ["no worker", "no worker", "up", "up", "no worker", "up"]
    assert [(mark[2], mark[4]) for mark in made.state(9)["marks"]] == [
        ("lost", "1 of its workers cut off"), ("lost", "2 of its workers cut off"),
        ("found", "its workers are back"),
    ]  # fmt: skip


def test_what_the_server_waits_for_is_shown_until_it_does_not() -> None:
    wait = {"what": "lease", "whom": "a", "text": "the 2 leases that it holds", "since_s": 3.0}
    assert told(WaitsChanged([wait])).state(9)["waits"] == [wait]
    assert told(WaitsChanged([wait]), WaitsChanged([])).state(9)["waits"] == []
    assert told(WaitsChanged([wait]), Recovery(0)).state(9)["waits"] == []


def test_the_last_sample_of_each_shard_is_told() -> None:
    up, down = ShardSampled(1, True, 9, 0, 50, 60), ShardSampled(1, False, 0, 0, 0, 0)
    zero = ShardSampled(0, True, 9, 0, 50, 60)
    shards = told(up, zero, down).state(9)["shards"]
    assert [(each["shard"], each["up"], each["facts"]) for each in shards] == [(0, True, 9), (1, False, 0)]


def test_only_what_is_new_is_told_to_who_knows_the_rest() -> None:
    made = told(Joined("a", 0, "x"), merge("a", 3.0, 80, 2))
    first = made.state(5)
    assert first["full"] and len(first["points"]) == 1 and first["ticks"] == {"a": [[2, 1.0, 2]]}
    assert first["members"][0]["staleness"] == [2] and first["tokens"] == 80
    again = made.state(5, first["number"], first["epoch"])
    assert not again["full"] and not again["points"] and not again["marks"] and not again["ticks"]
    made.on(Record(6, "global", merge("b", 2.0, 160)))
    more = made.state(7, first["number"], first["epoch"])
    assert [point[3] for point in more["points"]] == [2.0] and set(more["ticks"]) == {"b"}
    assert made.state(7, first["number"], "another incarnation")["full"]
    json.dumps(more, allow_nan=False)


def test_validations_and_a_persons_words_are_told_once() -> None:
    made = told(Steered("drain", "a"), ValidationDone("a", 1, 3, 2.5, 4.0, 800))
    first = made.state(5)
    assert first["validations"] == [[2, 1.0, 800, 2.5]]
    assert first["marks"] == [[1, 0.0, "steered", "a", "a person said: drain"]]
    assert made.state(5, first["number"], first["epoch"])["validations"] == []


def test_a_paused_run_is_said_to_be_paused() -> None:
    made = told()
    assert made.state(0)["phase"] == "running"
    for now_s, (event, phase) in enumerate(
        [
            (Steered("pause", ""), "paused"),
            (Recovery(0), "paused"),  # it outlives restarts of the server
            (Steered("drain", "a"), "paused"),
            (Steered("resume", ""), "running"),
            (Steered("stop", ""), "stopping"),
            (Recovery(0), "running"),  # resumed after its end
        ]
    ):
        made.on(Record(now_s, "global", event))
        assert made.state(now_s)["phase"] == phase


def test_a_long_run_stays_within_bounds_and_keeps_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_RECENT", 32)
    monkeypatch.setattr(history, "MAX_PAST", 32)
    made = told(Joined("a", 0, "x"))
    epochs = set()
    for i in range(1000):
        made.on(Record(i, "global", merge("ab"[i % 2], 10 - i / 100, 8 * i)))
        made.on(Record(i, "global", UpdateRefused("a", "no", i)))
        state = made.state(i)
        epochs.add(state["epoch"])
        assert len(state["points"]) <= 64 and len(state["marks"]) <= history.MAX_MARKS
    assert len(epochs) > 5, "who knew points that were merged since is told all again"
    tokens = [point[2] for point in state["points"]]
    losses = [point[3] for point in state["points"]]
    assert tokens == sorted(tokens) and losses == sorted(losses, reverse=True)
    assert (losses[0], losses[-1]) == (pytest.approx(10, abs=0.5), pytest.approx(0.01)), "no part of the run is lost"
    steps = [b - a for a, b in itertools.pairwise(tokens)]
    assert max(steps) <= 8 * 64, "nor is any part much coarser than the others"
    assert state["points"][-1][4] == 1.0 and state["points"][0][4] == -1.0
    assert len(state["ticks"]["a"]) == history.TICKS


def test_speed_is_that_of_the_last_minutes() -> None:
    made = History(FACTS, "incarnation")
    for second in range(0, 600, 10):
        made.on(Record(second, "global", merge("a", 1.0, 100 * second if second < 300 else 30_000 + (second - 300))))
    assert made.state(590)["tokens_per_s"] == pytest.approx(1.0, rel=0.1)
    assert made.state(2000)["tokens_per_s"] < 0.1, "a run that stands still is not fast"


def test_a_clock_that_is_set_back_gives_no_wrong_speed_and_keeps_nothing_for_ever() -> None:
    made = History(FACTS, "incarnation")
    for second in range(600):
        ahead_s = 3600 if 100 < second < 200 else 0
        made.on(Record(second + ahead_s, "global", merge("a", 1.0, second)))
        assert second < 202 or made.state(second)["tokens_per_s"] == pytest.approx(1.0)
    assert len(made._speeds) < 130


def test_rates_of_a_lost_member_are_not_shown() -> None:
    sample = MemberSampled("a", 0.5, 10, 20, 5.0, 6.0, 0, {"workers": 1.0})
    made = told(LivenessChanged("a", "up", 0), sample)
    assert made.state(2)["members"][0]["received_bytes_per_s"] == 6.0
    assert made.state(3)["members"][0]["silent_s"] == 2.5
    made.on(Record(3, "global", LivenessChanged("a", "cut off", 6)))
    assert made.state(4)["members"][0]["received_bytes_per_s"] == 0.0
    assert made.state(4)["members"][0]["received_bytes"] == 20


def test_what_others_say_of_unknown_members_is_left_out() -> None:
    made = told(Joined("c", 0, "x"), merge("c", 1.0, 8), SnapshotWritten(1, 0.5))
    assert made.state(3)["points"] == [] and [m[2] for m in made.state(3)["marks"]] == ["snapshot"]


def test_facts_of_a_run_with_and_without_regions_servers() -> None:
    workers = [{"name": f"eu-{i}", "hosts": [{"host": "h", "slots": 1}]} for i in range(2)]
    cluster = parse(
        ClusterConfig,
        {"name": "c", "regions": [{"name": "eu", "workers": workers}],
         "links": [{"regions": ["eu", "global"], "gbps": 0.5, "rtt_ms": 40.0}]}, "c",
    )  # fmt: skip
    raw = {
        "name": "r", "model": {"config": {"model_type": "llama"}},
        "data": {"train": "x", "sequence_length": 4, "train_samples": 10},
        "deepspeed": {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1},
    }  # fmt: skip
    found = facts(parse(RunConfig, raw, "r"), cluster, 7, ("all",))
    assert found.members == {"eu": {"region": "eu", "workers": 2, "gbps": 0.5, "rtt_ms": 40.0}}
    assert found.target_tokens == 40
    flat = facts(parse(RunConfig, {**raw, "outer": {"levels": 1}}, "r"), cluster, 7, ("all",))
    assert set(flat.members) == {"eu-0", "eu-1"} and flat.members["eu-1"]["region"] == "eu"
