"""A loss spike is undone: the run is stopped, taken back to a snapshot from before it, and launched there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from geotrain.commands.operate import LiveRun, RunState
from geotrain.config import ConfigError
from geotrain.launch.branches import GOES_ON, MADE, REQUEST
from geotrain.launch.launcher import locked, where_to_go_on
from geotrain.launch.rollback import snapshots_of
from geotrain.launch.spikes import SpikeWatch
from geotrain.net.storage.snapshots import PINNED
from tests.support.command_line import say
from tests.support.process_trees import until
from tests.support.server_processes import Site
from tests.support.small_runs import BATCH, losses, prepare_text, write_files

BUSY_S = 300.0
TOKENS = 8  # of a sample of the site's


class Trained:
    """A site whose servers keep all snapshots, half of its data trained. watch: of a launcher that begins."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "servers").symlink_to(".")
        self.site, self.told = Site(folder, train_samples=160, regions={"eu": ("a",)}), list[str]()
        raw = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**raw, "checkpoint": {**raw["checkpoint"], "keep": 100}}))
        for which in self.site.processes:
            self.site.serve(which)
        self.worker = self.site.worker("a")
        self.worker.join()
        for job in range(10):
            self.worker.train(self.worker.lease())
            if job == 4:
                assert until(lambda: any(each["committed_samples"] > 0 for each in snapshots_of(folder)))
        self.committed = LiveRun(folder).see().statuses["global"]["committed_samples"]

    def watch(self, whole: bool = True, per_hour: int = 3) -> SpikeWatch:
        site = self.site
        outer = site.run.outer.model_copy(update={"rollbacks_per_hour": per_hour})
        return SpikeWatch(
            site.run.model_copy(update={"outer": outer}), site.cluster, site.folder, whole, self.told.append
        )

    def ends(self) -> None:
        assert self.worker.lease() is None
        self.worker.leave()
        self.worker.close()
        assert [server.ended() for server in self.site.servers] == [(0, "")] * 2


def spiked(tokens: int) -> dict[str, Any]:
    return {"phase": "running", "loss_spike": {"loss": 9.0, "usual": 3.0, "tokens": tokens}}


def test_a_spike_has_the_run_taken_back_or_paused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Trained(folder)
    live, spike = LiveRun(folder), spiked(TOKENS * run.committed)
    try:
        # Without outer.rollbacks_per_hour nothing is done.
        SpikeWatch(run.site.run, run.site.cluster, folder, True, run.told.append).look(spike)
        assert not run.told
        (folder / MADE).write_text(json.dumps([time.time() - 3700.0, time.time() - 60.0]))
        for watch, at, why in (
            (run.watch(whole=False), spike, "not all sites"),
            (run.watch(per_hour=1), spike, "1 times within an hour (outer.rollbacks_per_hour)"),
            (run.watch(), spiked(0), "no snapshot is older"),
        ):
            watch.look(at)
            assert "is paused, not taken back" in run.told[-1] and why in run.told[-1]
            assert live.see().statuses["global"]["phase"] == "paused"
            live.steer("resume")
            watch.look(at)  # one that an operator lets go on is not paused again
            assert live.see().statuses["global"]["phase"] == "running" and not (folder / REQUEST).exists()
        watch = run.watch(per_hour=2)
        watch.look({**spike, "phase": "stopping"})
        assert not (folder / REQUEST).exists()
        watch.look(spike)
        number = json.loads((folder / REQUEST).read_text())
        older = [s["snapshot"] for s in snapshots_of(folder) if s["committed_samples"] < run.committed]
        assert number == older[-1] and f"goes back to snapshot {number}" in run.told[-1]
        assert (folder / f"global/snapshots/{number:08d}" / PINNED).exists()
        assert where_to_go_on(folder) == folder  # while it has not ended
        run.watch(whole=False).look({"phase": "running"})
        assert live.see().statuses["global"]["phase"] == "running"
        run.watch().look({"phase": "running"})  # of a launcher that was started anew
        assert live.see().statuses["global"]["phase"] == "stopping"
        run.ends()
        out = where_to_go_on(folder)
        assert out == tmp_path / "run-rollback-1" == where_to_go_on(folder)
        assert len(json.loads((out / MADE).read_text())) == 3
        assert [each["committed_samples"] for each in snapshots_of_branch(out, folder)] == [
            next(s["committed_samples"] for s in snapshots_of(folder) if s["snapshot"] == number)
        ]
        (folder / GOES_ON).unlink()
        (folder / REQUEST).write_text("999")
        with pytest.raises(ConfigError, match="--to 999"):
            where_to_go_on(folder)
        assert where_to_go_on(folder) == folder  # it can be launched again
    finally:
        run.site.kill()


