"""Output that appears whole or not at all: it is written under a temporary name beside its place and then renamed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

_MARKER = ".geotrain.json"
_PARTIAL, _ASIDE = ".partial", ".old"


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
        sync(final.parent)
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
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for aside in _left_beside(final, _ASIDE):
            with suppress(FileNotFoundError):  # its writer lives, and is done
                _bring_back_if_abandoned(aside, final)
        _check_replaceable(final, kind)
        for partial in _left_beside(final, _PARTIAL):
            with suppress(FileNotFoundError):
                _remove_if_abandoned(partial)
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=_PARTIAL, dir=final.parent))
        lock = os.open(temporary, os.O_RDONLY)
    except OutputError:
        raise
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


def sync(path: Path) -> None:
    """What a file or folder (its names) holds is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _left_beside(final: Path, suffix: str) -> list[Path]:
    """What other writers of this very folder have there: `.<name>.<random><suffix>`."""
    begin = f".{final.name}."
    return [
        path
        for path in final.parent.iterdir()
        if path.name.startswith(begin)
        and path.name.endswith(suffix)
        and "." not in path.name.removeprefix(begin).removesuffix(suffix)
    ]


def _remove_if_abandoned(partial: Path) -> None:
    """Remove what a killed process left: nobody holds the lock on it any more."""
    with _locked(partial) as abandoned:
        if abandoned:
            shutil.rmtree(partial, ignore_errors=True)


def _bring_back_if_abandoned(aside: Path, final: Path) -> None:
    """A process was killed while it replaced a folder: the older one returns unless the new one is in place."""
    with _locked(aside) as abandoned:
        if abandoned and not final.exists():
            aside.rename(final)
        elif abandoned:
            shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether this process has it to itself during the block; another's lock is not waited for."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = True
    except BlockingIOError:
        alone = False
    try:
        yield alone
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
    if not final.exists():
        temporary.rename(final)
        sync(final.parent)
        return
    aside = temporary.with_suffix(_ASIDE)
    with _locked(final):  # nobody brings it back meanwhile
        final.rename(aside)
        try:
            temporary.rename(final)
        except OSError:
            aside.rename(final)
            raise
        sync(final.parent)
        shutil.rmtree(aside, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)
