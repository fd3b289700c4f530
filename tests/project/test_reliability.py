"""Holds docs/reliability.md to tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.(?:py|txt))(?:::(\w+))?`")


def test_every_test_that_is_named_exists() -> None:
    named = NAMED.findall((ROOT / "docs/reliability.md").read_text())
    assert len(named) > 15
    for path, name in named:
        assert (ROOT / path).exists(), path
        if not name:
            continue
        defined = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
        assert name in defined, f"{path}::{name}"