def snapshots_of_branch(out: Path, of: Path) -> list[dict[str, Any]]:
    (out / "run.json").write_bytes((of / "run.json").read_bytes())
    return snapshots_of(out)


def test_who_may_take_a_live_run_back(tmp_path: Path) -> None:
    Site(tmp_path)
    live = LiveRun(tmp_path)
    with pytest.raises(ConfigError, match="--live needs the launcher of the whole run"):
        live.take_back(1)
    with locked(tmp_path), pytest.raises(ConfigError, match="has snapshots none"):
        live.take_back(1)
    (tmp_path / GOES_ON).write_text(json.dumps("elsewhere"))
    with pytest.raises(ConfigError, match="elsewhere: no run is here"):
        LiveRun(tmp_path)


BAD = """
import os
from pathlib import Path
if os.environ.get("RANK"):
    import torch
    from geotrain.inner.engine.engine import GeoEngine
    checked = GeoEngine._checked

    def bad(self, *given):
        batches = checked(self, *given)
        return [torch.randint_like(each, 128, 256) for each in batches] if Path({!r}).exists() else batches

    GeoEngine._checked = bad
"""


@pytest.mark.long("launch", "geotrain/outer/server")
def test_bad_data_are_undone_without_a_person_and_then_by_hand(tmp_path: Path) -> None:
    prepare_text(tmp_path)
    bad = tmp_path / "bad"
    (tmp_path / "sitecustomize.py").write_text(BAD.format(str(bad)))
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    outer = {
        "rule": {"name": "region_momentum", "updates_per_send": 1, "answers": "at_once"}, "local_steps": 8,
        "rollbacks_per_hour": 1,
    }  # fmt: skip
    stores = {"folder": str(tmp_path / "saved"), "snapshots": f"file://{tmp_path}/copies"}
    keys: dict[str, Any] = {"checkpoint": {"every_minutes": 0.05, "keep": 50, **stores}, "monitor": {"every_s": 0.5}}
    files = write_files(tmp_path, "run", 4000 * BATCH, {"eu": [1]}, outer, first={"env": env}, **keys)
    first, second, third = (tmp_path / name for name in ("run", "run-rollback-1", "run-rollback-2"))

    def jobs(folder: Path) -> int:
        log = folder / "events/eu-0.jsonl"
        return log.read_text().count('"JobTrained"') if log.exists() else 0

    with (tmp_path / "said").open("w") as out:
        command = [sys.executable, "-m", "geotrain", "launch", *map(str, files)]
        launcher = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def happens(what: Any) -> None:
        said = tmp_path / "said"
        assert until(lambda: what() or launcher.poll() is not None, BUSY_S), said.read_text()
        assert launcher.poll() is None, said.read_text()

    try:
        happens(lambda: jobs(first) > 30)
        bad.touch()
        happens(lambda: jobs(second) > 2)
        assert max(job for _, job in losses(files[0])) == jobs(first)
        assert LiveRun(first).see().state is RunState.RUNNING  # it follows
        happens(lambda: "is paused, not taken back: it was 1 times within an hour" in (tmp_path / "said").read_text())
        bad.unlink()
        (oldest, *_) = snapshots_of(second)
        assert say("rollback", first, "--to", str(oldest["snapshot"]), "--live").returncode == 0
        happens(lambda: jobs(third) > 2)
        assert say("stop", first, "--wait", f"{BUSY_S:g}").text.startswith("stopping stopped")
        assert launcher.wait(BUSY_S) == 0
    finally:
        launcher.terminate()
        launcher.wait(BUSY_S)
    spans = [json.loads((folder / "servers/global/status.json").read_text()) for folder in (first, second, third)]
    assert all(top["open_leases"] == 0 and not top["complete"] for top in spans)
    assert spans[0]["dispatched_samples"] < spans[1]["dispatched_samples"] < spans[2]["dispatched_samples"]
    assert {p.name for p in (tmp_path / "copies").iterdir()} >= {second.name, third.name}
    assert 0 < spans[1]["set_aside_samples"] <= spans[2]["set_aside_samples"]
