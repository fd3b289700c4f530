"""Changes single values in the text of a JSON file and leaves the rest as its author wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

Path = tuple[str | int, ...]
SPACE = " \t\r\n"


def put(text: str, path: Path, value: Any) -> str:
    """Return the text with `value` at `path` (keys, and indices of lists). A last key that is not there, or a last
    index that is the list's length, is appended, laid out as what stands before it. Raises KeyError when the way to
    it is missing. text: valid JSON."""
    shown = json.dumps(value, ensure_ascii=False)
    at, end = _skip(text, 0), len(text)
    for depth, key in enumerate(path):
        items = list(_items(text, at))
        found = next(((start, stop) for name, _, start, stop in items if name == key), None)
        if found is not None:
            at, end = found
            continue
        if depth < len(path) - 1 or (isinstance(key, int) and key != len(items)):
            raise KeyError(f"{path[: depth + 1]}")
        entry = shown if isinstance(key, int) else f"{json.dumps(key)}: {shown}"
        if not items:
            return text[: at + 1] + entry + text[at + 1 :]
        begin, end = items[-1][1], items[-1][3]
        gap_begin = items[-2][3] + 1 if len(items) > 1 else at + 1  # after the comma, or the bracket
        gap = text[gap_begin:begin] or (" " if len(items) == 1 else "")
        return text[:end] + "," + gap + entry + text[end:]
    return text[:at] + shown + text[end:]


def _items(text: str, at: int) -> Iterator[tuple[str | int, int, int, int]]:
    """Entries of the object or list that begins at `at`: (key or index, where the entry begins, where its value, its
    end)."""
    closing = {"{": "}", "[": "]"}.get(text[at])
    if closing is None:
        raise KeyError(f"{text[at : at + 20]!r} has no parts")
    here, count = _skip(text, at + 1), 0
    while text[here] != closing:
        begin, name = here, count
        if closing == "}":
            name, here = scanstring(text, here + 1, True)
            here = _skip(text, _skip(text, here) + 1)
        _, stop = json.JSONDecoder().raw_decode(text, here)
        yield name, begin, here, stop
        count += 1
        here = _skip(text, stop)
        if text[here] == ",":
            here = _skip(text, here + 1)


def _skip(text: str, at: int) -> int:
    while text[at] in SPACE:
        at += 1
    return at
