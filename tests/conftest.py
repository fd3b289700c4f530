"""The order of the suite, where its ranks compute, what is left to `make test-all`, and its processor time."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import os
import subprocess
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from tests.support.drawn import lot, seed_of

# An example may take any time: what else the machine does is no fault of the code.
settings.register_profile("suite", deadline=None, max_examples=30)
settings.register_profile("all", deadline=None, max_examples=200)

ROOT = Path(__file__).parents[1]
BEGAN_S = time.monotonic()
MOST_CASES = 12  # of a long test, that a change plays

# Small worlds have more ranks than a machine has GPUs, and expect the bits of a CPU; processes that tests start
# inherit it. Tests marked `gpu` ask torch itself for the device. It is set before anything imports DeepSpeed.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# Several tests run at a time: threads of one would only wait for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# While tests are collected, it would look through all of torch again and again; and afterwards at each turn.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests come first: processes that take files in turn then end at about the same time. Those that
    state timeouts play whole runs, which wait for much: between them come those that compute. Long ones begin."""
    leave_out_long(config, items)
    if config.option.only:
        return only(items, config.option.only.read_text().splitlines())
    if config.option.within is not None:
        seed = seed_of("LONG_SEED")
        return items.sort(key=lambda item: lot(seed, str(item.path.relative_to(ROOT))))
    asked_s, slow = Counter[Path](), Counter[Path]()
    for item in items:
        if timeout := item.get_closest_marker("timeout"):
            asked_s[item.path] += timeout.args[0]
        elif item.get_closest_marker("slow"):
            slow[item.path] += 1
    runs = [path for path, _ in asked_s.most_common()]
    others = [path for path, _ in slow.most_common() if path not in asked_s]
    place = {path: i / len(kind) for kind in (runs, others) for i, path in enumerate(kind)}
    items.sort(key=lambda item: place.get(item.path, 1.0))


def only(items: list[pytest.Item], tests: list[str]) -> None:
    """Keep, in their order, those that are named: each by itself, without its case, or by its file."""
    place = {test: i for i, test in enumerate(tests)}

    def where(item: pytest.Item) -> int:
        names = item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]
        return next((place[name] for name in names if name in place), -1)

    items[:] = sorted((item for item in items if where(item) >= 0), key=where)


@pytest.fixture
def geotrain() -> Any:
    """Give `say`, which runs a command of GeoTrain's in this process; what it needs is slow to import."""
    from tests.support.command_line import say

    return say


# -- long tests: whole spaces, long faults, browsers; `@pytest.mark.long("kernels")` names the paths that one covers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="long tests too, and Hypothesis' full profile")
    parser.addoption("--rewrite", action="store_true", help="scenarios are written anew (see tests/scenarios)")
    parser.addoption("--only", type=Path, metavar="FILE", help="the tests in its lines, in their order")
    parser.addoption("--contexts", action="store_true", help="record which lines each test executes")
    parser.addoption("--since", metavar="COMMIT", help="long tests too of what differs from this commit")
    parser.addoption("--within", type=float, metavar="SECONDS", help="files in drawn order; none begins later")


def changed_since(commit: str) -> list[str]:
    """Paths that differ between a commit and the working tree, relative to the repository."""
    command = ["git", "diff", "--name-only", commit, "--"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("all" if config.option.all else "suite")
    if config.option.contexts and (not config.getoption("tx", None) or hasattr(config, "workerinput")):
        from tests.contexts.recorder import Recorder

        config.pluginmanager.register(Recorder())


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a long test whose paths do not exist: no change would ever run it."""
    for mark in item.iter_markers("long"):
        if not mark.args or not all((ROOT / path).exists() for path in mark.args):
            raise pytest.UsageError(f"{item.nodeid}: `long` wants the paths that it covers, and has {mark.args}")


def leave_out_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the long tests that were not asked for: neither all, nor what they cover has changed. Of one with many
    cases a change plays those that the commit draws, or LONG_SEED."""
    if config.option.all:
        return
    changed = changed_since(config.option.since) if config.option.since else []

    def asked(item: pytest.Item) -> bool:
        covered = [path for mark in item.iter_markers("long") for path in mark.args]
        own = str(item.path.relative_to(ROOT))
        return not covered or any(path == own or Path(path).is_relative_to(c) for path in changed for c in covered)

    cases = defaultdict[str, list[pytest.Item]](list)
    for item in (item for item in items if asked(item) and item.get_closest_marker("long")):
        cases[item.nodeid.partition("[")[0]].append(item)
    for each in cases.values():
        each.sort(key=lambda item: lot(seed_of("LONG_SEED"), item.nodeid.partition("[")[2]))
    too_many = {item for each in cases.values() for item in each[MOST_CASES:]}
    left_out = [item for item in items if item in too_many or not asked(item)]
    items[:] = [item for item in items if item not in too_many and asked(item)]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    within_s = item.config.option.within
    if within_s is not None and time.monotonic() - BEGAN_S > within_s:
        pytest.skip(f"no time left for {item.path.relative_to(ROOT)}")


# -- processor time: of this process, its workers and all that they waited for


def processor_seconds() -> float:
    """Processor seconds of this process, of its children, and of those that its forkserver made."""
    forkserver = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    with suppress(psutil.Error):
        return sum(os.times()[:4]) + (sum(psutil.Process(forkserver).cpu_times()[:4]) if forkserver else 0.0)
    return sum(os.times()[:4])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["processor_s"] = processor_seconds()


WORKERS = pytest.StashKey[dict[str, float]]()  # worker → its processor seconds


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    seconds = node.config.stash.setdefault(WORKERS, {})
    seconds[node.gateway.id] = getattr(node, "workeroutput", {}).get("processor_s", 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    own, workers = os.times(), config.stash.get(WORKERS, {})
    total = own.user + own.system + sum(workers.values()) if workers else processor_seconds()
    terminalreporter.write_line(f"{total:.0f} s of processor time")
