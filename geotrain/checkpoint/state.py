"""The content of a checkpoint: of each shard, and of the engine as a whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from geotrain.inner.engine.engine import GeoEngine
from geotrain.inner.runtime import platform
from geotrain.inner.runtime.shards import OwnedShard
from geotrain.optimizers.inner_optimizer import InnerOptimizer, moments, step_count
from geotrain.parameters.parameter_map import canonical_parameters, digest

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def state_of(engine: GeoEngine, shard: OwnedShard, with_masters: bool, predicted: bool) -> dict[str, Tensor]:
    """Collect 1-D views of what is saved of a shard: its moments, its master, and the weights that ACCO predicted."""
    state = {
        name: moment.view(-1)[shard.offset : shard.offset + shard.numel]
        for name, moment in moments(engine.basic_optimizer, shard.owner).items()
    }
    if with_masters:
        state["master"] = shard.master
    if with_masters and predicted:
        state.update(engine.predicted_weights(shard))
    return state


def has_usable_prediction(engine: GeoEngine, manifest: dict[str, Any]) -> bool:
    """Whether the checkpoint has weights that ACCO predicted, in the form in which this engine predicts."""
    form = manifest["predicted"]
    return manifest["with_masters"] and form is not None and form == engine.prediction_form


def described(engine: GeoEngine, extra: dict[str, Any], with_masters: bool) -> dict[str, Any]:
    """Describe the engine as it is now, for the manifest. extra: anything JSON can hold."""
    return {
        "model": digest(canonical_parameters(engine.architecture)),
        "layout": layout_of_ranks(engine),
        "with_masters": with_masters,
        "predicted": engine.prediction_form if engine.has_prediction else None,
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
    sizes = {"tensor": mesh.tp_size, "pipeline": mesh.pp_size, "context": mesh.cp_size, "data": mesh.replicas}
    return sizes | {"expert": mesh.ep_size, "cuda": platform.HAS_CUDA}
