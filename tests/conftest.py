"""The order of the suite, where its ranks compute, and a word on what was left out."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# An example may take any time: what else the machine does is no fault of the code.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: processes that take files in turn then end at about the same time. Those that
    state timeouts play whole runs, which wait for much: between them come those that compute. Long ones begin."""
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


@pytest.fixture
def geotrain(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Says a command of GeoTrain's in this process: see `tests.support.command_line`."""
    from tests.support.command_line import running

    return running(monkeypatch, capfd)


LEFT_OUT = pytest.StashKey[dict[str, int]]()  # file → slow tests of it that -m has left out


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = {}


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow"):
            left_out, file = item.config.stash[LEFT_OUT], item.nodeid.partition("::")[0]
            left_out[file] = left_out.get(file, 0) + 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist collects, and so deselects, for itself: it tells the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT].update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (left_out := config.stash[LEFT_OUT]) and not config.option.keyword:
        terminalreporter.section("left out")
        for file, count in sorted(left_out.items()):
            terminalreporter.write_line(f"{count:3} slow in {file}")
        terminalreporter.write_line(f"{sum(left_out.values())} slow tests were not run; `make test` runs them")
