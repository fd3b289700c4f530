"""The house's rules, read from the source: imports run downward, and each library has its place."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Lowest first. A module may import its own layer's siblings within one package, and every lower layer.
LAYERS = [
    {"config", "faults", "canonical", "initial", "files", "reference", "kernels", "sharing"},
    {"outer"},
    {"inner", "net", "data", "plan", "simulate", "monitor", "export", "sample", "evaluate"},
    {"trainer", "launch", "quickstart"},
    {"cli", "cli_operate", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ONLY_IN = {"deepspeed": "inner", "megatron": "inner", "apex": "inner", "transformer_engine": "inner", "grpc": "net"}


def sources() -> list[tuple[str, Path]]:
    """(dotted name inside geotrain, file) of every module, kernels and launch included."""
    found = []
    for folder, prefix in (("geotrain", ""), ("kernels", "kernels."), ("launch", "launch.")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            dotted = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
            found.append((prefix + dotted.removesuffix(".__init__").removesuffix("__init__"), path))
    return [(name, path) for name, path in found if name]


def imports(path: Path) -> Iterator[str]:
    """Every absolute module name that the file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


@pytest.mark.parametrize(("name", "path"), sources(), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_run_downward(name: str, path: Path) -> None:
    top = name.split(".")[0]
    assert top in LEVEL, f"geotrain.{top} has no place in LAYERS"
    for imported in imports(path):
        parts = imported.split(".")
        if parts[0] == "geotrain" and len(parts) > 1 and parts[1] in LEVEL:
            assert LEVEL[parts[1]] <= LEVEL[top], f"geotrain.{name} imports upward: {imported}"
            pair = {top, parts[1]}
            assert pair != {"inner", "outer"}, (
                f"geotrain.{name}: inner and outer may not know each other ({imported})"
            )
        only = ONLY_IN.get(parts[0])
        assert only in (None, top), f"geotrain.{name} imports {imported}: only geotrain.{only} may"
        assert parts[0] not in ("kernels", "launch"), f"geotrain.{name}: import geotrain.{imported}, not {imported}"


def test_outer_is_pure() -> None:
    """State machines know no clock, socket, disk or thread."""
    banned = {"time", "datetime", "socket", "threading", "asyncio", "pathlib", "os", "random", "subprocess"}
    for name, path in sources():
        if name.startswith("outer"):
            used = {imported.split(".")[0] for imported in imports(path)} & banned
            assert not used, f"geotrain.{name} imports {used}"


def test_files_can_be_read_in_a_sitting() -> None:
    files = [
        p
        for folder in ("geotrain", "kernels", "launch", "tests", "benchmarks")
        for p in (ROOT / folder).rglob("*.py")
    ]
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > 500}
    assert not long, f"over 500 lines: {long}"


def test_launching_and_operating_import_no_torch() -> None:
    """It takes seconds, of every command that a person types."""
    modules = ("region", "operate", "watching", "logs", "check", "guard")
    program = f"import sys, {', '.join(f'geotrain.launch.{m}' for m in modules)}; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "False\n"
