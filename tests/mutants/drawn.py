"""Faults drawn over the whole product by lines of code, each with the tests that execute its line."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import cache

from tests.contexts.kept import ROOT, Contexts, product
from tests.mutants.faults import Fault
from tests.mutants.operators import Change, Source
from tests.support.code_lines import lines_of_code


@cache
def source(file: str) -> Source:
    return Source((ROOT / file).read_text())


def draw(sample: int, seed: int, contexts: Contexts, seconds: float, files: tuple[str, ...] = ("",)) -> list[Fault]:
    """So many faults, each on a line of its own. seconds: of tests for each fault, at most. files: how the names of
    those begin which are drawn from."""
    of = [file for file in product() if file.startswith(files)]
    lines = [(file, line) for file in of for line in sorted(lines_of_code(ROOT / file))]
    stream, found = random.Random(seed), list[Fault]()
    stream.shuffle(lines)
    while lines and len(found) < sample:
        file, line = lines.pop()
        if (change := one_of(file, line, stream)) is not None:
            old, tests = source(file).old(change), contexts.testing(file, range(change.line, change.last + 1))
            chosen, left_out = contexts.within(tests, seconds, [file])
            breaks = f"{change.kind}: {shortened(old)} → {shortened(change.new) or 'nothing'}"
            text = source(file).mutated(change)
            found.append(Fault(f"{file}:{line}", file, old, change.new, breaks, tuple(chosen), text, left_out))
    return found


def shortened(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 70 else f"{words[:67]}..."


@cache
def changes(file: str) -> dict[int, dict[str, list[Change]]]:
    """Line → kind → the changes that can be made there."""
    found: dict[int, dict[str, list[Change]]] = defaultdict(lambda: defaultdict(list))
    for change in source(file).changes():
        found[change.line][change.kind].append(change)
    return found


def one_of(file: str, line: int, stream: random.Random) -> Change | None:
    """Any kind of change on the line, and any one of that kind; None: there is none that makes a difference."""
    kinds = changes(file).get(line, {})
    for kind in stream.sample(sorted(kinds), len(kinds)):
        for change in stream.sample(kinds[kind], len(kinds[kind])):
            if source(file).tells(change):
                return change
    return None
