"""Finds what other packages bring, by entry points as pytest's plug-ins are (docs/extending.md)."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import TypeVar

Kind = TypeVar("Kind")


@cache
def entry_points_on(path: tuple[str, ...], group: str) -> EntryPoints:
    """Find the group's entry points on a `sys.path`. It reads files of every installed package, which takes
    milliseconds, and each configuration asks several times: once a process and path."""
    return entry_points(group=group)


def registered(group: str, name: str, kind: type[Kind]) -> type[Kind] | None:
    """Load what a package registered in the group under the name, a subclass of `kind`; None: nothing. Raises
    ValueError: it is none, cannot be loaded, or is there twice."""
    found = entry_points_on(tuple(sys.path), group).select(name=name)
    if not found:
        return None
    if len(found) > 1:
        packages = ", ".join(sorted(str(point.value) for point in found))
        raise ValueError(f"{name!r} is registered twice, by {packages}; uninstall one")
    (point,) = found
    try:
        block = point.load()
    except Exception as error:  # whatever the import of somebody's package raises
        raise ValueError(f"plug-in {name!r} ({point.value}) cannot be loaded: {error}") from error
    if not (isinstance(block, type) and issubclass(block, kind)):
        raise ValueError(f"plug-in {name!r} ({point.value}) is no subclass of {kind.__name__}")
    return block
