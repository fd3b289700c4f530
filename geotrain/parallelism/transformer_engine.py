"""Checks of settings that only NVIDIA's Transformer Engine can compute: FP8, and attention as a ring of context
ranks.

Those of the run are made before anything starts, those of a device by its rank.
"""

from __future__ import annotations

import math

from geotrain.config import Architecture, ConfigError, ParallelConfig, PrecisionConfig, RunConfig
from geotrain.families import layer_weights
from geotrain.families.weights import Weight

Capability = tuple[int, int]  # CUDA's compute capability
# Ada and Hopper multiply FP8; blocks are scaled by Hopper's kernels; MXFP8 is Blackwell's own format.
_CAPABILITY: dict[str, Capability] = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
_RING_CAPABILITY: Capability = (8, 0)  # its attention is in bf16, from Ampere on


def asked_by(precision: PrecisionConfig, parallel: ParallelConfig) -> tuple[str, Capability] | None:
    """Find the key that needs Transformer Engine, with its value, and the least capability of a device; None: no
    key."""
    if precision.fp8 is not None:
        recipe = f", precision.fp8_recipe = {precision.fp8_recipe!r}"
        return f"precision.fp8 = {precision.fp8!r}{recipe}", _CAPABILITY[precision.fp8_recipe]
    if parallel.context_exchange == "ring":
        return "parallel.context_exchange = 'ring'", _RING_CAPABILITY
    return None


def own_modules(a: Architecture) -> str | None:
    """Find what a model's layers have that Megatron-core's specification for Transformer Engine has no place for;
    None: no such thing."""
    found = {
        "latent attention": a.latent is not None,
        "norms behind layers": a.norms != "before",
        "norms over whole projections": a.qk_norm == "projection",
        "capped scores": a.score_cap is not None,
        "attention's sinks": a.sinks,
    }
    return a.net.name if a.net else next((what for what, there in found.items() if there), None)


def check_device(
    precision: PrecisionConfig, parallel: ParallelConfig, installed: bool, capability: Capability | None
) -> None:
    """Check one rank's device. Raises ConfigError.

    installed: whether Transformer Engine can be used. capability: of the device; None: it computes on the CPU.
    """
    asked = asked_by(precision, parallel)
    if asked is None:
        return
    key, least = asked
    if capability is None:
        raise ConfigError(f"{key}: needs a GPU, and this rank computes on the CPU; leave it out")
    if capability < least:
        raise ConfigError(
            f"{key}: needs a device of compute capability {dotted(least)}, this one has {dotted(capability)}; "
            "choose another recipe, or leave it out for this worker"
        )
    if not installed:
        raise ConfigError(
            f"{key}: needs Transformer Engine, which is not installed here; install transformer-engine (docs/gpu.md)"
            ", or leave it out"
        )


def dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


def check_transformer_engine(
    run: RunConfig, architecture: Architecture, parallel: ParallelConfig, precision: PrecisionConfig, bf16: bool,
    tokens: int,
) -> None:  # fmt: skip
    """Check a run whose parallel layout `check_layout` allows. Raises ConfigError.

    bf16: whether weights are. tokens: of a micro-batch.
    """
    asked = asked_by(precision, parallel)
    if asked is None:
        return
    if (own := own_modules(architecture)) is not None:
        raise ConfigError(
            f"{asked[0]} does not go with the {own} of a {architecture.model_type}, whose layers are "
            "built without Transformer Engine; leave it out"
        )
    if not bf16:
        raise ConfigError(f"{asked[0]} needs deepspeed.bf16.enabled: what is not in FP8 is in bf16; enable it")
    if precision.fp8 is not None:
        _check_fp8(architecture, parallel, precision, tokens // parallel.context)
    if parallel.context_exchange == "ring":
        _check_ring(run, architecture)


def _check_fp8(a: Architecture, parallel: ParallelConfig, precision: PrecisionConfig, tokens: int) -> None:
    """Check that all sizes are multiples of what FP8 products take. tokens: of a micro-batch, on this rank."""
    multiple = 32 if precision.fp8_recipe == "mxfp8" else 16
    sizes = {"the tokens of a micro-batch on a rank": tokens // (parallel.tensor if parallel.sequence else 1)}
    for layer in range(a.layers):
        for weight in layer_weights(a, layer):
            if weight.cut != "whole" and len(weight.shape) == 2:  # norms, biases and routers stay as they are
                sizes |= {f"{weight.name}: {which}": size for which, size in _divided(weight, parallel.tensor)}
    for what, size in sizes.items():
        if size % multiple:
            raise ConfigError(
                f"precision.fp8 = {precision.fp8!r}, precision.fp8_recipe = {precision.fp8_recipe!r}: {what}, "
                f"{size}, must be a multiple of {multiple}, in which FP8 products go; use "
                f"{math.ceil(size / multiple) * multiple}, a smaller parallel.tensor, or leave FP8 out"
            )


def _divided(weight: Weight, tp: int) -> list[tuple[str, int]]:
    """Compute the rows and columns that a tensor rank has of a matrix."""
    rows, columns = weight.shape
    if weight.cut == "rows":
        rows //= tp
    elif weight.cut == "columns":
        columns //= tp
    return [("rows on a rank", rows), ("columns on a rank", columns)]


def _check_ring(run: RunConfig, architecture: Architecture) -> None:
    window = architecture.sliding_window
    if window is not None and window < run.data.sequence_length:
        raise ConfigError(
            f"parallel.context_exchange = 'ring' does not go with a sliding window of {window} tokens, which "
            "Transformer Engine's ring does not know; use 'heads'"
        )
    if run.data.attention == "document":
        raise ConfigError(
            "parallel.context_exchange = 'ring' does not go with data.attention = 'document': each document's length "
            "would have to be a multiple of twice the context ranks; use 'heads'"
        )
