"""Faults as people make them: each operator changes one place of a Python source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType

TURNED = {
    **{ast.Eq: ("!=",), ast.NotEq: ("==",), ast.Is: ("is not",), ast.IsNot: ("is",)},
    **{ast.In: ("not in",), ast.NotIn: ("in",), ast.Lt: ("<=", ">"), ast.LtE: ("<", ">=")},
    **{ast.Gt: (">=", "<"), ast.GtE: (">", "<=")},
}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//"}
INSTEAD = {"min": "max", "max": "min", "any": "all", "all": "any"}
ANY_ORDER = {*INSTEAD, "isinstance", "suppress", "contextlib.suppress"}
COPYING = {"list", "dict", "set", "tuple", "bytes", "copy", "deepcopy", "sorted"}
# Says something to people, or only spares work: nobody's tests should notice, or mypy does.
SAID = re.compile(r"(\b_?(log|logger|logging|warnings|typer|console)\.)|^(print|say|_say|gc\.|cast\b)")
NO_FAULT = {"strict", "daemon", "name", "encoding", "help", "stacklevel", "repr", "description"}
SECONDS = re.compile(r"(_s|_ms|_minutes|_hours)\b|time|now|_S\b", re.IGNORECASE)  # a boundary of these is of no width

Span = tuple[int, int]  # of bytes


@dataclass(frozen=True)
class Change:
    """One fault: what takes the place of the bytes from `begin` to `end`. line, last: of the code it concerns."""

    kind: str
    line: int
    last: int
    begin: int
    end: int
    new: str


class Source:
    """A module's text and tree; `changes` lists all faults that can be made in it."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.tree = ast.parse(text)
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.code = compile(self.tree, "", "exec", dont_inherit=True)

    def mutated(self, change: Change) -> str:
        return (self.text[: change.begin] + change.new.encode() + self.text[change.end :]).decode()

    def tells(self, change: Change) -> bool:
        """Whether the compiled code differs: else the fault is none."""
        return not same_code(self.code, compile(self.mutated(change), "", "exec", dont_inherit=True))

    def old(self, change: Change) -> str:
        return self.text[change.begin : change.end].decode()

    # -- where

    def span(self, node: ast.AST) -> Span:
        begin = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def of(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.text[begin:end].decode()

    # -- what

    def changes(self) -> Iterator[Change]:
        yield from self._body(self.tree.body, None)

    def _make(self, kind: str, node: ast.AST, new: str, span: tuple[int, int] | None = None) -> Change:
        begin, end = span or self.span(node)
        return Change(kind, node.lineno, node.end_lineno or 0, begin, end, new)  # type: ignore[attr-defined]

    def _body(self, body: list[ast.stmt], function: ast.AST | None) -> Iterator[Change]:
        for statement in body:
            yield from self._statement(statement, function)

    def _statement(self, node: ast.stmt, function: ast.AST | None) -> Iterator[Change]:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self._function(node)
                return
            case ast.ClassDef():
                if not any(ast.unparse(base) in ("Protocol", "ABC") for base in node.bases):
                    yield from self._body(node.body, None)
                return
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                return
            case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Delete() | ast.Global() | ast.Nonlocal():
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.Raise():
                if function is not None:
                    yield self._make("error not raised", node, "pass")
                return
            case ast.Expr(value=ast.Call() | ast.Await() as call):
                if SAID.search(self.of(call).removeprefix("await ")):
                    return
                yield self._make("call left out", node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]) | ast.AugAssign():
                if function is not None and getattr(function, "name", "") != "__init__":
                    yield self._make("assignment left out", node, "pass")
            case ast.Return(value=None) | ast.Break() | ast.Continue():
                yield self._make("early end left out", node, "pass")
            case ast.If(test=test, body=[ast.Raise() | ast.Return() | ast.Continue() | ast.Break()], orelse=[]):
                yield self._make("check left out", test, "False")
            case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Constant):
                if isinstance(node, ast.If):
                    yield self._make("condition turned", test, f"not ({self.of(test)})")
            case ast.Try(handlers=handlers):
                for handler in handlers:
                    if not all(isinstance(s, ast.Pass | ast.Continue) for s in handler.body):
                        span = self.span(handler.body[0])[0], self.span(handler.body[-1])[1]
                        first = handler.body[0]
                        yield Change("error swallowed", first.lineno, handler.end_lineno or 0, *span, "pass")
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.stmt():
                    yield from self._statement(child, function)
                case ast.ExceptHandler() | ast.match_case():
                    yield from self._body(child.body, function)
                case ast.expr() if child is not getattr(node, "annotation", None):
                    yield from self._expression(child, function)
                case ast.withitem():
                    yield from self._expression(child.context_expr, function)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Change]:
        body = node.body[isinstance(node.body[0], ast.Expr) and ast.get_docstring(node) is not None :]
        if not body or node.name in ("__repr__", "__str__") or "NotImplementedError" in self.of(body[0]):
            return
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            return  # ...
        returns = "" if node.returns is None else self.of(node.returns)
        yields = any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(node))
        whole = self.span(body[0])[0], self.span(body[-1])[1]
        instead = {"None": ("pass",), "bool": ("return True", "return False")}.get(returns, ())
        if not yields and node.name != "__init__":
            for new in instead:
                line = body[0].lineno
                yield Change("function left out", line, body[0].end_lineno or line, *whole, new)
        inside = body[0].lineno, body[0].end_lineno or body[0].lineno
        for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]:
            for change in self._expression(default, node):
                yield Change("default changed", *inside, change.begin, change.end, change.new)
        yield from self._body(body, node)

    def _expression(self, node: ast.expr, function: ast.AST | None) -> Iterator[Change]:
        match node:
            case ast.JoinedStr() | ast.Lambda(body=ast.Constant()):
                return
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                for new in TURNED[type(operator)]:
                    boundary = new.rstrip("=") == self._between(left, right).strip().rstrip("=")
                    if not (boundary and SECONDS.search(self.of(node))):
                        kind = "off by one" if boundary and new[0] in "<>" else "comparison turned"
                        yield self._swap_operator(kind, node, left, right, new)
            case ast.BoolOp(op=operator, values=[left, right]):
                new = "or" if isinstance(operator, ast.And) else "and"
                yield self._swap_operator("and for or", node, left, right, new)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float())):
                return  # no number of a unit, but a sign that there is none
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._make("negation left out", node, self.of(operand))
            case ast.IfExp(test=test):
                yield self._make("condition turned", test, f"not ({self.of(test)})")
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
                if not any(isinstance(s, ast.JoinedStr | ast.List | ast.Tuple) for s in (left, right)) and not any(
                    isinstance(s, ast.Constant) and isinstance(s.value, str) for s in (left, right)
                ):
                    yield self._swap_operator("arithmetic", node, left, right, ARITHMETIC[type(operator)])
            case ast.Constant(value=bool(value)):
                yield self._make("default changed", node, str(not value))
            case ast.Constant(value=int(value)):
                if value < 10:
                    for new_value in (value + 1, value - 1):
                        yield self._make("off by one", node, str(new_value))
                else:
                    for factor in ("1000", "60"):
                        yield self._make("unit changed", node, f"({self.of(node)} * {factor})")
            case ast.Constant(value=float(value)):
                for operation in ("* 1000", "/ 1000", "* 60"):
                    yield self._make("unit changed", node, f"({self.of(node)} {operation})")
            case ast.Call():
                yield from self._call(node, function)
            case ast.Name() | ast.Attribute() if isinstance(node.ctx, ast.Load) and function is not None:
                for other in self._alike(node, function):
                    yield self._make("wrong variable", node, other)
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.expr() if not (isinstance(node, ast.Attribute) and isinstance(child, ast.Name)):
                    yield from self._expression(child, function)
                case ast.keyword() if child.arg not in NO_FAULT:
                    yield from self._expression(child.value, function)
                case ast.comprehension():
                    for inner in (child.iter, *child.ifs):
                        yield from self._expression(inner, function)
                    for test in child.ifs:
                        yield self._make("check left out", test, "True")

    def _call(self, node: ast.Call, function: ast.AST | None) -> Iterator[Change]:
        called = self.of(node.func)
        last = called.rpartition(".")[2]
        if called in INSTEAD and len(node.args) + len(node.keywords):
            yield self._make(f"{INSTEAD[called]} for {called}", node.func, INSTEAD[called])
        if last in COPYING and len(node.args) == 1 and isinstance(node.args[0], ast.Name | ast.Attribute):
            yield self._make("copy left out", node, self.of(node.args[0]))
        if last in ("copy", "clone") and isinstance(node.func, ast.Attribute) and not node.args:
            yield self._make("copy left out", node, self.of(node.func.value))
        types = self._types(function)
        for a, b in pairwise(node.args):
            plain = all(isinstance(arg, ast.Name | ast.Attribute) for arg in (a, b))
            if len({types.get(self.of(arg), "") for arg in (a, b)} - {""}) == 2:
                continue  # mypy refuses it
            if plain and self.of(a) != self.of(b) and called not in ANY_ORDER:
                span = self.span(a)[0], self.span(b)[1]
                yield self._make("arguments swapped", node, f"{self.of(b)}, {self.of(a)}", span)
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in NO_FAULT:
                begin, end = self.span(keyword)
                if (comma := re.match(rb"\s*,\s*", self.text[end:])) is not None:
                    end += comma.end()
                yield self._make("argument left out", keyword, "", (begin, end))

    def _types(self, function: ast.AST | None) -> dict[str, str]:
        """The annotations of a function's parameters."""
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return {}
        args = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        return {arg.arg: self.of(arg.annotation) for arg in args if arg.annotation is not None}

    def _alike(self, node: ast.Name | ast.Attribute, function: ast.AST) -> Iterator[str]:
        """Other parameters of the function with the same annotation."""
        types, name = self._types(function), self.of(node)
        yield from (other for other, kind in types.items() if other != name and types.get(name) == kind)

    def _between(self, left: ast.expr, right: ast.expr) -> str:
        return self.text[self.span(left)[1] : self.span(right)[0]].decode()

    def _swap_operator(self, kind: str, node: ast.expr, left: ast.expr, right: ast.expr, new: str) -> Change:
        """Another operator between the two; what closes and opens parentheses beside it stays."""
        between = self._between(left, right)
        operator = re.search(r"not\s+in|is\s+not|and|or|in|is|[<>=!]=|//|[-+*/%<>]", between)
        assert operator, between
        span = self.span(left)[1], self.span(right)[0]
        return self._make(kind, node, between[: operator.start()] + new + between[operator.end() :], span)


def same_code(a: CodeType, b: CodeType) -> bool:
    """Whether two code objects do the same, wherever their lines are."""
    if (a.co_code, a.co_names, a.co_varnames, len(a.co_consts)) != (
        *(b.co_code, b.co_names, b.co_varnames, len(b.co_consts)),
    ):
        return False
    return all(
        same_code(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else (type(x), x) == (type(y), y)
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )
