"""A worker's optimizer state on disk, by canonical address: it loads on any other layout.

`<folder>/<tag>/` holds one safetensors file a rank (the moments of the shards it pushes, with their runs in the
metadata) and `manifest.json`. The folder appears whole or not at all; its hosts must share the file system.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from geotrain.canonical import canonical_parameters, digest
from geotrain.files import sync
from geotrain.inner import platform
from geotrain.inner.engine import GeoEngine
from geotrain.inner.optimizer import moments, set_step_count, step_count
from geotrain.inner.reshard import Piece, Reader
from geotrain.inner.shards import OwnedShard

_MANIFEST = "manifest.json"
_REPLACED = ".replaced.tmp"  # after the name of a checkpoint that makes room for a newer one of its name
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class CheckpointError(OSError):
    """A checkpoint cannot be written or read. The message says which and why."""


def save(
    engine: GeoEngine, folder: str | Path, tag: str, extra: dict[str, Any], keep: int, with_masters: bool = False
) -> None:
    """Write a checkpoint and drop all but the newest `keep`. Every rank of the worker must call it.

    extra: anything JSON can hold; `load` returns it. with_masters: also the fp32 weights, which otherwise come
    from the outer loop. Raises CheckpointError on every rank if any failed; earlier checkpoints stay.
    """
    engine.settle()
    folder = Path(folder)
    temporary = folder / f"{tag}.tmp"
    first = engine.rank == 0
    try:
        _together(lambda: _prepare(temporary) if first else None, temporary)
        _together(lambda: _write_rank(engine, temporary, with_masters), temporary)
        _together(
            lambda: _finish(engine, temporary, folder / tag, extra, keep, with_masters) if first else None, temporary
        )
    except CheckpointError:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def load(engine: GeoEngine, folder: str | Path, tag: str | None = None) -> dict[str, Any] | None:
    """Take up the optimizer's state, from the newest whole checkpoint or the one called `tag`; return its `extra`.

    Every rank of the worker must call it. Masters are read if they were saved, else left alone. Random states are
    restored if the ranks are laid out as they were. Returns None if there is no checkpoint and no tag was given.
    Raises CheckpointError on every rank.
    """
    engine.settle()  # a step that is still under way would write the masters after this
    folder = Path(folder)
    manifest = _agreed(engine, lambda: _find(engine, folder, tag), folder)
    if manifest is None:
        return None
    place = folder / manifest["tag"]
    _together(lambda: _read_rank(engine, place, manifest), place)
    set_step_count(engine.basic_optimizer, manifest["optimizer_steps"])
    for counter, value in manifest["counters"].items():
        setattr(engine, counter, value)
    engine.refresh(predicted=_goes_on(engine, manifest))
    return manifest["extra"]


# ------------------------------------------------------------------------------------------------- all ranks


def _together(action: Any, place: Path) -> None:
    """Run on every rank; if one fails, all raise the same error."""
    problem: str | None = None
    try:
        action()
    except (OSError, SafetensorError, CheckpointError, ValueError, KeyError) as error:
        problem = f"rank {dist.get_rank()}: {_words(error)}"
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = [p for p in problems if p]
    if found:
        more = f" (and {len(found) - 1} more ranks)" if len(found) > 1 else ""
        raise CheckpointError(f"checkpoint {place}: {found[0]}{more}")


def _agreed(engine: GeoEngine, action: Any, place: Path) -> Any:
    """What rank 0 finds, on every rank."""
    box: list[Any] = [None]

    def find() -> None:
        if engine.rank == 0:
            box[0] = action()

    _together(find, place)
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


# ---------------------------------------------------------------------------------------------------- writing


def _prepare(temporary: Path) -> None:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    _bring_back(temporary.parent)
    for left_over in temporary.parent.glob("*.tmp"):  # of a save that was killed
        shutil.rmtree(left_over)
    temporary.mkdir()


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write_rank(engine: GeoEngine, folder: Path, with_masters: bool) -> None:
    tensors: dict[str, torch.Tensor] = {"rng.cpu": torch.get_rng_state()}
    if platform.HAS_CUDA:
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    runs: list[list[list[Any]]] = []
    for shard in engine.shards():
        if not shard.pushes:
            continue
        for name, view in _state(engine, shard, with_masters, engine.is_ahead).items():
            tensors[f"{len(runs)}.{name}"] = view.detach().cpu()
        runs.append([[r.parameter, r.start, r.length, r.stride, r.count] for r in shard.runs])
    path = folder / _rank_file(engine.rank)
    save_file(tensors, path, metadata={"shards": json.dumps(runs, separators=(",", ":"))})
    sync(path)


def _state(engine: GeoEngine, shard: OwnedShard, with_masters: bool, predicted: bool) -> dict[str, torch.Tensor]:
    """1-D views of a shard's moments, of its master, and of weights that ACCO predicted from it."""
    state = {
        name: moment.view(-1)[shard.offset : shard.offset + shard.numel]
        for name, moment in moments(engine.basic_optimizer, shard.owner).items()
    }
    if with_masters:
        state["master"] = shard.master
    if with_masters and predicted:
        state.update(engine.predicted(shard))
    return state


