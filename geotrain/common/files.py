"""Writes output that appears whole or not at all: under a temporary name beside its place, which is then renamed.

A process that is killed, or a power failure, thus leaves either the older output or the new one, never a part of it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from zlib_ng.zlib_ng import crc32

MARKER = ".geotrain.json"  # lists the files that were written here, so that no others are ever deleted
_PARTIAL, _ASIDE = ".partial", ".old"  # suffixes of temporary folders, behind a random word


_BLOCK_BYTES = 16 << 20  # so much is checksummed at once
_LFS = b"version https://git-lfs.github.com/spec/"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)


class OutputError(OSError):
    """Raised when an output cannot be written or may not be replaced. Says which, why and what to do."""


def out_of_room(error: BaseException | None) -> bool:
    """Whether a disk or a quota was full, or the table of open files: this error says so, or one from which it was
    made. Nothing is wrong then but the lack of room, so the same can be tried again later."""
    seen: set[int] = set()  # an error may lead back to itself
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return True
        error = error.__cause__ or error.__context__
    return False


def make_folder(folder: Path) -> None:
    """Make a folder, with those above it, and bring each new name to the disk. Raises OSError.

    Without that a power failure could take a new folder away, with everything that was carefully synced in it.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync(path.parent)
    if not missing and not folder.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))


@contextmanager
def whole_file(final: Path, mode: str = "w", permissions: int = 0o666) -> Iterator[IO[Any]]:
    """Give a file to write (mode "w": text, "wb": bytes), which takes the place of `final` at the end of the block.

    If the block raises, `final` stays as it was. Raises OutputError.
    """
    final = Path(os.path.realpath(final))  # a link stays one, to what it names
    temporary = final.with_name(f".{final.name}.{os.getpid()}.partial")
    with _output_errors(final, "cannot be written"):
        try:
            opener = partial(os.open, mode=permissions)
            with open(temporary, mode, encoding="utf-8" if mode == "w" else None, opener=opener) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(final)  # only now that the content is on disk
            sync(final.parent)  # the folder holds the names: until it is on disk, the renaming is not
        finally:
            temporary.unlink(missing_ok=True)


def write_whole(final: Path, text: str) -> None:
    """Write a text file whole, or leave `final` as it was. Raises OutputError."""
    with whole_file(final) as file:
        file.write(text)


@contextmanager
def whole_folder(final: Path, kind: str) -> Iterator[Path]:
    """Give a temporary folder beside `final` to write into; at the end of the block it becomes `final`.

    kind: what is written ("export", "dataset"). An existing `final` is replaced only if it is empty, or if it was
    written by this function as the same kind and holds nothing else. If the block raises, nothing is left behind.
    Raises OutputError, if possible before the block is run.
    """
    final = Path(os.path.realpath(final))  # a link stays one, to what it names
    with _output_errors(final, "cannot be created"):
        make_folder(final.parent)
        _clear_up_after_killed_writers(final)
        check_replaceable(final, kind)
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=_PARTIAL, dir=final.parent))
        lock = os.open(temporary, os.O_RDONLY)
    try:
        with _output_errors(final, "cannot be written", "; nothing was kept"):
            fcntl.flock(lock, fcntl.LOCK_EX)  # shows others that this writer lives: the kernel releases it at its end
            yield temporary
            names = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file())
            (temporary / MARKER).write_text(json.dumps({"kind": kind, "files": names}, indent=1) + "\n")
            temporary.chmod(0o755)  # mkdtemp's folders are private
            for path in (*sorted(temporary.rglob("*")), temporary):
                sync(path)
            check_replaceable(final, kind)  # once more: writing may have taken hours
            _swap(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's list of names, to the disk before this returns (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(path: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    """Write a safetensors file, which others may read as any file, and bring it to the disk. Raises OSError,
    SafetensorError."""
    from safetensors.torch import save_file  # it imports torch

    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)  # puts a file of its own in the place, which its owner alone may read
    path.chmod(mode)
    sync(path)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object that is no more than news of a process; empty: there is none, or it is damaged."""
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads(path.read_text()), dict):
            return found
    return {}


def git_lfs_pointer(path: Path) -> str:
    """Say, for an error, that a file is a Git LFS pointer; "" if it is none, or cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            return "a Git LFS pointer, which names the file that belongs here: `git lfs pull` there fetches it"
    return ""


def size_and_checksum(path: Path) -> tuple[int, int]:
    """Compute (length in bytes, crc32) of a file, a block at a time. Raises OSError."""
    size = checksum = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            size, checksum = size + len(block), crc32(block, checksum)
    return size, checksum


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Try to lock a file (flock), without waiting; returns whether it worked. Closing the descriptor unlocks it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _output_errors(final: Path, what: str, then: str = "") -> Iterator[None]:
    try:
        yield
    except OutputError:
        raise
    except (OSError, SafetensorError) as error:  # the latter as of a full disk
        raise OutputError(f"{final}: {what}: {getattr(error, 'strerror', None) or error}{then}") from None


def _clear_up_after_killed_writers(final: Path) -> None:
    """Remove what killed writers of this very folder left beside it, and bring back the folder they had moved aside.

    A writer has `.<name>.<random>.partial` there, and the older folder as `.old` while it replaces it. The latter
    gets its name back, unless the new one is in place already.
    """
    begin = f".{final.name}."
    for path in sorted(final.parent.iterdir()):
        _, _, suffix = path.name.removeprefix(begin).partition(".")
        if not path.name.startswith(begin) or f".{suffix}" not in (_PARTIAL, _ASIDE):
            continue
        with suppress(FileNotFoundError), locked(path) as abandoned:  # not found: its writer has just finished
            if abandoned and f".{suffix}" == _ASIDE and not final.exists():
                path.rename(final)
            elif abandoned:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder during the block, if no other process has locked it; gives whether it worked. It never waits."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


def check_replaceable(final: Path, kind: str) -> None:
    """Raise OutputError where `whole_folder` would."""
    if not final.exists():
        return
    if not final.is_dir():
        raise OutputError(f"{final}: exists and is not a folder; choose another output")
    present = {str(path.relative_to(final)) for path in final.rglob("*") if not path.is_dir() or path.is_symlink()}
    if not present:
        return
    if (marker := read_object(final / MARKER)).get("kind") != kind:
        raise OutputError(f"{final}: exists and is no older {kind} of GeoTrain; choose another output or remove it")
    foreign = sorted(present - {MARKER, *marker.get("files", [])})
    if foreign:
        raise OutputError(
            f"{final}: holds files that the older {kind} did not write ({', '.join(foreign[:3])}); "
            "move them away or choose another output"
        )


def _swap(temporary: Path, final: Path) -> None:
    """Rename the folder. An older one is moved aside first, and deleted when the new one is in place."""
    if not final.exists():
        temporary.rename(final)
        sync(final.parent)
        return
    aside = temporary.with_suffix(_ASIDE)
    with locked(final):  # so that no other writer takes it for abandoned and brings it back
        final.rename(aside)
        try:
            temporary.rename(final)
        except OSError:
            aside.rename(final)
            raise
        sync(final.parent)
        shutil.rmtree(aside, ignore_errors=True)
