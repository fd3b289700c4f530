"""Token files at a URL that fsspec knows (s3://…, gs://…, hf://…, https://…), read in blocks through a cache.

A block is fetched by one process of a machine and is on its disk for all of them. The cache is one file of a fixed
size, cut into slots. A block's slot follows from its number, so nothing has to be searched or tidied up, and data
that fit are fetched once. A slot says whose block it holds and the block's checksum: what was cut off by a kill or a
power failure is fetched again.

Credentials, end points and the like come from the environment, as each of fsspec's file systems documents.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import numpy as np
import numpy.typing as npt

from geotrain.common.backoff import RetryBackoff
from geotrain.data.tokens import BLOCK_BYTES, DataError, read_checksums

T = TypeVar("T")

FETCH_DEADLINE_S = 240.0  # for a block with all attempts; less than the loader's for a batch
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 10.0  # between attempts
AT_ONCE = 16  # blocks that a process fetches at a time
MOST_WAITING = 4096  # blocks that are wanted ahead; more are fetched only when they are read
_HEADER = struct.Struct("<16sII")  # key, length, CRC-32
_EMPTY = bytes(_HEADER.size)


def is_remote(prefix: str | Path) -> bool:
    """Whether this is a URL; else it is a path of this machine."""
    return "://" in str(prefix)


def default_cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "geotrain"


class BlockCache:
    """Blocks on this machine's disk, for all its processes: at most `size_bytes` of them. Raises DataError."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.slots = max(1, size_bytes // (BLOCK_BYTES + _HEADER.size))
        self._reserved = 0
        path = folder / f"blocks-{self.slots}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, self.slots * (BLOCK_BYTES + _HEADER.size))  # a hole until it is used
        except OSError as error:
            raise DataError(f"{path}: cannot be used: {error.strerror}; set data.cache_folder") from None
        self.pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="fetch")

    def reserve(self, blocks: int) -> int:
        """Reserve so many slots in a row; returns the first. The same files in the same order get the same ones."""
        first, self._reserved = self._reserved, self._reserved + blocks
        return first

    def get(self, slot: int, key: bytes) -> bytes | None:
        """Read the block with this key, if the slot holds it whole."""
        with suppress(OSError):
            found, length, checksum = _HEADER.unpack(os.pread(self._file, _HEADER.size, slot * _HEADER.size))
            if found == key and length <= BLOCK_BYTES:
                content = os.pread(self._file, length, self._place(slot))
                if len(content) == length and zlib.crc32(content) == checksum:
                    return content
        return None

    def put(self, slot: int, key: bytes, content: bytes) -> None:
        """Store a block in place of the slot's. A full disk costs only speed: the block is fetched when needed."""
        with suppress(OSError):
            os.pwrite(self._file, _EMPTY, slot * _HEADER.size)
            os.pwrite(self._file, content, self._place(slot))
            os.pwrite(self._file, _HEADER.pack(key, len(content), zlib.crc32(content)), slot * _HEADER.size)

    def _place(self, slot: int) -> int:
        return self.slots * _HEADER.size + slot * BLOCK_BYTES

    @contextmanager
    def fetching(self, slot: int, until_s: float) -> Iterator[None]:
        """Keep other processes from fetching into this slot meanwhile.

        The kernel releases the lock of a killed one; past the deadline (`time.monotonic`) both fetch, which is only a
        waste.
        """
        locked = False
        while not locked and time.monotonic() < until_s:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
                locked = True
            except OSError:
                time.sleep(0.01)
        try:
            yield
        finally:
            if locked:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)


@lru_cache(maxsize=8)
def open_cache(folder: Path, size_bytes: int) -> BlockCache:
    """Open this process's only cache in a folder: closing another one's file would give up the locks of the first."""
    return BlockCache(folder, size_bytes)


