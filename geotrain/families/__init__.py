"""Model families, a file each: its config.json, its weights' names, shapes and cuts, its settings of Megatron-core.

docs/extending.md says how to add one. No torch here: launching and planning ask them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from geotrain.common.entry_points import registered
from geotrain.families import reading
from geotrain.families.architecture import Architecture, UnsupportedModelError
from geotrain.families.deepseek_v3 import DeepseekV3
from geotrain.families.family import Family
from geotrain.families.granite import Granite
from geotrain.families.llama import Llama
from geotrain.families.mistral import Mistral
from geotrain.families.mixtral import Mixtral
from geotrain.families.qwen2 import Qwen2
from geotrain.families.qwen2_moe import Qwen2Moe
from geotrain.families.qwen3 import Qwen3
from geotrain.families.qwen3_moe import Qwen3Moe
from geotrain.families.smollm3 import SmolLM3
from geotrain.families.weights import Weight

__all__ = ["Architecture", "Family", "UnsupportedModelError", "architecture_from_hf", "family_of", "layer_weights"]

_BUILT_IN = (
    *(Llama(), Qwen2(), Qwen3(), Mistral(), SmolLM3(), Granite()),
    *(Qwen3Moe(), Mixtral(), Qwen2Moe(), DeepseekV3()),
)
FAMILIES = {family.model_type: family for family in _BUILT_IN}
_GROUP = "geotrain.families"


def family_of(model_type: Any) -> Family:
    """Find the family of this name, which may be another package's. Raises UnsupportedModelError."""
    known = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if known is not None:
        return known
    try:
        plugged = registered(_GROUP, model_type, Family) if isinstance(model_type, str) else None
    except ValueError as error:
        raise UnsupportedModelError(f"model config: model_type: {error}") from None
    if plugged is None:
        raise UnsupportedModelError(
            f"model config: model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    if getattr(plugged, "model_type", None) != model_type:
        raise UnsupportedModelError(
            f"model config: model_type: plug-in {model_type!r} is a family with another model_type; register it "
            "under that one"
        )
    return plugged()


@lru_cache(maxsize=128)  # the planner asks for the same layers again and again
def layer_weights(a: Architecture, layer: int) -> tuple[Weight, ...]:
    """List a layer's weights (see `Family.layer`)."""
    return tuple(family_of(a.model_type).layer(a, layer))


def architecture_from_hf(config: Mapping[str, Any]) -> Architecture:
    """Read a parsed Hugging Face `config.json`.

    Raises UnsupportedModelError naming the key, its value and what is supported. A key that its family does not read
    is an error, unless it is null or one of those that change nothing of the model.
    """
    noted = reading.Noted(config)
    family = family_of(reading.need(noted, "model_type"))
    architecture = family.architecture(noted)
    reading.special_ids(noted, architecture.vocab_size)
    noted.refuse_the_rest(family.idle)
    return architecture
