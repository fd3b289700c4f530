"""Which layouts can run, and where their parameters lie. No process is started."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from geotrain.config import ConfigError, ParallelConfig
from geotrain.layout import canonical_parameters
from geotrain.parallelism.checks import check_layout
from geotrain.parallelism.local_parameters import local_parameters
from tests.support.inner_worlds import LLAMA, QWEN, architecture, deepspeed_block


def layout(tensor: int = 1, pipeline: int = 1, sequence: bool = False) -> ParallelConfig:
    return ParallelConfig(tensor=tensor, pipeline=pipeline, sequence=sequence)


@pytest.mark.parametrize(
    ("parallel", "ranks", "dp"), [(layout(), 4, 4), (layout(2, 2), 4, 1), (layout(2, 1, True), 4, 2)]
)
def test_what_runs(parallel: ParallelConfig, ranks: int, dp: int) -> None:
    assert check_layout(architecture(LLAMA), parallel, ranks, deepspeed_block(1), 16) == dp


def block(**changes: Any) -> dict[str, Any]:
    return {**deepspeed_block(1), **changes}


@pytest.mark.parametrize(
    ("model", "parallel", "ranks", "deepspeed", "sequence_length", "says"),
    [
        ({}, layout(2, 2), 6, block(), 16, ["tensor 2 × pipeline 2", "6 ranks", "slots"]),
        ({"heads": 6, "kv_heads": 3}, layout(4), 4, block(), 16, ["num_attention_heads = 6", "parallel.tensor = 4"]),
        ({"kv_heads": 2}, layout(4), 4, block(), 16, ["num_key_value_heads = 2", "parallel.tensor = 4"]),
        ({"ffn_size": 49}, layout(2), 2, block(), 16, ["intermediate_size = 49", "of 50"]),
        ({"vocab_size": 97}, layout(2), 2, block(), 16, ["vocab_size = 97", "of 98"]),
        ({"layers": 5}, layout(1, 2), 2, block(), 16, ["num_hidden_layers = 5", "parallel.pipeline = 2"]),
        ({}, layout(1, 1, True), 2, block(), 16, ["parallel.sequence", "parallel.tensor > 1"]),
        ({}, layout(2, 1, True), 2, block(), 15, ["sequence_length = 15", "parallel.tensor = 2"]),
        ({}, layout(), 1, block(), 65, ["sequence_length = 65", "max_position_embeddings = 64"]),
        ({}, layout(1, 2), 2, deepspeed_block(2), 16, ["stage = 2", "pipeline = 2", "use stage 1"]),
        ({}, layout(), 1, deepspeed_block(3), 16, ["stage = 3", "0, 1 or 2"]),
        ({}, layout(), 1, block(zero_optimization={"stage": 1, "round_robin_gradients": True}), 16, ["round_robin"]),
        (
            {},
            layout(2),
            2,
            block(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}),
            16,
            ["offload_optimizer", "parallel.tensor = 2", "stage 1"],
        ),
        ({}, layout(), 1, block(optimizer={"type": "AdamW", "params": {"amsgrad": True}}), 16, ["amsgrad", "betas"]),
        ({}, layout(), 1, block(fp16={"enabled": True}), 16, ["fp16", "bf16"]),
        ({}, layout(), 1, deepspeed_block(0, bf16={"enabled": True}), 16, ["bf16", "stage 1 or 2"]),
        ({}, layout(), 1, block(optimizer={"type": "Lion"}), 16, ["'Lion'", "AdamW"]),
        ({}, layout(), 1, block(scheduler={"type": "StepLR"}), 16, ["'StepLR'", "WarmupCosineLR"]),
        ({}, layout(), 3, block(), 16, ["train_batch_size = 8", "data-parallel size 3"]),
        ({}, layout(), 8, block(), 16, ["train_batch_size = 8", "data-parallel size 8"]),
        ({}, layout(), 1, block(gradient_accumulation_steps=2), 16, ["gradient_accumulation_steps = 2"]),
    ],
)
def test_what_does_not_run_is_told_clearly(
    model: dict[str, Any],
    parallel: ParallelConfig,
    ranks: int,
    deepspeed: dict[str, Any],
    sequence_length: int,
    says: list[str],
) -> None:
    with pytest.raises(ConfigError) as error:
        check_layout(replace(architecture(LLAMA), **model), parallel, ranks, deepspeed, sequence_length)
    for words in says:
        assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", [LLAMA, QWEN, {**LLAMA, "model_type": "qwen2"}])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_pushed_runs_cover_every_element_once(model: dict[str, Any], tensor: int, pipeline: int) -> None:
    a = architecture(model)
    pushed = {p.name: np.zeros(p.numel, dtype=int) for p in canonical_parameters(a)}
    held = {name: count.copy() for name, count in pushed.items()}
    decays = {p.name: p.decays for p in canonical_parameters(a)}
    for tp_rank, pp_rank in product(range(tensor), range(pipeline)):
        for place in local_parameters(a, layout(tensor, pipeline), tp_rank, pp_rank):
            for run in place.runs:
                assert place.decays == decays[run.parameter]
                for row in range(run.count):
                    rows = slice(run.start + row * run.stride, run.start + row * run.stride + run.length)
                    held[run.parameter][rows] += 1
                    pushed[run.parameter][rows] += place.pushes
    for name, count in pushed.items():
        assert (count == 1).all(), name
        copies = tensor if "norm" in name else 2 if name == "model.embed_tokens.weight" and pipeline > 1 else 1
        assert (held[name] == (copies if a.tied_embeddings or "norm" in name else 1)).all(), name


def test_local_parameters_are_in_canonical_order() -> None:
    a = architecture(QWEN)
    order = {p.name: i for i, p in enumerate(canonical_parameters(a))}
    first = [order[place.runs[0].parameter] for place in local_parameters(a, layout(2), 1, 0)]
    assert first == sorted(first)


def test_only_norms_that_see_a_part_are_summed() -> None:
    def summed(parallel: ParallelConfig) -> set[str]:
        places = local_parameters(architecture(QWEN), parallel, 0, 0)
        return {place.name.split(".")[-2] for place in places if place.sums_over_tp}

    assert summed(layout()) == set()
    assert summed(layout(2)) == {"q_layernorm", "k_layernorm"}
    assert summed(layout(2, 1, True)) == {
        "q_layernorm",
        "k_layernorm",
        "input_layernorm",
        "pre_mlp_layernorm",
        "final_layernorm",
    }
