"""Each system call that changes a file goes wrong, one at a time and in every way: what was acknowledged is there.

    python -m benchmarks.crash_points            # every call, or as many as ten minutes allow
    python -m benchmarks.crash_points --seconds 3600
    python -m benchmarks.crash_points --quick    # some of them, in some seconds
    python -m benchmarks.crash_points --only checkpoint

A life of a region's server, of the global server, of a worker's checkpoints, of `export` and of `prepare` is
repeated, and at each of its calls that change a file (writes, opens that create, renames, deletions, fsyncs, …)

    before    the process ends before the call (and so after the one before it)
    half      it ends after half of a write
    power     it ends after the call, and all that was not synced is gone: contents of files, names in folders
    full      this call and all later ones find the disk full
    broken    this call alone gives EIO

The same for a second life, which begins with what a first one left that ended in the middle. Then a new process reads
the folder: it must come up, with everything that was acknowledged and nothing twice, bit for bit. With a full disk
the life itself must not end by any other error.

The last line is JSON: `points` tried, `broken` ones among them (the first of each life are told on standard error),
`all` that there are, and the same by life. At last, power is cut with all syncs forgotten, until something is found
broken: `noticed` is 1 then, and what was found is told as well.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import command_line, report, units_by_ending
from benchmarks.crash_points.disk import AT, SHIM, Durable, attempt, preloaded

MEMORY = Path("/dev/shm")  # where inode numbers are not used again, and a sync costs nothing
QUICK_S, LONGEST_S = 8.0, 540.0
SHOWN = 5
SUBJECTS = ("region", "global", "checkpoint", "export", "prepare")


class Explorer:
    """All points of one life. prepare: puts what the life begins with into its folder, and returns how many
    acknowledgements were given for it."""

    def __init__(self, name: str, subject: Any, life: str, scratch: Path, prepare: Callable[[Path], int]) -> None:
        self.name, self.subject, self.scratch, self.prepare = name, subject, scratch, prepare
        self.life = getattr(subject, life)
        self.points = self.broken = 0
        how, said = self._live("before", 0)[:2]
        assert how == "ended", f"{name} does not even live where nothing goes wrong: {how}"
        self.calls: str = said[-1]  # their kinds

    def _live(self, how: str, at: int) -> tuple[str, list[Any], Path, int]:
        folder = self.scratch / "folder"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        before = self.prepare(folder)
        if how == "power":
            Durable(folder).begin()
        ended, said = attempt(folder, lambda say: self.life(folder, say), how, at)
        return ended, said, folder, before

    def explore(self, how: str, at: int) -> None:
        ended, said, folder, before = self._live(how, at)
        acknowledged = max((n for n in (said[:-1] if ended == "ended" else said)), default=0) or before
        fault = ""
        if how == "full" and ended != "ended" and "No space left on device" not in ended:
            fault = f"a full disk ended it: {ended}"
        if how == "power":
            Durable(folder).cut_power()
        if not fault:
            looked, found = attempt(folder, lambda say: self.subject.look(folder, say), "before", 0)
            if looked != "ended":
                fault = f"it does not come up: {looked}"
            elif not self.subject.right(acknowledged, found[0]):
                fault = f"what was acknowledged ({acknowledged}) is not what is there"
        self.points += 1
        if fault:
            self.broken += 1
            if self.broken <= SHOWN:
                print(f"{self.name}: {how} at call {at} of {len(self.calls)}: {fault}", file=sys.stderr, flush=True)


def explorers(scratch: Path, only: Sequence[str]) -> list[Explorer]:
    from benchmarks.crash_points import subjects as kinds

    made = []
    subjects: dict[str, Callable[[], Any]] = {
        "region": lambda: kinds.ServerSubject("eu"),
        "global": lambda: kinds.ServerSubject("global"),
        "checkpoint": kinds.CheckpointSubject,
        "export": kinds.ExportSubject,
        "prepare": kinds.PrepareSubject,
    }
    for name in only:
        subject = subjects[name]()
        first = Explorer(f"{name}, first life", subject, "live", scratch, lambda folder: 0)
        left = scratch / f"left-{name}"
        _, said, folder, _ = first._live("before", len(first.calls) * 2 // 3)
        shutil.copytree(folder, left)
        acknowledged = max(said, default=0)

        def prepare(folder: Path, left: Path = left, acknowledged: int = acknowledged) -> int:
            shutil.copytree(left, folder, dirs_exist_ok=True)
            return acknowledged

        made += [first, Explorer(f"{name}, second life", subject, "again", scratch, prepare)]
    return made


def notices(todo: list[tuple[Explorer, int]]) -> int:
    """Whether power cuts are found to break something if no sync reaches the disk: 1 as soon as one is, else 0.
    The lives' own counts stay as they are."""
    Durable.forgets = True
    try:
        for life, at in todo:
            counts = life.points, life.broken
            life.explore("power", at)
            found, (life.points, life.broken) = life.broken > counts[1], counts
            if found:
                return 1
        return 0
    finally:
        Durable.forgets = False


def main() -> None:
    parser = command_line(__doc__, quick={"seconds": QUICK_S})
    parser.add_argument("--seconds", type=float, default=LONGEST_S, help="after which no further call is tried")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=SUBJECTS, help="the lives that are tried")
    options = parser.parse_args()
    place = MEMORY if MEMORY.is_dir() else None
    if SHIM not in os.environ:
        preloaded(Path(tempfile.mkdtemp(prefix="geotrain-crash-", dir=place)))
    torch.set_num_threads(1)
    scratch = Path(os.environ[SHIM])
    try:
        lives = explorers(scratch, options.only)
        todo = [
            (life, how, at)
            for life in lives
            for how, kinds in AT.items()
            for at, kind in enumerate(life.calls, 1)
            if kind in kinds
        ]
        random.Random(options.seed).shuffle(todo)  # so that what the time allows is spread over all of them
        end_s = time.monotonic() + options.seconds
        for life, how, at in todo:
            if time.monotonic() > end_s:
                break
            life.explore(how, at)
        noticed = notices([(life, at) for life, how, at in todo if how == "power"])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    by_life = {life.name: {"calls": len(life.calls), "points": life.points, "broken": life.broken} for life in lives}
    totals = {key: sum(life[key] for life in by_life.values()) for key in ("points", "broken")}
    results = {**totals, "all": len(todo), "noticed": noticed, "lives": by_life}
    report("crash_points", results, options, units_by_ending({}, "count"), timed=False)


if __name__ == "__main__":
    main()
