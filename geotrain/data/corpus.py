"""Real text found on any machine: the documentation and the sources of Python's standard library.

The quickstart and the studies train on it, so that they need no download.
"""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

_SUFFIXES = (".py", ".txt", ".rst")
_SKIPPED = frozenset(  # tests, installed packages, and tables rather than text
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)


def documents(limit_bytes: int) -> Iterator[str]:
    """Yield the language's documentation topics, then the library's files, in the order of their names.

    Stops before the first document with which all texts together would exceed `limit_bytes` (UTF-8).
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions package it apart
        topics = {}
    used_bytes = 0
    for text in chain((topics[name] for name in sorted(topics)), _texts(Path(sysconfig.get_path("stdlib")))):
        used_bytes += len(text.encode())
        if used_bytes > limit_bytes:
            return
        yield text


def _texts(folder: Path) -> Iterator[str]:
    """Yield the texts of files below the folder; sorted, since file systems list in no order."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in _SKIPPED:
            yield from _texts(path)
        elif path.suffix in _SUFFIXES and path.is_file():
            with suppress(UnicodeDecodeError, OSError):  # a few files are in other encodings
                if text := path.read_text(encoding="utf-8"):
                    yield text