def _goes_on(engine: GeoEngine, manifest: dict[str, Any]) -> bool:
    """Whether the weights that ACCO predicted were saved and can be used."""
    return manifest["with_masters"] and manifest["predicted"] is not None and manifest["predicted"] == engine.predicts


def _finish(
    engine: GeoEngine, temporary: Path, final: Path, extra: dict[str, Any], keep: int, with_masters: bool
) -> None:
    ranks = dist.get_world_size()
    manifest = {
        "format": 1,
        "tag": final.name,
        "saved_at": time.time(),
        "model": digest(canonical_parameters(engine.architecture)),
        "layout": _layout(engine),
        "files": {name: (temporary / name).stat().st_size for name in map(_rank_file, range(ranks))},
        "with_masters": with_masters,
        "predicted": engine.predicts if engine.is_ahead else None,
        "optimizer_steps": step_count(engine.basic_optimizer),
        "counters": {counter: getattr(engine, counter) for counter in _COUNTERS},
        "extra": extra,
    }
    path = temporary / _MANIFEST
    path.write_text(json.dumps(manifest, indent=1))
    sync(path)
    sync(temporary)
    if final.exists():
        final.rename(final.with_name(final.name + _REPLACED))
    temporary.rename(final)
    sync(final.parent)
    for old in [path for _, path in _whole(final.parent)][max(1, keep) :]:
        old.rename(old.with_name(f"{old.name}.old.tmp"))
    for dropped in final.parent.glob("*.tmp"):
        shutil.rmtree(dropped, ignore_errors=True)


def _bring_back(folder: Path) -> None:
    """After a kill while a checkpoint was replaced, the older one."""
    for replaced in folder.glob(f"*{_REPLACED}"):
        final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
        if not final.exists():
            replaced.rename(final)


def _layout(engine: GeoEngine) -> dict[str, Any]:
    mesh = engine.mesh
    return {"tensor": mesh.tp_size, "pipeline": mesh.pp_size, "data": mesh.dp_size, "cuda": platform.HAS_CUDA}


# ---------------------------------------------------------------------------------------------------- reading


def _whole(folder: Path) -> list[tuple[dict[str, Any], Path]]:
    """Checkpoints with all their files in full length, newest first."""
    found = []
    for path in folder.glob(f"*/{_MANIFEST}"):
        if path.parent.suffix == ".tmp":
            continue
        try:
            manifest = json.loads(path.read_text())
            sizes = {name: (path.parent / name).stat().st_size for name in manifest["files"]}
        except (OSError, ValueError, KeyError):
            continue
        if sizes == manifest["files"]:
            found.append((manifest, path.parent))
    return sorted(found, key=lambda pair: pair[0]["saved_at"], reverse=True)


def _find(engine: GeoEngine, folder: Path, tag: str | None) -> dict[str, Any] | None:
    _bring_back(folder)
    whole = [manifest for manifest, path in _whole(folder) if tag in (None, path.name)]
    if not whole:
        if tag is None:
            return None
        raise CheckpointError(f"there is no whole checkpoint {tag!r} in {folder}")
    wanted = digest(canonical_parameters(engine.architecture))
    if whole[0]["model"] != wanted:
        raise CheckpointError(f"{whole[0]['tag']!r} is of another model ({whole[0]['model']}, not {wanted})")
    return whole[0]


def _read_rank(engine: GeoEngine, folder: Path, manifest: dict[str, Any]) -> None:
    with Reader([folder / name for name in manifest["files"]]) as reader:
        for shard in engine.shards():
            pieces: list[Piece] = reader.locate(shard.runs)
            state = _state(engine, shard, manifest["with_masters"], _goes_on(engine, manifest))
            for name, view in state.items():
                view.copy_(reader.read(pieces, name, shard.numel))
    if manifest["layout"] == _layout(engine):
        with safe_open(folder / _rank_file(engine.rank), "pt") as file:
            torch.set_rng_state(file.get_tensor("rng.cpu"))
            if platform.HAS_CUDA:
                torch.cuda.set_rng_state(file.get_tensor("rng.cuda"))
