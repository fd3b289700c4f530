"""Layers that predict further tokens, behind the decoder: DeepSeek-V3's way (arXiv 2412.19437, section 2.2).

Layer k takes, of each token i, what the layer before gives, or the decoder behind its last norm, and the embedding of
token i + k. By a norm of its own and the model's head it predicts token i + k + 1. The mean of these losses is in no
figure: it joins backward alone, as Megatron-core's losses that balance experts do, and evaluation leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from geotrain.inner.runtime import platform

with platform.quiet_imports():
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.tensor_parallel.mappings import (
        gather_from_tensor_model_parallel_region,
        scatter_to_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel.random import checkpoint
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

HANDED = "attention_mask", "rotary_pos_emb", "packed_seq_params"  # by the model to its decoder, and to these layers


class Predictor(nn.Module):
    """One such layer: two norms, a projection of what they give together, a layer as the decoder's, a last norm."""

    def __init__(self, config: Any, specs: TransformerBlockSubmodules, groups: Any) -> None:
        """Build it. specs: of its letters, and of norms. groups: Megatron-core's process groups."""
        super().__init__()
        size, norm = config.hidden_size, specs.layer_norm
        self.enorm, self.hnorm, self.final_layernorm = (norm(config, size, config.layernorm_epsilon) for _ in "ehf")
        made = {"config": config, "init_method": config.init_method, "bias": False, "gather_output": False}
        self.eh_proj = ColumnParallelLinear(2 * size, size, **made)
        layers = (build_module(s, config=config, layer_number=1, pg_collection=groups) for s in specs.layer_specs)
        self.layers = nn.ModuleList(layers)
        self.divides_tokens, self.recomputes = config.sequence_parallel, config.recompute_granularity == "full"

    def forward(self, before: Tensor, embedded: Tensor, handed: dict[str, Any]) -> Tensor:
        """Return [sequence, batch, hidden], as both inputs are: whole, or this tensor rank's part of the tokens."""
        run = partial(self._run, handed)
        return checkpoint(run, False, before, embedded) if self.recomputes else run(before, embedded)

    def _run(self, handed: dict[str, Any], before: Tensor, embedded: Tensor) -> Tensor:
        joined = torch.cat((self.enorm(embedded), self.hnorm(before)), -1)
        hidden = gather_from_tensor_model_parallel_region(self.eh_proj(joined)[0])
        if self.divides_tokens:
            hidden = scatter_to_sequence_parallel_region(hidden)
        for layer in self.layers:
            hidden = layer(hidden, **handed)[0]
        return self.final_layernorm(hidden)


def add_predictors(model: Any, specs: Sequence[TransformerBlockSubmodules], factor: float) -> None:
    """Give the model's last stage such layers, and the embedding where it has none. factor: of their mean loss."""
    config, groups = model.config, model.pg_collection
    model.predictors = nn.ModuleList(Predictor(config, each, groups) for each in specs)
    if not model.pre_process:
        sizes = model.vocab_size, model.max_sequence_length
        model.embedding = LanguageModelEmbedding(config, *sizes, "rope", tp_group=groups.tp)
    given: list[Tensor | None] = [None]

    def note(module: nn.Module, positional: Any, named: dict[str, Any]) -> None:
        given[0] = named.get("labels") if module.training else None

    def behind(decoder: nn.Module, positional: Any, named: dict[str, Any], hidden: Tensor) -> Tensor:
        if (labels := given[0]) is None:
            return hidden
        further, total = hidden, hidden.new_zeros((), dtype=torch.float32)
        handed = {name: named[name] for name in HANDED if name in named}
        for depth, predictor in enumerate(model.predictors, 1):
            embedded = model.embedding(input_ids=labels.roll(1 - depth, 1), position_ids=None)
            further = predictor(further, embedded, handed)
            losses = model.compute_language_model_loss(labels.roll(-depth, 1), model.output_layer(further)[0])
            total = total + losses[:, :-depth].mean()  # what the last tokens are to predict is in no sample
        return MoEAuxLossAutoScaler.apply(hidden, factor / len(model.predictors) * total)

    model.register_forward_pre_hook(note, with_kwargs=True)
    model.decoder.register_forward_hook(behind, with_kwargs=True)
