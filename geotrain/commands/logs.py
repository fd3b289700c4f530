"""Reads what a run has written on this machine: log files as one stream, and an update's way from the events."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path

from geotrain.config import ConfigError, Topology, load_cluster, load_run
from geotrain.monitor.events import Follower
from geotrain.monitor.update_trace import RunFacts, UpdateTrace, trace
from geotrain.plan.model.answering import settled_outer, updates_per_send

POLL_S = 0.25
READ_BYTES = 1 << 16  # of one file, before the next one's turn


def stream(folder: Path, names: Sequence[str], lines: int, goes_on: Callable[[], bool]) -> Iterator[str]:
    """The last lines of each file, as far as they lie in its last READ_BYTES; then, for as long as `goes_on` says so,
    what is written to them. names: of processes; none: all. Raises ConfigError: there is no such log.
    """
    found = {path.stem: path for path in sorted((folder / "logs").glob("*.log"))}
    if not found:
        raise ConfigError(f"{folder}/logs: no log files here; a far region's lie in the same folder on its machine")
    for name in names:
        if name not in found:
            raise ConfigError(f"{folder}/logs: no log of {name!r}; there are: {', '.join(found)}")
    chosen = list(names) or list(found)

    def prefixed(name: str, line: bytes) -> str:
        text = line.decode(errors="replace")
        return text if len(chosen) == 1 else f"{name}: {text}"

    with ExitStack() as opened:
        files = {name: opened.enter_context(found[name].open("rb")) for name in chosen}
        rests = dict.fromkeys(files, b"")  # a line that is not whole yet waits for its end
        for name, file in files.items():
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            *whole, rests[name] = file.read().split(b"\n")
            yield from (prefixed(name, line) for line in (whole[-lines:] if lines else []))
        more = True
        while more:
            more, quiet = goes_on(), True  # asked before reading: what was written until the run ended is still read
            for name, file in files.items():
                while read := file.read(READ_BYTES):
                    quiet = False
                    *whole, rests[name] = (rests[name] + read).split(b"\n")
                    yield from (prefixed(name, line) for line in whole)
            if quiet and more:
                time.sleep(POLL_S)
        yield from (prefixed(name, rest) for name, rest in rests.items() if rest)


def trace_update(folder: Path, update: str) -> UpdateTrace:
    """The way of an update ("eu-0/2.17"; "eu/2.5" is one of a region) through the run in this folder, from the events
    of all processes that lie here. Raises ConfigError: no run, no such member, or no such id."""
    run, cluster = load_run(folder / "run.json"), load_cluster(folder / "cluster.json")
    every = updates_per_send(settled_outer(run, len(cluster.workers)))
    facts = RunFacts(Topology(run, cluster).server_of, every, getattr(run.outer.rule, "ledger", True))
    paths = {path.stem: path for path in (folder / "events").glob("*.jsonl")}
    paths |= {path.parent.name: path for path in (folder / "servers").glob("*/events.jsonl")}
    logs = {}
    for name, path in paths.items():
        with closing(Follower(path, past_only=True)) as follower:
            logs[name] = list(follower.read())
    try:
        return trace(update, logs, facts)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def shown(found: UpdateTrace) -> Iterator[str]:
    """The lines that show an update's way: time of day, delay since the stage before, process, stage."""
    yield found.update
    width = max((len(step.where) for step in found.steps), default=0)
    before_s = found.steps[0].time_s if found.steps else 0.0
    for step in found.steps:
        clock = datetime.fromtimestamp(step.time_s).isoformat(" ", "milliseconds")
        yield f"  {clock}  {step.time_s - before_s:+9.3f} s  {step.where:{width}}  {step.what}"
        before_s = step.time_s
    since = f" (for {time.time() - before_s:,.0f} s)" if found.steps else ""
    for where in found.held:
        yield f"held{since}: {where}"
    if not found.held:
        yield "arrived: it is in the global weights, and its answers are adopted"
