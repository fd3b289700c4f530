"""A worker's checkpoints: copied to the host beside training, and written by a thread of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geotrain.checkpoint import loading
from geotrain.checkpoint.folders import CheckpointError, CheckpointFolder, RanksOfWorker
from geotrain.checkpoint.state import described, state_of
from geotrain.common.files import save_tensors
from geotrain.inner.engine.engine import GeoEngine
from geotrain.inner.runtime import platform
from geotrain.staging.cuda import CudaStaging, NoStreams

_OTHERWISE = (
    "each optimizer keeps other moments; set deepspeed.optimizer.type back, or begin a new run from the exported "
    "weights (model.init_from)"
)


class Checkpoints:
    """The checkpoints of a worker in one folder, of which one at most is under way.

    Every rank of the worker makes it, and makes the same calls; they contain collectives.

    keep: how many stay. no_room: called on every rank, on the writing thread, with the error of a checkpoint for
    which a disk had no room; None: it is raised as any other. Memory: a copy of what is saved on the host, which is
    allocated once, pinned where there is a GPU.
    """

    def __init__(
        self,
        engine: GeoEngine,
        folder: str | Path,
        keep: int,
        no_room: Callable[[CheckpointError], None] | None = None,
    ) -> None:
        self._engine, self._no_room, self._ranks = engine, no_room, RanksOfWorker()
        self.files = CheckpointFolder(self._ranks, Path(folder), keep, _OTHERWISE, "safetensors")
        streams = torch.cuda if platform.HAS_CUDA else NoStreams()
        self._staging = CudaStaging(engine.device, streams, "checkpoints")
        self._under_way: Future[None] | None = None

    def save(self, tag: str, extra: dict[str, Any]) -> None:
        """Begin to write a checkpoint of the state as it is now; when it is whole, all but the newest `keep` go.

        It waits for the former one, and otherwise for no disk: training goes on, but for the device, which writes to
        nothing that is still to be copied. extra: anything JSON can hold; `load` returns it.
        Raises CheckpointError, on every rank if any rank failed: of the former checkpoint, or where the folder cannot
        be made. Earlier checkpoints stay.
        """
        self.wait()
        engine = self._engine
        engine.settle()
        if engine.residuals:
            engine.optimizer.move_residuals()
        with self._reporting_full_disk():
            apart = any(self._ranks.sharing(self.files.folder).leaders)
            tensors, places = self._saved(every_shard=apart)
            random = {"rng.cpu": torch.get_rng_state()}
            if platform.HAS_CUDA:
                random["rng.cuda"] = torch.cuda.get_rng_state()
            manifest = {"own_files": apart, **described(engine, extra)}

            def write(copies: Sequence[Tensor]) -> None:
                named = {**random, **dict(zip(tensors, copies, strict=True))}
                with self._reporting_full_disk():
                    self.files.write(tag, manifest, lambda path: _write_file(path, named, places))

            with self._staging.beside():
                self._under_way = self._staging.keep(0, tuple(tensors.values()), write)
                engine.read_until(partial(self._staging.wait, self._staging.mark()))

    def wait(self) -> None:
        """Return when the last checkpoint is whole on every rank. Raises CheckpointError, on every rank."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def load(self, tag: str | None = None) -> dict[str, Any] | None:
        """Restore the newest whole checkpoint, or the one called `tag` (`loading.load`)."""
        self.wait()
        return loading.load(self._engine, self.files, tag)

    def close(self) -> None:
        """Wait for the last checkpoint, and end the thread and the process group. Raises CheckpointError."""
        try:
            self.wait()
        finally:
            self._staging.close()
            self._ranks.close()

    @contextlib.contextmanager
    def _reporting_full_disk(self) -> Iterator[None]:
        """Report a full disk inside this context."""
        try:
            yield
        except CheckpointError as error:
            if self._no_room is None or not error.no_room:
                raise
            self._no_room(error)

    def _saved(self, every_shard: bool) -> tuple[dict[str, Tensor], list[Any]]:
        """Collect views of what this rank saves, by name in its file, and the places of their shards.

        A place is whether the rank pushes the shard, and its runs. every_shard: also shards that another rank pushes.
        """
        engine, tensors, places = self._engine, dict[str, Tensor](), list[Any]()
        for shard in engine.shards():
            if shard.pushes or every_shard:
                state = state_of(engine, shard)
                tensors |= {f"{len(places)}.{name}": view for name, view in state.items()}
                runs = [[r.parameter, r.start, r.length, r.stride, r.count] for r in shard.runs]
                places.append([shard.pushes, runs])
        return tensors, places


def _write_file(path: Path, tensors: dict[str, Tensor], places: list[Any]) -> None:
    save_tensors(path, tensors, {"shards": json.dumps(places, separators=(",", ":"))})
