"""The content of a checkpoint: of each shard, and of the engine as a whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from geotrain.inner.engine.engine import GeoEngine
from geotrain.inner.runtime import platform
from geotrain.inner.runtime.shards import OwnedShard
from geotrain.optimizers.inner_optimizer import InnerOptimizer, moments, step_count
from geotrain.parameters.parameter_map import canonical_parameters, digest

RESIDUAL = "residual"  # a name beside those of moments
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def state_of(engine: GeoEngine, shard: OwnedShard) -> dict[str, Tensor]:
    """Collect 1-D views of what is saved of a shard: its moments and, where gradients travel in codes, what these
    lost, which `move_residuals` brings there. Weights come from the outer loop at a restart."""
    state = dict(moments(engine.basic_optimizer, shard.owner))
    if id(shard.owner) in engine.residuals:
        state[RESIDUAL] = engine.residuals[id(shard.owner)]
    return {name: values.view(-1)[shard.offset : shard.offset + shard.numel] for name, values in state.items()}


def described(engine: GeoEngine, extra: dict[str, Any]) -> dict[str, Any]:
    """Describe the engine as it is now, for the manifest. extra: anything JSON can hold."""
    return {
        "model": digest(canonical_parameters(engine.architecture)),
        "layout": layout_of_ranks(engine),
        "optimizer": kind_of(engine),
        "optimizer_steps": step_count(engine.basic_optimizer),
        "counters": {counter: getattr(engine, counter) for counter in COUNTERS},
        "extra": extra,
    }


def kind_of(engine: GeoEngine) -> str:
    """Name of the optimizer, which decides what moments there are: AdamW, Muon, or another package's class."""
    optimizer = engine.basic_optimizer
    kind = optimizer.settings if isinstance(optimizer, InnerOptimizer) else optimizer
    return type(kind).__name__.removesuffix("Settings")


def layout_of_ranks(engine: GeoEngine) -> dict[str, Any]:
    """The worker's parallel layout: ranks of other layouts have other random states, and other shards."""
    mesh = engine.mesh
    sizes: dict[str, Any] = {"tensor": mesh.tp_size, "pipeline": mesh.pp_size, "context": mesh.cp_size}
    if mesh.stage_layers is not None:
        sizes["stage_layers"] = list(mesh.stage_layers)
    return sizes | {"data": mesh.replicas, "expert": mesh.ep_size, "cuda": platform.HAS_CUDA}
