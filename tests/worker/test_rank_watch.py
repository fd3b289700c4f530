"""A rank that hangs, or is far slower than its equals, is told within a minute."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from geotrain.common.device_state import DeviceState
from geotrain.worker import rank_watch
from geotrain.worker.rank_watch import BEAT_S, CHECKPOINT, EVERY_S, EXCHANGE, VALIDATION, RankState, RankWatch
from tests.support.inner_worlds import run_world
from tests.support.process_trees import until

CPU = torch.device("cpu")
STEP_S = 0.5
WITHIN_S = 300.0  # of collectives in a real world


class Ranks:
    """Ranks of one worker in virtual time, over a store of torch's. seconds: of each one's product, which may change;
    None: its process is stopped. waits: ranks that are in no step; blocked: those that never end theirs. All others
    wait for these in their steps."""

    def __init__(self, *seconds: float | None, hang_s: float = 40.0) -> None:
        self.seconds, self.now_s, self.told = list(seconds), 0.0, list[tuple[float, str]]()
        self.waits, self.blocked, self.lost = set[int](), set[int](), list[tuple[float, int]]()
        self.devices = [DeviceState()] * len(seconds)
        store = dist.HashStore()

        def rank(number: int) -> RankWatch:
            return RankWatch(
                CPU,
                lambda what: self.told.append((self.now_s, what)),
                lambda: self.lost.append((self.now_s, number)),
                hang_s,
                store,
                number,
                len(seconds),
                measure=lambda device: self.seconds[number] or 0.0,
                clock=lambda: self.now_s,
                state=lambda: self.devices[number],
            )

        self.ranks = [rank(number) for number in range(len(seconds))]

    def run(self, for_s: float) -> None:
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += STEP_S
            alive = {n: rank for n, rank in enumerate(self.ranks) if self.seconds[n] is not None}
            together = not self.waits | self.blocked and len(alive) == len(self.ranks)
            for number, rank in alive.items():
                if together or (number in self.waits and rank._step_s >= 0):
                    rank.after_step()
                if together and number not in self.waits:
                    rank.begin_step()
            for each in [rank.speak for rank in alive.values()] + [rank.judge for rank in alive.values()]:
                if not self.now_s % BEAT_S:
                    each()


def test_a_slow_rank_is_told_once_within_a_minute_of_its_fault() -> None:
    ranks = Ranks(1e-3, 1e-3, 1.2e-3, 1e-3)
    ranks.run(300.0)
    assert ranks.told == []
    ranks.seconds[2], begin_s = 2.5e-3, ranks.now_s
    ranks.run(300.0)
    ((at_s, words),) = ranks.told
    assert at_s - begin_s < 60.0
    assert (
        re.search(r"rank 2 on \S+, process \d+ computes at 40% of its equals' speed", words)
        and "2.5 ms there, 1 ms" in words
    )
    ranks.seconds[2] = 1e-3
    ranks.run(100.0)
    ranks.seconds[2] = 2.5e-3
    ranks.run(100.0)
    assert len(ranks.told) == 2  # it was well in between


@pytest.mark.parametrize("seconds", [(1e-3,), (1e-3, 1.9e-3)])
def test_nobody_is_slow_without_an_equal_or_by_less_than_twice(seconds: tuple[float, ...]) -> None:
    ranks = Ranks(*seconds)
    ranks.run(200.0)
    assert ranks.told == []


def test_a_longer_step_of_a_growing_batch_hangs_no_more_than_a_short_one() -> None:
    """A step counts by its samples: of a batch that has grown 32-fold it takes 32 times as long."""
    now_s, told = 0.0, list[str]()
    watch = RankWatch(CPU, told.append, lambda: None, measure=lambda _: 1e-3, clock=lambda: now_s)

    def step(samples: int, seconds: float) -> None:
        nonlocal now_s
        watch.begin_step(samples)
        end_s = now_s + seconds
        while now_s < end_s:
            now_s += min(BEAT_S, end_s - now_s)
            watch.speak()
            watch.judge()
        watch.after_step()

    for _ in range(20):
        step(2, 4.0)
    step(64, 128.0)
    assert told == []
    step(2, 60.0)
    assert len(told) == 1 and told[0].startswith("hangs: rank 0 ")


def test_what_a_users_loop_does_between_its_steps_is_told_once() -> None:
    """Such as an evaluation of two minutes each hundred steps: a longer one than ever before may be a hang."""
    now_s, told = 0.0, list[str]()
    watch = RankWatch(CPU, told.append, measure=lambda _: 1e-3, clock=lambda: now_s)
    for step in range(1, 400):
        end_s = now_s + (120.0 if step % 100 == 0 else 1.0)
        while now_s < end_s:
            now_s += min(BEAT_S, end_s - now_s)
            watch.speak()
            watch.judge()
        watch.after_step()
        watch.begin_step()
    assert len(told) == 1 and told[0].startswith("hangs: rank 0 ")


def test_a_rank_that_is_slower_in_three_jobs_is_told_with_its_device() -> None:
    ranks = Ranks(1e-3, 1.4e-3, 1e-3)
    ranks.devices = [DeviceState(0.97, 1.98e9), DeviceState(0.99, 1.4e9, slowed="heat"), DeviceState(0.97, 1.98e9)]

    def jobs(count: int, for_s: float) -> None:
        for _ in range(count):
            ranks.run(for_s)
            for rank in ranks.ranks:
                rank.after_job()

    jobs(1, 60.0)
    jobs(3, 10.0)  # with too few products
    assert ranks.told == []
    jobs(3, 60.0)
    ((_, words),) = ranks.told
    assert "rank 1 on " in words and "at 71% of its equals' speed" in words
    assert "its device: 99% busy, 1.4e+09 Hz, slowed by heat; that of rank 0: 97% busy, 1.98e+09 Hz" in words
    assert ranks.ranks[0].numbers()["device_clock_hz"] == 1.4e9


def test_a_moment_is_no_fault() -> None:
    ranks = Ranks(1e-3, 1e-3)
    ranks.seconds[1] = 5e-3
    ranks.run(2 * EVERY_S + 1)
    ranks.seconds[1] = 1e-3
    ranks.run(2 * EVERY_S)
    assert ranks.told == []


@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_whose_process_is_stopped_is_told_within_a_minute_and_ends_its_worker(number: int) -> None:
    ranks = Ranks(1e-3, 1e-3, 1e-3)
    ranks.run(100.0)
    ranks.seconds[number], begin_s = None, ranks.now_s
    ranks.run(300.0)
    ((at_s, words),) = ranks.told
    assert at_s - begin_s < 60.0 and ranks.lost == [(at_s, 1 if number == 0 else 0)]
    assert re.match(
        rf"hangs: rank {number} \(\S+, process \d+\) after \d+ steps, last seen in speak .*; its pro", words
    )


def test_a_rank_that_others_wait_for_in_a_step_is_told_and_ends_its_worker(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(1e-3, 1e-3, 1e-3)
    ranks.run(100.0)
    ranks.blocked, begin_s, ranks.devices[0] = {1}, ranks.now_s, DeviceState(1.0, xids=(79,))
    ranks.run(300.0)
    ((at_s, words),) = ranks.told
    assert at_s - begin_s < 60.0 and ranks.lost == [(at_s, 0)] and words.startswith("hangs: rank 0 (")
    assert "; its device: 100% busy, Xid 79;" in words
    assert capfd.readouterr().err.count("Current thread") == 3  # each wrote its stacks once


def test_a_rank_that_waits_for_data_or_a_server_is_told_and_ends_nothing() -> None:
    ranks = Ranks(1e-3, 1e-3)
    ranks.run(100.0)
    ranks.waits = {1}
    ranks.run(300.0)
    ((_, words),) = ranks.told
    assert words.startswith("rank 1 (") and words.endswith("the other ranks wait for it") and ranks.lost == []


@pytest.mark.parametrize(("work", "within_s"), [(EXCHANGE, 60.0), (VALIDATION, 60.0), (CHECKPOINT, 420.0)])
def test_work_between_steps_hangs_as_a_step_does(work: str, within_s: float) -> None:
    """But not what it waits for from a server."""
    ranks = Ranks(1e-3, 1e-3)
    ranks.run(100.0)
    with ExitStack() as works:
        for rank in ranks.ranks:
            rank.after_step()
            for _ in range(2):  # with these it is compared
                with rank.doing(work):
                    pass
            works.enter_context(rank.doing(work))
        ranks.blocked, begin_s = {1}, ranks.now_s
        with ranks.ranks[0].elsewhere(), ranks.ranks[1].elsewhere():
            ranks.run(1000.0)
        assert ranks.told == []
        ranks.run(600.0)
    ((at_s, words),) = ranks.told
    assert within_s - 30.0 < at_s - begin_s - 1000.0 < within_s and ranks.lost == [(at_s, 0)]
    assert re.match(rf"hangs: rank 0 \(.*\) in its {work} after \d+ steps", words)


@pytest.mark.parametrize("numbers", [1, 2])
@pytest.mark.parametrize("first", ["judge", "speak", "after_step"])
def test_a_pause_of_all_processes_is_no_fault_of_one(first: str, numbers: int) -> None:
    """As by SIGSTOP, a debugger or a paused machine, in the middle of a step; whichever thread wakes first."""
    ranks = Ranks(*[1e-3] * numbers)
    ranks.run(100.0)
    ranks.now_s += 1000.0
    for work in (first, "speak", "judge"):
        for rank in ranks.ranks:
            getattr(rank, work)()
    ranks.run(100.0)
    assert ranks.told == [] and ranks.lost == []


def test_a_longer_step_is_no_hang_where_it_is_stated() -> None:
    ranks = Ranks(1e-3, 1e-3, hang_s=120.0)
    ranks.run(100.0)
    ranks.blocked = {0, 1}
    ranks.run(110.0)
    ranks.blocked = set()
    ranks.run(100.0)
    assert ranks.told == []
    ranks.blocked, begin_s = {0, 1}, ranks.now_s
    ranks.run(600.0)
    ((at_s, words),) = ranks.told
    assert at_s - begin_s > 120.0 and "(monitor.hang_s = 120: raise it" in words


@pytest.mark.parametrize(
    ("steps", "places", "hang"),
    [
        ((7, 6, 7), ("distributed", "load", "distributed"), [1]),
        ((7, 7, 7), ("distributed", "load", "distributed"), [1]),
        ((7, 7, 7), ("wait", "wait", "mm"), [2]),
        ((7, 7), ("all_reduce (distributed)", "all_reduce (distributed)"), [0, 1]),
    ],
    ids=["a step behind", "in no collective", "elsewhere than most", "all at one place"],
)
def test_who_keeps_the_others_waiting(steps: tuple[int, ...], places: tuple[str, ...], hang: list[int]) -> None:
    states = [RankState(9, "cpu", "a", steps=n, at=at) for n, at in zip(steps, places, strict=True)]
    assert rank_watch._least_far(dict(enumerate(states))) == hang


def in_a_world(how: str, number: int) -> str:
    """Rank `number` hangs in a step of a real world; what the other rank is told before its collective gives up."""
    rank_watch.BEAT_S = 0.2
    from geotrain.inner.runtime.parallel import join

    # Rank 0 keeps the store, as in a run, and stops with it.
    met = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        met.set("port", str(kept.port))
    os.environ["MASTER_PORT"] = met.get("port").decode()
    join(timeout_s=WITHIN_S)
    told: list[str] = []
    lost = threading.Event()

    def end() -> None:
        """Let the collective end at once, as the launcher would end all ranks."""
        lost.set()
        os.kill(int(watch._all[number].process.rpartition(" ")[2]), signal.SIGKILL)

    watch = RankWatch(CPU, told.append, end, hang_s=6.0)
    watch.start()
    for step in range(4):
        watch.begin_step()
        if step == 3:
            assert until(lambda: all(state.steps == 3 for state in watch._all.values()), WITHIN_S)
            dist.barrier()  # each has read what the other says
        if dist.get_rank() == number and step == 3:
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600.0)
        if step == 3:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.zeros(1))
            break
        dist.all_reduce(torch.zeros(1))
        watch.after_step()
    assert lost.is_set() and len(told) == 1
    return told[0]


@pytest.mark.parametrize(
    ("how", "number", "words"),
    [
        ("stopped", 1, r"hangs: rank 1 .*last seen in .*in_a_world.*its process does not answer; others wait in"),
        ("asleep", 1, r"hangs: rank 1 .*after 3 steps, last seen in in_a_world \(worker/test_rank_watch.py:\d+\)"),
        ("stopped", 0, "hangs: rank 0 .*in_a_world.*; it keeps the ranks' store, which does not answer"),
    ],
)
def test_a_rank_of_a_real_world_hangs(how: str, number: int, words: str) -> None:
    results: list[Any] = run_world(2, in_a_world, how, number, lost=[number])
    assert re.match(words, results[1 - number]), results


def test_the_product_of_this_machine_takes_some_time() -> None:
    told: list[str] = []
    store, now_s = dist.HashStore(), [0.0]
    rank = RankWatch(CPU, told.append, store=store, rank=1, ranks=2, clock=lambda: now_s[0])
    rank.after_step()
    assert rank._own.product_s == 0.0
    for now_s[0] in (EVERY_S / 2, EVERY_S):
        rank.speak()
    rank.after_step()
    rank.speak()
    said = RankState(*json.loads(store.get("geotrain.rank.1")))
    assert 0.0 < said.product_s < 10.0 and (said.kind, said.steps, said.turn) == ("cpu", 2, 1)
