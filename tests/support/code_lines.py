"""Counts lines of code: lines that hold a token of the program. Blank lines, comments and docstrings are free."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path

NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


@cache
def code_lines(path: Path) -> int:
    """Lines of code of a Python, C or JavaScript file. A string that is a statement of its own counts as
    docstring."""
    text = path.read_text()
    if path.suffix != ".py":
        lines = re.sub(r"/\*.*?\*/", "", text, flags=re.S).splitlines()
        return sum(bool(line.strip()) and not line.strip().startswith("//") for line in lines)
    return len(lines_of_code(path))


@cache
def lines_of_code(path: Path) -> frozenset[int]:
    """The numbers of a Python file's lines of code."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                docstrings |= set(range(first, last + 1))
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            held |= set(range(token.start[0], token.end[0] + 1))
    return frozenset(held - docstrings)


def sources(folders: Iterable[Path]) -> list[Path]:
    """The Python, C and JavaScript files of these folders."""
    return [p for folder in folders for p in sorted(folder.rglob("*")) if p.suffix in (".py", ".c", ".h", ".js")]
