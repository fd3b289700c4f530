"""Seeds known faults one at a time and runs the tests that should notice them: `python -m tests.mutants [-k NAME]`.

Each fault is run in a fork of this process, which has imported the libraries but nothing of the product, so the fork
imports the product with the fault in it. First the tests run without a fault, since a red test notices nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests.mutants.faults import FAULTS, ROOT, Fault, read_faults

LIBRARIES = ("torch", "numpy", "grpc", "pydantic", "cryptography.x509", "msgpack", "psutil")
FORKS = multiprocessing.get_context("fork")
# A hang, or a wait for what never comes, is ended after this and a multiple of the tests' own time without a fault.
GRACE_S, GRACE_TIMES = 20.0, 4.0
SHOWN = 200  # characters of a failure


@dataclass
class Outcome:
    """What the tests of one fork said. noticed: by the first test that failed; "": none did."""

    noticed: str
    seconds: float
    hung: bool = False


@dataclass
class Fork:
    """One run of some tests in a fork. fault: None: without one. told: the file to which the fork writes."""

    tests: tuple[str, ...]
    fault: Fault | None
    within_s: float
    told: Path
    begun_s: float = field(default_factory=time.monotonic)

    def start(self) -> BaseProcess:
        self.process = FORKS.Process(target=self._run)
        self.process.start()
        return self.process

    def _run(self) -> None:
        """Run the tests, and end without Python's own end, which would wait for what a fault has left behind."""
        os.setsid()
        with self.told.with_suffix(".log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(ROOT)
        if self.fault is not None:
            self._seed(self.fault)
        os._exit(self.judge(Told(self.told)))

    def judge(self, told: Told) -> int:
        """Run the tests with the fault, and tell what notices it. Returns an exit code."""
        code = pytest.main(
            ["-x", "-p", "no:cacheprovider", f"--basetemp={self.told.with_suffix('')}", *self.tests], [told]
        )
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
            told.write(f"pytest ended with {code!r}")
        return code

    def _seed(self, fault: Fault) -> None:
        from tests.mutants.hook import sitecustomize

        source = self.told.with_suffix(".py")
        source.write_text(fault.mutated())
        os.environ[sitecustomize.MUTATED] = str(ROOT / fault.file)
        os.environ[sitecustomize.SOURCE] = str(source)
        paths = [str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        sitecustomize.install()

    def end(self, hung: bool) -> Outcome:
        """End the fork, and all that it has started and that did not leave its group."""
        seconds = time.monotonic() - self.begun_s
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()  # it may not have made its group yet
        self.process.join()
        noticed = self.told.read_text() if self.told.exists() else ""
        if self.process.exitcode and not noticed:
            noticed = "no answer" if hung else f"the process ended with {self.process.exitcode}"
        return Outcome(noticed, seconds, hung)


class Told:
    """A plug-in of pytest: writes the first failure to a file. Hypothesis neither shrinks nor remembers here."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, what: str) -> None:
        if not self.path.exists():
            self.path.write_text(what[:SHOWN])

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        settings.register_profile(
            "mutants", settings(), phases=(Phase.explicit, Phase.generate), database=None, derandomize=True
        )
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(f"collecting {report.nodeid}")


def outcomes(forks: Iterable[Callable[[], Fork]], at_once: int) -> Iterator[tuple[Fork, Outcome]]:
    """Run so many forks at a time; give each when it has ended or its time is over."""
    todo, running = deque(forks), dict[int, Fork]()
    while todo or running:
        while todo and len(running) < at_once:
            fork = todo.popleft()()
            running[fork.start().sentinel] = fork
        first_s = min(fork.begun_s + fork.within_s for fork in running.values())
        ended = wait(list(running), timeout=max(0.0, first_s - time.monotonic()))
        late = [s for s, fork in running.items() if time.monotonic() >= fork.begun_s + fork.within_s]
        for sentinel in {*ended, *late}:
            fork = running.pop(sentinel)  # type: ignore[arg-type]
            yield fork, fork.end(hung=sentinel not in ended)


def without_faults(faults: list[Fault], make: Callable[..., Fork], at_once: int) -> dict[str, Outcome]:
    """Run all the faults' tests as the code is, those of one file in one fork. Returns the outcomes by file."""
    by_file: dict[str, dict[str, None]] = {}
    for test in (test for fault in faults for test in fault.tests):
        by_file.setdefault(file_of(test), {})[test] = None
    # a whole file has all its tests
    forks = [partial(make, (f,) if f in tests else tuple(tests)) for f, tests in by_file.items()]
    healthy = {}
    for fork, outcome in outcomes(forks, at_once):
        file = file_of(fork.tests[0])
        healthy[file] = outcome
        said = f"red: {outcome.noticed}" if outcome.noticed else "green"
        print(f"         {outcome.seconds:6.1f} s  {file}, without a fault: {said}", flush=True)
    return healthy


def file_of(test: str) -> str:
    return test.partition("::")[0]


def run(faults: list[Fault], at_once: int) -> dict[str, float]:
    """Print what became of each fault. Returns how many there were, how many survived, and the seconds."""
    begin_s, survived = time.monotonic(), 0
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        numbers = count()

        def make(tests: tuple[str, ...], fault: Fault | None = None, within_s: float = 600.0) -> Fork:
            return Fork(tests, fault, within_s, Path(folder) / f"{next(numbers)}.told")

        healthy = without_faults(faults, make, at_once)

        def seeded(fault: Fault) -> Fork:
            usual_s = sum(healthy[file].seconds for file in {file_of(test) for test in fault.tests})
            return make(fault.tests, fault, GRACE_S + GRACE_TIMES * usual_s)

        for fork, outcome in outcomes([partial(seeded, fault) for fault in faults], at_once):
            fault = fork.fault
            assert fault is not None
            red = any(healthy[file_of(test)].noticed for test in fault.tests)
            lives = red or not outcome.noticed
            survived += lives
            verdict = "survived" if lives else "hung" if outcome.hung else "killed"
            by = f"{fault.breaks}" if lives else f"by {outcome.noticed}"
            print(f"{verdict:8} {outcome.seconds:6.1f} s  {fault.name}: {by}", flush=True)
    return {"mutants": len(faults), "survived": survived, "seconds": round(time.monotonic() - begin_s, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "-k", nargs="*", default=[""], metavar="NAME", help="only faults with one of these in the name"
    )
    parser.add_argument("--list", type=Path, default=FAULTS, metavar="FILE", help="in place of the kept list")
    parser.add_argument("-n", type=int, default=2, metavar="FORKS", help="at a time")
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    faults = [fault for fault in read_faults(args.list) if any(name in fault.name for name in args.k)]
    for fault in faults:
        fault.mutated()  # the whole list follows the code, or nothing runs
    result = run(faults, args.n)
    print(json.dumps(result))
    return min(1, int(result["survived"]))


if __name__ == "__main__":
    sys.exit(main())
