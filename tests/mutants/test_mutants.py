"""The list of seeded faults follows the code and the tests, and its runner tells what is noticed from what is not."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mutants.__main__ import Fork, outcomes
from tests.mutants.faults import ROOT, Fault, read_faults

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


def test_there_are_faults_in_every_package() -> None:
    packages = {Path(fault.file).parts[fault.file.startswith("geotrain/")] for fault in FAULTS}
    assert len(FAULTS) >= 60
    folders = {path.parent.name for path in (ROOT / "geotrain").glob("*/__init__.py")}
    assert packages == folders | {"kernels", "launch"}


def run(path: Path, **faults: str) -> tuple[int, list[str]]:
    """The exit code and the lines of the runner. faults: name → what a round's schedule returns with it."""
    path.write_text("".join(ON_A_SCHEDULE.format(name=name, new=new) for name, new in faults.items()))
    command = [sys.executable, "-m", "tests.mutants", "--list", str(path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=500)
    print(done.stderr)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_it_kills_what_is_noticed_and_reports_what_is_not(tmp_path: Path) -> None:
    place = "begin // round_steps * round_steps"
    code, lines = run(
        tmp_path / "three.toml",
        own=f"at = {place} + step",
        broken="at = nothing_of_this_name",
        harmless=f"at = step * workers + {place}",
    )
    told = (re.match(r"(killed|hung|survived) +[0-9.]+ s  (\w+): ", line) for line in lines)
    verdicts = {found[2]: found[1] for found in told if found}
    assert verdicts == {"own": "killed", "broken": "killed", "harmless": "survived"}, lines
    assert code == 1 and json.loads(lines[-1]) | {"seconds": 0} == {"mutants": 3, "survived": 1, "seconds": 0}


class Sleeper(Fork):
    def _run(self) -> None:
        time.sleep(600)


def test_what_does_not_end_is_ended_and_told_apart(tmp_path: Path) -> None:
    [(_, outcome)] = outcomes([lambda: Sleeper((), None, 0.2, tmp_path / "0.told")], at_once=2)
    assert outcome.hung and outcome.noticed == "no answer"


def test_a_list_that_does_not_follow_the_code_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(
        ON_A_SCHEDULE.format(name="own", new="return 0").replace("begin // round_steps", "begin//round_steps")
    )
    with pytest.raises(ValueError, match="has 0 places"):
        read_faults(path)[0].mutated()
