"""What the sampler tells: states of members, what is waited for, bytes and rates."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geotrain.monitor.events import EventLog, Follower, MemberSampled, WaitsChanged
from geotrain.net.server.sampler import Sampler
from geotrain.net.transport.tcp_counters import Traffic
from geotrain.outer.server.region_server import mean_metrics


def world(folder: Path, status: dict[str, Any]) -> tuple[Sampler, Follower]:
    service = SimpleNamespace(
        failure_detector=SimpleNamespace(missed_s=6.0), beats={"a": {"queue": 1.0}}, status=lambda whole: status
    )
    events = EventLog(folder / "e.jsonl", source="global")
    traffic = {"a": Traffic(1000, 500)}
    server_thread: Any = SimpleNamespace(status=status)
    return Sampler(server_thread, service, events, folder, lambda: traffic, Traffic, 5.0), Follower(events.path)  # type: ignore[arg-type]


def test_a_members_states_are_told_once_each(tmp_path: Path) -> None:
    a, never = {"state": "away", "silent_s": 0.0}, {"state": "away", "silent_s": 99.0}
    sampler, log = world(tmp_path, {"members": {"a": a, "never": never}, "waits": []})
    for a["state"], a["silent_s"] in (("up", 0.0), ("up", 5.9), ("cut off", 6.1), ("cut off", 7.1), ("lost", 60.0),
                                      ("up", 0.2), ("left", 1.0)):  # fmt: skip
        sampler.look()
    found = [record.event for record in log.read()]
    assert [(event.member, event.state) for event in found] == [  # type: ignore[attr-defined]
        ("a", state) for state in ("up", "cut off", "lost", "up", "left")
    ]
    silent_s = [event.silent_s for event in found]  # type: ignore[attr-defined]
    assert silent_s[1:4] == pytest.approx([6.1, 6.1, 6.1], abs=0.3), "all since its last message"


def test_only_a_wait_that_lasts_is_told_and_so_is_its_end(tmp_path: Path) -> None:
    lease, data = ({"what": what, "whom": "a", "text": "", "since_s": 0.0} for what in ("lease", "data"))
    data["since_s"] = time.time() + 3600
    status: dict[str, Any] = {"members": {}, "waits": [lease, data]}
    sampler, log = world(tmp_path, status)
    for status["waits"] in ([data], [lease, data], [lease], []):
        sampler.look()
    assert [record.event for record in log.read()] == [WaitsChanged([lease]), WaitsChanged([])]


def test_a_sample_of_a_member_has_bytes_and_rates(tmp_path: Path) -> None:
    member = {"silent_s": 0.5, "refused": 2}
    sampler, log = world(tmp_path, {})
    sampler._sample_member("a", member, Traffic(1000, 500), 2.0)
    sampler._sample_member("a", member, Traffic(1600, 500), 2.0)
    first, second = (record.event for record in log.read())  # bytes of earlier incarnations are no rate
    assert first == MemberSampled("a", 0.5, 1000, 500, 0.0, 0.0, 2, {"queue": 1.0})
    assert second == MemberSampled("a", 0.5, 1600, 500, 300.0, 0.0, 2, {"queue": 1.0})


def test_a_regions_numbers_from_its_workers() -> None:
    workers = [{"loss": 2.0, "tokens_per_s": 10.0, "staleness": 3.0}, {"loss": 4.0, "tokens_per_s": 5.0, "mfu": 0.5}]
    assert mean_metrics(workers) == {"loss": 3.0, "tokens_per_s": 15.0, "mfu": 0.5}
    assert mean_metrics([]) == {}
