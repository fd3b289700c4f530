"""Copies of a worker's checkpoints, on another host and in object storage, in case its hosts or their disks are lost.

Where hosts share no folder, each rank's file goes, once it is on the disk, to a rank of the next host, which writes
it beside its own: piece by piece, one of each file in memory. Files that a host lacks when the worker starts again,
be it that it is new or that the layout is another one, come from a host that has them, or from object storage:

    <url>/<run>/workers/<worker>/rank-<n>/<checkpoint id>/

There are the files of the ranks that see the same folder as rank n, which leads them, copied as servers' snapshots
are (`net/storage/remote_snapshots.py`), with the checkpoint's manifest. All hosts copy the same checkpoints: the next
one is chosen when all have copied the last. Its files are linked into a folder beside the checkpoints, where they
stay until then.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from geotrain.checkpoint.folders import CheckpointError, CheckpointFolder, finish, known, manifests, prepare, sealed
from geotrain.common.files import make_folder, sync
from geotrain.config import RunConfig
from geotrain.monitor.events import Trouble
from geotrain.net.storage.owner import Owner
from geotrain.net.storage.remote_snapshots import Copies, RemoteSnapshots, Uploader, condemned
from geotrain.net.storage.snapshots import DamagedSnapshot, StoreError, write_meta
from geotrain.outer.events import Event

LINKED = ".copied"  # beside the checkpoints: the files that are being copied to object storage
PIECE_BYTES = 4 << 20  # of a file that goes to another host at once


class CheckpointCopies:
    """Copies the checkpoints of `files`, to object storage one each `checkpoint.every_minutes` at most, and brings
    back what is not here. Every rank makes it. It is also what `remote_snapshots.Uploader` copies. Raises
    ConfigError."""

    def __init__(
        self, files: CheckpointFolder, run: RunConfig, worker: str, write_event: Callable[[Event], None]
    ) -> None:
        self.files, self.ranks, self.folder = files, files.ranks, files.folder / LINKED
        self._run, self._worker, self._write_event = run, worker, write_event
        self._chosen, self._next_s = dict[int, str](), 0.0  # number → checkpoint id, of the newest one to upload
        self._url, self._loop = run.checkpoint.snapshots, asyncio.new_event_loop()
        if self._url is not None:
            own = Copies(stored(run, worker, self.ranks.rank), run.checkpoint.keep)
            self._uploader = Uploader(self, own, write_event)
            threading.Thread(target=self._upload, name="copies", daemon=True).start()
        files.written, files.elsewhere, files.bring = self.written, self.elsewhere, self.bring

    def _upload(self) -> None:
        self._loop.run_until_complete(self._uploader.run())

    def checkpoint_ids(self) -> dict[int, str]:
        return self._chosen

    @contextmanager
    def kept(self, number: int) -> Iterator[Path]:
        yield self.folder
        shutil.rmtree(self.folder)  # after an error it stays, for another attempt

    def written(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Copy the checkpoint whose files are in this folder. A collective. Raises CheckpointError."""
        names, hosts = sorted(manifest["files"]), dict[int, list[int]]()
        for rank, leader in enumerate(manifest["leaders"]):
            hosts.setdefault(leader, []).append(rank)
        others = [*list(hosts.values())[1:], hosts[0]] if len(hosts) > 1 else []
        moves = [
            (names[rank], rank, other[i % len(other)])
            for own, other in zip(hosts.values(), others, strict=False)
            for i, rank in enumerate(own)
        ]
        self.ranks.together(lambda: self._move(moves, manifest, folder, folder), folder)
        if self._url is not None:
            self._choose(folder, json.loads(sealed(manifest)))

    def _choose(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Upload this checkpoint, if it is time for one. A collective."""
        done = self._uploader.uploaded >= max(self._chosen, default=0)
        states = self.ranks.gather((done, time.monotonic() >= self._next_s))
        if not states[0][1] or not all(states[leader][0] for leader in manifest["leaders"]):
            return
        self._next_s = time.monotonic() + 60 * self._run.checkpoint.every_minutes
        self._chosen = {manifest["number"]: _checkpoint_id(manifest)}
        own = [name for name, leader in _leaders(manifest).items() if leader == self.ranks.rank]
        if not own:
            return  # another rank leads
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            make_folder(self.folder)
            for name in own:
                os.link(folder / name, self.folder / name)
            stated = {Path(name).stem: manifest["files"][name] for name in own}
            owner = Owner(self._run.name, self._worker, manifest["origin"]).plain()
            write_meta(self.folder, stated, {"owner": owner, "manifest": manifest})
            self._loop.call_soon_threadsafe(self._uploader.wake)
        except OSError as error:
            self._chosen = {}  # another checkpoint's turn is not held up
            self._write_event(Trouble(f"{folder}: not copied to object storage: {error}"))

    def elsewhere(self) -> list[dict[str, Any]]:
        """Read the manifests of what is in object storage. Raises StoreError if that cannot be read, and nothing is
        here."""
        found: list[dict[str, Any]] = []
        if self._url is not None and self.ranks.rank == 0:  # for all
            try:
                store = stored(self._run, self._worker)
                for checkpoint_id in store.whole():
                    with suppress(DamagedSnapshot):
                        found.append(store.meta(checkpoint_id)["manifest"])
            except StoreError as error:
                if not manifests(self.files.folder):
                    raise
                self._write_event(Trouble(str(error)))
        return [each for each in found if known(each)]

    def bring(self, manifest: dict[str, Any], needed: list[str]) -> None:
        """Bring files of a checkpoint that are not here, each to the hosts that need it; says in the folder's faults
        what came from object storage, and what fails. A collective."""
        ranks, place = self.ranks, self.files.folder / manifest["tag"]
        temporary = place.with_name(f"{place.name}.tmp")
        here = ranks.together(lambda: [name for name in manifest["files"] if (place / name).exists()], place)
        lacking = [{*names} - {*have} for names, have in zip(ranks.gather(needed), here, strict=True)]
        if not any(lacking):
            return
        leaders = ranks.sharing(self.files.folder).leaders
        has = {name: leader for leader, names in zip(leaders, here, strict=True) for name in names}
        wants = sorted({(name, leader) for leader, names in zip(leaders, lacking, strict=True) for name in names})
        mine = [name for name, leader in wants if leader == ranks.rank]
        moves = [(name, has[name], leader) for name, leader in wants if name in has]
        try:
            ranks.together(lambda: _begin(place, temporary) if mine else None, place)
            ranks.together(lambda: self._move(moves, manifest, place, temporary), place)
            notes = ranks.together(lambda: self._fetch(manifest, mine, place, temporary) if mine else "", place)
        except CheckpointError as error:
            notes = [str(error)]
        self.files.faults += filter(None, notes)

    def _fetch(self, manifest: dict[str, Any], names: Collection[str], place: Path, temporary: Path) -> str:
        """Fetch what lacks still, and put the folder in the checkpoint's place. Returns what a person should know."""
        checkpoint_id, note = _checkpoint_id(manifest), ""
        for leader in sorted({_leaders(manifest)[name] for name in names if not (temporary / name).exists()}):
            if self._url is None:
                return ""  # it is lost
            store, fetched = stored(self._run, self._worker, leader), place.with_name(f"{place.name}.fetched.tmp")
            try:
                store.fetch(checkpoint_id, fetched)
            except DamagedSnapshot as error:
                return "; ".join([f"{store.url}/{checkpoint_id}: {error}", *condemned(store, checkpoint_id, error)])
            for path in fetched.glob("rank-*"):
                path.replace(temporary / path.name)
            note = f"{place}: files that are not here came from {store.url}/{checkpoint_id}"
        finish(temporary, place, manifest)
        return note

    def _move(self, moves: Sequence[tuple[str, int, int]], manifest: dict[str, Any], outof: Path, into: Path) -> None:
        """Send files of the checkpoint between hosts. moves: a file, the rank that has it in `outof`, and the rank
        that writes it to `into`; the same on all ranks. What cannot be read is sent as zeros: its checksum shows it.
        Raises OSError when all is over, so that nobody waits for this rank."""
        failed, sizes, me = list[OSError](), {n: size for n, (size, _) in manifest["files"].items()}, self.ranks.rank
        mine = [(tag, *move) for tag, move in enumerate(moves) if me in move[1:]]
        for begin in range(0, max((sizes[name] for name, _, _ in moves), default=0), PIECE_BYTES):
            under_way, came = list[Any](), list[tuple[Path, torch.Tensor]]()
            for tag, name, source, target in (move for move in mine if sizes[move[1]] > begin):
                piece = torch.zeros(min(PIECE_BYTES, sizes[name] - begin), dtype=torch.uint8)
                if source == me:
                    with _noted(failed), (outof / name).open("rb") as file:
                        file.seek(begin)
                        file.readinto(piece.numpy().data)
                    under_way.append(dist.isend(piece, target, self.ranks.group, tag))
                else:
                    under_way.append(dist.irecv(piece, source, self.ranks.group, tag))
                    came.append((into / name, piece))
            for work in under_way:
                work.wait()
            for path, piece in came:
                with _noted(failed), path.open("ab") as file:
                    file.write(piece.numpy().data)
        for _, name, _, target in mine:
            with _noted(failed):
                sync((into if target == me else outof) / name)
        if failed:
            raise failed[0]


@contextmanager
def _noted(failed: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        failed.append(error)


def _begin(place: Path, temporary: Path) -> None:
    """Make the folder, with the files that are here."""
    prepare(temporary)
    for path in place.glob("rank-*"):
        os.link(path, temporary / path.name)


def stored(run: RunConfig, worker: str, leader: int = 0) -> RemoteSnapshots:
    """Open the copies of the files of those ranks of a worker that rank `leader` leads. Raises ConfigError."""
    url = str(run.checkpoint.snapshots).rstrip("/")
    return RemoteSnapshots(f"{url}/{run.name}/workers/{worker}/rank-{leader:05d}")


def _leaders(manifest: dict[str, Any]) -> dict[str, int]:
    """By file, who leads the ranks that wrote it to the same folder."""
    return dict(zip(sorted(manifest["files"]), manifest["leaders"], strict=True))


def _checkpoint_id(manifest: dict[str, Any]) -> str:
    return f"{manifest['number']:08d}-{manifest['checksum']:08x}"
