"""Which lines each test executed when it was last recorded, and which tests to run for lines of today's source."""

from __future__ import annotations

import ast
import difflib
import gzip
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from coverage.numbits import numbits_to_nums, numbits_union

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build/contexts"  # a file for each file of tests, and `sources/`: what was executed, by its hash
Lines = dict[str, bytes]  # by file; coverage's numbits
COLLECTED_S = 1.0  # to import a file of tests, about
QUICK_S = 2.0
UNKNOWN_S = 30.0


def path_of(file: str) -> Path:
    """Where the contexts of a file of tests are kept."""
    return KEPT / (file.replace("/", ".") + ".json.gz")


def read(file: str) -> dict[str, Any]:
    """seconds: of each test by itself; shared: of the wide fixtures that it uses; lines: context → file → the hash of
    the source and the lines' bits."""
    path = path_of(file)
    kept = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}
    return {"seconds": {}, "shared": {}, "lines": {}} | kept


def keep(
    file: str,
    lines: dict[str, Lines],
    seconds: dict[str, float],
    shared: dict[str, float] | None = None,
    failed: Collection[str] = (),
) -> None:
    """Write down what tests of a file executed, and of which source, in place of what these tests did before. One
    that failed may have ended before lines that it executes: what it did before stays."""
    kept = read(file)
    before = {test: kept["lines"][test] for test in failed if test in kept["lines"]}
    if kept["seconds"].keys() <= seconds.keys():
        kept = {"seconds": {}, "shared": {}, "lines": {}}  # all its tests were played: others are there no more
    for context, of in lines.items():
        old = kept["lines"].setdefault(context, {}) if context == file else {}
        for name, bits in of.items():
            source = keep_source(ROOT / name)
            if name in old and old[name][0] == source:  # its fixtures of other tests
                bits = numbits_union(bits, bytes.fromhex(old[name][1]))
            if any(bits):
                old[name] = [source, bits.hex()]
        kept["lines"][context] = old
    kept["lines"] |= before
    for what, took_s in (("seconds", seconds), ("shared", shared or {})):
        kept[what] |= {test: round(s, 3) for test, s in took_s.items()}
    path = path_of(file)
    path.with_suffix(".new").write_bytes(gzip.compress(json.dumps(kept).encode()))
    path.with_suffix(".new").rename(path)


def source_of(path: Path) -> str:
    """The name by which a file's content is kept."""
    return hashlib.sha1(path.read_bytes()).hexdigest()[:16]


@cache
def keep_source(path: Path) -> str:
    name = source_of(path)
    (KEPT / "sources").mkdir(parents=True, exist_ok=True)
    (KEPT / "sources" / name).write_bytes(path.read_bytes())
    return name


@cache
def kept_source(name: str) -> list[str]:
    return (KEPT / "sources" / name).read_text().splitlines()


@cache
def places(source: str, file: str) -> dict[int, set[int]]:
    """Line of the source → lines of today's file: the same, or those that took its place or stand beside it."""
    old, new = kept_source(source), (ROOT / file).read_text().splitlines() if (ROOT / file).exists() else []
    now: dict[int, set[int]] = {}
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for line in range(a, b):
            now[line + 1] = {c + line - a + 1} if tag == "equal" else set(range(c + 1, d + 1)) or {c, c + 1}
        if tag == "insert":
            for line in (a, a + 1):
                now.setdefault(line, set()).update(range(c + 1, d + 1))
    return now


