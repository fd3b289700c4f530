"""Copies of a server's snapshots at any URL that fsspec knows, in case the disk of the server is lost.

    <url>/<number>/<tensor>.safetensors, then <url>/<number>/meta.json

`meta.json` names every file with its length and checksum. It is copied last and removed first, so it is there only
while all other files are: object stores cannot rename a folder, so it marks a copy as whole. Credentials, end points
and the like come from the environment, as each of fsspec's file systems documents.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from geotrain.config import ConfigError
from geotrain.monitor.events import SnapshotUploaded, Trouble
from geotrain.net.deadlines import within
from geotrain.net.snapshots import META, DamagedSnapshot, Snapshot, SnapshotStore, StoreError, checked_meta
from geotrain.outer.events import Event

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 300.0  # between attempts to upload


class SnapshotMirror:
    """The copies of one server's snapshots below `url`, of which the newest `keep` stay.

    All methods block. They raise StoreError, whose message names the URL; the constructor raises ConfigError.
    """

    def __init__(self, url: str, keep: int) -> None:
        self.url, self.keep = url.rstrip("/"), keep
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError, TypeError) as error:
            raise ConfigError(f"checkpoint.snapshots = {url!r}: cannot be used: {error}") from None

    def numbers(self) -> list[int]:
        """The numbers of the snapshots that are there whole, ascending."""
        with self._faults("cannot be read"):
            self._files.invalidate_cache()  # fsspec caches listings, which other processes may have outdated
            names = [path.rstrip("/").rpartition("/")[2] for path in self._list(self._root)]
            return sorted(int(n) for n in names if n.isdecimal() and self._files.exists(self._path(int(n), META)))

    def upload(self, folder: Path, number: int) -> int:
        """Copy one snapshot's folder and delete the oldest copies. Returns the snapshot's size in bytes.

        A copy with another content under the same number is replaced; its manifest is removed first.
        """
        with self._faults("the snapshot cannot be copied there"):
            files = sorted(path for path in folder.iterdir() if path.name != META)
            size = sum(path.stat().st_size for path in files)
            self._files.invalidate_cache()
            if self._files.exists(self._path(number, META)):
                if self._files.cat_file(self._path(number, META)) == (folder / META).read_bytes():
                    return size
                self._files.rm_file(self._path(number, META))
            self._files.makedirs(self._path(number), exist_ok=True)
            for path in (*files, folder / META):
                self._files.put_file(str(path), self._path(number, path.name))
        for old in self.numbers()[: -self.keep]:
            with self._faults("an old snapshot cannot be removed"):
                self._files.rm_file(self._path(old, META))
                self._files.rm(self._path(old), recursive=True)
        return size

    def fetch(self, number: int, store: SnapshotStore) -> Snapshot:
        """Copy a snapshot into the store of this machine.

        Raises also DamagedSnapshot if the copy is not whole. After an error nothing is left in the store.
        """
        temporary = store.folder / f".{number:08d}.fetched"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with self._faults("cannot be read"):
                temporary.mkdir(parents=True)
                meta: bytes = self._files.cat_file(self._path(number, META))
                (temporary / META).write_bytes(meta)
                for name in checked_meta(meta)["files"]:
                    self._files.get_file(
                        self._path(number, f"{name}.safetensors"), str(temporary / f"{name}.safetensors")
                    )
            return store.adopt(temporary, number)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _path(self, number: int, name: str = "") -> str:
        return f"{self._root}/{number:08d}/{name}".rstrip("/")

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


def newest_snapshot(store: SnapshotStore, mirror: SnapshotMirror | None) -> tuple[Snapshot | None, list[str]]:
    """The newest whole snapshot, and sentences on what was found wrong with newer ones.

    It comes from this machine's disk or, if the copies have a newer one, from there.
    Raises StoreError if the disk has none and the copies cannot be read.
    """
    newest, faults = store.load_newest()
    if mirror is None:
        return newest, faults
    try:
        numbers = mirror.numbers()
    except StoreError as error:
        if newest is None:
            raise
        return newest, [*faults, str(error)]
    for number in reversed([n for n in numbers if newest is None or n > newest.number]):
        try:
            fetched = mirror.fetch(number, store)
        except (DamagedSnapshot, StoreError) as error:
            faults.append(f"{mirror.url}/{number:08d}: passed over: {error}")
        else:
            faults.append(f"{store.folder}: has no whole snapshot {number}; it came from {mirror.url}")
            return fetched, faults
    return newest, faults


class Uploader:
    """Copies the newest snapshot of a store to a mirror whenever there is a new one, while the server works.

    A copy that fails is tried again after growing pauses. tell: called with events. Belongs to one event loop.
    """

    def __init__(self, store: SnapshotStore, mirror: SnapshotMirror, tell: Callable[[Event], None]) -> None:
        self.store, self.mirror, self.tell = store, mirror, tell
        self.uploaded = 0  # number of the newest snapshot that the mirror has whole
        self.trouble: str | None = None  # why the last attempt failed; None if it did not
        self._work, self._done = asyncio.Event(), asyncio.Event()

    def status(self) -> dict[str, Any]:
        return {"url": self.mirror.url, "uploaded": self.uploaded, "trouble": self.trouble}

    def wake(self) -> None:
        """Note that there is a new snapshot to copy."""
        self._done.clear()
        self._work.set()

    async def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            self._work.clear()
            try:
                await self._upload_newest()
            except StoreError as error:
                if self.trouble is None:
                    log.error("%s; trying again", error)
                    self.tell(Trouble(str(error)))  # only at the first failure of several
                self.trouble = str(error)
                with suppress(TimeoutError):
                    await within(pause_s * random.uniform(0.5, 1.0), self._work.wait())
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
            else:
                self.trouble, pause_s = None, FIRST_PAUSE_S
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
                f"{self.mirror.url}: the last snapshot was not copied there within {within_s:g} s "
                f"({self.trouble or 'the link is slow'}); it is in {self.store.folder}"
            ) from None

    async def _upload_newest(self) -> None:
        number = max(self.store.numbers(), default=0)
        if number <= self.uploaded:
            return
        began_s = time.monotonic()
        with self.store.kept(number) as folder:
            size = await _beside(lambda: self.mirror.upload(folder, number))
        self.uploaded = number
        self.tell(SnapshotUploaded(number, size, time.monotonic() - began_s))


async def _beside(call: Callable[[], T]) -> T:
    """Run the call on a daemon thread and await its result.

    At its end the process does not wait for a daemon thread, unlike for an executor's. So an upload that hangs cannot
    hold it up.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="upload", daemon=True).start()
    return await asyncio.wrap_future(done)
