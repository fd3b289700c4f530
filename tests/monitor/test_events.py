"""Events: what is written is what is read, across rotation."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from geotrain.config import ClusterConfig, architecture_from_hf, parse
from geotrain.monitor.dispatch import EventDispatcher
from geotrain.monitor.events import EventLog, Follower, Record, Trouble
from geotrain.monitor.utilization import PhaseTimer, peak_flops, training_flops_per_token
from geotrain.outer.events import Joined, UpdateApplied
from tests.support.net_worlds import TINY


def words(records: list[Record]) -> list[str]:
    return [r.event.what for r in records if isinstance(r.event, Trouble)]


def test_an_event_comes_back_as_it_was(tmp_path: Path) -> None:
    update = UpdateApplied("eu", 1, 3, 2, [4, 5], 6, 7, 8, 2.5, {"lr": 0.1}, 0.25, 1000)
    with EventLog(tmp_path / "e.jsonl", source="global") as log:
        log.write(update)
    (record,) = Follower(tmp_path / "e.jsonl").read()
    assert (record.source, record.event) == ("global", update)


def test_what_an_older_or_newer_version_wrote_is_read_as_far_as_it_is_known() -> None:
    older = Record.from_line('{"time_s": 1, "event": "Trouble", "what": "x"}')
    assert older == Record(1.0, "", Trouble("x"))
    newer = Record.from_line('{"time_s": 1, "source": "eu", "event": "Trouble", "what": "x", "more": 1}')
    assert newer == Record(1.0, "eu", Trouble("x"))
    for line in ('{"event": "Nonsense", "time_s": 1}', "{", "[]", '{"time_s": 1, "event": "Trouble"}', "3"):
        assert Record.from_line(line) is None


def test_a_follower_reads_every_event_once_while_files_are_rotated(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e.jsonl", max_bytes=3000, older=3)
    follower, seen = Follower(log.path), []
    for i in range(300):
        log.write(Trouble(str(i)))
        if i % 7 == 0:
            seen += words(list(follower.read()))
    seen += words(list(follower.read()))
    assert seen == [str(i) for i in range(300)] and not follower.missed
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["e.jsonl", "e.jsonl.1", "e.jsonl.2", "e.jsonl.3"]
    assert all(p.stat().st_size < 3200 for p in tmp_path.iterdir())


def test_a_follower_that_comes_late_says_that_it_missed_some(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e.jsonl", max_bytes=1000, older=1)
    follower = Follower(log.path)
    log.write(Trouble("first"))
    assert words(list(follower.read())) == ["first"] and not follower.missed
    for i in range(100):
        log.write(Trouble(str(i)))
    late = words(list(follower.read()))
    assert follower.missed and late[-1] == "99"
    numbers = [int(n) for n in late]
    assert numbers == sorted(set(numbers)) and 20 < len(numbers) < 100


def test_a_line_that_is_not_whole_is_left_until_it_is(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    line = Record(1.0, "eu", Trouble("whole")).to_line()
    path.write_text(line + line[:20])
    follower = Follower(path)
    assert words(list(follower.read())) == ["whole"]
    with path.open("a") as file:
        file.write(line[20:])
    assert words(list(follower.read())) == ["whole"]


def test_a_feed_gives_the_past_and_then_the_present_once_each(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e.jsonl") as log:
        log.write(Trouble("before"))
    log = EventLog(tmp_path / "e.jsonl")
    log._file.write(Record(1.0, "", Trouble("long ago")).to_line().encode())
    log._file.write(Record(time.time() + 3600, "", Trouble("the clock was ahead")).to_line().encode())
    all_seen: list[Record] = []
    new_seen: list[Record] = []

    def broken(record: Record) -> None:
        raise ValueError("a sink that fails")

    dispatcher = EventDispatcher(log, [broken, all_seen.append], [new_seen.append])
    dispatcher.start()
    log.write(Trouble("now"))
    dispatcher.stop()
    log.write(Trouble("after the end"))
    assert words(all_seen) == ["before", "long ago", "the clock was ahead", "now"] and words(new_seen) == ["now"]


def test_a_slow_sink_never_makes_the_writer_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geotrain.monitor.dispatch.MAX_WAITING", 5)
    go = threading.Event()
    seen: list[Record] = []

    def slow(record: Record) -> None:
        go.wait(60)
        seen.append(record)

    log = EventLog(tmp_path / "e.jsonl")
    dispatcher = EventDispatcher(log, live=[slow])
    dispatcher.start()
    for i in range(50):
        log.write(Trouble(str(i)))
    assert dispatcher.dropped >= 44
    go.set()
    dispatcher.stop()
    assert len(seen) == 50 - dispatcher.dropped


@pytest.mark.parametrize("enabled", [False, True])
def test_a_log_that_is_switched_off_or_closed_writes_nothing(tmp_path: Path, enabled: bool) -> None:
    with EventLog(tmp_path / "e.jsonl", enabled=enabled) as log:
        if enabled:
            log.close()
        log.write(Joined("eu", 0, "x"))
    assert (tmp_path / "e.jsonl").read_text() == ""


def test_phases_share_out_all_the_time() -> None:
    now = iter([0.0, 1.0, 3.0, 3.5, 10.0])
    timer = PhaseTimer(lambda: next(now), "a", "b")
    for name in ("a", "b", "a", "b"):
        timer.lap(name)
    assert timer.seconds == {"a": 1.5, "b": 8.5}


def test_model_flops_by_hand() -> None:
    tiny = architecture_from_hf(TINY)
    # one layer: q and o 16·16, k and v 16·8, gate, up and down 16·32, two norms of 16; embeddings 32·16; last norm
    parameters = 2 * (2 * 256 + 2 * 128 + 3 * 512 + 32) + 512 + 16
    assert training_flops_per_token(tiny, 8) == 6 * parameters + 12 * 2 * 2 * 8 * 8
    untied = architecture_from_hf({**TINY, "tie_word_embeddings": False})
    assert training_flops_per_token(untied, 8) == training_flops_per_token(tiny, 8)


def test_peak_flops_come_from_the_cluster_file() -> None:
    hosts = [{"host": "a", "slots": 4, "device": "h"}, {"host": "b", "slots": 2, "device": "k"}]
    devices = {"h": {"memory_gb": 80, "tflops": 900}, "k": {"memory_gb": 80, "tflops": 100}}
    region = {"name": "eu", "workers": [{"name": "eu-0", "hosts": hosts}]}
    cluster = parse(ClusterConfig, {"name": "c", "devices": devices, "regions": [region]}, "c")
    assert peak_flops(cluster, cluster.worker("eu", None)) == pytest.approx(3.8e15)
    region["workers"][0]["hosts"] = [{"host": "a", "slots": 4}]  # type: ignore[index]
    cluster = parse(ClusterConfig, {"name": "c", "regions": [region]}, "c")
    assert peak_flops(cluster, cluster.worker("eu", None)) is None
