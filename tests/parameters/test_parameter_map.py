"""Runs, clipping, layouts: against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.config import UnsupportedModelError, architecture_from_hf
from geotrain.parameters.parameter_map import (
    Parameter,
    ParameterMap,
    ParameterMapError,
    StridedSlice,
    active_parameter_count,
    canonical_parameters,
    clip_runs,
    fragments_due,
    gather,
    numel,
    parameter_count,
    scatter,
)


def elements(runs):
    return [
        (r.parameter, r.start + row * r.stride + i) for r in runs for row in range(r.count) for i in range(r.length)
    ]


runs_strategy = st.lists(
    st.builds(
        lambda start, length, gap, count: StridedSlice(
            start, length, length + gap if count > 1 else 0, count, parameter="p"
        ),
        st.integers(0, 50), st.integers(1, 7), st.integers(0, 5), st.integers(1, 6),
    ),
    max_size=5,
)  # fmt: skip


@given(runs_strategy, st.integers(0, 80), st.integers(0, 80))
def test_clipping_equals_slicing_the_elements(runs, begin, length):
    assert elements(clip_runs(runs, begin, begin + length)) == elements(runs)[begin : begin + length]


def test_gather_and_scatter_are_inverse():
    vector = torch.arange(100.0)
    slices = (StridedSlice(3, 4), StridedSlice(20, 2, 5, 6), StridedSlice(90, 10))
    picked = gather(vector, slices)
    assert picked.tolist() == [
        *range(3, 7), *(20 + 5 * r + i for r in range(6) for i in range(2)), *range(90, 100)
    ]  # fmt: skip
    target = torch.full((100,), -1.0)
    scatter(picked, slices, target)
    assert numel(slices) == 26 and int((target >= 0).sum()) == 26
    assert torch.equal(gather(target, slices), picked)


LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def test_fragments_are_strided_and_hold_everything_once():
    parameters = canonical_parameters(architecture_from_hf(LLAMA))
    parameter_map = ParameterMap(parameters, layers_per_fragment=3)
    assert [f.name for f in parameter_map.fragments] == ["layers-0", "layers-1", "layers-2", "embedding", "head"]
    layers = {f.name: sorted({p.layer for p in f.parameters}) for f in parameter_map.fragments[:3]}
    assert layers == {"layers-0": [0, 3, 6], "layers-1": [1, 4], "layers-2": [2, 5]}
    assert [p.name for p in parameter_map.fragments[4].parameters] == ["model.norm.weight", "lm_head.weight"]
    assert sum(f.numel for f in parameter_map.fragments) == sum(p.numel for p in parameters) == parameter_map.numel
    vector = torch.arange(float(parameter_map.fragments[1].numel))
    together = torch.cat([t.reshape(-1) for _, t in parameter_map.split(1, vector)])
    assert torch.equal(together, vector)


def test_layout_errors():
    parameter_map = ParameterMap([Parameter("a", (4, 4), 0, "normal"), Parameter("b", (4,), None, "ones")])
    with pytest.raises(ParameterMapError, match="no parameter 'c'"):
        parameter_map.slices([StridedSlice(0, 1, parameter="c")], 0)
    with pytest.raises(ParameterMapError, match="reaches beyond its 16 elements"):
        parameter_map.slices([StridedSlice(0, 4, 5, 4, parameter="a")], 0)


@given(st.integers(1, 9), st.integers(1, 40))
def test_every_fragment_leaves_once_a_period(fragments, period):
    for begin in (1, period + 1):
        sent = [p for step in range(begin, begin + period) for p in fragments_due(range(fragments), period, step)]
        assert sorted(sent) == list(range(fragments))
    assert fragments - 1 in fragments_due(range(fragments), period, period)


def test_parameter_counts_of_known_models():
    qwen15_moe = {
        "model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
    }  # fmt: skip
    assert parameter_count(architecture_from_hf(qwen15_moe)) == 14_315_784_192
    deepseek_v3 = {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "n_routed_experts": 256,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    architecture = architecture_from_hf(deepseek_v3)
    assert parameter_count(architecture) == 671_026_419_200
    assert 37e9 < active_parameter_count(architecture) < 38e9, "as its paper says"
    predicting = architecture_from_hf({**deepseek_v3, "num_nextn_predict_layers": 1})
    shared = 2 * 129280 * 7168  # its published checkpoint, beside scales of FP8, has embedding and head once more
    assert parameter_count(predicting) + shared == 684_489_845_504


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type 'llama3'"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size = 30 is not a multiple"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 must be a whole number from 1 to 10,000"),
        ({"vocab_size": float("nan")}, "vocab_size = nan must be a whole number"),
        ({"head_dim": "8"}, "head_dim = '8' must be a whole number"),
        ({"rms_norm_eps": [1]}, r"rms_norm_eps = \[1\] must be a number"),
        ({"rope_parameters": {"rope_type": ["llama3"]}}, r"rope type \['llama3'\] is not supported"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}},
         "'yarn' and 'linear' is not support"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor = 0.5 must be a number, 1 or more"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2}}, "factor does not belong to rope type 'default'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}},
         "full_attention does not belong to rope type 'default'"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
         r"rope_theta = 10000 and rope_parameters.rope_theta = 500000 differ"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
         "rope_parameters and rope_scaling differ"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                           "original_max_position_embeddings": 8}},
         "low_freq_factor = 4.0 must be less than high_freq_factor = 4.0"),
        ({"rope_theta": 0}, "rope_theta = 0 must be a number, 1 or more"),
        ({"rope_parameters": ["default"]}, r"rope_parameters = \['default'\] must be an object"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 1000.* must be a number"),
        ({"initializer_range": 1.5}, "initializer_range = 1.5 must be a number, from 0 to 1"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' must be true or false"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0 must be a whole number"),
        ({"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8},
         "no more chosen than there are, whichever key says it"),
        ({"head_dim": 5}, "head_dim = 5 must be even"),
        ({"pad_token_id": 96}, "pad_token_id = 96 is no id below vocab_size = 96; leave it out"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id = \[1, -1\] is no id"),
        # What would go into the export without being read: no version loads it, or it is another model.
        ({"hidden_size": 80, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32},
         "hidden_size = 80 is not a multiple of num_attention_heads = 3, as transformers wants it"),
        ({"quantization_config": {"load_in_4bit": True}},
         "quantization_config = {'load_in_4bit': True}: GeoTrain does"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported; only 1.0"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
         "partial_rotary_factor does not"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 28},
         "layer_types = .* must be 'full_attention', num_h"),
        ({"model_type": "mistral", "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 3},
         "layer_types = .* must be 'sliding_attention', num_hidden_layers = 7 times"),
        ({"sliding_window": 16}, "sliding_window = 16 .*: GeoTrain does not read this for model_type 'llama'"),
        ({"num_experts": 8, "model_type": "qwen3"},
         "num_experts = 8: GeoTrain does not read this for model_type 'qw"),
        ({"rope_thetta": 1e6, "logit_scale": 2},
         r"rope_thetta = 1000000.0 \(did you mean 'rope_theta'\?\); logit_scale"),
    ],
)  # fmt: skip
def test_unsupported_models_say_why(change, message):
    config = {k: v for k, v in {**LLAMA, **change}.items() if v is not None}
    with pytest.raises(UnsupportedModelError, match=message):
        architecture_from_hf(config)


@pytest.mark.parametrize("known", [0, 1, 2])
def test_what_says_nothing_of_the_model_is_left_out(known):
    """Nulls, bookkeeping of transformers, and keys that other values leave without effect."""
    idle = [
        {"quantization_config": None, "unheard_of": None},
        {"_name_or_path": "x", "torch_dtype": "float16", "use_cache": False, "auto_map": {}, "temperature": 0.6},
        {"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False},
    ][known]
    plain = {**LLAMA, "model_type": idle.get("model_type", "llama")}
    assert architecture_from_hf({**plain, **idle}) == architecture_from_hf(plain)
