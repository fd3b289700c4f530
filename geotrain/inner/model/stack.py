"""Megatron-core's model of a list of layers, each a letter: HybridModel, and in 0.16, which has none, GPTModel.

A layer of a family is one letter or two (`Family.letters`): what mixes tokens, and an MLP or experts. Both models
number what stands for a letter; canonical addresses have the families' layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from geotrain.inner.runtime import platform

with platform.quiet_imports():
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    try:
        from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:  # 0.16
        from megatron.core.models.gpt.gpt_model import GPTModel

        HybridModel = None

_PLACES = ("mamba", "gdn", "attention", "dsa", "mla", "mlp", "moe")


def by_letters(layer: ModuleSpec, letters: str) -> list[ModuleSpec]:
    """Cut the specification of a TransformerLayer: attention without the MLP, the MLP without attention, or one of
    them."""
    whole, nothing = layer.submodules, (IdentityOp, IdentityOp, IdentityFuncOp)
    ends = ("pre_mlp_layernorm", "mlp", "mlp_bda"), ("input_layernorm", "self_attention", "self_attn_bda")
    cut = [replace(layer, submodules=replace(whole, **dict(zip(names, nothing, strict=True)))) for names in ends]
    return [cut[letter in "-E"] for letter in letters]


class _Numbered(nn.Module):
    """A layer by its number, where HybridStack builds all layers of a letter alike."""

    def __new__(cls, layers: dict[int, ModuleSpec], layer_number: int, **settings: Any) -> Any:
        return build_module(layers[layer_number], layer_number=layer_number, **settings)


if HybridModel is not None:

    class Stack(HybridStack):
        """Megatron-core's stack with a specification of its own for each layer, and for the last norm."""

        def __init__(
            self, config: Any, submodules: TransformerBlockSubmodules, pp_layer_offset: int, **settings: Any
        ) -> None:
            layers = ModuleSpec(_Numbered, {"layers": dict(enumerate(submodules.layer_specs, 1 + pp_layer_offset))})
            places = HybridStackSubmodules(**{f"{place}_layer": layers for place in _PLACES})
            super().__init__(config, places, pp_layer_offset=pp_layer_offset, post_layer_norm=False, **settings)
            if self.post_process:
                self.post_layer_norm = True  # its own would be Transformer Engine's
                self.final_norm = submodules.layer_norm(config, config.hidden_size, config.layernorm_epsilon)


def stacked(config: Any, specs: TransformerBlockSubmodules, stages: Sequence[str], **settings: Any) -> Any:
    """Build a pipeline stage. specs: of its letters. stages: the letters of all stages. settings: of both models."""
    if HybridModel is None:
        return GPTModel(config, specs, **settings)
    return HybridModel(config, ModuleSpec(Stack, submodules=specs), hybrid_layer_pattern="|".join(stages), **settings)


def parts_of(model: Any, owners: Sequence[int]) -> list[tuple[int, str, nn.Module]]:
    """List the stage's attentions and MLPs, each with its layer. owners: of each letter, the layer that it is of."""
    return [
        (layer, name, part)
        for layer, half in zip(owners, model.decoder.layers, strict=True)
        for name, part in half.named_children()
        if name in ("self_attention", "mlp") and not isinstance(part, IdentityOp)
    ]


def plain_name(name: str, owners: Sequence[int]) -> str:
    """Name a parameter of the model as if it had whole layers. owners: of each letter, the layer of the stage. What
    predicts further tokens is a layer, too."""
    if name.startswith("predictors."):
        _, number, within = name.split(".", 2)
        return f"decoder.layers.{1 + owners[-1] + int(number)}." + re.sub(r"^layers\.\d\.", "", within)
    if name.startswith("decoder.layers."):
        _, _, number, within = name.split(".", 3)
        return f"decoder.layers.{owners[int(number)]}.{within}"
    return name.replace("decoder.final_norm.", "decoder.final_layernorm.")
