"""What all processes of a run must agree on, as a digest and as the list of what differs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from geotrain.config.run import RunConfig


def config_digest(run: RunConfig) -> str:
    """Digest what all processes of a run must agree on (`_agreed`), in hex."""
    text = json.dumps(_agreed(run), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def config_changes(before: RunConfig, now: RunConfig) -> list[str]:
    """List what differs of that on which all processes of a run must agree: "outer.local_steps: was 8, is 64"."""

    def leaves(place: Any, key: str) -> dict[str, Any]:
        if not isinstance(place, dict):
            return {key: place}
        return {k: v for name, each in place.items() for k, v in leaves(each, f"{key}.{name}".lstrip(".")).items()}

    old, new = leaves(_agreed(before), ""), leaves(_agreed(now), "")
    pairs = {key: [json.dumps(each[key]) if key in each else "nothing" for each in (old, new)] for key in old | new}
    return [f"{key}: was {was}, is {is_now}" for key, (was, is_now) in pairs.items() if was != is_now]


def _agreed(run: RunConfig) -> dict[str, Any]:
    """Copy what all processes of a run must agree on: the model, the data and the outer loop.

    Other settings may differ between workers, or change at a resume: parallel layouts, DeepSpeed's settings,
    monitoring, where things lie. The data's sha256 is compared by itself.
    """
    left_out = {
        "model": {"recompute", "init_from", "init_changes", "weights"},  # memory; what the parameter map's digest has
        "outer": {"state_device", "mirrors", "rollbacks_per_hour"},  # where vectors lie; what a launcher does
        "data": {"sha256", "skip", "validation", "tokenizer", "cache_folder", "cache_gb"},
    }
    if run.data.curriculum is None:
        left_out["data"].add("train_samples")  # a finished run may be extended; phases are shares of the whole
    shared = run.model_dump(by_alias=True, mode="json", include={*left_out, "name", "seed"}, exclude=left_out)
    weights = [1.0 if each.weight is None and run.data.curriculum is None else each.weight for each in run.data.train]
    shared["data"]["train"] = {str(number): {"weight": weight} for number, weight in enumerate(weights)}
    if run.data.rampup_batch_size is not None:
        shared["data"]["samples_per_step"] = run.samples_per_step  # by which steps have their places
    return shared
