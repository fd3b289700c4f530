"""What is wrong with a configuration file, in words: the key, its value, the rule, and the nearest known key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel


def explain(kind: type[BaseModel], fault: Any) -> str:
    """One of pydantic's errors about a model of this kind, in a line."""
    location = [str(part) for part in fault["loc"]]
    key = ".".join(location) or "(whole file)"
    if fault["type"] == "extra_forbidden":
        known = sorted(_known_keys(kind, location[:-1]))
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"{key}: unknown key; {hint}"
    if fault["type"] == "missing":
        return f"{key}: this key is required"
    value = json.dumps(fault["input"], default=str)
    value = value if len(value) <= 80 else value[:77] + "…"
    return f"{key} = {value}: {fault['msg'].removeprefix('Value error, ')}"


def _known_keys(kind: type[BaseModel], path: list[str]) -> set[str]:
    """Keys of the model that `path` leads to; indices into lists are passed over."""
    for part in path:
        for name, field in kind.model_fields.items():
            if part in (name, field.alias):
                kind = next(_models_in(field.annotation), kind)
                break
    return {field.alias or name for name, field in kind.model_fields.items()}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, tuple, list) or get_args(annotation):
        for inner in get_args(annotation):
            yield from _models_in(inner)
