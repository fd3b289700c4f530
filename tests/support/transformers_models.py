"""The same models by transformers: what ours are compared with."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.inner_worlds import VOCABULARY


def transformers_model(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **options))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
