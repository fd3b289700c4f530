"""A real run of processes over emulated links, and its simulation: the same updates in the same order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from geotrain.config import load_cluster, load_run
from geotrain.launch import wan
from geotrain.launch.operate import Run
from geotrain.outer.layout import layout_of
from geotrain.simulate.agreement import Applied, least_gap_s, real, simulated
from tests.launch.trees import marked, new_mark, until
from tests.small_runs import prepare_text, write_files

START_S = 240.0  # until all workers have joined, on a busy machine
PACE_S = {"eu-0": 0.7, "eu-1": 1.7, "us-0": 1.3}  # least seconds of an inner step: they set the order
SAMPLES = 4 * 20  # 20 inner steps of all workers together


def scripted(folder: Path) -> tuple[Path, Path]:
    """Two regions of two and one workers, over links on which an update takes a while."""
    prepare_text(folder)
    outer = {
        "rule": "halos", "updates_per_send": 2, "scale_local_steps": False, "up": {"name": "int4"},
        "down": {"name": "int4"},
    }  # fmt: skip
    run_file, cluster_file = write_files(folder, "run", SAMPLES, {"eu": [1, 1], "us": [1]}, outer)
    cluster = json.loads(cluster_file.read_text())
    cluster["emulate_links"] = True
    cluster["links"] = [
        {"regions": ["eu", "global"], "gbps": 0.01, "rtt_ms": 100.0},
        {"regions": ["us", "global"], "gbps": 0.01, "rtt_ms": 300.0},
    ]
    for region in cluster["regions"]:
        for worker in region["workers"]:
            worker["min_step_s"] = PACE_S[worker["name"]]
    cluster_file.write_text(json.dumps(cluster))
    return run_file, cluster_file


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(600)
def test_a_real_run_applies_what_its_simulation_applies(tmp_path: Path) -> None:
    """Workers wait until the last has joined, so that all begin together; paces and links decide from there on."""
    assert wan.cannot_emulate() == ""
    run_file, cluster_file = scripted(tmp_path)
    run, cluster = load_run(run_file), load_cluster(cluster_file)
    expected = simulated(run, cluster, layout_of(run))
    assert least_gap_s(expected) > 0.3, "the script leaves the order to chance"
    mark = new_mark()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "geotrain", "launch", str(run_file), str(cluster_file)],
        env={**os.environ, **mark, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        folder = run.run_folder
        assert until(lambda: (folder / "servers/global/listening.json").exists(), START_S)
        live = Run(folder)
        assert live.steer("pause") == "paused"

        def joined() -> bool:
            return {"eu-0", "eu-1", "us-0"} <= {a.member for a in real(folder, "Joined")}

        assert until(lambda: launcher.poll() is not None or joined(), START_S)
        assert not real(folder), "the run began before it was told to"
        live.steer("resume")
        said = launcher.communicate(timeout=120)[0]
        assert launcher.returncode == 0, said
    finally:
        launcher.kill()
        launcher.communicate()
    assert marked(mark) == []
    found = real(folder)
    for site in ("global", "eu", "us"):
        assert order(found, site) == order(expected, site), site
    assert len(order(found, "global")) >= 6


def order(applied: list[Applied], site: str) -> list[tuple[str, int]]:
    return [(a.member, a.sequence) for a in applied if a.site == site]
