"""The base of both configuration files: strict, frozen blocks, and how JSON is validated into one.

An error in a file is explained in the words of the file: the key, its value, the rule, and the nearest known key.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

# Integers up to 2^53 are the same to all readers of JSON.
PositiveInt = Annotated[int, Field(ge=1, le=1 << 53)]
NonNegativeInt = Annotated[int, Field(ge=0, le=1 << 53)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")]

# Keys stand in command lines, where a space or a quote is the end of a word (hosts: `geotrain.config.hosts`).
_ENVIRONMENT_KEY = r"[A-Za-z_][A-Za-z0-9_]{0,254}"


def _matching(pattern: str, rule: str) -> AfterValidator:
    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"must be {rule}")
        return text

    return AfterValidator(check)


AbsolutePath = Annotated[
    str, _matching("/[^$]*", 'an absolute path, since it is one of another machine, without "$"')
]
EnvironmentKey = Annotated[
    str, _matching(_ENVIRONMENT_KEY, "a variable's name: letters, digits and _ only, and no digit at the front")
]


class ConfigError(ValueError):
    """A configuration file is wrong. The message names file, key, value and rule."""


SCHEMA = "$schema"  # key by which a JSON file names its schema
EXIT_FOR_GOOD = 2  # exit code of an error that a person must mend: the launcher does not start the process again


class Block(BaseModel):
    """A JSON object of a configuration file: unknown keys are errors, types are not converted, values never change.

    elsewhere: keys that other packages have → what to write instead; `%s` stands for the key's value.
    paths: keys, as "data.train", of files and folders; in a file, relative ones are meant from the file's folder.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {}
    paths: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def differing(self, *keys: str) -> list[str]:
        """Select those of the keys that exist in this block and do not hold their default."""
        fields = type(self).model_fields
        return [key for key in keys if key in fields and getattr(self, key) != fields[key].default]


Config = TypeVar("Config", bound=Block)


def read_json(path: Path, lacks: str = "") -> Any:
    """Read and parse a JSON file. lacks: a key by which the other of run and cluster file is known. Raises
    ConfigError."""
    try:
        raw = json.loads(path.read_text(), object_pairs_hook=_object)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # of the text's encoding, too
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if lacks and isinstance(raw, dict) and lacks in raw:
        raise ConfigError(f"{path}: has {lacks!r}: the run file comes first, then the cluster file")
    return raw


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of a JSON file. Raises ValueError: a key stands twice, of which JSON would drop the first."""
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"the key {twice[0]!r} stands twice in one object")
    return dict(pairs)


def with_paths(raw: Any, keys: Iterable[str], change: Callable[[str], str]) -> Any:
    """Copy parsed JSON with `change` applied to the strings at these keys, as far as they are there.

    A key is as "data.train", or "data.train.*.prefix" for all items of a list.
    """

    def at(place: Any, parts: Sequence[str]) -> Any:
        if not parts:
            return change(place) if isinstance(place, str) and place else place
        first, *rest = parts
        if first == "*":
            return [at(item, rest) for item in place] if isinstance(place, list) else place
        return {**place, first: at(place[first], rest)} if isinstance(place, dict) and first in place else place

    for key in keys:
        raw = at(raw, key.split("."))
    return raw


def from_folder(raw: Any, keys: Iterable[str], folder: Path, where: str) -> Any:
    """Copy parsed JSON with absolute paths at these keys, but for URLs. folder: of relative ones. where: what the
    keys stand in, for errors. Raises ConfigError."""

    def absolute(key: str, path: str) -> str:
        if path.startswith("~") or "$" in path:
            raise ConfigError(
                f'{where}: {key} = "{path}": only a shell replaces "~" and "$"; write the path as it is on each '
                "machine"
            )
        return path if "://" in path else os.path.normpath(Path.cwd() / folder / path)

    for key in keys:
        raw = with_paths(raw, (key,), partial(absolute, key))
    return raw


def shipped_configs() -> Path:
    """Find the folder of the run, model and cluster files that come with GeoTrain: in a checkout, or as installed."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.with_name("configs")


def parse(kind: type[Config], raw: Any, where: str) -> Config:
    """Validate parsed JSON. where: the file, for errors. Raises ConfigError with one line for each fault.

    A `$schema` at its top is for editors, and is passed over.
    """
    if isinstance(raw, dict) and isinstance(raw.get(SCHEMA), str):
        raw = {key: value for key, value in raw.items() if key != SCHEMA}
    try:
        # Back to JSON, since strict mode treats Python objects more strictly than JSON: it would refuse a list for a
        # tuple. "3" is not taken for an integer either way.
        return TypeAdapter(kind).validate_json(json.dumps(raw))
    except ValidationError as error:
        found = error.errors()
        # Only the innermost faults are of use: of a list with a bad item, pydantic also says that it is too short.
        outer = {fault["loc"][:depth] for fault in found for depth in range(len(fault["loc"]))}
        innermost = [fault for fault in found if fault["loc"] not in outer]
        faults = "\n".join(f"  {explain(kind, fault)}" for fault in innermost)
        raise ConfigError(f"{where}: not a valid {kind.__name__}\n{faults}") from None


