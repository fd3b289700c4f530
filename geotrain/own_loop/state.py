"""Saves what a user's loop needs to go on after a death: its optimizer, and whatever else has a `state_dict`.

In checkpoints of the format that the trainer has (`geotrain.checkpoint.folders`); a rank's file is what torch saves,
and only the same rank of as many reads it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from geotrain.checkpoint.folders import CheckpointError, CheckpointFolder, RanksOfWorker
from geotrain.common.files import sync

_OTHERWISE = "give OuterLoop a `state` of the same names and types, or resume=False to begin without"


class Stateful(Protocol):
    """Torch's protocol of stateful objects: an optimizer, a scheduler, a scaler, or the user's own."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class LoopCheckpoints:
    """The checkpoints of a user's loop. All ranks make the same calls, which contain collectives.

    model: the parameter map's digest. keep: how many stay.
    """

    def __init__(
        self, folder: Path, ranks: RanksOfWorker, state: Mapping[str, Stateful], model: str, keep: int
    ) -> None:
        self._state, self.files = state, CheckpointFolder(ranks, folder, keep, _OTHERWISE, "pt")
        kinds = ", ".join(f"{name} ({type(part).__name__})" for name, part in sorted(state.items()))
        self._described = {"model": model, "optimizer": kinds, "layout": {"ranks": ranks.world_size}}
        self._readable = False  # whether torch has read such a file back

    def claim(self, origin: str) -> None:
        """Refuse a folder that holds another run's state (`CheckpointFolder.claim`), where there is any to save."""
        if self._state:
            self.files.claim(origin)

    def save(self, job: int) -> str:
        """Save after this job. Returns what a person should know if there was no room on the disk; else "". Without
        room training goes on, and the next save tries again. Raises CheckpointError."""
        if not self._state:
            return ""
        try:
            self.files.write(
                f"job-{job:08d}", {"own_files": True, **self._described, "extra": {"job": job}}, self._write
            )
        except CheckpointError as error:
            if not error.no_room:
                raise
            return f"{error}; training goes on without this checkpoint"
        return ""

    def load(self) -> int:
        """Load the newest state that every rank has whole; returns its job, 0 where there is none. Raises
        CheckpointError: it is of another model, number of ranks, names or types, or a part does not take it."""
        manifest = self.files.newest(self._described) if self._state else None
        if manifest is None:
            return 0
        place = self.files.folder / manifest["tag"]
        if (layout := manifest["layout"]) != self._described["layout"]:
            raise CheckpointError(
                f"checkpoint {place}: was saved in another layout, and each rank reads its own file only: "
                f"resume with the layout {layout}, or begin without"
            )
        self.files.ranks.together(lambda: self._read(place), place)
        return int(manifest["extra"]["job"])

    def _write(self, path: Path) -> None:
        try:
            torch.save({name: part.state_dict() for name, part in self._state.items()}, path)
            if not self._readable:  # what torch does not read back would be reported at a restart, too late
                torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                self._readable = True
        except Exception:
            self._each(_read_back)  # says which part it is, if it is one
            raise
        sync(path)

    def _read(self, place: Path) -> None:
        saved = torch.load(place / self.files.file, map_location="cpu", weights_only=True)
        self._each(lambda name, part: part.load_state_dict(saved[name]))

    def _each(self, call: Callable[[str, Stateful], object]) -> None:
        """Call the function with each part of the state. Raises ValueError, with the part, whatever it raises."""
        for name, part in self._state.items():
            try:
                call(name, part)
            except Exception as error:  # a part of the user's may raise anything
                unread = isinstance(error, pickle.UnpicklingError) and error.__context__  # torch's own words are many
                why = next(iter(str(unread or error).splitlines()), type(error).__name__)
                raise ValueError(f"state[{name!r}], a {type(part).__name__}: {why}; {_OTHERWISE}") from error


def _read_back(name: str, part: Stateful) -> None:
    buffer = io.BytesIO()
    torch.save(part.state_dict(), buffer)
    torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
