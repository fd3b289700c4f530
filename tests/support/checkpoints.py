"""Checkpoints of an engine, begun and waited for at once; with its masters beside them, as the outer loop has
them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from geotrain.parameters.parameter_map import canonical_parameters
from tests.support.inner_worlds import at, write

_TAG = "tag of the masters"


def save(
    engine: Any, folder: str | Path, tag: str, extra: dict[str, Any], keep: int, with_masters: bool = False
) -> None:
    """Every rank must call it. with_masters: `load` restores them, too. Raises CheckpointError."""
    from geotrain.checkpoint.saving import Checkpoints

    with closing(Checkpoints(engine, folder, keep)) as checkpoints:
        if with_masters:
            extra = keep_masters(engine, folder, tag, extra)
        checkpoints.save(tag, extra)


def keep_masters(engine: Any, folder: str | Path, tag: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Write this rank's masters beside the folder; returns what the checkpoint must carry for `load` to find them."""
    engine.settle()
    place = _masters(folder)
    place.mkdir(parents=True, exist_ok=True)
    torch.save([(shard.runs, shard.master.clone()) for shard in engine.shards()], place / f"{tag}-{engine.rank}.pt")
    engine.agree(True)  # all have written
    return {**extra, _TAG: tag}


def load(engine: Any, folder: str | Path, tag: str | None = None, opened: Any = None) -> dict[str, Any] | None:
    """Every rank must call it. opened: Checkpoints in place of those in the folder. Raises CheckpointError."""
    from geotrain.checkpoint.saving import Checkpoints

    with closing(opened or Checkpoints(engine, folder, 1)) as checkpoints:
        extra = checkpoints.load(tag)
    if extra is not None and (kept := extra.pop(_TAG, None)):
        weights = {p.name: torch.zeros(p.numel) for p in canonical_parameters(engine.architecture)}
        for path in _masters(folder).glob(f"{kept}-*.pt"):
            for runs, master in torch.load(path, weights_only=False):
                for run, values in zip(runs, master.split([run.numel for run in runs]), strict=True):
                    at(weights[run.parameter], run).copy_(values.view(run.count, run.length))
        write(engine, weights)
    return extra


def _masters(folder: str | Path) -> Path:
    return Path(f"{folder}-masters")
