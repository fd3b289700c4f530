"""What a launch does with what it has started: real processes, in place of servers and workers."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geotrain.config import ConfigError, load_cluster, load_run
from geotrain.launch import launcher
from geotrain.launch.site_processes import LaunchRequest
from geotrain.launch.supervisor import ProcessSpec, Supervisor
from geotrain.monitor.events import EventLog, Record, Trouble
from tests.support.small_runs import prepare_text, write_files

Launch = Callable[..., int]
LONG_S = 60.0  # a launch that waits for what never comes ends then, and well


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Launch a run of two workers, of which the first always fails, and is not started again. writes: process → file
    in the run's folder, and what it writes there as it ends."""
    prepare_text(tmp_path)

    class Instead(Supervisor):
        lasts_s, writes = 0.0, dict[str, tuple[str, str]]()

        def start(self, spec: ProcessSpec) -> None:
            assert not (tmp_path / "r" / launcher.OUTCOME).exists(), "it would tell how this launch ended"
            file, text = self.writes.get(spec.name, ("ended", ""))
            (tmp_path / "r" / file).parent.mkdir(parents=True, exist_ok=True)
            does = f"import time; time.sleep({self.lasts_s}); open('r/{file}', 'w').write({text!r})"
            does = "raise SystemExit(3)" if spec.name == "eu-0" else does
            command = sys.executable, "-c", does
            super().start(replace(spec, command=command, first_input=b""))

    def begin(rule: str = "sync", resume: bool = False, lasts_s: float = 0, writes: Any = None, **keys: Any) -> int:
        Instead.lasts_s, Instead.writes = lasts_s, writes or {}
        files = write_files(
            tmp_path, "r", 32, {"eu": [1], "us": [1]}, {"rule": {"name": rule}}, restarts=0, shards=1, **keys
        )
        return launcher.launch(*files, resume=resume)

    monkeypatch.setattr(launcher, "Supervisor", Instead)
    monkeypatch.chdir(tmp_path)
    return begin


def test_only_a_synchronous_run_ends_when_a_worker_is_given_up(launch: Launch, tmp_path: Path) -> None:
    assert launch("sync", lasts_s=LONG_S) == 3
    assert json.loads((tmp_path / "r" / launcher.OUTCOME).read_text())["code"] == 3


def test_where_others_go_on_a_launch_says_what_they_said_last_and_what_is_not_trained(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = json.dumps({"train_samples": 32, "committed_samples": 20, "phase": "ended"})
    late = Record(1.0, "us-0", Trouble("it was late")).to_line()
    writes = {"global": ("servers/global/status.json", left), "us-0": ("events/us-0.jsonl", late)}
    assert launch("region_momentum", lasts_s=3.0, writes=writes, monitor={"every_s": LONG_S}) == 1
    said, reason = capsys.readouterr()
    assert "us-0: it was late" in said and "62.5% of the data is trained, and kept" in said
    assert "12 samples are not trained: continue with --resume; " in reason


def test_a_resume_keeps_ports_and_data(launch: Launch, tmp_path: Path) -> None:
    """Regions that run know the ports. A worker's files are its owner's alone: an environment may hold a key."""
    folder = tmp_path / "r"
    launch()
    (folder / "servers").mkdir()
    before, run = load_cluster(folder / "cluster.json"), load_run(folder / "run.json")
    files = [path for path in (folder / "hosts").iterdir() if path.is_file()]
    assert {path.name for path in files} == {"eu-0", "us-0"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    launch(resume=True)
    assert load_cluster(folder / "cluster.json") == before and before.global_shards[0].port
    assert run.data.sha256 and load_run(folder / "run.json").data.sha256 == run.data.sha256
    data = json.loads((tmp_path / "r.json").read_text())["data"]
    with pytest.raises(ConfigError, match=rf"data\.sha256: was {run.data.sha256}, is 0000.*resume with the same"):
        launch(resume=True, data={**data, "sha256": "0" * 64})


def test_what_workers_report_as_trouble_is_said_once_and_not_by_a_later_launch(tmp_path: Path) -> None:
    prepare_text(tmp_path)
    run, cluster = write_files(tmp_path, "troubled", 64, {"eu": [1]}, {})
    request = LaunchRequest(load_run(run), load_cluster(cluster), ("eu",), resume=False)
    said = list[str]()
    with EventLog(tmp_path / "events/eu-0.jsonl", source="eu-0") as log:
        log.write(Trouble("earlier"))
        tell = launcher.troubles_of(request, tmp_path, said.append)
        log.write(Trouble("now"))
        for _ in range(2):
            tell()
    assert said == ["eu-0: now"]
