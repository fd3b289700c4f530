"""What is kept of tests finds those that execute a line, and what they take."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from coverage.numbits import nums_to_numbits

from tests.contexts import kept

FILE, SOURCE = "tests/contexts/test_contexts.py", "launch/backoff.py"
LAST = kept.tree(SOURCE).body[-1].end_lineno or 0
FIRST, SECOND = f"{FILE}::first", f"{FILE}::second"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept, "KEPT", tmp_path)
    monkeypatch.setattr(kept, "keep_source", kept.keep_source.__wrapped__)
    return tmp_path


def lines(*contexts: str, of: int = LAST) -> dict[str, kept.Lines]:
    return {context: {SOURCE: nums_to_numbits([of])} for context in contexts}


def test_a_test_that_failed_is_known_by_what_it_executed_before(folder: Path) -> None:
    kept.keep(FILE, lines(FIRST, SECOND), {FIRST: 1.0, SECOND: 1.0})
    kept.keep(FILE, lines(FIRST, SECOND, of=1), {FIRST: 1.0, SECOND: 1.0}, failed=[FIRST])
    assert kept.Contexts(folder).testing(SOURCE, [LAST]) == {FIRST}


def test_the_first_of_a_file_takes_what_its_tests_share(folder: Path) -> None:
    kept.keep(FILE, lines(FILE), {FIRST: 1.0, SECOND: 0.0}, {FIRST: 200.0, SECOND: 200.0})
    contexts = kept.Contexts(folder)
    assert contexts.testing(SOURCE, [LAST]) == {FILE}
    assert contexts.within({FILE}, 60.0, [SOURCE]) == ([], 2)
    assert contexts.within({SECOND}, 60.0, [SOURCE]) == ([], 1), "alone it waits for the same"
    assert contexts.within({FILE}, 201.5, [SOURCE]) == ([SECOND], 1)
    assert contexts.within({FILE}, 500.0, [SOURCE]) == ([SECOND, FIRST], 0)


def test_what_executes_a_line_itself_goes_before_what_does_as_it_is_imported(folder: Path) -> None:
    other = f"{FILE.removesuffix('.py')}_more.py"
    kept.keep(FILE, lines(FIRST), {FIRST: 1.0})
    kept.keep(other, {f"{other}::": {SOURCE: nums_to_numbits([1, LAST])}}, {f"{other}::test": 1.0})
    assert kept.Contexts(folder).testing(SOURCE, [LAST]) == {FIRST}
    kept.keep(FILE, {}, {FIRST: 1.0})
    assert kept.Contexts(folder).testing(SOURCE, [LAST]) == {other}


RECORDED = """
from pathlib import Path
from tests.contexts import kept, recorder
kept.KEPT = recorder.KEPT = Path(__file__).parent

def pytest_configure(config):
    config.pluginmanager.register(recorder.Recorder())
"""
SHARED = """
import time
import pytest
from geotrain.config import RestartConfig
from geotrain.launch.backoff import RestartBackoff

@pytest.fixture(scope="module")
def slow():
    time.sleep(1)

def test_first(slow): RestartBackoff(RestartConfig()).next_pause_s(0.0)
def test_second(slow): ...
def test_alone(): ...
"""


def test_what_fixtures_and_imports_do_is_no_test_s_own(folder: Path) -> None:
    (folder / "conftest.py").write_text(RECORDED)
    (folder / "test_it.py").write_text(SHARED)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={folder}", str(folder)]
    done = subprocess.run(command, cwd=kept.ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    found = kept.Contexts(folder)
    first, second, alone = (f"test_it.py::test_{name}" for name in ("first", "second", "alone"))
    assert found.seconds[first] < found.shared[first] == found.shared[second] and found.shared[alone] == 0.0
    assert set(chain(*found.lines(SOURCE).values())) == {first, "test_it.py::"}
