"""docs/operations.md knows every wait: its length, and what it must be longer than."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from geotrain.config.block import Block

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("geotrain", "kernels", "launch") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGE = (ROOT / "docs/operations.md").read_text().partition("\n## Deadlines\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| `([\w/.]+)` \| (\S+) \| .+ \| (.+) \|$", PAGE, re.MULTILINE)
BOUNDS = "timeout", "timeout_s", "within_s", "deadline_s", "connect_s", "grace_s"  # parameters that bound a wait
WAITS = "wait", "result", "join", "acquire"


def constants() -> set[str]:
    """Those of modules whose names end in _S."""
    return {
        f"{path.relative_to(ROOT).with_suffix('').as_posix().removeprefix('geotrain/')}.{name.id}"
        for path in FILES
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and name.id.endswith("_S")
    }


def keys() -> dict[str, float]:
    """Configuration keys in seconds, and their defaults."""
    fields = [pair for block in Block.__subclasses__() for pair in block.model_fields.items()]
    return {name: field.default for name, field in fields if name.endswith("_s")}


def value(name: str) -> float:
    where, _, last = name.rpartition(".")
    if last.islower():
        return keys()[last]
    return float(getattr(importlib.import_module(f"geotrain.{where.replace('/', '.')}"), last))


def test_the_table_has_every_wait_and_says_how_long_it_is() -> None:
    names, others = {name for name, _, _ in ROWS}, set(re.findall(r"`([\w/.]+)`", PAGE.rpartition("|\n")[2]))
    assert not names & others
    asked = {name for name in names | others if name.rpartition(".")[2].islower()}
    assert (names | others) - asked == constants()
    assert {name.rpartition(".")[2] for name in asked} == keys().keys()
    assert {name: f"{value(name):g}" for name, _, _ in ROWS} == {name: said for name, said, _ in ROWS}


def test_a_wait_is_longer_than_what_happens_in_it() -> None:
    for name, _, larger in ROWS:
        for times, other in re.findall(r"(?:(\d+) × )?`([\w/.]+)`", larger):
            assert value(name) > float(times or 1) * value(other), (name, other)


def test_no_wait_has_a_number_in_place_of_a_name() -> None:
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            bounds: list[ast.expr | None] = []
            if isinstance(node, ast.Call):
                waits = isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
                bounds = [*node.args[:waits], *(k.value for k in node.keywords if k.arg in BOUNDS)]
            elif isinstance(node, ast.arguments):
                taken = [*node.posonlyargs, *node.args]
                last = taken[len(taken) - len(node.defaults) :], node.kwonlyargs
                pairs = zip([*last[0], *last[1]], [*node.defaults, *node.kw_defaults], strict=True)
                bounds = [default for parameter, default in pairs if parameter.arg in BOUNDS]
            numbers = [b for b in bounds if isinstance(b, ast.Constant) and isinstance(b.value, int | float)]
            found += [f"{path.relative_to(ROOT)}:{number.lineno}" for number in numbers]
    assert found == []
