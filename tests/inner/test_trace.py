"""A step of every shipped run on a GPU, traced on "meta": no host waits, no more launches than known,
and products as the cost model counts them. The traced engine is the real one; see `benchmarks.trace`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUNS = sorted((ROOT / "configs/runs").glob("*.json"))
# A layer's of a micro-batch, and those of what is no layer; of the stage that has most. An operator counts as one.
LAUNCHES = {
    "125m": (35, 29),
    "1b": (36, 29),
    "8b": (36, 38),
    "long-8b": (58, 40),
    "70b": (49, 24),
    "moe-30b-a3b": (264, 28),
    "quickstart": (36, 29),
    "quickstart-moe": (143, 33),
    "latent": (259, 132),
    "documents": (38, 39),
}
SHORT = ("8b", "quickstart-moe")  # plain layers, and all that experts add
ALL = pytest.mark.long(
    "geotrain/inner", "geotrain/optimizers", "geotrain/plan/model", "benchmarks/trace", "configs/runs"
)
NAMES = [pytest.param(name, marks=[] if name in SHORT else ALL) for name in LAUNCHES]
# Of tokens' numbers, with which the host shapes the tensors of each expert and of the exchange among ranks.
WAITS_OF_EXPERTS = 1
LATENT = {
    "model_type": "deepseek_v3", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "first_k_dense_replace": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
}  # fmt: skip

pytestmark = pytest.mark.timeout(900)  # the first test waits for the traces of all


@pytest.fixture(scope="module")
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By run and stage, of the shipped runs that are asked for and of one with latent attention."""
    own = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params["name"] for item in own if "name" in item.callspec.params}
    runs = [path for path in RUNS if path.stem in asked]
    if "latent" in asked:
        raw = json.loads((ROOT / "configs/runs/moe-30b-a3b.json").read_text())
        raw |= {"name": "latent", "model": {"config": LATENT, "recompute": "none"}, "parallel": {"expert": 8}}
        runs.append(tmp_path_factory.mktemp("runs") / "latent.json")
        runs[-1].write_text(json.dumps(raw))
    if "documents" in asked:  # laid in a row for attention, and back
        raw = json.loads((ROOT / "configs/runs/8b.json").read_text())
        raw["model"]["config"] = str(ROOT / "configs/models/llama-8b.json")
        raw |= {"name": "documents", "data": {**raw["data"], "attention": "document"}}
        runs.append(tmp_path_factory.mktemp("runs") / "documents.json")
        runs[-1].write_text(json.dumps(raw))
    command = [sys.executable, "-m", "benchmarks.trace", "--run", *map(str, runs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_shipped_run_has_its_bounds() -> None:
    assert LAUNCHES.keys() == {path.stem for path in RUNS} | {"latent", "documents"}


@pytest.mark.parametrize("name", NAMES)
def test_nobody_waits_and_launches_are_bounded(traced: dict[str, Any], name: str) -> None:
    assert traced["not_linear"] == 0
    if name == "70b":
        assert traced[name].keys() == {"stage_0", "stage_1", "stage_3"}
    waits = WAITS_OF_EXPERTS if name in ("moe-30b-a3b", "quickstart-moe", "latent") else 0
    for stage in traced[name].values():
        assert stage["layer"]["waits"] == waits and stage["optimizer"]["waits"] == 1  # for the norm
        assert stage["rest"]["waits"] == 0
        assert stage["layer"]["product_flops_ratio"] == 1.0
        assert 0 < stage["layer"]["launches"] <= LAUNCHES[name][0]
        assert 0 < stage["rest"]["launches"] <= LAUNCHES[name][1]
