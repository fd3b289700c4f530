"""Copies the shipped run, model and cluster files into a folder of one's own: `geotrain configs`."""

from __future__ import annotations

import shutil
from pathlib import Path

from geotrain.common.files import whole_folder
from geotrain.config import ConfigError, shipped_configs


def copy_configs(folder: Path) -> None:
    """Copy the shipped files into a new folder. Raises ConfigError if it exists, and OutputError; then nothing is
    written."""
    if folder.exists():  # also one that was written here: its files may have been changed since
        raise ConfigError(f"{folder} is there already; name one that is not")
    with whole_folder(folder, "configs") as new:
        for kind in ("runs", "models", "clusters", "monitoring", "slurm", "kubernetes"):
            shutil.copytree(shipped_configs() / kind, new / kind)
