"""Small models of each family, the same ones by transformers, and how plain PyTorch trains them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from geotrain.parameters.hf_export import write_checkpoint
from tests.support.inner_worlds import LLAMA, QWEN

LLAMA_3 = {
    **LLAMA,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
YARN = {**QWEN, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
LINEAR = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 5, "head_dim": 12}
SMOLLM3 = {
    **LLAMA,
    "model_type": "smollm3",
    "no_rope_layer_interval": 2,
    "tie_word_embeddings": True,
    "pad_token_id": None,  # transformers' default is beyond this vocabulary
}
GRANITE = {
    **LLAMA,
    "model_type": "granite",
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
}
QWEN_MOE = {
    **QWEN, "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01, "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.05, "num_hidden_layers": 2,
}  # fmt: skip

QWEN2_MOE = {
    **QWEN_MOE,
    "model_type": "qwen2_moe",
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": 40,
    "head_dim": 8,
}
OLMO2 = {**LLAMA, "model_type": "olmo2", "pad_token_id": None, "eos_token_id": None}
KINDS = {
    "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5e3},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
OLMO3 = {**OLMO2, "model_type": "olmo3", "rope_parameters": KINDS, "sliding_window": 5, "layer_types": ALTERNATING}
del OLMO3["rope_theta"]
GEMMA2 = {
    **LLAMA, "model_type": "gemma2", "head_dim": 12, "tie_word_embeddings": True, "sliding_window": 5,
    "query_pre_attn_scalar": 10, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0,
    "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GEMMA3 = {
    **GEMMA2, "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "sliding_window_pattern": 3, "rope_local_base_freq": 100.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}  # fmt: skip
GPT_OSS = {
    **LLAMA, "model_type": "gpt_oss", "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.05, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 5,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
}  # fmt: skip
QWEN3_NEXT = {
    **QWEN2_MOE, "model_type": "qwen3_next", "norm_topk_prob": True, "router_z_loss_coef": 0.0, "head_dim": 16,
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_expand": 2}
GRANITE_4 = {
    **GRANITE, **MAMBA, "model_type": "granitemoehybrid", "intermediate_size": 24, "num_local_experts": 4,
    "num_experts_per_tok": 2, "router_aux_loss_coef": 0.05, "shared_intermediate_size": 40, "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"], "position_embedding_type": "nope", "pad_token_id": None,
}  # fmt: skip
NEMOTRON_H = {
    **LLAMA, "model_type": "nemotron_h", "hybrid_override_pattern": "M-*-", "head_dim": 8, "mamba_num_heads": 6,
    "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 10, "layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}  # fmt: skip
NEMOTRON_3 = {
    **NEMOTRON_H, "hybrid_override_pattern": "ME*-", "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40, "aux_loss_alpha": 0.05, "router_bias_update_rate": 0.02,
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "model_type": "deepseek_v3", "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6,
    "aux_loss_alpha": 0.05, "router_bias_update_rate": 0.02,
}  # fmt: skip
PREDICTING = {**DEEPSEEK, "num_nextn_predict_layers": 2, "mtp_loss_factor": 0.4}
PREDICTORS: dict[str, Any] = {
    "enorm": torch.nn.RMSNorm,
    "hnorm": torch.nn.RMSNorm,
    "eh_proj": torch.nn.Linear,
    "shared_head.norm": torch.nn.RMSNorm,
}
LATENT_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))


def transformers_model(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model, loaded from an export of these weights."""
    from transformers import AutoModelForCausalLM

    count, further = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        write_checkpoint(weights.items(), config, path, None, "float32")
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**written, "num_hidden_layers": count + further}))
        model, report = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    model.config.num_hidden_layers = count  # by which it passes over what predicts further tokens
    beyond = set()
    for layer in range(count, count + further):
        for name, kind in PREDICTORS.items():
            weight = weights[found := f"model.layers.{layer}.{name}.weight"]
            sizes = (model.config.rms_norm_eps,) if kind is torch.nn.RMSNorm else (weight.shape[0], False)
            made = kind(weight.shape[-1], *sizes)
            made.weight.data.copy_(weight)
            model.model.layers[layer].add_module(name.partition(".")[0], made)
            beyond.add(found)
    assert report["unexpected_keys"] == beyond and not report["missing_keys"] and not report["mismatched_keys"]
    return model


