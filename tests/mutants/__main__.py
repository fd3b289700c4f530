"""Seeds faults one at a time and runs the tests that should notice them: `python -m tests.mutants [-k NAME]` those of
the kept list, `--sample 200 --seed 7` those drawn over the whole product, each with the tests that execute its line.

Each fault is run in a fork of this process, which has imported the libraries but nothing of the product. In the
fork's own mount namespace the changed file lies over the checkout's, so that every process it starts has the fault,
also a wheel's; other processes do not see it. Tests that noticed something then run without a fault: a red test
notices nothing.
"""

from __future__ import annotations

import argparse
import ctypes
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

from tests.contexts.kept import Contexts, file_of
from tests.mutants.drawn import draw
from tests.mutants.faults import FAULTS, ROOT, Fault, read_faults
from tests.support.process_trees import MARK, marked

LIBRARIES = (
    *("torch", "numpy", "grpc", "pydantic", "cryptography.x509", "msgpack", "psutil", "scipy.optimize", "triton"),
    *("fsspec", "pyarrow.parquet", "prometheus_client", "typer", "rich.live", "requests", "transformers"),
    "torch._inductor",
)
FORKS = multiprocessing.get_context("fork")
# A hang, or a wait for what never comes, is ended after this and a multiple of the tests' own time without a fault.
GRACE_S, GRACE_TIMES = 30.0, 4.0
FILES = 4  # of tests are collected at a time: the first often notice
UNABLE = 70  # the exit code of a fork that could not lay the fault over the file
CLONE_NEWNS, CLONE_NEWUSER, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x1000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Outcome:
    """What the tests of one fork said. noticed: by the first test that failed, without a fault all that did, a line
    each; "": none did."""

    noticed: str
    seconds: float
    hung: bool = False


