"""Small models with experts, and how they are trained by transformers and plain PyTorch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from geotrain.hf_checkpoint import write_checkpoint
from tests.support.inner_worlds import LLAMA, QWEN, VOCABULARY

QWEN_MOE = {
    **QWEN,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.1,
    "router_z_loss_coef": 0.01,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.05,
    "num_hidden_layers": 2,
}


def transformers_experts(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model, which fuses a layer's experts, loaded from a checkpoint with these weights."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(weights.items(), config, Path(folder) / "out", None, "float32")
        model, report = AutoModelForCausalLM.from_pretrained(
            Path(folder) / "out", dtype=torch.float32, output_loading_info=True
        )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def losses(model: Any, config: dict[str, Any], tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross entropy, balancing and z losses) of a micro-batch, by the papers' equations on transformers' logits."""
    out = model(tokens[:, :-1], output_router_logits=True)
    main = torch.nn.functional.cross_entropy(out.logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
    chosen, balance = config["num_experts_per_tok"], torch.zeros(())
    for logits in out.router_logits:
        logits = logits.reshape(-1, logits.shape[-1])
        shares = logits.softmax(-1)
        took = torch.zeros_like(shares).scatter(1, shares.topk(chosen).indices, 1.0).mean(0) / chosen
        balance = balance + config["router_aux_loss_coef"] * shares.shape[-1] * (took * shares.mean(0)).sum()
        balance = balance + config.get("router_z_loss_coef", 0.0) * logits.logsumexp(-1).square().mean()
    return main, balance
