"""Which layouts can run, and where their parameters lie. No process is started."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from geotrain.commands.dry_run import check_shards
from geotrain.config import AccoConfig, ConfigError, ParallelConfig, UnsupportedModelError
from geotrain.parallelism.acco_forms import check_acco
from geotrain.parallelism.checks import check_layout
from geotrain.parallelism.local_parameters import local_parameters
from geotrain.parameters.parameter_map import canonical_parameters, parameter_map_of
from tests.support.families import DEEPSEEK, MIXTRAL, PREDICTING, QWEN2_MOE, QWEN_MOE
from tests.support.inner_worlds import LLAMA, QWEN, architecture, deepspeed_block, run_config


def layout(tensor: int = 1, pipeline: int = 1, sequence: bool = False, **more: Any) -> ParallelConfig:
    return ParallelConfig(tensor=tensor, pipeline=pipeline, sequence=sequence, **more)


def changed(**keys: int) -> dict[str, Any]:
    return {**LLAMA, **keys}


def block(**changes: Any) -> dict[str, Any]:
    return {**deepspeed_block(1), **changes}


def case(
    says: str, *where: int | bool, model: dict[str, Any] = LLAMA, ranks: int | None = None,
    deepspeed: dict[str, Any] | None = None, length: int = 16, **parallel: Any,
) -> Any:  # fmt: skip
    """One thing that is wrong with a run that is right otherwise. says: parts of the message, by `…`; ranks: as many
    as a replica has, if not stated."""
    wanted = layout(*where, **parallel)
    return model, wanted, ranks or wanted.replica_ranks, deepspeed or block(), length, says.split(" … ")


MULTI_HEAD = changed(hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
OFFLOADED = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
# Pairs of choices that never go together are in test_layouts.py.
REFUSED = [
    case("tensor 2 × pipeline 2 … 6 ranks … slots", 2, 2, ranks=6),
    case("num_attention_heads = 6 … parallel.tensor = 4", 4, model=MULTI_HEAD),
    case("num_key_value_heads = 2 … parallel.tensor = 4", 4),
    case("intermediate_size = 49 … of 50", 2, model=changed(intermediate_size=49)),
    case("num_hidden_layers = 5 … parallel.pipeline = 2", 1, 2, model=changed(num_hidden_layers=5)),
    case("parallel.stage_layers adds up to 5 … num_hidden_layers is 4", 1, 2, model=changed(num_hidden_layers=4),
         stage_layers=(2, 3)),
    case("parallel.sequence … parallel.tensor > 1", 1, 1, True, ranks=2),
    case("sequence_length = 15 … parallel.tensor = 2", 2, 1, True, length=15),
    case("sequence_length = 65 … max_position_embeddings = 64", length=65),
    case("stage = 3 … 0, 1 or 2", deepspeed=deepspeed_block(3)),
    case("round_robin", deepspeed=block(zero_optimization={"stage": 1, "round_robin_gradients": True})),
    case("offload_optimizer … parallel.tensor = 2 … stage 1", 2,
         deepspeed=block(zero_optimization={**OFFLOADED, "stage": 2})),
    case("amsgrad … betas", deepspeed=block(optimizer={"type": "AdamW", "params": {"amsgrad": True}})),
    case("learning_rate", deepspeed=block(optimizer={"type": "AdamW", "params": {"learning_rate": 1.0}})),
    case("fp16 … bf16", deepspeed=block(fp16={"enabled": True})),
    case("'Lion' … AdamW", deepspeed=block(optimizer={"type": "Lion"})),
    case("'StepLR' … WarmupCosineLR", deepspeed=block(scheduler={"type": "StepLR"})),
    case("train_batch_size = 8 … data-parallel size 3", ranks=3),
    case("train_batch_size = 8 … data-parallel size 8", ranks=8),
    case("gradient_accumulation_steps = 2", deepspeed=block(gradient_accumulation_steps=2)),
    case("pipeline 2 × context 2 = 4 … 6 ranks … parallel.context", 1, 2, context=2, ranks=6),
    case("sequence_length = 15 … parallel.context = 2 … use 16", context=2, length=15),
    case("num_key_value_heads = 2 … context = 4: … use parallel.context = 2", context=4),
    case("context = 2 × parallel.tensor = 2 … use parallel.context = 1", 2, context=2),
    case("= 18 … tensor = 2 × parallel.context = 2", 2, 1, True, context=2, length=18,
         model=changed(num_key_value_heads=4)),
    case("train_batch_size = 8 … data-parallel size 8", context=2, ranks=16),
    case("parallel.expert = 4 … 2 data-parallel ranks … slots", model=MIXTRAL, expert=4, ranks=2),
    case("6 experts … parallel.expert = 4", model={**MIXTRAL, "num_local_experts": 6}, expert=4, ranks=4),
    case("2 data-parallel ranks (data × context)", model=MIXTRAL, context=2, expert=4, ranks=2),
    case("reduce_scatter … leave it out", model=MIXTRAL, expert=2, ranks=2,
         deepspeed=block(zero_optimization={"stage": 1, "reduce_scatter": False})),
    case("parallel.sites = 2 needs equal runs of the worker's 2 data-parallel ranks", sites=2, ranks=2),
    case("parallel.sites = 2 … 4 data-parallel ranks", model=MIXTRAL, sites=2, expert=4, ranks=4),
    case("parallel.sites = 2 … deepspeed.zero_optimization.stage = 1", sites=2, ranks=4,
         deepspeed=deepspeed_block(0)),
    case("moe_intermediate_size = 25", 2, 1, True, model={**QWEN_MOE, "moe_intermediate_size": 25}),
    case("model config: intermediate_size = 49", 2, 1, True, model={**DEEPSEEK, "intermediate_size": 49}),
    case("parallel.expert = 2 … layers 0 to 0 of 2 … parallel.pipeline = 2 … leave out deepspeed", 1, 2, expert=2,
         ranks=4, model=DEEPSEEK, deepspeed=block(zero_optimization=OFFLOADED)),
    case("last of 2 pipeline stages needs 3 layers … and has 2", 1, 2, ranks=2, model=PREDICTING),
    case("num_hidden_layers + num_nextn_predict_layers = 4", 1, 3, ranks=3, model=PREDICTING),
]  # fmt: skip


@pytest.mark.parametrize(("model", "parallel", "ranks", "deepspeed", "length", "says"), REFUSED)
def test_what_does_not_run_is_told_clearly(
    model: Any, parallel: ParallelConfig, ranks: int, deepspeed: Any, length: int, says: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        check_layout(architecture(model), parallel, ranks, deepspeed, length)
    assert all(words in str(error.value) for words in says) and "\n" not in str(error.value)


def test_acco_is_refused_with_biased_routers_and_sites() -> None:
    for model in (LLAMA, MIXTRAL):
        check_acco(AccoConfig(), architecture(model), ParallelConfig(), block(), 4)
    with pytest.raises(ConfigError, match=r"acco does not go with parallel\.sites = 2"):
        check_acco(AccoConfig(), architecture(LLAMA), ParallelConfig(sites=2), block(), 4)
    with pytest.raises(ConfigError, match="acco does not go with the routers of a deepseek_v3"):
        check_acco(AccoConfig(), architecture(DEEPSEEK), ParallelConfig(), block(), 4)


@pytest.mark.parametrize(
    ("model", "change", "says"),
    [
        (QWEN_MOE, {"num_experts": 0}, "num_experts = 0"),
        (QWEN_MOE, {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 of 8 experts is not supported"),
        (QWEN2_MOE, {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok = 1 of 8"),
        (MIXTRAL, {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 of 4"),
        (MIXTRAL, {"norm_topk_prob": False}, "norm_topk_prob = False is not supported; only True"),
        (DEEPSEEK, {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 of 8"),
        (QWEN_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 8 experts"),
        (QWEN_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (QWEN_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        (QWEN_MOE, {"router_aux_loss_coef": -1}, "router_aux_loss_coef = -1"),
        (QWEN_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size = None"),
        (DEEPSEEK, {"n_group": 3}, "n_group = 3 must divide n_routed_experts = 8"),
        (DEEPSEEK, {"num_experts_per_tok": 6},
         "num_experts_per_tok = 6 is not supported with topk_group = 1 of n_group = 2"),
        (DEEPSEEK, {"first_k_dense_replace": 2},
         "first_k_dense_replace = 2 of num_hidden_layers = 2 leaves no layer"),
        (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported; only 4"),
        (PREDICTING, {"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported; only False"),
        (PREDICTING, {"num_nextn_predict_layers": 3}, "num_nextn_predict_layers = 3 must be a whole number from 0"),
        (DEEPSEEK, {"head_dim": 8}, "head_dim = 8 is not supported; only 4"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave = False is not supported; only True"),
        (DEEPSEEK, {"rope_scaling": {"type": "yarn", "factor": 4.0}},
         "mscale = None and mscale_all_dim = None are not"),
        (DEEPSEEK, {"router_bias_update_rate": -1}, "router_bias_update_rate = -1 must be a number"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_built_are_told_clearly(model: Any, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        architecture({**model, **change})


def test_a_rank_that_is_missing_is_not_one_that_is_null() -> None:
    latent = architecture({**DEEPSEEK, "q_lora_rank": None}).latent
    assert latent is not None and latent.query_rank == 0
    with pytest.raises(UnsupportedModelError, match="key 'q_lora_rank' is missing"):
        architecture({key: value for key, value in DEEPSEEK.items() if key != "q_lora_rank"})


@pytest.mark.parametrize("model", [MIXTRAL, QWEN2_MOE, DEEPSEEK], ids=lambda model: model["model_type"])
@pytest.mark.parametrize("expert", [1, 2, 4])
def test_each_expert_is_on_the_ranks_that_speak_for_it(model: dict[str, Any], expert: int) -> None:
    a, parallel = architecture(model), layout(2, 2, True, expert=expert)
    pushed = dict.fromkeys((p.name for p in canonical_parameters(a)), 0)
    for tp_rank, pp_rank, ep_rank in product(range(2), range(2), range(expert)):
        for place in local_parameters(a, parallel, tp_rank, pp_rank, ep_rank):
            assert place.expert == (expert > 1 and ".local_experts." in place.name)
            for run in place.runs:
                pushed[run.parameter] += run.numel * (place.pushes and (place.expert or ep_rank == 0))
    assert pushed == {p.name: p.numel for p in canonical_parameters(a)}


@pytest.mark.parametrize("model", [LLAMA, QWEN, {**LLAMA, "model_type": "qwen2"}, {**QWEN, "vocab_size": 97}])
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


@pytest.mark.parametrize(
    ("size", "tensor", "words", "rows"),
    [(50257, 1, [50257], 50257), (50264, 8, [6283] * 8, 6283), (50257, 2, [25216, 25041], 25216),
     (50254, 4, [12672, 12672, 12672, 12238], 12672), (259, 4, [128, 128, 3, 0], 128)],
)  # fmt: skip
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_is_padded_behind_its_end(
    size: int, tensor: int, words: list[int], rows: int, tied: bool
) -> None:
    many = {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": tied}
    a, tables = architecture(changed(vocab_size=size, **many)), ("embedding.word_embeddings", "output_layer")
    assert check_layout(a, layout(tensor, 2), 2 * tensor, block(), 16) == 1
    run = run_config(changed(vocab_size=size, **many), block())
    assert check_shards(parameter_map_of(run), run, layout(tensor, 2)) >= rows * a.hidden_size
    for tp_rank, stage in product(range(tensor), range(2)):
        places = local_parameters(a, layout(tensor, 2), tp_rank, stage)
        (table,) = (place for place in places if place.name == f"{tables[stage]}.weight")
        assert sum(run.numel for run in table.runs) == words[tp_rank] * a.hidden_size
        assert table.numel == rows * a.hidden_size and not any(place.padding for place in places if place != table)


@pytest.mark.parametrize(
    ("layers", "told"), [((1, 2, 1), "lists 3 stages, pipeline = 2"), ((2, 2), "as many, .* leave it out")]
)
def test_stages_that_are_refused(layers: tuple[int, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        layout(pipeline=2, stage_layers=layers)
