"""Writes docs/configuration.md from the configuration's own types: keys, types, defaults, meanings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from geotrain.common.files import write_whole
from geotrain.config import ClusterConfig, RunConfig, json_schema

EXACT = 1 << 53  # all integers end there, which need not be said
INTRODUCTION = """# Configuration

Two JSON files: the *run* says what to train, the *cluster* where. An unknown key is an error that names it and the
nearest known one. `geotrain dry-run` checks both files together; `configs/schema/` holds their JSON Schema.

In brackets: a key's type, and its default, if it has one. This page is written by `geotrain schema` from
`geotrain/config/`; edit that."""


def write_schema(out: Path, docs: Path) -> list[Path]:
    """Write the JSON Schema of run and cluster files into a folder, and their reference. Returns the files."""
    texts = {
        out / "run.json": json.dumps(json_schema(RunConfig), indent=2),
        out / "cluster.json": json.dumps(json_schema(ClusterConfig), indent=2),
        docs: reference(RunConfig, ClusterConfig),
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")
    return list(texts)


def reference(run: type[BaseModel], cluster: type[BaseModel]) -> str:
    """Return the reference as Markdown: a list of keys for each block of the two files."""
    parts = [INTRODUCTION]
    seen: set[str] = set()
    for title, kind in (("The run file", run), ("The cluster file", cluster)):
        schema = json_schema(kind)  # type: ignore[arg-type]
        parts.append(f"## {title}\n\n{_block(schema)}")
        for name, block in sorted(schema["$defs"].items()):
            if name not in seen:
                seen.add(name)
                parts.append(f"### {name}\n\n{_block(block)}")
    return "\n\n".join(parts)


def _block(block: dict[str, Any]) -> str:
    lines = [block["description"], ""] if "description" in block else []
    fields, required = block["properties"], block.get("required", ())
    for key, field in sorted(fields.items(), key=lambda item: item[0] != "name"):  # a union's discriminator first
        default = "required" if key in required else _default(field.get("default"))
        kind = _type(field).removesuffix(" or null") if default == "`null`" else _type(field)
        meaning = f": {field['description']}" if "description" in field else ""
        lines.append(f"- `{key}` ({'; '.join(filter(None, (kind, default)))}){meaning}")
    return "\n".join(lines)


def _default(value: Any) -> str:
    """Return a key's default. Returns "" for a block, whose keys have defaults of their own."""
    if isinstance(value, dict) and value:
        return f"`{json.dumps({'name': value['name']})}`" if "name" in value else ""  # of a union: which one
    return f"`{json.dumps(value)}`"


def _type(field: dict[str, Any]) -> str:
    return " or ".join(dict.fromkeys(_types(field)))


def _types(field: dict[str, Any]) -> Iterator[str]:
    for option in (*field.get("anyOf", ()), *field.get("oneOf", ())):
        yield from _types(option)
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        yield f"[{name}](#{name.lower()})"
    elif "enum" in field:
        yield ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    elif "const" in field:
        yield f"`{json.dumps(field['const'])}`"
    elif field.get("type") == "array":
        items = field.get("items") or {"type": "values"}
        inner = " or ".join(_types(items)) or "values"
        yield f"list of {inner}"
    elif field.get("type") == "object" and isinstance(field.get("additionalProperties"), dict):
        inner = " or ".join(_types(field["additionalProperties"]))
        yield f"object of {inner}" if inner else "object"
    elif "type" in field:
        yield f"{field['type']}{_bounds(field)}"


def _bounds(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[name]:g}" for name, sign in signs.items() if field.get(name, EXACT) < EXACT]
    if "pattern" in field:
        bounds.append(f"like `{field['pattern']}`")
    return f" {', '.join(bounds)}" if bounds else ""
