"""`geotrain plan`: what it says and writes, and that its files run."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tests.support.small_runs as small_runs
from geotrain.commands import cli
from geotrain.config import load_cluster, load_run
from geotrain.data.tokenizer import byte_tokenizer

ROOT = Path(__file__).parent.parent.parent
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
        "final loss, 5 workers: 0.3% above data parallelism's of as many tokens, as of 95% of them",
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
    assert "76.0 GB (h100)" in said and re.search(r"[\d.]+ h for 1e\+11", said)


@pytest.mark.long("geotrain/plan", "geotrain/commands", "launch", "examples/planned")
@pytest.mark.slow
def test_a_planned_run_is_launched_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """examples/planned: three regions on this machine, a CPU rank in each, with emulated links where root runs it."""
    for name in ("run.json", "inventory.json"):
        shutil.copy(ROOT / "examples/planned" / name, tmp_path)
    small_runs.prepare_text(tmp_path)
    byte_tokenizer().save(tmp_path / "data/tokenizer")
    out = tmp_path / "planned"
    code, said = command(monkeypatch, capfd, "plan", tmp_path / "run.json", tmp_path / "inventory.json", "--out", out)
    assert code == 0, said
    planned, cluster = load_run(out / "run.json"), load_cluster(out / "cluster.json")
    assert planned.outer.rule.name == "region_momentum" and cluster.emulate_links
    workers = {
        worker.name: (worker.ranks, worker.launcher) for region in cluster.regions for worker in region.workers
    }
    assert workers == dict.fromkeys(("eu-0", "us-0", "asia-0"), (1, "local"))
    small_runs.launched((out / "run.json", out / "cluster.json"))
    assert small_runs.status(out / "run.json", "global")["committed_samples"] == planned.data.train_samples
    assert {worker for worker, _ in small_runs.losses(out / "run.json")} <= set(workers)


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
    assert tensor == {given.parallel.tensor}
    assert planned.data.train_samples == given.data.train_samples
