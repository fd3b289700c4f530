"""Output that appears whole or not at all: it is written under a temporary name beside its place and then renamed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_MARKER = ".geotrain.json"


class OutputError(OSError):
    """An output cannot be written or may not be replaced. Says which, why and what to do."""


@contextmanager
def whole_file(final: Path) -> Iterator[TextIO]:
    """Give a text file to write, which takes the place of `final` at the end of the block. Raises OutputError."""
    temporary = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(final)
        _sync(final.parent)
    except OSError as error:
        raise OutputError(f"{final}: cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(final: Path, kind: str) -> Iterator[Path]:
    """Give a temporary folder beside `final` to write into; at the end of the block it becomes `final`.

    kind: what is written ("export", "dataset"). An existing `final` is replaced only when it is empty or was
    written here before as the same kind and holds nothing else. When the block raises, nothing is left behind.
    Raises OutputError, before the block is run when that can be known.
    """
    final = final.absolute()
    _check_replaceable(final, kind)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in final.parent.glob(f".{final.name}.*.partial"):
            _remove_if_abandoned(left)
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
        lock = os.open(temporary, os.O_RDONLY)
    except OSError as error:
        raise OutputError(f"{final}: cannot be created: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # for as long as this process lives
        yield temporary
        names = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file())
        (temporary / _MARKER).write_text(json.dumps({"kind": kind, "files": names}, indent=1) + "\n")
        temporary.chmod(0o755)  # mkdtemp's folders are private
        _sync_tree(temporary)
        _check_replaceable(final, kind)
        _swap(temporary, final)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{final}: cannot be written: {error.strerror or error}; nothing was kept") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _remove_if_abandoned(partial: Path) -> None:
    """Remove what a killed process left: nobody holds the lock on it any more."""
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(partial, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)


def _check_replaceable(final: Path, kind: str) -> None:
    if not final.exists() and not final.is_symlink():
        return
    if not final.is_dir():
        raise OutputError(f"{final}: exists and is not a folder; choose another output")
    present = {str(path.relative_to(final)) for path in final.rglob("*") if not path.is_dir() or path.is_symlink()}
    if not present:
        return
    try:
        marker = json.loads((final / _MARKER).read_text())
    except (OSError, ValueError):
        marker = {}
    if not isinstance(marker, dict) or marker.get("kind") != kind:
        raise OutputError(f"{final}: exists and is no older {kind} of GeoTrain; choose another output or remove it")
    foreign = sorted(present - {_MARKER, *marker.get("files", [])})
    if foreign:
        raise OutputError(
            f"{final}: holds files that the older {kind} did not write ({', '.join(foreign[:3])}); "
            "move them away or choose another output"
        )


def _swap(temporary: Path, final: Path) -> None:
    """Rename; an older folder stands aside until the new one is in place."""
    aside = temporary.with_suffix(".old")
    if final.exists():
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if aside.exists():
            aside.rename(final)
        raise
    _sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
