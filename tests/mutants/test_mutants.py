"""Faults are drawn as people make them; the kept list follows the code and the tests; the runner tells what is
noticed from what is not."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contexts.kept import Contexts
from tests.mutants.__main__ import Fork, outcomes
from tests.mutants.drawn import draw
from tests.mutants.faults import ROOT, Fault, read_faults
from tests.mutants.operators import Source

FAULTS = read_faults()
ON_A_SCHEDULE = """
[{name}]
file = "geotrain/worker/schedule.py"
old = "at = begin // round_steps * round_steps + step * workers"
new = "{new}"
breaks = "the rate of a round"
tests = ["tests/worker/test_schedule.py::test_all_workers_of_a_synchronous_run_pass_through_one_schedule"]
"""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_in_code_that_is_there_and_its_tests_are_too(fault: Fault) -> None:
    ast.parse(fault.mutated())
    for test in fault.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text()
        name, _, case = name.rstrip("]").partition("[")
        assert not name or re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{test}: there is none"
        assert "scenarios" not in file or not case or (ROOT / file).with_name(f"{case}.txt").exists(), f"{test}: gone"


@pytest.mark.parametrize(
    ("before", "kind", "after"),
    [
        ("if a < b: f()", "off by one", {"if a <= b: f()"}),
        ("if a < b: f()", "comparison turned", {"if a > b: f()"}),
        ("if at_s < now: f()", "off by one", set()),
        ("if a and b: f()", "and for or", {"if a or b: f()"}),
        ("if not may(a): raise ValueError(a < b)", "check left out", {"if False: raise ValueError(a < b)"}),
        ("raise ValueError(1)", "error not raised", {"pass"}),
        ("try: f()\nexcept OSError: g(a)", "error swallowed", {"try: f()\nexcept OSError: pass"}),
        ("await file.flush()", "call left out", {"pass"}),
        ("logger.info(a)", "call left out", set()),
        ("self.a = list(a)", "copy left out", {"self.a = a"}),
        ("self.a = a", "assignment left out", {"pass"}),
        ("f(a, b.c, 3)", "arguments swapped", {"f(b.c, a, 3)"}),
        ("f(a, c)", "arguments swapped", set()),
        ("f(a, key=b, name=a)", "argument left out", {"f(a, name=a)"}),
        ("f(a)", "wrong variable", {"f(b)"}),
        ("WAIT_S = 0.5", "unit changed", {"WAIT_S = (0.5 * 1000)", "WAIT_S = (0.5 / 1000)", "WAIT_S = (0.5 * 60)"}),
        ("f(a, on=True)", "default changed", {"f(a, on=False)"}),
        ("f(min(a, b))", "max for min", {"f(max(a, b))"}),
        ("f((a) + (b))", "arithmetic", {"f((a) - (b))"}),
    ],
)
def test_faults_are_made_as_people_make_them(before: str, kind: str, after: set[str]) -> None:
    head = "async def f(self, a: int, b: int, c: str) -> str:\n    "
    source = Source(head + before.replace("\n", "\n    ") + "\n    return c\n")
    changed = [source.mutated(change) for change in source.changes() if change.kind == kind]
    assert {text.removeprefix(head).split("\n    return c")[0].replace("\n    ", "\n") for text in changed} == after


def test_a_fault_that_makes_no_difference_is_told() -> None:
    source = Source("def f(a: int) -> float:\n    return 0.0\n")
    assert [source.tells(change) for change in source.changes()] == [False] * 3


def test_what_is_drawn_is_anywhere_and_the_same_for_a_seed() -> None:
    nothing_recorded = Contexts(Path("no such folder"))
    drawn = draw(20, 1, nothing_recorded, 60.0)
    assert drawn == draw(20, 1, nothing_recorded, 60.0) != draw(20, 2, nothing_recorded, 60.0)
    assert len({Path(fault.file).parent for fault in drawn}) > 10
    assert all((ROOT / fault.file).read_text() != fault.mutated() for fault in drawn)


def run(path: Path, **faults: str) -> tuple[int, list[str]]:
    """The exit code and the lines of the runner. faults: name → what a round's schedule returns with it."""
    path.write_text("".join(ON_A_SCHEDULE.format(name=name, new=new) for name, new in faults.items()))
    command = [sys.executable, "-m", "tests.mutants", "--list", str(path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=500)
    print(done.stderr)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_it_tells_what_is_noticed_and_reports_what_is_not(tmp_path: Path) -> None:
    place = "begin // round_steps * round_steps"
    code, lines = run(
        tmp_path / "three.toml",
        own=f"at = {place} + step",
        broken="at = nothing_of_this_name",
        harmless=f"at = step * workers + {place}",
    )
    told = (re.match(r"(noticed|hung|survived) +[0-9.]+ s  (\w+): ", line) for line in lines)
    verdicts = {found[2]: found[1] for found in told if found}
    assert verdicts == {"own": "noticed", "broken": "noticed", "harmless": "survived"}, lines
    figures = {"drawn": 3, "noticed": 2, "survived": 1, "undecided": 0, "seconds": 0}
    assert code == 1 and json.loads(lines[-1]) | {"seconds": 0} == figures


class Sleeper(Fork):
    within_s = 0.2

    def __post_init__(self) -> None: ...

    def _run(self) -> None:
        time.sleep(600)


def test_what_does_not_end_is_ended_and_told_apart(tmp_path: Path) -> None:
    [(_, outcome)] = outcomes([lambda: Sleeper((), None, Contexts(tmp_path), tmp_path / "0.told")], at_once=2)
    assert outcome.hung and outcome.noticed == "no answer"


def test_a_list_that_does_not_follow_the_code_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(
        ON_A_SCHEDULE.format(name="own", new="return 0").replace("begin // round_steps", "begin//round_steps")
    )
    with pytest.raises(ValueError, match="has 0 places"):
        read_faults(path)[0].mutated()