class Contexts:
    """All that is kept. executed: file → line of today's source → contexts; size: lines each executed; shared: what
    the wide fixtures that a test uses take."""

    def __init__(self, folder: Path = KEPT) -> None:
        self.seconds: dict[str, float] = {}
        self.shared: dict[str, float] = {}
        self.executed: dict[str, list[tuple[str, str, bytes]]] = defaultdict(list)
        self.size: dict[str, int] = defaultdict(int)
        for path in sorted(folder.glob("*.json.gz")):
            kept = json.loads(gzip.decompress(path.read_bytes()))
            self.seconds |= kept["seconds"]
            self.shared |= kept.get("shared", {})
            for context, of in kept["lines"].items():
                for name, (source, bits) in of.items():
                    self.executed[name].append((context, source, bytes.fromhex(bits)))
                    self.size[context] += len(numbits_to_nums(bytes.fromhex(bits)))
        self.by_file: dict[str, list[str]] = defaultdict(list)
        for test in self.seconds:
            self.by_file[file_of(test)].append(test)
        self._lines: dict[str, dict[int, set[str]]] = {}

    def lines(self, file: str) -> dict[int, set[str]]:
        """Line of today's file → the contexts that executed it."""
        if file not in self._lines:
            found = self._lines[file] = defaultdict(set)
            for context, source, bits in self.executed.get(file, []):
                now = places(source, file)
                for line in numbits_to_nums(bits):
                    for place in now.get(line, ()):
                        found[place].add(context)
        return self._lines[file]

    def testing(self, file: str, lines: Iterable[int]) -> set[str]:
        """The tests that execute any of these lines, and files where what their tests share does; where a constant or
        a default is among the lines, what uses it. Where none does, the files that do when they are imported. Where
        none is known to, since not all processes are recorded, the files of those that execute the functions around
        them, the module, or what names it; or of the same name."""
        lines = set(lines)
        own = functions(file)
        inside = {line for span in own for line in span}
        found = self._executing(file, lines & inside)
        for used in {uses for line in lines - inside if (uses := constant(file, line))}:
            found |= self._using(used)
        around = {line for span in own if lines & set(span) for line in span}
        named = partial(self._using, rf"\b{Path(file).stem}\b")
        found = {test for test in found if not test.endswith("::")} or set(map(file_of, found))
        found = found or set(map(file_of, self._executing(file, around) or self._executing(file, inside) or named()))
        own_name = Path(file).name if Path(file).name.startswith("test_") else f"test_{Path(file).stem}.py"
        return found or {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob(own_name)}

    def _executing(self, file: str, lines: Iterable[int]) -> set[str]:
        executed = self.lines(file)
        return {context for line in lines for context in executed.get(line, ())}

    def _using(self, used: str) -> set[str]:
        return {test for user in product() for test in self._executing(user, places_of(used, user))}

    def usual_s(self, test: str) -> float:
        """What a test takes by itself, about; a file: the longest of its tests, with what they share."""
        if test in self.seconds:
            return self.seconds[test]
        return max((self.seconds[t] + self.shared.get(t, 0.0) for t in self.by_file.get(test, ())), default=UNKNOWN_S)

    def within(self, tests: Iterable[str], seconds: float, files: Iterable[str]) -> tuple[list[str], int]:
        """Of these tests, which together take at most so long: first the quick ones, of files beside the product's
        before others, then of those that execute least, since they look closest; then the slow ones, the fastest
        first. Of a file that is named itself all are meant. The first of a file makes what it shares with others.
        Returns how many are left out, too."""
        by_file: dict[str, set[str]] = defaultdict(set)
        for test in tests:
            by_file[file_of(test)].add(test)
        beside = tuple(f"tests/{file.removeprefix('geotrain/').partition('/')[0]}/" for file in files)

        def order(own: str) -> tuple[bool, int]:
            return not own.startswith(beside), min(self.size[test] for test in by_file[own])

        def whole_s(test: str) -> float:
            return self.usual_s(test) + self.shared.get(test, 0.0)

        all_of, chosen, made_s = list[str](), list[str](), dict[str, float]()
        for own in sorted(by_file, key=order):
            known = self.by_file.get(own, []) if own in by_file[own] else []
            all_of += sorted(known or by_file[own], key=whole_s)
        left, quick = seconds, [test for test in all_of if whole_s(test) < QUICK_S]
        for test in (*quick, *sorted(set(all_of) - set(quick), key=whole_s)):
            own, shared_s = file_of(test), self.shared.get(test, 0.0)
            first_s = 0.0 if own in made_s else COLLECTED_S
            if (cost_s := first_s + self.usual_s(test) + max(0.0, shared_s - made_s.get(own, 0.0))) <= left:
                left, made_s[own] = left - cost_s, max(shared_s, made_s.get(own, 0.0))
                chosen.append(test)
        return chosen, len(all_of) - len(chosen)

    def stale(self) -> list[str]:
        """The files of tests that were never recorded, or not as they are now."""
        found = []
        for path in sorted((ROOT / "tests").rglob("test_*.py")):
            name = path.relative_to(ROOT).as_posix()
            if path.parent.name in ("contexts", "mutants", "project"):  # which execute nothing of the product
                continue
            kept = {source for context, source, _ in self.executed.get(name, ()) if file_of(context) == name}
            if kept != {source_of(path)}:
                found.append(name)
        return found


def file_of(test: str) -> str:
    return test.partition("::")[0]


@cache
def product() -> list[str]:
    """The product's Python files."""
    folders = ("geotrain", "kernels", "launch")
    return [p.relative_to(ROOT).as_posix() for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


@cache
def functions(file: str) -> list[range]:
    """The lines of each function's body: all others are executed once, by whoever imports the module first."""
    nodes = [n for n in ast.walk(tree(file)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [range(node.body[0].lineno, (node.end_lineno or 0) + 1) for node in nodes]


def constant(file: str, line: int) -> str:
    """A pattern for what uses the constant, or the field, that is set on the line; "": none is."""
    for node in ast.walk(tree(file)):
        for statement in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    if line in range(statement.lineno, (statement.end_lineno or 0) + 1):
                        return rf"\b{name}\b" if isinstance(node, ast.Module) else rf"\.{name}\b|\b{name}="
    return ""


@cache
def places_of(used: str, file: str) -> set[int]:
    """Lines inside functions that use a name."""
    text = (ROOT / file).read_text().splitlines()
    return {line for span in functions(file) for line in span if re.search(used, text[line - 1])}
