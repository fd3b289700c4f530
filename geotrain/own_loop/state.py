"""Saves what a user's loop needs to go on after a death: its optimizer, and whatever else has a `state_dict`.

Each rank has files of its own, so its hosts need not share a file system:

    <folder>/rank-00001-of-00002/job-00000024.pt

A resume takes the newest job of which every rank has a whole file.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from geotrain.common.files import make_folder, out_of_room, whole_file
from geotrain.own_loop.rank import TorchRank

_JOB = re.compile(r"job-(\d{8,})\.pt")


class Stateful(Protocol):
    """Torch's protocol of stateful objects: an optimizer, a scheduler, a scaler, or the user's own."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class StateFiles:
    """The saved states of one rank. All ranks make the same calls. keep: how many saves stay."""

    def __init__(self, folder: Path, rank: TorchRank, state: Mapping[str, Stateful], digest: str, keep: int) -> None:
        self._folder = folder / f"rank-{rank.rank:05d}-of-{rank.world_size:05d}"
        self._rank, self._state, self._digest, self._keep = rank, state, digest, keep

    def save(self, job: int) -> str:
        """Save after this job. Returns what a person should know if there was no room on the disk; else "". Without
        room training goes on, and the next save tries again. Raises OSError."""
        if not self._state:
            return ""
        path = self._folder / f"job-{job:08d}.pt"
        saved = {name: part.state_dict() for name, part in self._state.items()}
        try:
            make_folder(self._folder.absolute())
            with whole_file(path, "wb") as file:
                torch.save({"parameter_map": self._digest, "job": job, "state": saved}, file)
        except (OSError, RuntimeError) as error:  # torch wraps what its writer meets
            if out_of_room(error):
                return f"{path}: no room on the disk; training goes on without this save"
            raise
        for old in sorted(self._jobs(), reverse=True)[self._keep :]:
            (self._folder / f"job-{old:08d}.pt").unlink(missing_ok=True)
        return ""

    def load(self) -> int:
        """Load the newest state that every rank has; returns its job, 0 where there is none. A damaged one is passed
        over. A collective."""
        if not self._state:
            return 0
        for left_over in self._folder.glob(".*.partial"):  # of a save that was killed
            left_over.unlink(missing_ok=True)
        common = set.intersection(*self._rank.gather(self._jobs()))
        for job in sorted(common, reverse=True):
            saved: dict[str, Any] | None = None
            with suppress(OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError):
                read = torch.load(self._folder / f"job-{job:08d}.pt", map_location="cpu", weights_only=True)
                saved = read["state"] if read["parameter_map"] == self._digest else None
            if self._rank.agree(saved is not None and saved.keys() == self._state.keys()):
                assert saved is not None
                for name, part in self._state.items():
                    part.load_state_dict(saved[name])
                return job
        return 0

    def _jobs(self) -> set[int]:
        names = (_JOB.fullmatch(path.name) for path in self._folder.glob("job-*.pt"))
        return {int(found[1]) for found in names if found}