def relocated(config: Config, change: Callable[[str], str]) -> Config:
    """Copy a configuration with `change` applied to its paths, as for a machine where they lie elsewhere."""
    raw = config.model_dump(by_alias=True, mode="json")
    return parse(type(config), with_paths(raw, config.paths, change), type(config).__name__)


def json_schema(kind: type[Block]) -> dict[str, Any]:
    """Build the JSON Schema that editors use to check and complete a config file."""
    schema = kind.model_json_schema(by_alias=True)
    schema["properties"][SCHEMA] = {"type": "string", "description": "Of this file, for editors; not looked at."}
    return {SCHEMA: "https://json-schema.org/draft/2020-12/schema", **schema}


def explain(kind: Any, fault: Any) -> str:
    """Explain one of pydantic's errors in a line. kind: the type that was validated, a block or a union of blocks
    that are distinguished by `name`. fault: an item of `ValidationError.errors()`."""
    where, models, union = _follow(kind, fault["loc"])
    key, whole = ".".join(where) or "(whole file)", json.dumps(fault["input"], default=str)
    value = whole if len(whole) <= 80 else whole[:77] + "…"
    names = [name for model in models for name in _names(model)]
    match fault["type"]:
        case "missing":
            return f"{key}: this key is required"
        case "extra_forbidden" if where[-1] in models[0].elsewhere:
            return f"{key}: {models[0].elsewhere[where[-1]].replace('%s', whole)}"
        case "extra_forbidden":
            # Perhaps a setting of another member of the union (of another rule or codec).
            others = [json.dumps(name) for model in union if where[-1] in _keys(model) for name in _names(model)]
            if others:
                return f"{key}: a setting of {' or '.join(others)}, not of this one; leave it out"
            known = sorted(_keys(models[0]))
            return f"{key}: unknown key; {nearest(where[-1], known, 'known keys: ' + ', '.join(known))}"
        case "union_tag_not_found":
            return f"{'.'.join([*where, 'name'])}: this key is required; known: {', '.join(names)}"
        case "union_tag_invalid":
            name = fault["input"]["name"]
            return f"{'.'.join([*where, 'name'])} = {json.dumps(name)}: {nearest(str(name), names)}"
        case "dict_type" | "model_attributes_type" if fault["input"] in names:
            return f'{key} = {value}: write {{"name": {value}}}; the settings of {value} stand beside its name'
        case "dict_type" | "model_attributes_type" if names:
            return f'{key} = {value}: write {{"name": …}}; known: ' + ", ".join(names)
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error" and isinstance(fault["input"], dict):  # the message names what is meant
        return f"{key}: {message}"
    return f"{key} = {value}: {message}"


def nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Advise on a word that is none of those known. otherwise: what to say when none is like it; by default, all."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else otherwise or f"known: {', '.join(names)}"


def _follow(kind: Any, location: tuple[str | int, ...]) -> tuple[list[str], list[type[Block]], list[type[Block]]]:
    """Follow one of pydantic's error locations through the types.

    Returns (keys as the file has them; the blocks that may stand at the location; all members of the union to which
    these belong, or the same blocks where there is no union). pydantic puts the name of the chosen member of a union
    into the location; it is not a key of the file, so it is left out of the keys. Unknown keys and indices into lists
    are keys, but lead to no other block.
    """
    keys: list[str] = []
    models = union = list(_models_in(kind))
    for part in location:
        chosen = [model for model in models if part in _names(model)]
        if chosen and len(union) > 1 and models is union:
            models = chosen
            continue
        keys.append(str(part))
        field = _keys(models[0]).get(str(part)) if models else None
        if field is not None:
            models = union = list(_models_in(field.annotation))
    return keys, models, union


def _keys(model: type[Block]) -> dict[str, Any]:
    """List the block's fields by the names that a file uses: `global` is a Python keyword, so some have an alias."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _names(model: type[Block]) -> tuple[str, ...]:
    """List the values of `name` by which a union recognizes this block; empty for a block that is not of a union."""
    field = model.model_fields.get("name")
    return tuple(n for n in get_args(field.annotation) if isinstance(n, str)) if field else ()


def _models_in(annotation: Any) -> Iterator[type[Block]]:
    """Find all blocks in a type annotation, also inside unions, tuples and dictionaries."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation
    else:
        for inner in get_args(annotation):
            yield from _models_in(inner)
