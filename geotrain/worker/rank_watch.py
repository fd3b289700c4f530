"""Finds a rank that hangs, and one that computes far more slowly than its equals.

In a step all ranks wait for one that does not come, or for the slowest, so that their own times show nothing. So
each rank says in the ranks' store what it does: a thread of its own writes that, whatever the rank's main thread
waits for. Each rank reads what all say, and the lowest one that still writes reports what is wrong.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice, pairwise, product
from pathlib import Path
from statistics import median
from traceback import walk_stack
from typing import NamedTuple

import torch
import torch.distributed as dist

from geotrain.common.device_state import DeviceState, numbers_of_worker
from geotrain.common.running_clock import RunningClock

EVERY_S, IN_A_ROW = 12.0, 3  # between two products; a slow rank is reported within a minute
FACTOR = 2.0  # times the others' median
JOB_FACTOR, JOB_PRODUCTS = 1.25, 3  # of the fastest of a job's products, where there were so many: in three jobs
LOOKS = (FACTOR, "turn", "product_s"), (JOB_FACTOR, "jobs", "job_s")  # what of a rank's state counts, and is compared
TURNS = 4  # of which the fastest counts: what else the host does for a moment is no fault
BEAT_S = 5.0  # between two words of a rank
SILENT = 0.625  # of `hang_s` without a word: the process is stopped, or its machine gone
STUCK_STEPS = 5.0  # in one piece of work: `hang_s`, and so many times the longest of the last ones of its kind
STEPS = 16  # these; the first two compile, and none is judged before
STEP, EXCHANGE, VALIDATION, CHECKPOINT = "step", "exchange", "validation", "checkpoint"  # kinds of work
PATIENCE = {CHECKPOINT: 10.0}  # times `hang_s`: a file system of many may pause
FRAMES = 4  # innermost ones, of what a rank is at


class RankState(NamedTuple):  # its annotations are no strings: docs could not resolve those of a named tuple
    """What a rank says. beats: words so far. in_step_s: since its step, or other work that ranks do together, began;
    −1: it is in none, as while it waits for data or a server. work: which. stuck: whether that is too long. turn,
    product_s: number and time of its last product. at: the innermost functions of its main thread. left: whether it
    has ended in good order. jobs, job_s: jobs that had products, and the fastest of the last one. device: that it
    computes on."""

    beats: int = 0
    kind: str = ""
    process: str = ""
    steps: int = 0
    in_step_s: float = -1.0
    stuck: bool = False
    product_s: float = 0.0
    turn: int = 0
    at: str = ""
    left: bool = False
    job_s: float = 0.0
    jobs: int = 0
    device: DeviceState = DeviceState()
    work: str = STEP


class RankWatch:
    """This rank's part. The main thread calls `begin_step` and `after_step`; there are no collectives and no waits.

    device: that computes. trouble: called, in a thread, on one rank with what a person should know. lost: called
    after it where the worker cannot go on, on that rank; None: the loop is the user's, whose steps hold all that it
    does between them, an evaluation too: the longest one is never forgotten. hang_s: `monitor.hang_s`. store: of the
    ranks' process group; None: the default group's, or of a rank alone its own. state: gives at once what is known
    of the device. rank, ranks, measure, clock: for tests.
    """

    def __init__(
        self,
        device: torch.device,
        trouble: Callable[[str], None],
        lost: Callable[[], None] | None = None,
        hang_s: float = 40.0,
        store: dist.Store | None = None,
        rank: int = 0,
        ranks: int = 1,
        measure: Callable[[torch.device], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        state: Callable[[], DeviceState] = DeviceState,
    ) -> None:
        if store is None and dist.is_initialized():
            store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
            store = store.clone()  # type: ignore[attr-defined]  # a connection of its own: others wait in theirs
        self._store = store or dist.HashStore()
        self._device, self._trouble, self._lost, self._rank, self.hang_s = device, trouble, lost, rank, hang_s
        # This process may have been stopped: it took no step meanwhile, and received nothing.
        self._clock = RunningClock(2 * BEAT_S, clock)
        self._measure, self._state = measure or product_s, state
        self._keys = [f"geotrain.rank.{each}" for each in range(ranks)]
        self._main = threading.get_ident()
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._own = RankState(kind=kind, process=f"{socket.gethostname()}, process {os.getpid()}")
        now_s = self._clock()
        self._due_s, self._step_s, self._samples, self._work = now_s + EVERY_S, -1.0, 1, STEP
        # By kind of work: seconds, of a step for each of its samples.
        self._lasted_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=STEPS))
        self._all = {each: RankState() for each in range(ranks)}  # what each said last
        self._read_s, self._received_s = now_s, dict.fromkeys(self._all, now_s)  # by rank: when its last state came
        self._reported = set[int]()  # ranks that hang or are waited for, until they go on
        self.found = dict[str, float]()  # by others, for a job's report
        self._in_job = list[float]()  # seconds of this job's products
        # By what is compared, and rank: times in a row; the last one compared.
        self._slow, self._seen = Counter[tuple[str, int]](), dict[tuple[str, int], int]()
        self._over = threading.Event()

    def start(self) -> None:
        """Begin to speak and to judge, each in a thread of its own: a store whose process hangs answers nobody. All
        ranks come to it together."""
        self._read_s = now_s = self._clock()
        self._received_s = dict.fromkeys(self._all, now_s)
        for work in (self.speak, self.judge):
            threading.Thread(target=self._repeat, args=(work,), name=f"ranks-{work.__name__}", daemon=True).start()

    def stop(self) -> None:
        """End in good order: from now on no rank waits for this one."""
        self._over.set()

    def begin_step(self, samples: int = 1, work: str = STEP) -> None:
        """Note that a step of so many samples begins, for which all data are here, or other work."""
        self._work, self._samples, self._step_s = work, samples, self._clock()

    def _end(self, work: str) -> None:
        begun_s, self._step_s = self._step_s, -1.0
        lasted_s = 0.0 if begun_s < 0 else (self._clock() - begun_s) / self._samples
        before = self._lasted_s[work]
        before.append(max([lasted_s, *before]) if self._lost is None else lasted_s)

    @contextmanager
    def doing(self, work: str) -> Iterator[None]:
        """Do other work that all ranks do together: it hangs as a step does."""
        self.begin_step(work=work)
        try:
            yield
        finally:
            self._end(work)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Be in no work meanwhile: what this waits for has a deadline of its own."""
        work = self._work if self._step_s >= 0 else ""
        if work and work != STEP:
            self._end(work)
        self._step_s = -1.0
        yield
        if work:
            self.begin_step(self._samples, work)

    def after_step(self) -> None:
        """Note that a step is over, and time a product if that is due."""
        self._end(STEP)
        self._own, now_s = self._own._replace(steps=self._own.steps + 1), self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            self._own = self._own._replace(product_s=self._measure(self._device), turn=self._own.turn + 1)
            self._in_job.append(self._own.product_s)

    def after_job(self) -> None:
        """Note that a job is over; one with few products counts with the next."""
        if len(self._in_job) >= JOB_PRODUCTS:
            self._own = self._own._replace(job_s=min(self._in_job), jobs=self._own.jobs + 1)
            self._in_job = []

    def numbers(self) -> dict[str, float]:
        """What is known of the devices of all ranks, for a job's report."""
        return numbers_of_worker(state.device for state in self._all.values()) | self.found

    def _repeat(self, work: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the store is gone with its rank, as all collectives will say
            while True:
                over = self._over.is_set()
                work()
                if over:
                    return
                self._over.wait(BEAT_S)

    def speak(self) -> None:
        """Write what this rank does, and read what all do."""
        own, work, since_s, frame = self._own, self._work, self._step_s, sys._current_frames().get(self._main)
        in_step_s, lasted_s = self._clock() - since_s if since_s >= 0 else -1.0, tuple(self._lasted_s.get(work, ()))
        least_s = PATIENCE.get(work, 1.0) * self.hang_s
        stuck = len(lasted_s) >= 2 and in_step_s > max(least_s, STUCK_STEPS * self._samples * max(lasted_s))
        if stuck and not self._all[self._rank].stuck:
            with suppress(OSError, ValueError, AttributeError):  # no log is there, or it is no file
                faulthandler.dump_traceback(sys.stderr)
        beats, left = self._all[self._rank].beats + 1, self._over.is_set()
        said = own._replace(beats=beats, in_step_s=in_step_s, stuck=stuck, at=_place(frame), left=left)
        said = said._replace(device=self._state(), work=work)
        self._store.set(self._keys[self._rank], json.dumps(said))
        for rank, key in enumerate(self._keys):
            if self._store.check([key]):
                state = RankState(*json.loads(self._store.get(key)))
                state = state._replace(device=DeviceState(*state.device))
                if state.beats != self._all[rank].beats:
                    self._received_s[rank] = self._clock()
                self._all[rank] = state
        self._read_s = self._clock()

    def judge(self) -> None:
        """Report ranks that hang, that are waited for, or that are slow, if it is this rank that reports."""
        now_s, silent_s = self._clock(), SILENT * self.hang_s
        if self._over.is_set():
            return
        if now_s - self._read_s > silent_s + self._rank * BEAT_S:  # one after another: the first ends all
            self._report({0: f"{self._words(0)}; it keeps the ranks' store, which does not answer"}, lost=True)
            return
        present = {rank: state for rank, state in self._all.items() if not state.left}
        silent = {rank for rank in present if now_s - self._received_s[rank] > silent_s}
        if self._rank != min(present.keys() - silent, default=-1):
            return
        if silent:
            self._report({rank: f"{self._words(rank)}; its process does not answer" for rank in silent}, lost=True)
            return
        self._compare(present)
        if not any(state.stuck for state in present.values()):
            self._reported.clear()
            return
        elsewhere = {rank for rank, state in present.items() if state.in_step_s < 0}
        if elsewhere:  # what they wait for has a deadline of its own
            self._report({rank: f"{self._words(rank)}: the other ranks wait for it" for rank in elsewhere})
        else:
            self._report({rank: self._words(rank) for rank in _least_far(present)}, lost=True)

    def _words(self, rank: int) -> str:
        state = self._all[rank]
        if not state.beats:
            return f"rank {rank}, from which nothing was received"
        work = f" in its {state.work}" if state.work != STEP and state.in_step_s >= 0 else ""
        text = f"rank {rank} ({state.process}){work} after {state.steps} steps, last seen in {state.at}"
        return text + state.device.said("its device")

    def _report(self, words: dict[int, str], lost: bool = False) -> None:
        """Report ranks, once. lost: they hang, and the worker with them."""
        if words.keys() <= self._reported:
            return
        text = "; ".join(words[rank] for rank in sorted(words))
        if lost:
            waiting = next((state.at for rank, state in sorted(self._all.items()) if rank not in words), "")
            text = f"hangs: {text}" + (f"; others wait in {waiting}" if waiting else "")
            text += f" (monitor.hang_s = {self.hang_s:g}: raise it if steps may take so long)"
        self._reported |= words.keys()
        self._trouble(text)
        if lost and self._lost is not None:
            self._lost()

    def _compare(self, present: dict[int, RankState]) -> None:
        for (factor, count, lasted), (rank, own) in product(LOOKS, present.items()):
            number, seconds, of = getattr(own, count), getattr(own, lasted), (count, rank)
            alike = {r: s for r, s in present.items() if r != rank and s.kind == own.kind and getattr(s, count)}
            equals = {r: getattr(s, lasted) for r, s in alike.items()}
            if not equals or self._seen.get(of, 0) == number:
                continue
            self._seen[of] = number
            usual = median(equals.values())
            self._slow[of] = self._slow[of] + 1 if seconds >= factor * usual else 0
            if self._slow[of] == IN_A_ROW and (count == "turn" or self._slow["turn", rank] < IN_A_ROW):
                other = min(equals, key=lambda r: abs(equals[r] - usual))
                self._trouble(
                    f"rank {rank} on {own.process} computes at {usual / seconds:.0%} of its equals' speed, and all "
                    f"wait for it: a matrix product takes {1e3 * seconds:.3g} ms there, {1e3 * usual:.3g} ms "
                    f"elsewhere{own.device.said('its device')}{present[other].device.said(f'that of rank {other}')}; "
                    "look at what else the host does"
                )


def _least_far(states: dict[int, RankState]) -> list[int]:
    """Choose the ranks that keep the others waiting: those with the fewest steps; of these, those that are in no
    collective, if others are; of these, those whose place is the rarest."""
    fewest = min(state.steps for state in states.values())
    behind = {rank: state for rank, state in states.items() if state.steps == fewest}
    busy = {rank: state for rank, state in behind.items() if "distributed" not in state.at} or behind
    places = Counter(state.at for state in busy.values())
    return [rank for rank, state in busy.items() if places[state.at] == min(places.values())]


def _place(frame: object) -> str:
    """Name the innermost functions of a thread's stack, with file and line."""
    stack = islice(walk_stack(frame), FRAMES) if frame is not None else ()  # type: ignore[arg-type]
    return " < ".join(
        f"{f.f_code.co_name} ({'/'.join(Path(f.f_code.co_filename).parts[-2:])}:{line})" for f, line in stack
    )


def product_s(device: torch.device) -> float:
    """Time a matrix product: the fastest of some turns, in seconds. The first one also waits for what the device has
    to do."""
    a = torch.ones(2048, 2048, dtype=torch.bfloat16, device=device) if device.type == "cuda" else torch.ones(256, 256)
    times = [time.perf_counter()]
    for _ in range(TURNS):
        torch.mm(a, a)[0, 0].item()
        times.append(time.perf_counter())
    return min(end - begin for begin, end in pairwise(times))
