"""Two regions whose ranks share a model with experts differently train it in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from geotrain.commands.export import export_run
from geotrain.config import load_run
from geotrain.parameters.hf_checkpoint import read_checkpoint
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import parameter_map_of
from tests.support.small_runs import BATCH, LOCAL_STEPS, MODEL, launched, losses, prepare_text, status, write_files

EXPERTS = {
    **MODEL,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
}
ROUND = 2 * LOCAL_STEPS * BATCH  # samples that the two workers train in a round of the synchronous rule
ROUNDS = 12


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_regions_that_share_a_model_differently_train_it_together(tmp_path: Path) -> None:
    """In `eu` two ranks have all experts, and half of each sequence; in `us` two have half of the experts each."""
    prepare_text(tmp_path)
    run_file, cluster = write_files(
        tmp_path,
        "experts",
        ROUNDS * ROUND,
        {"eu": [2], "us": [2]},
        {"rule": {"name": "sync"}},
        model={"config": EXPERTS},
        checkpoint={"every_jobs": 4},
    )
    raw = json.loads(cluster.read_text())
    for region, parallel in zip(raw["regions"], ({"context": 2}, {"expert": 2}), strict=True):
        region["workers"][0]["parallel"] = parallel
    cluster.write_text(json.dumps(raw))
    launched((run_file, cluster))
    assert status(run_file, "global")["committed_samples"] == ROUNDS * ROUND
    jobs = losses(run_file)
    assert len(jobs) == 2 * ROUNDS
    for worker in ("eu-0", "us-0"):
        assert jobs[worker, ROUNDS] < 0.9 * jobs[worker, 1]
    manifests = {
        path.parts[-3]: json.loads(path.read_text())["layout"]
        for path in (tmp_path / "experts" / "checkpoints").glob("*/*/manifest.json")
    }
    assert {worker: (layout.get("context", 1), layout.get("expert", 1)) for worker, layout in manifests.items()} == {
        "eu-0": (2, 1),
        "us-0": (1, 2),
    }
    export_run(tmp_path / "experts", tmp_path / "export", "float32")
    run = load_run(run_file)
    exported = dict(read_checkpoint(tmp_path / "export")[1])
    for parameter in parameter_map_of(run).parameters:
        assert not torch.equal(exported[parameter.name], initial_tensor(parameter, run.seed)), parameter.name
