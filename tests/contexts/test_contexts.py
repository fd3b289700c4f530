"""What is kept of tests finds those that execute a line, and what they take."""

from __future__ import annotations

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
    kept.keep(FILE, lines(FILE), {FIRST: 200.0, SECOND: 0.0})  # the second waits for the same, where it is alone
    contexts = kept.Contexts(folder)
    assert contexts.testing(SOURCE, [LAST]) == {FILE}
    assert contexts.within({FILE}, 60.0, [SOURCE]) == ([], 2)
    assert contexts.within({FILE}, 500.0, [SOURCE]) == ([SECOND, FIRST], 0)
    assert contexts.within({SECOND}, 60.0, [SOURCE]) == ([SECOND], 0)
