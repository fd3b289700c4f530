"""`geotrain plan`: what it says and writes, and that its files run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import tests.support.small_runs as small_runs
from geotrain import cli
from geotrain.config import load_cluster, load_run

ROOT = Path(__file__).parent.parent.parent
STEPS = 16
INVENTORY = "configs/clusters/world-inventory.json"


def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str]:
    """Exit code and all that was said, spaces squeezed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["geotrain", *map(str, arguments)])
    capfd.readouterr()
    try:
        cli.main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capfd.readouterr()
    return code, " ".join((said.out + said.err).split())


def test_a_model_on_an_inventory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "planned"
    code, said = command(
        monkeypatch,
        capfd,
        "plan",
        "configs/models/llama-8b.json",
        INVENTORY,
        "--out",
        out,
        "--explain",
        "--tokens",
        "1e11",
    )
    assert code == 0, said
    for words in (
        "us-east-0 us-east",
        "× h100",
        "global server: us-west",
        "1e+11 tokens:",
        "USD",
        "limited by",
        "staleness",
    ):
        assert words in said
    assert re.search(r"instead tokens/s .* a step takes [\d.]+ s, not [\d.]+ s: ", said)
    assert "global server in europe" in said
    assert "inner steps between global exchanges, not" in said
    assert {p.name for p in out.iterdir()} == {"run.json", "cluster.json", "hosts", "placement.svg"}
    run, cluster = load_run(out / "run.json"), load_cluster(out / "cluster.json")
    workers = [w for r in cluster.regions for w in r.workers]
    assert {p.name for p in (out / "hosts").iterdir()} == {w.name for w in workers}
    hosts = (out / "hosts/europe-0").read_text().splitlines()
    assert hosts[0] == "europe-node0 slots=8"
    picture = ElementTree.parse(out / "placement.svg").getroot()
    assert picture.tag.endswith("svg")
    drawn = (out / "placement.svg").read_text()
    assert all(f"{w.name}: " in drawn for w in workers), "texts are kept as comments"
    assert run.data.train_samples * run.data.sequence_length == pytest.approx(1e11, rel=1e-3)
    code, said = command(monkeypatch, capfd, "dry-run", out / "run.json", out / "cluster.json")
    assert code == 2 and said.count("cannot be read") == 1, said  # all that a launch lacks here is a certificate
    assert "certs/world/operator-operator.key: cannot be read" in said
    assert "8,030,261,248 parameters" in said


def local_inventory() -> dict[str, Any]:
    """Two regions on this machine, a CPU rank in each."""
    device = {"memory_gb": 2.0, "tflops": 0.02, "efficiency": 0.5, "host_gbps": 20.0}
    return {
        "name": "here",
        "regions": [
            {"name": name, "hosts": [{"host": "localhost", "slots": 1, "device": "cpu"}]} for name in ("eu", "us")
        ],
        "links": [{"regions": ["eu", "us"], "gbps": 1.0, "rtt_ms": 20.0}],
        "devices": {"cpu": device},
    }


@pytest.mark.slow
def test_a_planned_run_is_launched_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small_runs.prepare_text(tmp_path)
    run, cluster = small_runs.write_files(
        tmp_path, "wish", STEPS * small_runs.BATCH, {"eu": [1]}, {"rule": {"name": "sync"}}
    )
    raw = json.loads(run.read_text())
    raw["outer"] = {"rule": {"name": "region_momentum"}}
    run.write_text(json.dumps(raw))
    cluster.write_text(json.dumps(local_inventory()))
    out = tmp_path / "planned"
    code, said = command(monkeypatch, capfd, "plan", run, cluster, "--out", out)
    assert code == 0, said
    planned = load_run(out / "run.json")
    assert planned.outer.rule.name == "region_momentum"
    assert [(w.name, w.ranks, w.launcher) for r in load_cluster(out / "cluster.json").regions for w in r.workers] == [
        ("eu-0", 1, "local"),
        ("us-0", 1, "local"),
    ]
    small_runs.launched((out / "run.json", out / "cluster.json"))
    assert small_runs.status(out / "run.json", "global")["committed_samples"] == STEPS * small_runs.BATCH
    assert {worker for worker, _ in small_runs.losses(out / "run.json")} <= {"eu-0", "us-0"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["configs/models/llama-70b.json", "configs/clusters/four-regions-ssh.json"], "names no device"),
        (["configs/models/llama-8b.json", INVENTORY, "--pin-global", "mars"], "--pin-global mars: no such region"),
        (["configs/models/none.json", INVENTORY], "none.json: cannot be read"),
        (["configs/runs/1b.json", INVENTORY, "--objective", "cost", "--within-days", "0.001"], "cannot be had"),
    ],
)
def test_errors_are_one_message_and_write_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    code, said = command(monkeypatch, capfd, "plan", *arguments, "--out", tmp_path / "out")
    assert code == 2
    assert said.startswith("geotrain: ")
    assert message in said
    assert not (tmp_path / "out").exists()


def test_keys_of_the_run_file_are_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = command(monkeypatch, capfd, "plan", "configs/runs/8b.json", INVENTORY, "--out", tmp_path / "out")
    assert code == 0, said
    given, planned = load_run(ROOT / "configs/runs/8b.json"), load_run(tmp_path / "out/run.json")
    assert planned.outer == given.outer
    assert planned.model.recompute == given.model.recompute
    tensor = {
        (w.parallel or planned.parallel).tensor
        for r in load_cluster(tmp_path / "out/cluster.json").regions
        for w in r.workers
    }
    assert tensor == {4}
    assert planned.data.train_samples == given.data.train_samples
