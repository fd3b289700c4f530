"""What a checkpoint holds: of each shard, and of the engine as a whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from geotrain.inner.engine.engine import GeoEngine
from geotrain.inner.runtime import platform
from geotrain.inner.runtime.shards import OwnedShard
from geotrain.optimizers.muon import Muon
from geotrain.optimizers.updates import moments
from geotrain.parameters.parameter_map import canonical_parameters, digest

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def state_of(engine: GeoEngine, shard: OwnedShard, with_masters: bool, predicted: bool) -> dict[str, Tensor]:
    """1-D views of what is saved of a shard: its moments, its master, and the weights that ACCO predicted."""
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
    """What the manifest says of the engine as it is now, but for its steps. extra: anything JSON can hold."""
    return {
        "model": digest(canonical_parameters(engine.architecture)),
        "layout": layout_of_ranks(engine),
        "with_masters": with_masters,
        "predicted": engine.prediction_form if engine.has_prediction else None,
        "optimizer": kind_of(engine),
        "counters": {counter: getattr(engine, counter) for counter in COUNTERS},
        "extra": extra,
    }


def kind_of(engine: GeoEngine) -> str:
    optimizer = engine.basic_optimizer
    if "moments" in optimizer.param_groups[0]:  # another package's
        return type(optimizer).__name__
    return "Muon" if isinstance(optimizer, Muon) else "AdamW"


def layout_of_ranks(engine: GeoEngine) -> dict[str, Any]:
    mesh = engine.mesh
    layout = {"tensor": mesh.tp_size, "pipeline": mesh.pp_size, "data": mesh.replicas, "cuda": platform.HAS_CUDA}
    newer = {"expert": mesh.ep_size, "context": mesh.cp_size}  # left out where 1, as checkpoints have it from before
    return layout | {name: size for name, size in newer.items() if size > 1}
