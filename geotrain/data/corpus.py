"""Real text found on any machine: the documentation and the sources of Python's standard library."""

from __future__ import annotations

import importlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from geotrain.data.tokens import DataError
from geotrain.files import whole_file

_SUFFIXES = (".py", ".txt", ".rst")
_SKIPPED = frozenset(  # tests, installed packages, and tables rather than text
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)


def documents(limit_bytes: int) -> Iterator[str]:
    """The language's documentation topics, then the library's files, in the order of their names.

    Stops before the first document with which the texts would exceed `limit_bytes` (UTF-8).
    """
    used_bytes = 0
    for text in _all_documents():
        used_bytes += len(text.encode())
        if used_bytes > limit_bytes:
            return
        yield text


def write_jsonl(path: Path, limit_bytes: int) -> int:
    """Write the corpus as an input of `prepare`; gives the number of documents. Raises DataError: none found."""
    count = 0
    with whole_file(path) as file:
        for text in documents(limit_bytes):
            file.write(json.dumps({"text": text}) + "\n")
            count += 1
        if not count:
            raise DataError("no documentation or sources of Python's standard library here; give text of your own")
    return count


def _all_documents() -> Iterator[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions package it apart
        topics = {}
    yield from (topics[name] for name in sorted(topics))
    for path in _files(Path(sysconfig.get_path("stdlib"))):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):  # a few files are in other encodings
            continue
        if text:
            yield text


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in _SKIPPED:
            yield from _files(path)
        elif path.suffix in _SUFFIXES and path.is_file():
            yield path
