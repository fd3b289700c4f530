"""What is shown of a run, from what servers say."""

import json
from pathlib import Path
from typing import Any

import pytest

from geotrain.config import ClusterConfig, HostConfig, RegionConfig, WorkerConfig
from geotrain.launch.progress import Eta, last_words, line, lines, new_console, size, table, view


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
    "members": {"eu": member(staleness=2.0, restarts=1), "us": member()},
    "train_samples": 100,
    "committed_samples": 25,
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
    seen = view(cluster(), {"global": TOP, "eu": EU}, eta_s=83.0)
    assert line(seen.rows[0], seen) == (
        "eu: loss 3.500, 1,500 tokens/s, up 1.5 MB, down 2.0 kB, version 31 (global 7), staleness 2, "
        "workers 1/2, restarts 3, committed 25%, 1:23 left"
    )
    assert seen.rows[1].loss is None
    assert [text[:2] for text in lines(seen)] == ["eu"]  # nothing is known of the other
    console = new_console()
    with console.capture() as shown:
        console.print(table(seen))
    assert "3.500" in shown.get()


def test_nothing_is_known_at_first() -> None:
    seen = view(cluster(), {})
    assert list(lines(seen)) == []
    assert (seen.share, seen.rows[0].workers, seen.rows[0].up_bytes) == (0.0, 2, 0)


def test_a_flat_run_has_workers_at_the_global_server() -> None:
    top = {
        **TOP,
        "members": {"eu-0": member(loss=3.0, staleness=1.0), "eu-1": member(), "us-0": member(), "us-1": member()},
        "peers": {"eu-0": {"sent_bytes": 10, "received_bytes": 20}, "us-0": {"sent_bytes": 1, "received_bytes": 2}},
    }
    row = view(cluster(), {"global": top}).rows[0]
    assert (row.loss, row.up_bytes, row.down_bytes, row.staleness, row.workers_here) == (3.0, 20, 10, 1, 2)
    assert (row.version, row.global_version) == (8, 8)


def test_time_that_is_left() -> None:
    eta = Eta()
    assert eta.update(0.0, 0.0) is None
    assert eta.update(0.1, 10.0) is None
    assert eta.update(0.3, 20.0) == pytest.approx(35.0)


def test_sizes() -> None:
    sizes = [size(count) for count in (0, 999, 1500, 2.5e6, 3e9, 4e12, 5e15)]
    assert sizes == ["0 B", "999 B", "1.5 kB", "2.5 MB", "3.0 GB", "4.0 TB", "5000.0 TB"]


def test_last_words(tmp_path: Path) -> None:
    (tmp_path / "servers/eu").mkdir(parents=True)
    (tmp_path / "servers/eu/status.json").write_text(json.dumps(EU))
    assert last_words(tmp_path, ("global", "eu")) == {"eu": EU}
