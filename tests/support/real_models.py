"""config.json of real models, with the keys that stand in them and small sizes of the same ratios."""

from __future__ import annotations

from typing import Any

# What bookkeeping a file has, by the version of transformers that wrote it.
OLD = {"_name_or_path": "some/model", "torch_dtype": "float16", "transformers_version": "4.31.0", "use_cache": True}
NEW = {"torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "attention_dropout": 0.0}
SIZES = {"vocab_size": 264, "num_hidden_layers": 3, "hidden_act": "silu", "initializer_range": 0.02}
LLAMA_3 = {
    **SIZES, **NEW, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 224, "num_attention_heads": 8, "num_key_value_heads": 2, "bos_token_id": 200,
    "eos_token_id": [201, 208, 209], "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 16, "rope_type": "llama3"},
}  # fmt: skip
MISTRAL = {
    **SIZES, **OLD, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 64,
    "intermediate_size": 224, "num_attention_heads": 8, "num_key_value_heads": 2, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "sliding_window": 9, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = {
    **SIZES, **NEW, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 56,
    "intermediate_size": 304, "num_attention_heads": 7, "num_key_value_heads": 1, "bos_token_id": 243,
    "eos_token_id": 243, "max_position_embeddings": 128, "max_window_layers": 24, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "sliding_window": 128, "tie_word_embeddings": True, "use_sliding_window": False,
}  # fmt: skip
SMOLLM3 = {
    **SIZES, **NEW, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_size": 64,
    "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": False,
    "bos_token_id": 200, "eos_token_id": 212, "pad_token_id": 204, "layer_types": ["full_attention"] * 3,
    "max_position_embeddings": 128, "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 0, 1], "pretraining_tp": 2, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
}  # fmt: skip
GRANITE = {
    **SIZES, **NEW, "architectures": ["GraniteForCausalLM"], "model_type": "granite", "hidden_size": 64,
    "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": False,
    "attention_multiplier": 0.115625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
    "logits_scaling": 8.0, "max_position_embeddings": 128, "mlp_bias": False, "pad_token_id": 0,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = {
    **SIZES, **NEW, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "intermediate_size": 192, "head_dim": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
    "attention_bias": False, "bos_token_id": 243, "eos_token_id": 245, "max_position_embeddings": 128,
    "max_window_layers": 28, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_window_layers": 48, "mlp_only_layers": [],
    "moe_intermediate_size": 24, "norm_topk_prob": True, "num_experts": 16, "num_experts_per_tok": 4,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2_MOE = {
    **QWEN2, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 64,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_window_layers": 21, "decoder_sparse_step": 1,
    "moe_intermediate_size": 44, "shared_expert_intermediate_size": 176, "norm_topk_prob": False,
    "num_experts": 15, "num_experts_per_tok": 4, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    **SIZES, **OLD, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64,
    "intermediate_size": 112, "num_attention_heads": 8, "num_key_value_heads": 2, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 128, "num_experts_per_tok": 2, "num_local_experts": 8,
    "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": None, "tie_word_embeddings": False, "attention_dropout": 0.0,
}  # fmt: skip
DEEPSEEK = {
    **SIZES, **NEW, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 56,
    "intermediate_size": 144, "moe_intermediate_size": 16, "num_attention_heads": 8, "num_key_value_heads": 8,
    "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 1,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "kv_lora_rank": 16, "q_lora_rank": 48,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "max_position_embeddings": 128,
    "moe_layer_freq": 1, "n_group": 4, "topk_group": 2, "n_routed_experts": 32, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 4, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "seq_aux": True, "aux_loss_alpha": 0.0001, "topk_method": "noaux_tc", "tie_word_embeddings": False,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 8, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 16, "type": "yarn"},
}  # fmt: skip


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


OLMO2 = {
    **SIZES, **NEW, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 64,
    "intermediate_size": 172, "num_attention_heads": 8, "num_key_value_heads": 8, "attention_bias": False,
    "eos_token_id": 257, "pad_token_id": 213, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
}  # fmt: skip
OLMO3 = {
    **OLMO2, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                     "original_max_position_embeddings": 16, "rope_type": "yarn"},
}  # fmt: skip
GEMMA2 = {
    **SIZES, **NEW, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 48,
    "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "attention_bias": False, "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": 1, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 128, "pad_token_id": 0,
    "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 9,
}  # fmt: skip
GEMMA3 = {
    **without(GEMMA2, "hidden_act"), "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_key_value_heads": 1, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window_pattern": 6, "num_hidden_layers": 6,
}  # fmt: skip
GPT_OSS = {
    **SIZES, **NEW, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 60,
    "intermediate_size": 60, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "attention_bias": True, "eos_token_id": 202, "pad_token_id": 199, "experts_per_token": 4,
    "initial_context_length": 16, "max_position_embeddings": 128, "num_experts_per_tok": 4, "num_local_experts": 16,
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "output_router_logits": False,
    "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 9,
    "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 16,
                     "rope_type": "yarn", "truncate": False},
}  # fmt: skip
QWEN3_NEXT = {
    **without(QWEN2_MOE, "max_window_layers", "sliding_window"),
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "attention_bias": False, "head_dim": 16,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_value_head_dim": 8, "mlp_only_layers": [], "norm_topk_prob": True,
    "num_hidden_layers": 4, "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rope_scaling": None,
    "rope_theta": 10000000,
}  # fmt: skip
GRANITE_4 = {
    **GRANITE, "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
    "attention_multiplier": 0.0078125, "init_method": "mup", "intermediate_size": 32, "logits_scaling": 6,
    "layer_types": ["mamba", "mamba", "attention"], "mamba_chunk_size": 256, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 8, "mamba_proj_bias": False, "normalization_function": "rmsnorm", "num_experts_per_tok": 3,
    "num_local_experts": 16, "output_router_logits": False, "position_embedding_type": "nope",
    "router_aux_loss_coef": 0.0, "shared_intermediate_size": 64,
}  # fmt: skip
NEMOTRON_H = {
    **without(SIZES, "hidden_act"), **NEW, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
    "attention_bias": False, "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2,
    "head_dim": 16, "hidden_dropout": 0.0, "hidden_size": 64, "hybrid_override_pattern": "M-M*-M-",
    "intermediate_size": 256, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 16, "mamba_hidden_act": "silu",
    "mamba_num_heads": 16, "mamba_proj_bias": False, "max_position_embeddings": 128, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "n_groups": 4, "num_attention_heads": 8, "num_hidden_layers": 7,
    "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0, "rescale_prenorm_residual": True,
    "residual_in_fp32": False, "rms_norm_eps": 1e-5, "sliding_window": None, "ssm_state_size": 16,
    "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "use_bias": False, "use_conv_bias": True,
    "use_mamba_kernels": True,
}  # fmt: skip
FULL = ["full_attention"] * 3


def with_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The same model as transformers 5 writes it."""
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    rope = {**scaling, "rope_theta": config["rope_theta"]}
    renamed = {"rope_parameters": rope, "dtype": config["torch_dtype"], "transformers_version": "5.0.0"}
    return {**without(config, "rope_scaling", "rope_theta", "torch_dtype"), **renamed}


YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"}
MODELS: dict[str, dict[str, Any]] = {
    "llama-2": {**without(LLAMA_3, "rope_theta", "mlp_bias", "attention_bias"), **OLD, "rope_scaling": None,
                "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2, "intermediate_size": 172},
    "llama-3.1": LLAMA_3,
    "llama-3.2": {**LLAMA_3, "head_dim": 8, "tie_word_embeddings": True,
                  "rope_scaling": {**LLAMA_3["rope_scaling"], "factor": 32.0}},
    "llama-linear": {**LLAMA_3, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral-0.1": MISTRAL,
    "mistral-0.3": {**MISTRAL, "sliding_window": None, "rope_theta": 1000000.0},
    "mistral-nemo": {**MISTRAL, "hidden_size": 80, "head_dim": 8, "sliding_window": None},
    "smollm3-3b": SMOLLM3,
    "smollm3-plain": {**SMOLLM3, "no_rope_layers": [1, 1, 1], "rope_scaling": YARN},
    "granite-3.3-2b": GRANITE,
    "granite-plain": without(GRANITE, "embedding_multiplier", "logits_scaling", "residual_multiplier"),
    "granite-yarn": {**GRANITE, "rope_scaling": YARN},
    "qwen2-0.5b": QWEN2,
    "qwen2.5-7b": {**QWEN2, "use_mrope": False, "tie_word_embeddings": False},
    "qwen2.5-yarn": {**QWEN2, "rope_scaling": YARN},
    "qwen3-0.6b": QWEN3,
    "qwen3-bare": without(QWEN3, "head_dim"),
    "qwen3-types": {**QWEN3, "layer_types": FULL},
    "qwen3-yarn": {**QWEN3, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "qwen3-30b-a3b": QWEN3_MOE,
    "qwen1.5-moe": QWEN2_MOE,
    "mixtral-8x7b": MIXTRAL,
    "mixtral-bare": without(MIXTRAL, "rope_theta", "rms_norm_eps", "router_aux_loss_coef"),
    "mixtral-8x22b": {**MIXTRAL, "num_attention_heads": 12, "hidden_size": 96, "router_jitter_noise": 0.0},
    "olmo2-7b": OLMO2,
    "olmo2-32b": {**OLMO2, "num_key_value_heads": 2},
    "olmo3-7b": OLMO3,
    "olmo3-base": {**without(OLMO3, "layer_types"), "rope_scaling": None, "num_hidden_layers": 4},
    "gemma2-2b": GEMMA2,
    "gemma2-bare": without(GEMMA2, "attn_logit_softcapping", "final_logit_softcapping", "hidden_act"),
    "gemma3-1b": GEMMA3,
    "gemma3-4b-text": {**without(GEMMA3, "sliding_window_pattern"),
                       "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "gemma3-270m": {**without(GEMMA3, "rope_theta", "rope_local_base_freq", "rope_scaling", "torch_dtype"),
                    "_sliding_window_pattern": 6, "layer_types": ["sliding_attention"] * 5 + FULL[:1],
                    "use_bidirectional_attention": False, "rope_parameters": {
                        "full_attention": {"rope_theta": 1000000, "rope_type": "default"},
                        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}},
    "gpt-oss-20b": GPT_OSS,
    "gpt-oss-120b": {**without(GPT_OSS, "layer_types"), "num_local_experts": 32, "num_hidden_layers": 3},
    "qwen3-next-80b-a3b": QWEN3_NEXT,
    "granite-4.0-h-tiny": GRANITE_4,
    "granite-4.0-h-micro": {**GRANITE_4, "num_local_experts": 0, "num_experts_per_tok": 0},
    "granite-4.0-micro": {**GRANITE_4, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_d_head": "auto",
                          "layer_types": ["attention"] * 3, "position_embedding_type": "rope"},
    "nemotron-h-8b": NEMOTRON_H,
    "nemotron-nano-2-types": {**without(NEMOTRON_H, "hybrid_override_pattern"), "num_hidden_layers": 4,
                              "layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
    "nemotron-3-nano": {
        **NEMOTRON_H, "hybrid_override_pattern": "MEM*EM-", "moe_intermediate_size": 64, "n_group": 1,
        "topk_group": 1, "moe_shared_expert_intermediate_size": 128, "n_routed_experts": 16, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5, "rope_theta": 10000,
        "partial_rotary_factor": 1.0, "moe_shared_expert_overlap": False,
    },
    "deepseek-v3": {**DEEPSEEK, "num_nextn_predict_layers": 1},
    "moonlight": {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6,
                  "n_shared_experts": 2, "routed_scaling_factor": 2.446, "rope_theta": 50000.0, "rope_scaling": None,
                  "rms_norm_eps": 1e-5},
}  # fmt: skip
MODELS |= {
    f"{name}-parameters": with_parameters(MODELS[name])
    for name in ("llama-3.1", "mistral-0.1", "qwen2.5-yarn", "qwen3-30b-a3b", "deepseek-v3")
}
# What stands in config.json of models that are not built, and a part of the reason that is stated.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 264}, "model_type 'gpt2'"),
    "phi-3": ({**LLAMA_3, "model_type": "phi3", "rope_scaling": None}, "model_type 'phi3'"),
    "olmo-1": ({**without(OLMO2, "rms_norm_eps"), "model_type": "olmo", "clip_qkv": None}, "model_type 'olmo'"),
    "gemma3-4b": ({"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {}}, "its text_config alone"),
    "llama-4-scout": ({"model_type": "llama4", "text_config": LLAMA_3}, "model_type 'llama4'"),
    "mamba-2": ({"model_type": "mamba2", "hidden_size": 64, "state_size": 16}, "model_type 'mamba2'"),
    "llama-dynamic": ({**LLAMA_3, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    "llama-quantized": ({**LLAMA_3, "quantization_config": {"bits": 4}}, "quantization_config"),
    "llama-biased": ({**LLAMA_3, "attention_bias": True}, "attention_bias = True"),
    "qwen2-windows": ({**QWEN2, "use_sliding_window": True}, "use_sliding_window = True"),
    "mixtral-jitter": ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
    "qwen3-moe-some-dense": ({**QWEN3_MOE, "mlp_only_layers": [0]}, "mlp_only_layers"),
    "olmo3-two-bases": ({**OLMO3, "rope_theta": 10000}, "versions of transformers disagree"),
    "gemma3-no-types": ({**GEMMA3, "layer_types": FULL}, "for each of num_hidden_layers = 6 layers"),
    "gemma3-flat": ({**GEMMA3, "rope_parameters": {"rope_theta": 1e6}}, "an object for full_attention"),
    "gpt-oss-mxfp4": ({**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    "gpt-oss-no-rope": (without(GPT_OSS, "rope_scaling"), "a gpt_oss needs rope_scaling"),
    "qwen3-next-dense-layers": ({**QWEN3_NEXT, "mlp_only_layers": [0]}, "mlp_only_layers"),
    "qwen3-next-odd-share": ({**QWEN3_NEXT, "partial_rotary_factor": 0.3}, "must be an even number"),
    "qwen3-next-two-shares": ({**QWEN3_NEXT, "rope_parameters": {"partial_rotary_factor": 0.5}}, "state one of them"),
    "qwen3-next-types": ({**QWEN3_NEXT, "layer_types": FULL}, "for each of num_hidden_layers = 4 layers"),
    "qwen3-next-heads": ({**QWEN3_NEXT, "linear_num_value_heads": 6}, "is not a multiple of linear_num_key_heads"),
    "granite-4-types": ({**GRANITE_4, "layer_types": FULL[:2]}, "for each of num_hidden_layers = 3 layers"),
    "granite-4-heads": ({**GRANITE_4, "mamba_n_heads": 7}, "must be mamba_expand = 2 times hidden_size = 64"),
    "nemotron-h-types": ({**NEMOTRON_H, "num_hidden_layers": 6}, "num_hidden_layers = 6"),
    "nemotron-h-letters": ({**NEMOTRON_H, "hybrid_override_pattern": "MG*-M-M"}, "M, *, - or E of each layer"),
    "nemotron-h-experts": ({**NEMOTRON_H, "hybrid_override_pattern": "ME*-M-M"}, "key 'n_routed_experts' is missing"),
    "nemotron-h-groups": ({**NEMOTRON_H, "n_groups": 3}, "is not a multiple of n_groups = 3"),
    "nemotron-h-gelu": ({**NEMOTRON_H, "mlp_hidden_act": "gelu"}, "mlp_hidden_act = 'gelu'"),
    "gemma-bidirectional": ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
}  # fmt: skip
