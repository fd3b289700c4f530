"""`geotrain plan`: what it says and writes, and that its files run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from geotrain.commands.plan import WARMUP_SHARE, default_run
from geotrain.config import load_cluster, load_run
from geotrain.data.tokenizer import byte_tokenizer
from tests.support import small_runs
from tests.support.command_line import say

ROOT = Path(__file__).parent.parent.parent
INVENTORY = "configs/clusters/world-inventory.json"


def test_a_model_on_an_inventory(tmp_path: Path) -> None:
    out = tmp_path / "planned"
    wanted = "--explain", "--tokens", "1e11"
    done = say("plan", "configs/models/llama-8b.json", INVENTORY, "--out", out, *wanted)
    assert done.returncode == 0, done.text
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
        assert words in done.text
    assert re.search(r"instead tokens/s .* a step takes [\d.]+ s, not [\d.]+ s: ", done.text)
    assert "global server in europe" in done.text
    assert "inner steps between global exchanges, not" in done.text
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
    done = say("dry-run", out / "run.json", out / "cluster.json")
    assert done.returncode == 2 and done.text.count("cannot be read") == 1, done.text  # a launch lacks a certificate
    assert "certs/world/operator-operator.key: cannot be read" in done.text
    assert "8,030,261,248 parameters" in done.text
    assert "76.0 GB (h100)" in done.text and re.search(r"[\d.]+ h for 1e\+11", done.text)


def test_the_run_of_a_bare_model() -> None:
    """Batches of 2^20 tokens, 20 tokens a parameter, and a schedule as long as its data."""
    model = json.loads((ROOT / "configs/models/llama-8b.json").read_text())
    run = default_run("Llama_8B!", {**model, "max_position_embeddings": 2048}, None)
    found = run["name"], run["data"]["sequence_length"], run["deepspeed"]["train_batch_size"]
    assert found == ("llama-8b", 2048, 512)
    schedule = run["deepspeed"]["scheduler"]["params"]
    assert schedule["total_num_steps"] == run["data"]["train_samples"] // 512 == round(20 * 8_030_261_248 / 2**20)
    assert schedule["warmup_num_steps"] == pytest.approx(WARMUP_SHARE * schedule["total_num_steps"], abs=1)
    least = default_run("?", model, 1.0)
    assert (least["name"], least["data"]["sequence_length"], least["data"]["train_samples"]) == ("planned", 4096, 256)


@pytest.mark.long("geotrain/plan", "geotrain/commands", "launch", "examples/planned")
@pytest.mark.slow
def test_a_planned_run_is_launched_unchanged(tmp_path: Path) -> None:
    """examples/planned: three regions on this machine, a CPU rank in each, with emulated links where root runs it."""
    for name in ("run.json", "inventory.json"):
        shutil.copy(ROOT / "examples/planned" / name, tmp_path)
    small_runs.prepare_text(tmp_path)
    byte_tokenizer().save(tmp_path / "data/tokenizer")
    out = tmp_path / "planned"
    done = say("plan", tmp_path / "run.json", tmp_path / "inventory.json", "--out", out)
    assert done.returncode == 0, done.text
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
        (["configs/runs/1b.json", INVENTORY, "--within-days", "0.001"], "this plan needs "),
        (["configs/runs/1b.json", INVENTORY, "--tokens-per-s", "1e12"], "this plan trains "),
    ],
)
def test_errors_are_one_message_and_write_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = say("plan", *arguments, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.text.startswith("geotrain: ")
    assert message in done.text
    assert not (tmp_path / "out").exists()


def test_keys_of_the_run_file_are_pins(tmp_path: Path) -> None:
    done = say("plan", "configs/runs/8b.json", INVENTORY, "--out", tmp_path / "out")
    assert done.returncode == 0, done.text
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
    assert f"{given.data.train_samples * given.data.sequence_length:.3g} tokens:" in done.text
