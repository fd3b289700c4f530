"""Model families, a file each: its config.json, its weights' names, shapes and cuts, its settings of Megatron-core.

docs/extending.md says how to add one. No torch here: launching and planning ask them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

from geotrain.common.entry_points import registered
from geotrain.families import reading
from geotrain.families.architecture import Architecture, UnsupportedModelError
from geotrain.families.family import Family
from geotrain.families.weights import Weight

__all__ = ["Architecture", "Family", "UnsupportedModelError", "architecture_from_hf", "family_of", "layer_weights"]

# Each in a file of its name without "_text", which is imported when a model of it is read.
FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "smollm3", "granite", "granitemoehybrid", "nemotron_h", "olmo2", "olmo3",
    "gemma2", "gemma3_text", "qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe", "qwen3_next", "deepseek_v3",
)  # fmt: skip
_GROUP = "geotrain.families"


def family_of(model_type: Any) -> Family:
    """Find the family of this name, which may be another package's. Raises UnsupportedModelError."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return _built_in(model_type)
    try:
        plugged = registered(_GROUP, model_type, Family) if isinstance(model_type, str) else None
    except ValueError as error:
        raise UnsupportedModelError(f"model config: model_type: {error}") from None
    if plugged is None:
        raise UnsupportedModelError(
            f"model config: model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}; of a model "
            "of text and images give its text_config alone"
        )
    if getattr(plugged, "model_type", None) != model_type:
        raise UnsupportedModelError(
            f"model config: model_type: plug-in {model_type!r} is a family with another model_type; register it "
            "under that one"
        )
    return plugged()


@cache
def _built_in(model_type: str) -> Family:
    module = import_module(f"geotrain.families.{model_type.removesuffix('_text')}")
    kinds = (kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__)
    family: type[Family] = next(kind for kind in kinds if getattr(kind, "model_type", None) == model_type)
    return family()


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