def _predicted(model: Any, config: dict[str, Any], tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Compute λ times the mean loss of DeepSeek-V3's further predictions (equations 21 to 25)."""
    labels, costs = tokens[:, 1:], []
    for depth, layer in enumerate(model.model.layers[config["num_hidden_layers"] :], 1):
        seen = model.model.embed_tokens(labels.roll(1 - depth, 1))
        rotary = model.model.rotary_emb(hidden, torch.arange(labels.shape[1])[None])
        hidden = layer.eh_proj(torch.cat((layer.enorm(seen), layer.hnorm(hidden)), -1))
        hidden = layer.shared_head(layer(hidden, position_embeddings=rotary))
        logits = model.lm_head(hidden)[:, :-depth]
        costs.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, depth:].flatten()))
    return config["mtp_loss_factor"] * torch.stack(costs).mean() if costs else torch.zeros(())


def losses(model: Any, config: dict[str, Any], tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross entropy, balancing and z losses) of a micro-batch, by the papers' equations on transformers' logits."""
    if "aux_loss_alpha" in config:
        return _losses_by_sequence(model, config, tokens)
    sparse = "num_experts_per_tok" in config
    out = model(tokens[:, :-1], **({"output_router_logits": True} if sparse else {}))
    main = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].reshape(-1))
    chosen, balance = config.get("num_experts_per_tok", 0), torch.zeros(())
    for logits in out.router_logits if sparse else ():
        logits = logits.reshape(-1, logits.shape[-1])
        shares = logits.softmax(-1)
        took = torch.zeros_like(shares).scatter(1, shares.topk(chosen).indices, 1.0).mean(0) / chosen
        balance = balance + config["router_aux_loss_coef"] * shares.shape[-1] * (took * shares.mean(0)).sum()
        balance = balance + config.get("router_z_loss_coef", 0.0) * logits.logsumexp(-1).square().mean()
    return main, balance


def _losses_by_sequence(
    model: Any, config: dict[str, Any], tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equations 17 to 20 of DeepSeek-V3. Each router's choices are added to its `counts`, [experts]."""
    balance, k = torch.zeros(()), config["num_experts_per_tok"]
    routers = biased_gates(model)
    said: list[Any] = []
    hooks = [router.register_forward_hook(lambda _, __, out: said.append(out)) for router in routers]
    hidden = model.model(tokens[:, :-1]).last_hidden_state
    logits, balance = model.lm_head(hidden), balance + _predicted(model, config, tokens, hidden)
    for hook in hooks:
        hook.remove()
    for router, (scores, _, chosen) in zip(routers, said, strict=True):
        shares = scores.view(len(tokens), -1, scores.shape[-1]).sigmoid()
        shares = shares / shares.sum(-1, keepdim=True)
        often = torch.zeros_like(shares).scatter(2, shares.topk(k).indices, 1.0).mean(1) * shares.shape[-1] / k
        balance = balance + config["aux_loss_alpha"] * (often * shares.mean(1)).sum(1).mean()
        counts = torch.bincount(chosen.flatten(), minlength=scores.shape[-1])
        router.counts = getattr(router, "counts", 0) + counts
    main = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))
    return main, balance


def biased_gates(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]


def move_biases(model: Any, config: dict[str, Any]) -> None:
    """After a step: up where an expert had less than the mean, down where it had more; count anew."""
    for router in biased_gates(model):
        counts = router.counts.float()
        router.e_score_correction_bias += config["router_bias_update_rate"] * (counts.mean() - counts).sign()
        router.counts = 0
