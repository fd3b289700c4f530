"""A plug-in of pytest that records which lines each test executes, in its own process and in those that it starts.

Not recorded is what a process ran that was killed, or started by `python -S`, or with another environment.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage
from coverage.numbits import numbits_union

from tests.contexts.kept import KEPT, ROOT, Lines, keep

CONTEXT, STARTS = "GEOTRAIN_TESTED", "COVERAGE_PROCESS_START"  # in the environment of processes that a test starts
SETTINGS = f"""
[run]
data_file = {{folder}}/lines
parallel = true
context = ${{{CONTEXT}-}}
patch = _exit
disable_warnings = no-data-collected, module-not-measured, no-ctracer
include =
    {ROOT}/geotrain/*
    {ROOT}/kernels/*
    {ROOT}/launch/*
    {ROOT}/tests/*
    */site/geotrain/*
"""


def begin(settings: str, context: str) -> None:
    """In a process that a server of forks made: it has the context of the test that started that server."""
    if (inherited := Coverage.current()) is not None:
        inherited.stop()
    os.environ |= {STARTS: settings, CONTEXT: context}
    Coverage(config_file=settings).start()


class Carried:
    """Goes with each process that multiprocessing starts, and begins to record where it is unpickled."""

    def __init__(self, settings: str, context: str) -> None:
        self.given = settings, context

    def __reduce__(self) -> Any:
        return begin, self.given


class Recorder:
    """A context is a test's name, or a file's: of its wide fixtures; with `::` at its end, of what its import
    executes."""

    def __init__(self) -> None:
        KEPT.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(dir=KEPT))
        self.settings = self.folder / "settings"
        self.settings.write_text(SETTINGS.replace("{folder}", str(self.folder)))
        self.seconds: dict[str, float] = defaultdict(float)
        self.fixtures_s: dict[tuple[str, str], float] = {}  # by file and name; of wide ones
        self.uses: dict[str, Collection[str]] = {}  # by test
        self.failed: set[str] = set()
        self.context = os.environ[CONTEXT] = ""
        self.coverage = Coverage(config_file=str(self.settings))
        self.coverage.start()
        os.environ[STARTS] = str(self.settings)

    def begin(self, context: str) -> None:
        self.context = os.environ[CONTEXT] = context
        carried = Carried(str(self.settings), context)
        multiprocessing.current_process()._config["context"] = carried  # type: ignore[attr-defined]
        self.coverage.switch_context(context)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        if isinstance(collector, pytest.Module):
            self.begin(f"{collector.nodeid}::")
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.begin(item.nodeid)
        self.uses[item.nodeid] = getattr(item, "fixturenames", ())
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        context, began_s = self.context, time.monotonic()
        self.begin(file := context.partition("::")[0])
        try:
            return (yield)
        finally:
            self.begin(context)
            self.fixtures_s[file, fixturedef.argname] = took_s = time.monotonic() - began_s
            if context != file:
                self.seconds[context] -= took_s

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        lines: dict[str, Lines] = defaultdict(dict)
        for context, file, bits in recorded(self.folder):
            of = lines[context].setdefault(file, bits)
            lines[context][file] = numbits_union(of, bits)
        for file in {test.partition("::")[0] for test in self.seconds}:
            own = {context: of for context, of in lines.items() if context.partition("::")[0] == file}
            seconds = {test: s for test, s in self.seconds.items() if test.partition("::")[0] == file}
            shared = {test: sum(self.fixtures_s.get((file, n), 0.0) for n in self.uses[test]) for test in seconds}
            keep(file, own, seconds, shared, self.failed)
        shutil.rmtree(self.folder)


def recorded(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Each context, file and lines that processes have left in the folder. One that was killed leaves half a file."""
    query = (
        "select context.context, file.path, numbits from line_bits "
        "join context on context.id = context_id join file on file.id = file_id"
    )
    for path in sorted(folder.glob("lines.*")):
        with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as database:
            for context, file, bits in database.execute(query).fetchall():
                if context and (name := in_checkout(file)):
                    yield context, name, bits


def in_checkout(file: str) -> str:
    """The path in the checkout of a file that was executed, there or as a wheel has it; "": it has none."""
    if file.startswith(f"{ROOT}/"):
        name = file.removeprefix(f"{ROOT}/")
    else:
        name = file.rpartition("/site/")[2]
        if name.startswith(("geotrain/kernels/", "geotrain/launch/")):
            name = name.removeprefix("geotrain/")
    return name if (ROOT / name).is_file() else ""
