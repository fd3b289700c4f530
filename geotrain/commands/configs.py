"""`geotrain configs`: the shipped run, model and cluster files in a folder of one's own."""

from __future__ import annotations

import shutil
from pathlib import Path

from geotrain.common.files import whole_folder
from geotrain.config import ConfigError, shipped_configs


def copy_configs(folder: Path) -> None:
    """Raises ConfigError, if the folder is there, and OutputError; then nothing is written."""
    if folder.exists():  # also one that was written here: its files may have been changed since
        raise ConfigError(f"{folder} is there already; name one that is not")
    with whole_folder(folder, "configs") as new:
        for kind in ("runs", "models", "clusters", "monitoring", "slurm", "kubernetes"):
            shutil.copytree(shipped_configs() / kind, new / kind)
