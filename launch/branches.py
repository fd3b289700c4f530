"""What lies in the folder of a run that its launcher takes back, or has (`rollback`)."""

from __future__ import annotations

import json
from pathlib import Path

# In a run's folder, as JSON: the snapshot that it is to go back to; the folder in which it goes on; and, of a branch
# that a launcher made, when it and those before it were made.
REQUEST, GOES_ON, MADE = "rollback.json", "rolled_back.json", "rollbacks.json"


def where_it_goes_on(folder: Path) -> Path:
    """Follow a run that was taken back by its launcher to the folder in which it goes on."""
    while (path := folder / GOES_ON).exists():
        folder = folder.with_name(json.loads(path.read_text()))
    return folder


def rollbacks(folder: Path) -> list[float]:
    """List when launchers took the run back, in seconds since 1970."""
    path = folder / MADE
    return list(json.loads(path.read_text())) if path.exists() else []
