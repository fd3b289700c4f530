"""Let each system call that changes a file go wrong, one at a time and in every way: what was acknowledged is there.

    python -m tests.chaos.crash_points          # every call, or as many as ten minutes allow, spread by the seed
    python -m tests.chaos.crash_points --points 24    # so many of them
    python -m tests.chaos.crash_points --only checkpoint

An incarnation of a region's server, of the global server, of a worker's checkpoints, of `export` and of `prepare` is
repeated, and at each of its calls that change a file (writes, opens that create, renames, deletions, fsyncs, …)

    before    the process ends before the call (and so after the one before it)
    half      it ends after half of a write
    power     it ends after the call, and all that was not synced is gone: contents of files, names in folders
    full      this call and all later ones find the disk full
    broken    this call alone gives EIO

The same for a second incarnation, which begins with what a first one left that ended in the middle. Then a new
process reads the folder: it must come up, with everything that was acknowledged and nothing twice, bit for bit. With
a full disk the incarnation itself must not end by any other error.

An incarnation is played once for the first three kinds: what the disk holds is kept at each of its calls. For the
other two it is played at each. States that are alike are looked at once. As many processes work as there are
processors.

The last line is JSON: `points` tried, `broken` ones among them (the first of each incarnation are told on standard
error), `all` that there are, `states` that were looked at, and the same by incarnation. At last, power is cut with
all syncs forgotten, until something is found broken: `noticed` is 1 then, and what was found is told as well.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import command_line, report, units_by_ending
from tests.chaos.crash_points.disk import AT, SHIM, Durable, attempt, digest, preloaded, states

MEMORY = Path("/dev/shm")  # where inode numbers are not used again, and a sync costs nothing
QUICK_POINTS, LONGEST_S = 24, 540.0
SHOWN = 5
SUBJECTS = ("region", "global", "checkpoint", "export", "prepare")
LIVED = ("full", "broken")  # at each call of these the incarnation is played anew, since it may go on


class Explorer:
    """Explores all points of one incarnation. prepare: puts what the incarnation begins with into its folder, and
    returns how many acknowledgements were given for it."""

    def __init__(
        self, name: str, subject: Any, incarnation: str, scratch: Path, prepare: Callable[[Path], int]
    ) -> None:
        self.name, self.subject, self.scratch, self.prepare = name, subject, scratch, prepare
        self.incarnation = getattr(subject, incarnation)
        how, said = self.live("before", 0)[:2]
        assert how == "ended", f"{name} does not even live where nothing goes wrong: {how}"
        self.calls: str = said[-1]  # their kinds
        self.states: dict[tuple[str, int], tuple[int, Path]] = {}  # kind of end, call → acknowledged, what is left

    def points(self) -> Iterator[tuple[str, int]]:
        for how, kinds in AT.items():
            yield from ((how, at) for at, kind in enumerate(self.calls, 1) if kind in kinds)

    def keep_states(self, points: set[tuple[str, int]]) -> None:
        """Play the incarnation once, for all of these points at which it ends."""
        folder, before = self._begin()
        kept = self.scratch / "states" / self.name
        shutil.rmtree(kept, ignore_errors=True)
        for how, at, said, name in states(folder, lambda say: self.incarnation(folder, say), kept, points):
            self.states[how, at] = said or before, kept / name

    def live(self, how: str, at: int) -> tuple[str, list[Any], Path, int]:
        folder, before = self._begin()
        ended, said = attempt(folder, lambda say: self.incarnation(folder, say), how, at)
        return ended, said, folder, before

    def explore(self, how: str, at: int, known: dict[tuple[Any, str], tuple[str, Any]]) -> str:
        """Describe what is wrong there; "" if nothing is. known: what was found in states that were looked at."""
        if how in LIVED:
            ended, said, folder, before = self.live(how, at)
            acknowledged = max((n for n in (said[:-1] if ended == "ended" else said)), default=0) or before
            if how == "full" and ended != "ended" and "No space left on device" not in ended:
                return f"a full disk ended it: {ended}"
            name = digest(folder)
        else:
            acknowledged, left = self.states[how, at]
            name, folder = left.name, self.scratch / "folder"
            if (self.subject, name) not in known:
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(left, folder)
        if (self.subject, name) not in known:
            looked, found = attempt(folder, lambda say: self.subject.look(folder, say))
            known[self.subject, name] = looked, found[0] if found else None
        looked, what = known[self.subject, name]
        if looked != "ended":
            return f"it does not come up: {looked}"
        right = self.subject.right(acknowledged, what)
        return "" if right else f"what was acknowledged ({acknowledged}) is not what is there"

    def _begin(self) -> tuple[Path, int]:
        folder = self.scratch / "folder"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder, self.prepare(folder)


def explorers(scratch: Path, only: Sequence[str]) -> list[Explorer]:
    from tests.chaos.crash_points import subjects as kinds

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
        first = Explorer(f"{name}, first incarnation", subject, "live", scratch, lambda folder: 0)
        left = scratch / f"left-{name}"
        _, said, folder, _ = first.live("before", len(first.calls) * 2 // 3)
        shutil.copytree(folder, left)
        acknowledged = max(said, default=0)

        def prepare(folder: Path, left: Path = left, acknowledged: int = acknowledged) -> int:
            shutil.copytree(left, folder, dirs_exist_ok=True)
            return acknowledged

        made += [first, Explorer(f"{name}, second incarnation", subject, "again", scratch, prepare)]
    return made


def explored(todo: list[tuple[Explorer, str, int]], results: Path, end_s: float) -> int:
    """Explore the points in as many processes as there are processors, until `end_s`; each result is a line of the
    file. Returns how many states were looked at."""
    processes = os.cpu_count() or 1
    pipes = []
    for process in range(processes):
        read, write = os.pipe()
        if os.fork() == 0:
            looked = 1
            try:
                looked = _explore(todo, results, end_s, process, processes)
            finally:
                os.write(write, b"%d" % looked)
                os._exit(0)
        os.close(write)
        pipes.append(os.fdopen(read, "rb"))
    told = [int(pipe.read()) for pipe in pipes]
    for _ in pipes:
        assert os.wait()[1] == 0
    return sum(told)


def _explore(todo: list[tuple[Explorer, str, int]], results: Path, end_s: float, process: int, processes: int) -> int:
    """Explore the share of one process: of states that are alike, all."""
    known: dict[tuple[Any, str], tuple[str, Any]] = {}
    lines = os.open(results, os.O_WRONLY | os.O_APPEND)
    for incarnation in {incarnation for incarnation, _, _ in todo}:
        incarnation.scratch /= str(process)
    for number, (incarnation, how, at) in enumerate(todo):
        whose = number if how in LIVED else int(incarnation.states[how, at][1].name, 16)
        if whose % processes != process:
            continue
        if time.monotonic() > end_s:
            break
        fault = incarnation.explore(how, at, known)
        os.write(lines, json.dumps([incarnation.name, how, at, fault]).encode() + b"\n")
    return len(known)


def notices(incarnations: list[Explorer]) -> int:
    """Whether power cuts are found to break something if no sync reaches the disk: 1 as soon as one is, else 0."""
    Durable.forgets = True
    try:
        for incarnation in incarnations:
            power_cuts = [(how, at) for how, at in incarnation.points() if how == "power"]
            incarnation.keep_states({*power_cuts})
            for how, at in power_cuts:
                if fault := incarnation.explore(how, at, {}):
                    print(f"noticed: {incarnation.name}: power at call {at}: {fault}", file=sys.stderr)
                    return 1
        return 0
    finally:
        Durable.forgets = False


def main() -> None:
    parser = command_line(__doc__, quick={"points": QUICK_POINTS})
    parser.add_argument("--seconds", type=float, default=LONGEST_S, help="after which no further call is tried")
    parser.add_argument("--all", action="store_true", help="however long it takes")
    parser.add_argument("--points", type=int, help="so many of them, however long it takes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", nargs="+", choices=SUBJECTS, default=SUBJECTS, help="the incarnations that are tried"
    )
    options = parser.parse_args()
    place = MEMORY if MEMORY.is_dir() else None
    if SHIM not in os.environ:
        preloaded(Path(tempfile.mkdtemp(prefix="geotrain-crash-", dir=place)))
    torch.set_num_threads(1)
    scratch = Path(os.environ[SHIM])
    try:
        incarnations = explorers(scratch, options.only)
        points = [(incarnation, how, at) for incarnation in incarnations for how, at in incarnation.points()]
        random.Random(options.seed).shuffle(todo := list(points))  # so that those that are tried are spread over all
        todo = todo[: options.points]
        for incarnation in incarnations:
            incarnation.keep_states({(how, at) for whose, how, at in todo if whose is incarnation})
        whole = options.all or options.points is not None
        (results := scratch / "results").touch()
        looked = explored(todo, results, inf if whole else time.monotonic() + options.seconds)
        tried = [json.loads(line) for line in results.read_text().splitlines()]
        found = {(name, how, at): fault for name, how, at, fault in tried}
        noticed = notices(incarnations)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    shown = Counter[str]()
    for (name, how, at), fault in found.items():
        shown[name] += bool(fault)
        if fault and shown[name] <= SHOWN:
            print(f"{name}: {how} at call {at}: {fault}", file=sys.stderr, flush=True)
    by_incarnation = {
        incarnation.name: {
            "calls": len(incarnation.calls),
            "points": sum(name == incarnation.name for name, _, _ in found),
            "broken": shown[incarnation.name],
        }
        for incarnation in incarnations
    }
    totals = {key: sum(incarnation[key] for incarnation in by_incarnation.values()) for key in ("points", "broken")}
    all_of_it = {"all": len(points), "states": looked, "noticed": noticed, "incarnations": by_incarnation}
    report("crash_points", {**totals, **all_of_it}, options, units_by_ending({}, "count"), timed=False)


if __name__ == "__main__":
    main()
