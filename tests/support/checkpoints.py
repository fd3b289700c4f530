"""Checkpoints of an engine, begun and waited for at once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any


def save(
    engine: Any, folder: str | Path, tag: str, extra: dict[str, Any], keep: int, with_masters: bool = False
) -> None:
    """Every rank must call it. Raises CheckpointError."""
    from geotrain.checkpoint.saving import Checkpoints

    with closing(Checkpoints(engine, folder, keep, with_masters)) as checkpoints:
        checkpoints.save(tag, extra)


def load(engine: Any, folder: str | Path, tag: str | None = None) -> dict[str, Any] | None:
    """Every rank must call it. Raises CheckpointError."""
    from geotrain.checkpoint.saving import Checkpoints

    with closing(Checkpoints(engine, folder, 1)) as checkpoints:
        return checkpoints.load(tag)