class RemoteTokens:
    """A .bin file at a URL, as a read-only array: `len` and slices. Reading raises DataError.

    tokens: how many there must be. sha256: of the file, by which the cache knows its blocks. checksums: whether
    `<prefix>.crc` has those of its blocks (see `BlockChecksums`).
    """

    def __init__(
        self, prefix: str, tokens: int, dtype: npt.DTypeLike, sha256: str, checksums: bool, cache: BlockCache
    ) -> None:
        self.url, self.dtype, self._tokens, self._cache = f"{prefix}.bin", np.dtype(dtype), tokens, cache
        self._size = tokens * self.dtype.itemsize
        self._blocks = -(-self._size // BLOCK_BYTES)
        self._identity, self._first_slot = sha256, cache.reserve(self._blocks)
        self._files, self._path = _file_system(self.url)
        # One without calls of its own opens the file for each block, and would read megabytes ahead.
        self._exactly = {} if self._files.async_impl else {"cache_type": "none"}
        found = _patiently(self.url, lambda: self._files.size(self._path))
        if found != self._size:
            raise DataError(
                f"{self.url}: has {found} bytes, its manifest states {self._size}; they do not belong together, or "
                "the copy is truncated: copy both again"
            )
        self._checksums = None
        if checksums:
            self._checksums = read_checksums(prefix, read_whole(f"{prefix}.crc"), self._size)
        self._lock = threading.Lock()
        self._coming: dict[int, Future[bytes]] = {}

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        start, stop, _ = part.indices(self._tokens)
        begin, end = start * self.dtype.itemsize, stop * self.dtype.itemsize
        numbers = _block_numbers(begin, end)
        coming = [self._want(number) for number in numbers]
        try:
            content = b"".join(each.result(timeout=FETCH_DEADLINE_S + LAST_PAUSE_S) for each in coming)
        except TimeoutError:
            raise DataError(f"{self.url}: no answer in {FETCH_DEADLINE_S:.0f} s; is the store reachable?") from None
        skipped = begin - numbers.start * BLOCK_BYTES
        return np.frombuffer(content[skipped : skipped + end - begin], self.dtype)

    def fetch_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to fetch tokens start ≤ i < stop that will be read soon. Does not wait; errors show when reading."""
        size = self.dtype.itemsize
        for number in {n for start, stop in ranges for n in _block_numbers(start * size, stop * size)}:
            if len(self._coming) < MOST_WAITING:
                self._want(number)

    def _want(self, number: int) -> Future[bytes]:
        with self._lock:
            if number in self._coming:
                return self._coming[number]
            future = self._coming[number] = self._cache.pool.submit(self._block, number)
        future.add_done_callback(lambda _: self._coming.pop(number, None))
        return future

    def _block(self, number: int) -> bytes:
        slot = (self._first_slot + number) % self._cache.slots
        key = hashlib.blake2b(f"{self._identity} {number}".encode(), digest_size=16).digest()
        if (content := self._cache.get(slot, key)) is not None:
            return content
        begin = number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self._size)

        def fetch() -> bytes:
            content: bytes = self._files.cat_file(self._path, start=begin, end=end, **self._exactly)
            if len(content) != end - begin:
                raise OSError(f"{len(content)} bytes came where {end - begin} from {begin} on were asked for")
            if self._checksums is not None and zlib.crc32(content) != self._checksums[number]:
                raise OSError(f"the {end - begin} bytes from {begin} on do not match their checksum")
            return content

        with self._cache.fetching(slot, time.monotonic() + FETCH_DEADLINE_S):
            if (content := self._cache.get(slot, key)) is None:  # another process may have been faster
                content = _patiently(self.url, fetch)
                self._cache.put(slot, key, content)
        return content


def read_whole(url: str) -> bytes:
    """Read a small file. Raises DataError."""
    files, path = _file_system(url)
    return bytes(_patiently(url, lambda: files.cat_file(path)))


def _block_numbers(begin: int, end: int) -> range:
    return range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))


def _file_system(url: str) -> tuple[Any, str]:
    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, TypeError) as error:
        raise DataError(f"{url}: cannot be used: {error}") from None
    if url.startswith("hf://") and not path.startswith("buckets/") and not re.search("@[0-9a-f]{40}/", path):
        raise DataError(
            f"{url}: names no commit, and what a branch holds may change during the run: write "
            "hf://datasets/OWNER/NAME@COMMIT/PREFIX, with the commit's 40 digits"
        )
    return files, path


def _patiently(url: str, work: Callable[[], T]) -> T:
    """Repeat the work until it succeeds or the deadline is over. Raises DataError."""
    until_s, backoff = time.monotonic() + FETCH_DEADLINE_S, RetryBackoff(FIRST_PAUSE_S, LAST_PAUSE_S)
    while True:
        try:
            return work()
        except (FileNotFoundError, PermissionError) as error:
            what = "no such file" if isinstance(error, FileNotFoundError) else "not allowed"
            raise DataError(f"{url}: {what}; look at the prefix and the credentials") from None
        except Exception as error:  # each of fsspec's file systems has errors of its own
            if time.monotonic() + (pause_s := backoff.pause_s()) > until_s:
                reason = (str(error).splitlines() or [""])[0] or type(error).__name__
                raise DataError(
                    f"{url}: could not be read in {FETCH_DEADLINE_S:.0f} s: {reason}; is the store reachable?"
                ) from None
        time.sleep(pause_s)
