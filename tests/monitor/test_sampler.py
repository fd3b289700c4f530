"""Who is heard of: a member counts as lost after a few heartbeats, and as found with its next sign."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geotrain.monitor.events import EventLog, Follower, Found, Lost, MemberSampled
from geotrain.net.server.sampler import Sampler
from geotrain.net.transport.tcp_counters import Traffic
from geotrain.outer.server.region_server import mean_metrics


def world(folder: Path, silent: dict[str, float], **members: Any) -> tuple[Sampler, Follower]:
    server = SimpleNamespace(members=members)
    service = SimpleNamespace(
        failure_detector=SimpleNamespace(silent_for=lambda name, now_s: silent[name]),
        beats={"a": {"queue": 1.0}},
    )
    events = EventLog(folder / "e.jsonl", source="global")
    traffic = {"a": Traffic(1000, 500)}
    server_thread: Any = SimpleNamespace(server=server, status={"members": {"a": {"refused": 2}}})
    sampler = Sampler(server_thread, service, events, folder, lambda: traffic, Traffic(), 5.0, 2.0)  # type: ignore[arg-type]
    return sampler, Follower(events.path)


def member(left: bool = False, joined: bool = True) -> SimpleNamespace:
    return SimpleNamespace(left=left, joined={0: None} if joined else {})


def test_lost_and_found_once_each(tmp_path: Path) -> None:
    silent = {"a": 0.0, "gone": 99.0, "never": 99.0}
    sampler, log = world(tmp_path, silent, a=member(), gone=member(left=True), never=member(joined=False))
    for silent["a"] in (0.0, 5.9, 6.1, 7.1, 0.2, 1.0):
        sampler.look_for_lost()
    found = [record.event for record in log.read()]
    assert [type(event) for event in found] == [Lost, Found]
    assert found[0] == Lost("a", 6.1) and found[1].silent_s == pytest.approx(6.0, abs=0.3)  # type: ignore[union-attr]


def test_a_sample_of_a_member_has_bytes_and_rates(tmp_path: Path) -> None:
    sampler, log = world(tmp_path, {"a": 0.5}, a=member())
    sampler._sample_member("a", Traffic(1000, 500), time.monotonic(), 2.0)
    sampler._sample_member("a", Traffic(1600, 500), time.monotonic(), 2.0)
    first, second = (record.event for record in log.read())  # bytes of earlier incarnations are no rate
    assert first == MemberSampled("a", 0.5, 1000, 500, 0.0, 0.0, 2, {"queue": 1.0})
    assert second == MemberSampled("a", 0.5, 1600, 500, 300.0, 0.0, 2, {"queue": 1.0})


def test_a_regions_numbers_from_its_workers() -> None:
    workers = [{"loss": 2.0, "tokens_per_s": 10.0, "staleness": 3.0}, {"loss": 4.0, "tokens_per_s": 5.0, "mfu": 0.5}]
    assert mean_metrics(workers) == {"loss": 3.0, "tokens_per_s": 15.0, "mfu": 0.5}
    assert mean_metrics([]) == {}
