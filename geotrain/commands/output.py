"""Prints what a command found: as text or, with --json, as JSON on standard output and nothing else there."""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="The result as JSON; all else goes to standard error.")]


@dataclass(frozen=True)
class Output:
    """The result of a command. data: for JSON; what it has no type for becomes text. text: for people; empty: all is
    printed already. code: exit code."""

    data: Any
    text: str = ""
    code: int = 0


def with_json(function: Callable[..., Output]) -> Callable[..., None]:
    """Make a command of a function that returns its result; the command has the option --json."""

    @wraps(function)
    def command(*, as_json: bool = False, **arguments: Any) -> None:
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            result = function(**arguments)
        if as_json or result.text:
            print(json.dumps(result.data, indent=2, ensure_ascii=False, default=str) if as_json else result.text)
        if result.code:
            raise typer.Exit(result.code)

    signature = inspect.signature(function, eval_str=True)
    option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    command.__annotations__ = {**function.__annotations__, "as_json": Json, "return": None}
    return command


def age_s(time_s: float) -> float:
    """Seconds since a Unix time, for people."""
    return time.time() - time_s


def duration(seconds: float) -> str:
    """Format seconds in the largest unit of which there are at least two."""
    for unit, count in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * count:
            return f"{seconds / count:.3g} {unit}"
    return f"{seconds:.3g} seconds"
