"""The display of a run, from the status of its servers."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from geotrain.config import ClusterConfig, HostConfig, RegionConfig, WorkerConfig
from geotrain.launch.launcher import how_to_go_on
from geotrain.launch.terminal import (
    Eta,
    aged,
    draw,
    headline,
    last_words,
    lines,
    new_console,
    region_cells,
    region_state,
    share_of,
    wait_lines,
)


def cluster() -> ClusterConfig:
    def region(name: str) -> RegionConfig:
        hosts = (HostConfig(host="localhost", slots=1),)
        workers = tuple(WorkerConfig(name=f"{name}-{i}", hosts=hosts) for i in range(2))
        return RegionConfig(name=name, workers=workers)

    return ClusterConfig(name="c", regions=(region("eu"), region("us")))


def member(**more: Any) -> dict[str, Any]:
    return {"joined": True, "left": False, "restarts": 0, **more}


TOP = {
    "versions": [7, 8],
    "members": {"eu": member(staleness=2.0, restarts=1, takes_part=True), "us": member()},
    "train_samples": 100,
    "committed_samples": 25,
    "sharing": 2,
}
EU = {
    "versions": [30, 31],
    "global_versions": [6, 7],
    "members": {
        "eu-0": member(loss=3.0, tokens_per_s=1000.0, restarts=2),
        "eu-1": member(loss=4.0, tokens_per_s=500.0, left=True),
    },
    "links": {"up_bytes": 1_500_000, "down_bytes": 2_000},
}


def test_a_row_for_each_region() -> None:
    statuses = {"global": TOP, "eu": EU}
    assert lines(cluster(), statuses, 83.0) == [  # nothing is known of the other
        "eu: loss 3.500, 1,500 tokens/s, up 1.5 MB, down 2.0 kB, version 31 (global 7), staleness 2, "
        "share 50%, workers 1/2, restarts 3, committed 25%, 1:23 left"
    ]
    dead = {
        **EU,
        "members": {"eu-0": member(loss=3.0, tokens_per_s=1000.0, state="cut off"), "eu-1": member(left=True)},
    }
    row = region_cells(cluster().regions[0], {"global": TOP, "eu": dead})
    assert (row["workers"], row["tokens/s"], row["loss"]) == ("0/2", "–", "3.000")
    gone = {**TOP, "members": {"eu": member(state="cut off", silent_s=9.0)}}
    assert lines(cluster(), {"global": gone, "eu": EU}, 83.0)[0].startswith("eu: cut off 0:09; loss 3.500, 1,500")
    assert region_cells(cluster().regions[1], statuses)["loss"] == "–"
    console = new_console()
    with console.capture() as shown:
        console.print(draw("r: running", cluster(), {**statuses, "global": {**TOP, "page": "http://here/"}}, 83.0))
    title, headings, *rows, page = shown.get().splitlines()
    assert (title, page) == ("r: running; 1:23 left", "status page: http://here/")
    assert headings.split()[:4] == ["region", "state", "loss", "tokens/s"]
    assert [row.split()[:4] for row in rows] == [["eu", "–", "3.500", "1,500"], ["us", "–", "–", "–"]]


@pytest.mark.parametrize(
    ("top", "own", "said"),
    [
        ({"members": {"eu": member(state="up", silent_s=0.4)}}, {}, "up"),
        ({"members": {"eu": member(state="lost", silent_s=700.0)}}, {"connected": False}, "lost 11:40"),
        ({"members": {"eu-0": member(state="up"), "eu-1": member(state="cut off", silent_s=9.0)}}, {},
         "cut off 0:09"),
        ({"members": {"eu": member(state="up")}, "as_of": 5.0}, {"connected": False}, "cut off"),
        ({}, {"connected": True}, "up"),
        ({}, {"connected": True, "as_of": 5.0}, "no answer"),
        ({}, {}, "–"),
    ],
)  # fmt: skip
def test_how_a_region_is(top: dict[str, Any], own: dict[str, Any], said: str) -> None:
    """The global server's judgement counts while it answers, then the region's own answer."""
    assert region_state(cluster().regions[0], {"global": top, "eu": own}) == said


def test_what_servers_that_answer_wait_for() -> None:
    waits = [{"whom": "us", "text": "its goodbye", "since_s": 40.0}, {"whom": "", "text": "room", "since_s": 99.0}]
    assert wait_lines({"global": {"waits": waits}, "eu": {"waits": waits, "as_of": 1.0}}, 100.0) == [
        "global waits for us: its goodbye (for 1:00)", "global waits for room (for 0:01)"
    ]  # fmt: skip


def test_a_shard_that_is_down_is_seen() -> None:
    shards = [
        {"shard": 0, "up": True, "facts": 1200, "behind": 2, "rss_bytes": 3_000_000},
        {"shard": 1, "up": False, "facts": 0, "behind": 0, "rss_bytes": 0},
    ]
    console = new_console()
    with console.capture() as shown:
        console.print(draw("r", cluster(), {"global": TOP, "eu": {**EU, "shards": shards}}))
    assert "shards of eu: 0 1,200 facts, 2 not in the ledger, 3.0 MB; 1 DOWN" in shown.get()


@pytest.mark.parametrize("phase", ["paused", "stopping"])
def test_a_run_at_rest_tells_no_time_that_is_left(phase: str) -> None:
    statuses = {"global": {**TOP, "phase": phase}, "eu": EU}
    (line,) = lines(cluster(), statuses, 83.0)
    assert line.endswith(f"committed 25%, {phase}")
    console = new_console()
    with console.capture() as shown:
        console.print(draw(f"r: {phase}", cluster(), statuses, 83.0))
    assert shown.get().splitlines()[0] == f"r: {phase}"
    assert "1:23 left" in lines(cluster(), {**statuses, "global": {**TOP, "phase": "running"}}, 83.0)[0]


def test_a_headline(monkeypatch: pytest.MonkeyPatch) -> None:
    top = {**TOP, "draining": ["us"], "validation": {"loss": 3.25, "samples": 1000}}
    assert headline(top, "running") == (
        "running; draining us; 25.0% committed; validation loss 3.2500 (at 1,000 samples)"
    )
    spike = {**TOP, "loss_spike": {"loss": 5.5, "usual": 3.1, "tokens": 9}}
    assert headline(spike, "running").endswith("committed; loss spike: 5.5000, where 3.1000 was usual")
    assert headline({}, "failed", "no disk") == "failed; no disk", "what is not known is not said"
    gone = {**TOP, "members": {"eu": member(state="lost"), "us": member(state="up")}}
    assert headline(gone, "running") == "running; eu lost; 25.0% committed"
    monkeypatch.setattr(time, "time", lambda: 1060.0)
    seen = {**gone, "as_of": 1000.0}
    assert headline(seen, "unreachable", "no answer") == "unreachable; 25.0% committed, 1:00 ago; no answer"


def test_a_run_without_an_end_tells_samples() -> None:
    top = {**TOP, "train_samples": 3 << 40, "committed_samples": 12_345}
    assert headline(top, "running") == "running; 12,345 samples committed" and share_of(top) == 0.0
    (line,) = lines(cluster(), {"global": top, "eu": EU}, None)
    assert line.endswith("committed 12,345 samples, – left")


def test_a_flat_run_has_workers_at_the_global_server() -> None:
    top = {
        **TOP,
        "members": {"eu-0": member(loss=3.0, staleness=1.0), "eu-1": member(), "us-0": member(), "us-1": member()},
        "peers": {"eu-0": {"sent_bytes": 10, "received_bytes": 20}, "us-0": {"sent_bytes": 1, "received_bytes": 2}},
    }
    row = region_cells(cluster().regions[0], {"global": top})
    shown = {"loss": "3.000", "up": "20 B", "down": "10 B", "stale": "1", "workers": "2/2"}
    assert shown.items() <= row.items()
    assert (row["version"], row["global"]) == ("8", "8")


def test_what_does_not_answer_is_as_old_as_its_last_answer() -> None:
    once = aged({"global": TOP, "eu": {**EU, "finished": True}}, 5.0)
    assert aged(once, 9.0) == once and once["global"]["as_of"] == 5.0 and "as_of" not in once["eu"]


def test_time_that_is_left() -> None:
    eta = Eta()
    assert eta.update(0.0, 0.0) is None
    assert eta.update(0.1, 10.0) is None
    assert eta.update(0.3, 20.0) == pytest.approx(35.0)


def test_last_words(tmp_path: Path) -> None:
    (tmp_path / "servers/eu").mkdir(parents=True)
    (tmp_path / "servers/eu/status.json").write_text(json.dumps(EU))
    assert last_words(tmp_path, ("global", "eu")) == {"eu": EU}


def test_a_run_that_was_stopped_says_how_it_goes_on(tmp_path: Path) -> None:
    status = tmp_path / "servers/global/status.json"
    status.parent.mkdir(parents=True)

    def told(**more: Any) -> str:
        status.write_text(json.dumps({**TOP, "phase": "ended", **more}))
        return how_to_go_on(tmp_path, Path("my runs/r.json"), Path("c.json"), ("outer.local_steps=4",))

    assert told(complete=False) == (
        "25.0% of the data is trained, and kept; the run goes on with: "
        "geotrain launch 'my runs/r.json' c.json --resume --set outer.local_steps=4"
    )
    assert told(complete=True, committed_samples=100) == ""
    status.unlink()
    assert how_to_go_on(tmp_path, Path("r.json"), Path("c.json")) == ""
