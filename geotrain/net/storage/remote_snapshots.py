"""Copies a server's snapshots to any URL that fsspec knows, in case a disk is lost.

    <url>/<checkpoint id>/<tensor>.safetensors, then <url>/<checkpoint id>/meta.json

`meta.json` names every file with its length and checksum. It is copied last and removed first, so it is there only
while all other files are: object stores cannot rename a folder, so it marks a copy as whole. Until then the same
content stands in `begun.json`: an upload that broke goes on with the files that are not there, a download with the
bytes. A copy that was found damaged gets a file `damaged.txt`, and is whole no more. Credentials, end points and the
like come from the environment, as each of fsspec's file systems documents.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec

from geotrain.common.backoff import RetryBackoff
from geotrain.config import ConfigError
from geotrain.monitor.events import SnapshotUploaded, Trouble
from geotrain.net.storage.owner import OtherOwnerError, Owner
from geotrain.net.storage.snapshots import (
    META,
    DamagedSnapshot,
    OtherFormatError,
    Snapshot,
    SnapshotStore,
    StoreError,
    check,
    checked_meta,
)
from geotrain.net.transport.deadlines import within
from geotrain.outer.events import Event

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 300.0  # between attempts to upload
DAMAGED, BEGUN = "damaged.txt", "begun.json"
PART_BYTES = 32 << 20  # of a file that is fetched at once
CHECKPOINT_ID = re.compile(r"\d{8}-[0-9a-f]+")


class RemoteSnapshots:
    """Keeps the copies of one process's snapshots below `url`.

    All methods block. They raise StoreError, whose message names the URL; the constructor raises ConfigError.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # Who gave up waiting for a copy, as an incarnation of the server that has ended, cannot end it: the next one
        # waits.
        self._one = threading.Lock()
        self._condemned: set[str] = set()  # checkpoint ids of copies found damaged, be it that none can be marked
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError, TypeError) as error:
            raise ConfigError(f"checkpoint.snapshots = {url!r}: cannot be used: {error}") from None

    def checkpoint_ids(self) -> dict[str, bool]:
        """List the checkpoint ids of which something is there, ascending, and whether it is a whole copy."""
        with self._faults("cannot be read"):
            self._files.invalidate_cache()  # fsspec caches listings, which other processes may have outdated
            names = sorted(path.rstrip("/").rpartition("/")[2] for path in self._list(self._root))
            return {name: self._is_whole(name) for name in names if CHECKPOINT_ID.fullmatch(name)}

    def whole(self) -> list[str]:
        """List the checkpoint ids of whole copies, ascending."""
        return [checkpoint_id for checkpoint_id, is_whole in self.checkpoint_ids().items() if is_whole]

    def upload(self, folder: Path, checkpoint_id: str) -> int:
        """Copy one snapshot's folder, unless its copy is there. Returns the snapshot's size in bytes."""
        with self._one, self._faults("the snapshot cannot be copied there"):
            files = sorted(path for path in folder.iterdir() if path.name != META)
            size = sum(path.stat().st_size for path in files)
            self._files.invalidate_cache()
            meta = (folder / META).read_bytes()
            if self._is_whole(checkpoint_id) and self._files.cat_file(self._path(checkpoint_id, META)) == meta:
                return size
            self._remove(checkpoint_id, META, DAMAGED)
            there, begun = self._sizes(checkpoint_id), self._path(checkpoint_id, BEGUN)
            if BEGUN not in there or self._files.cat_file(begun) != meta:
                self._remove(checkpoint_id, *there)  # of another content, be it that sizes are the same
                there = {}
                self._files.makedirs(self._path(checkpoint_id), exist_ok=True)
                self._files.pipe_file(begun, meta)
            for path in (*files, folder / META):
                if there.get(path.name) != path.stat().st_size:
                    self._files.put_file(str(path), self._path(checkpoint_id, path.name))
            self._remove(checkpoint_id, BEGUN)
            self._condemned.discard(checkpoint_id)
        return size

    def drop(self, checkpoint_id: str) -> None:
        """Remove what is there of the checkpoint."""
        with self._faults("an old snapshot cannot be removed"):
            self._remove(checkpoint_id, META)
            with suppress(FileNotFoundError):
                self._files.rm(self._path(checkpoint_id), recursive=True)

    def condemn(self, checkpoint_id: str, why: str) -> None:
        """Note that this copy is damaged: it is whole no more, for this process also where the store may only be
        read."""
        self._condemned.add(checkpoint_id)
        with self._faults("cannot be written"):
            self._files.pipe_file(self._path(checkpoint_id, DAMAGED), why.encode())

    def meta(self, checkpoint_id: str) -> dict[str, Any]:
        """Read the JSON part of a copy. Raises also DamagedSnapshot."""
        with self._faults("cannot be read"):
            content: bytes = self._files.cat_file(self._path(checkpoint_id, META))
            found: dict[str, Any] = checked_meta(content, f"{self.url}/{checkpoint_id}")["meta"]
            return found

    def owner(self, checkpoint_id: str) -> Owner | None:
        """Read whose state a copy is; None: it does not say. Raises also DamagedSnapshot."""
        return Owner.of(self.meta(checkpoint_id))

    def check_owner(self, own: Owner) -> str:
        """Raise OtherOwnerError if the newest whole copy is somebody else's. Returns its checkpoint id; "": there is
        none."""
        for checkpoint_id in reversed(self.whole()):
            with suppress(DamagedSnapshot):
                own.check(self.owner(checkpoint_id), self.url)
                return checkpoint_id
        return ""

    def fetch(self, checkpoint_id: str, folder: Path) -> None:
        """Copy a snapshot into a folder of this machine, and bring it to the disk. It goes on with what a call that
        broke has left there, and tries again as long as something comes.

        Raises also DamagedSnapshot if the copy is not whole; then nothing is left there.
        """
        with self._faults("cannot be read"):
            meta: bytes = self._files.cat_file(self._path(checkpoint_id, META))
            files = checked_meta(meta, f"{self.url}/{checkpoint_id}")["files"]
            goes_on = (folder / META).exists() and (folder / META).read_bytes() == meta
            if not goes_on:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                (folder / META).write_bytes(meta)
        backoff, came_bytes = RetryBackoff(FIRST_PAUSE_S, LAST_PAUSE_S), 0
        while True:
            try:
                with self._faults("cannot be read"):
                    for name, (size, _) in files.items():
                        self._fetch_file(checkpoint_id, folder / f"{name}.safetensors", size)
                    return check(folder)
            except DamagedSnapshot:
                shutil.rmtree(folder, ignore_errors=True)
                if not goes_on:
                    raise
                return self.fetch(checkpoint_id, folder)  # perhaps it was this machine's disk
            except StoreError:
                before, came_bytes = came_bytes, sum(path.stat().st_size for path in folder.iterdir())
                if came_bytes == before:
                    raise
                time.sleep(backoff.pause_s())

    def _fetch_file(self, checkpoint_id: str, path: Path, size: int) -> None:
        """Append to a file what it lacks. Where the copy is shorter, so is the file."""
        with path.open("ab") as file:
            while (begin := file.tell()) < size:
                end = min(size, begin + PART_BYTES)
                part: bytes = self._files.cat_file(self._path(checkpoint_id, path.name), start=begin, end=end)
                if file.write(part) < end - begin:
                    break

    def _sizes(self, checkpoint_id: str) -> dict[str, int]:
        """Sizes of the files that are there of a copy, by name.

        By a listing: fsspec's `exists` is False for any error, and what is not there may be removed or written anew.
        """
        try:
            files = self._files.ls(self._path(checkpoint_id), detail=True)
        except FileNotFoundError:
            return {}
        return {each["name"].rpartition("/")[2]: each["size"] for each in files}

    def _is_whole(self, checkpoint_id: str) -> bool:
        there = self._sizes(checkpoint_id)
        return META in there and DAMAGED not in there and checkpoint_id not in self._condemned

    def _remove(self, checkpoint_id: str, *names: str) -> None:
        there = self._sizes(checkpoint_id)
        for name in [name for name in names if name in there]:
            self._files.rm_file(self._path(checkpoint_id, name))

    def _path(self, checkpoint_id: str, name: str = "") -> str:
        return f"{self._root}/{checkpoint_id}/{name}".rstrip("/")

    def _list(self, path: str) -> list[str]:
        try:
            return list(self._files.ls(path, detail=False))
        except FileNotFoundError:
            return []

    @contextmanager
    def _faults(self, what: str) -> Iterator[None]:
        """Turn any error of a file system into StoreError; each of fsspec's file systems raises errors of its own."""
        try:
            yield
        except (DamagedSnapshot, StoreError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise StoreError(f"checkpoint.snapshots = {self.url}: {what}: {reason}") from error


class Copies:
    """The copies of a process's snapshots, of which the newest `keep` stay. All methods block, and raise
    StoreError."""

    def __init__(self, own: RemoteSnapshots, keep: int) -> None:
        self.own, self.keep = own, keep

    @property
    def url(self) -> str:
        return self.own.url

    def check_place(self, folder: Path, checkpoint_id: str) -> None:
        """Raise StoreError where the copies are not of the state whose snapshot this is: copied there, it would push
        them out."""
        own = Owner.of(checked_meta((folder / META).read_bytes(), folder)["meta"])
        newest = self.own.check_owner(own) if own else ""
        if newest not in ("", checkpoint_id) and number_of(newest) >= number_of(checkpoint_id):
            raise StoreError(
                f"{self.url}: holds {newest}, which another process wrote beside this one: is {folder} a copy of its "
                "folder? Stop one of the two, or give one of them another checkpoint.snapshots"
            )

    def upload(self, folder: Path, checkpoint_id: str) -> int:
        """Copy a snapshot, then remove what is not wanted any more. Returns the snapshot's size in bytes."""
        size = self.own.upload(folder, checkpoint_id)
        there = self.own.checkpoint_ids()
        stay = {checkpoint_id, *sorted(name for name, is_whole in there.items() if is_whole)[-self.keep :]}
        for old in sorted(set(there) - stay):
            self.own.drop(old)
        return size


def newest_snapshot(
    store: SnapshotStore, mirror: RemoteSnapshots | None, own: Owner | None = None
) -> tuple[Snapshot | None, list[str]]:
    """Load the newest whole snapshot of a server; returns also what is wrong with newer ones.

    It comes from this machine's disk or, if that has none or its newest is damaged, from the copies. Where they go
    further than all that the disk ever had, the folder is a copy of another that went on, or an old backup, and what
    comes next is for a person to say: raises OtherOwnerError. So it does where a newer one than the one that is whole
    says that it is another's. Raises StoreError if the disk has none and the copies cannot be read.

    own: whose state it is to be, for a disk that has none.
    """
    newest, faults = store.load_newest()
    own = (Owner.of(newest.meta) if newest else None) or own or Owner("", "")
    if newest is not None:
        own.check(Owner.of(store.newest_meta()), store.folder)
    if mirror is None:
        return newest, faults
    try:
        checkpoint_ids = mirror.checkpoint_ids()
        if newest is not None:
            mirror.check_owner(own)
    except StoreError as error:
        if newest is None or isinstance(error, OtherOwnerError):
            raise
        return newest, [*faults, str(error)]
    for checkpoint_id in reversed([m for m, is_whole in checkpoint_ids.items() if is_whole]):
        if newest is not None and number_of(checkpoint_id) <= newest.number:
            break
        if newest is not None:
            check_is_known(store, mirror, checkpoint_id)
        temporary = store.folder / ".fetched"
        try:
            own = own.check(mirror.owner(checkpoint_id), f"{mirror.url}/{checkpoint_id}")
            mirror.fetch(checkpoint_id, temporary)
        except (OtherFormatError, OtherOwnerError):
            raise
        except (DamagedSnapshot, StoreError) as error:
            faults.append(f"{mirror.url}/{checkpoint_id}: passed over: {error}")
            if isinstance(error, DamagedSnapshot):
                faults += condemned(mirror, checkpoint_id, error)
        else:
            number = number_of(max(checkpoint_ids))  # what follows is then newer than all that is there
            store.adopt(temporary, number)
            faults.append(
                f"{store.folder}: has no whole snapshot {number}; it came from {mirror.url}/{checkpoint_id}"
            )
            return store.load(number), faults
    return newest, faults


def check_is_known(store: SnapshotStore, mirror: RemoteSnapshots, checkpoint_id: str) -> None:
    """Raise OtherOwnerError if that copy is newer than all that this disk ever had."""
    last = max(store.numbers(), default=0)
    if number_of(checkpoint_id) > last:
        raise OtherOwnerError(
            f"{mirror.url}: holds {checkpoint_id}, newer than the last snapshot in {store.folder}, {last}: this "
            "folder is an old copy of the run's. Nothing was changed: to go on from the store, move the folder away; "
            "to go on from the folder, choose another checkpoint.snapshots"
        )


def condemned(mirror: RemoteSnapshots, checkpoint_id: str, error: DamagedSnapshot) -> list[str]:
    """Condemn a damaged copy. Returns a sentence where that cannot be written: it is passed over all the same."""
    try:
        mirror.condemn(checkpoint_id, str(error))
    except StoreError as unwritten:
        return [str(unwritten)]
    return []


def number_of(checkpoint_id: str) -> int:
    """Sequence number of a checkpoint id; grows with time."""
    return int(checkpoint_id.partition("-")[0])


class Uploaded(Protocol):
    """What is copied: a `SnapshotStore`, or the like."""

    folder: Path

    def checkpoint_ids(self) -> dict[int, str]: ...
    def kept(self, number: int) -> AbstractContextManager[Path]: ...


class Uploader:
    """Copies the newest snapshot of a store whenever there is a new one, while the server works.

    A copy that fails is tried again after growing pauses. write_event: called with events. Belongs to one event loop.
    """

    def __init__(self, store: Uploaded, copies: Copies, write_event: Callable[[Event], None]) -> None:
        self.store, self.copies, self.write_event = store, copies, write_event
        self.uploaded = 0  # number of the newest snapshot that the mirror has whole
        self.trouble: str | None = None  # why the last attempt failed; None if it did not
        self._work, self._done = asyncio.Event(), asyncio.Event()

    def status(self) -> dict[str, Any]:
        return {"url": self.copies.url, "uploaded": self.uploaded, "trouble": self.trouble}

    def wake(self) -> None:
        """Note that there is a new snapshot to copy."""
        self._done.clear()
        self._work.set()

    async def run(self) -> None:
        backoff = RetryBackoff(FIRST_PAUSE_S, LAST_PAUSE_S)
        while True:
            self._work.clear()
            try:
                await self._upload_newest()
            except StoreError as error:
                if self.trouble is None:
                    log.error("%s; trying again", error)
                    self.write_event(Trouble(str(error)))  # only at the first failure of several
                self.trouble = str(error)
                with suppress(TimeoutError):
                    await within(backoff.pause_s(), self._work.wait())
            else:
                self.trouble = None
                backoff.reset()
                if not self._work.is_set():
                    self._done.set()
                await self._work.wait()

    async def finish(self, within_s: float) -> None:
        """Wait until the mirror has the newest snapshot. Raises StoreError after `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                await self._done.wait()
        except TimeoutError:
            raise StoreError(
                f"{self.copies.url}: the last snapshot was not copied there within {within_s:g} s "
                f"({self.trouble or 'the link is slow'}); it is in {self.store.folder}"
            ) from None

    async def _upload_newest(self) -> None:
        number, checkpoint_id = max(self.store.checkpoint_ids().items(), default=(0, ""))
        if number <= self.uploaded or not checkpoint_id:
            return
        began_s = time.monotonic()
        with self.store.kept(number) as folder:
            await beside(lambda: self.copies.check_place(folder, checkpoint_id))
            size = await beside(lambda: self.copies.upload(folder, checkpoint_id))
        self.uploaded = number
        self.write_event(SnapshotUploaded(number, size, time.monotonic() - began_s))


async def beside(call: Callable[[], T]) -> T:
    """Run the call on a daemon thread and await its result.

    At its end the process does not wait for a daemon thread, unlike for an executor's. So an upload that hangs cannot
    hold it up.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # the call goes on though nobody awaits it any more

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="upload", daemon=True).start()
    return await asyncio.wrap_future(done)
