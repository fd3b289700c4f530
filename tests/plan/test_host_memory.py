"""Where the outer loop's vectors are counted: on the device, or on the host with the pinned buffers between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geotrain.config import ConfigError, ParallelConfig, RunConfig, architecture_from_hf, load_cluster, load_run
from geotrain.launch.check import check_worker
from geotrain.parallelism.local_parameters import any_of_stage, first_like, local_parameters
from geotrain.plan.model.memory import host_memory, rank_memory
from tests.support.families import DEEPSEEK
from tests.support.plan_cases import MODEL

CONFIGS = Path(__file__).parents[2] / "configs"
WORKER = load_cluster(CONFIGS / "clusters/four-regions-ssh.json").regions[0].workers[0]
OFFLOADED = ('deepspeed.zero_optimization.offload_optimizer={"device": "cpu"}', "deepspeed.optimizer.type=AdamW")


def run(*changes: str) -> RunConfig:
    return load_run(CONFIGS / "runs/1b.json", changes)


def both(*changes: str) -> tuple[dict[str, int], dict[str, int]]:
    wanted = run(*changes)
    return rank_memory(wanted, wanted.architecture, WORKER), host_memory(wanted, wanted.architecture, WORKER)


def test_what_leaves_the_device_arrives_on_the_host() -> None:
    (device, host), (none, there) = both("outer.state_device=device"), both("outer.state_device=host")
    assert device["outer"] == there["outer"] > 0 and host["outer"] == none["outer"] == 0
    assert {**device, "outer": 0} == none
    assert there["pinned"] == 2 * 64 << 20  # however large the model is
    assert host["pinned"] > there["pinned"]


@pytest.mark.parametrize(
    ("codecs", "each"),
    [
        (('outer.local={"name": "fp32"}',), 8),
        (('outer.local={"name": "bf16"}',), 12),
        (('outer.local={"name": "int8"}',), 16),  # changes come down, against a mirror
    ],
)
def test_what_is_kept_follows_from_the_codecs(codecs: Any, each: int) -> None:
    plain, _ = both('outer.local={"name": "fp32"}')
    assert both(*codecs)[0]["outer"] * 8 == plain["outer"] * each


def test_with_an_offloaded_optimizer_all_of_it_is_on_the_host() -> None:
    device, host = both(*OFFLOADED)
    assert device["outer"] == 0 and device["optimizer"] == 0 and host["pinned"] == 0
    assert host["outer"] > 0 and host["optimizer"] > 0
    with pytest.raises(ConfigError, match=r"outer\.state_device = 'device' does not go with .*offload_optimizer"):
        check_worker(run(*OFFLOADED, "outer.state_device=device"), WORKER)


def test_fp8_keeps_weights_twice_more_and_half_of_what_products_read() -> None:
    (plain, _), (fp8, _) = both(), both("precision.fp8=hybrid")
    a, parallel = run().architecture, run().parallel
    matrices = a.layers * (2 * a.hidden_size * a.heads * a.head_dim + 2 * a.hidden_size * a.kv_heads * a.head_dim)
    matrices += a.layers * 3 * a.hidden_size * a.ffn_size
    ranks = parallel.tensor * parallel.pipeline
    assert fp8["weights"] - plain["weights"] == 2 * matrices // ranks
    tokens = run().data.sequence_length * run().deepspeed["train_micro_batch_size_per_gpu"]
    whole = parallel.tensor if parallel.sequence else 1
    less = a.hidden_size / whole + 0.5 * (a.ffn_size - a.heads * a.head_dim) / parallel.tensor
    assert plain["activations"] - fp8["activations"] == pytest.approx(2 * tokens * a.layers * less, rel=1e-6)
    (with_acco, _), (without, _) = both("acco={}", "precision.fp8=hybrid"), both("acco={}")
    assert with_acco["weights"] - without["weights"] == 2 * matrices // ranks


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model", [MODEL, DEEPSEEK])
def test_a_stage_is_counted_by_the_first_like_it(model: dict[str, Any], tied: bool) -> None:
    a = architecture_from_hf({**model, "num_hidden_layers": 6, "tie_word_embeddings": tied})
    unlike = ParallelConfig(pipeline=4, stage_layers=(1, 2, 2, 1))
    assert first_like(a, unlike) == (0, 1, 1, 3)
    for parallel in (*(ParallelConfig(pipeline=pipeline) for pipeline in (1, 2, 3, 6)), unlike):
        for stage in range(parallel.pipeline):
            own = [place.numel for place in local_parameters(a, parallel, 0, stage)]
            assert sorted(place.numel for place in any_of_stage(a, parallel, stage)) == sorted(own)
    first = first_like(a, ParallelConfig(pipeline=6))
    assert first[0] == 0 and first[5] == 5 and len(set(first)) < 6, "most stages are like another"