@dataclass
class Fork:
    """One run of some tests in a fork. fault: None: without one. told: the file to which the fork writes."""

    tests: tuple[str, ...]
    fault: Fault | None
    contexts: Contexts
    told: Path
    begun_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        files = {file_of(test) for test in self.tests}
        usual_s = sum(map(self.contexts.usual_s, self.tests)) + sum(map(self.contexts.usual_s, files))
        self.within_s = GRACE_S * (1 + len(files)) + GRACE_TIMES * usual_s

    def start(self) -> BaseProcess:
        self.process = FORKS.Process(target=self._run)
        self.process.start()
        return self.process

    def _run(self) -> None:
        """Run the tests, and end without Python's own end, which would wait for what a fault has left behind."""
        os.setsid()
        os.environ[MARK] = self.told.name
        with self.told.with_suffix(".log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(ROOT)
        if self.fault is not None:
            self._seed(self.fault)
        os._exit(self.judge())

    def judge(self) -> int:
        """Run the tests with the fault, some files at a time, and tell what notices it. Returns an exit code."""
        files, only = list(dict.fromkeys(map(file_of, self.tests))), self.told.with_suffix(".tests")
        only.write_text("\n".join(self.tests))
        for begin in range(0, len(files), FILES):
            told = Told(self.told, self.contexts)
            words = ["-p", "no:cacheprovider", f"--only={only}", f"--basetemp={self.told.with_suffix('')}-{begin}"]
            if self.fault is not None:
                words.append("-x")
            code = pytest.main([*words, *files[begin : begin + FILES]], [told])
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
                told.write(f"pytest ended with {code!r}")
            if code != pytest.ExitCode.OK and self.fault is not None:
                return code
        return 0

    def _seed(self, fault: Fault) -> None:
        source = self.told.with_suffix(".py")
        source.write_text(fault.mutated())
        moment = int(self.told.stem) + 1  # of its own: what Python has compiled of other sources is not of this one
        os.utime(source, (moment, moment))
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        lay_over(ROOT / fault.file, source)

    def end(self, hung: bool) -> Outcome:
        """End the fork, and all that it has started."""
        seconds = time.monotonic() - self.begun_s
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()  # it may not have made its group yet
        self.process.join()
        for pid in marked({MARK: self.told.name}):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.exitcode == UNABLE:
            raise RuntimeError(self.told.with_suffix(".log").read_text())
        noticed = self.told.read_text().rstrip("\n") if self.told.exists() else ""
        if self.process.exitcode and not noticed:
            noticed = "no answer" if hung else f"the process ended with {self.process.exitcode}"
        return Outcome(noticed, seconds, hung)


def lay_over(file: Path, source: Path) -> None:
    """Show this process, and those it starts, the source as the file's content."""
    user, root = os.geteuid(), os.geteuid() == 0
    if _libc.unshare(CLONE_NEWNS | (0 if root else CLONE_NEWUSER)) == 0:
        if not root:
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        _libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        _libc.mount(bytes(source), bytes(file), None, MS_BIND, None)
    if file.read_bytes() != source.read_bytes():
        print(f"no mount namespace: {os.strerror(ctypes.get_errno())}", file=sys.stderr, flush=True)
        os._exit(UNABLE)


class Told:
    """A plug-in of pytest: writes failures to a file, and ends what takes much longer than usual. Hypothesis neither
    shrinks nor remembers here."""

    def __init__(self, path: Path, contexts: Contexts) -> None:
        self.path, self.contexts = path, contexts

    def write(self, what: str) -> None:
        with self.path.open("a") as told:
            told.write(what.replace("\n", " ") + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        settings.register_profile(
            "mutants", settings(), phases=(Phase.explicit, Phase.generate), database=None, derandomize=True
        )
        settings.load_profile("mutants")

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        usual_s = self.contexts.usual_s(file_of(item.nodeid))  # any may be the first to ask for what the file shares
        item.add_marker(pytest.mark.timeout(GRACE_S + GRACE_TIMES * usual_s), append=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(f"collecting {report.nodeid}")


def outcomes(
    forks: Iterable[Callable[[], Fork]], at_once: int, until_s: float = float("inf")
) -> Iterator[tuple[Fork, Outcome]]:
    """Run so many forks at a time; give each when it has ended or its time is over. None begins after `until_s`."""
    todo, running = deque(forks), dict[int, Fork]()
    while running or (todo and time.monotonic() < until_s):
        while todo and len(running) < at_once and time.monotonic() < until_s:
            fork = todo.popleft()()
            running[fork.start().sentinel] = fork
        first_s = min(fork.begun_s + fork.within_s for fork in running.values())
        ended = wait(list(running), timeout=max(0.0, first_s - time.monotonic()))
        late = [s for s, fork in running.items() if time.monotonic() >= fork.begun_s + fork.within_s]
        for sentinel in {*ended, *late}:
            fork = running.pop(sentinel)  # type: ignore[arg-type]
            yield fork, fork.end(hung=sentinel not in ended)


def run(faults: list[Fault], contexts: Contexts, at_once: int, minutes: float) -> dict[str, float]:
    """Print what became of each fault, and last those that survived. Returns how many there were of each kind."""
    begin_s = time.monotonic()
    for library in LIBRARIES:
        importlib.import_module(library)
    known = [name for name in sys.modules if name.partition(".")[0] == "geotrain"]
    assert not known, f"forks have {known} already, and would not read it with a fault"
    noticed, survived = dict[str, str](), list[Fault]()
    with tempfile.TemporaryDirectory() as folder:
        numbers = count()

        def make(tests: tuple[str, ...], fault: Fault | None = None) -> Fork:
            return Fork(tests, fault, contexts, Path(folder) / f"{next(numbers)}.told")

        until_s = begin_s + 60 * minutes
        for fork, outcome in outcomes([partial(make, fault.tests, fault) for fault in faults], at_once, until_s):
            fault = fork.fault
            assert fault is not None
            if outcome.noticed:
                noticed[fault.name] = outcome.noticed.partition("\n")[0]
            else:
                survived.append(fault)
            verdict = "survived" if not outcome.noticed else "hung" if outcome.hung else "noticed"
            print(f"{verdict:8} {outcome.seconds:6.1f} s  {fault.name}: {fault.breaks}", flush=True)
            print(f"{'':20}{noticed.get(fault.name) or f'of {len(fork.tests)} tests'}", flush=True)
        red = red_without(noticed, make, at_once)
    ended = {fault.name for fault in survived} | noticed.keys()
    why = {
        **{name: f"{test} is red without it" for name, test in noticed.items() if test in red},
        **{fault.name: f"{fault.left_out} more tests execute it" for fault in survived if fault.left_out},
        **{fault.name: "there was no time for it" for fault in faults if fault.name not in ended},
    }
    for fault in faults:
        if fault.name in why:
            print(f"undecided {fault.name}: {fault.breaks}; {why[fault.name]}")
        elif fault in survived:
            print(f"survived {fault.name}: {fault.breaks}{'' if fault.tests else '; no test executes it'}")
    lived = len({fault.name for fault in survived} - why.keys())
    return {
        "drawn": len(faults),
        "noticed": len(faults) - lived - len(why),
        "survived": lived,
        "undecided": len(why),
        "seconds": round(time.monotonic() - begin_s, 1),
    }


def red_without(noticed: dict[str, str], make: Callable[..., Fork], at_once: int) -> set[str]:
    """Those of the tests which noticed faults that are red without one, too."""
    by_file: dict[str, list[str]] = {}
    for test in sorted({test.removeprefix("collecting ") for test in noticed.values()}):
        if (ROOT / file_of(test)).is_file():
            by_file.setdefault(file_of(test), []).append(test)
    red = set[str]()
    for fork, outcome in outcomes([partial(make, tuple(tests)) for tests in by_file.values()], at_once):
        if failed := set(outcome.noticed.splitlines()):
            print(f"red without a fault, after {outcome.seconds:.1f} s: {', '.join(sorted(failed))}", flush=True)
        red |= (
            failed if failed <= set(noticed.values()) else {*failed, *fork.tests}
        )  # it ended before all were played
    return red


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "-k", nargs="*", default=[""], metavar="NAME", help="only those with one of these in the name"
    )
    parser.add_argument("--list", type=Path, default=FAULTS, metavar="FILE", help="in place of the kept list")
    parser.add_argument("--sample", type=int, default=0, help="draw so many faults, in place of a list")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", default=[""], help="draw only from files whose names begin so")
    parser.add_argument("--seconds", type=float, default=120.0, help="of tests for each fault, as recorded, at most")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no more faults begin")
    parser.add_argument("-n", type=int, default=2, metavar="FORKS", help="at a time")
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    contexts = Contexts()
    drawn = args.sample, args.seed, contexts, args.seconds, tuple(args.files)
    found = draw(*drawn) if args.sample else read_faults(args.list)
    faults = [fault for fault in found if any(name in fault.name for name in args.k)]
    for fault in faults:
        fault.mutated()  # the whole list follows the code, or nothing runs
    result = run(faults, contexts, args.n, args.minutes)
    print(json.dumps(result))
    return min(1, int(result["survived"]))


if __name__ == "__main__":
    sys.exit(main())
