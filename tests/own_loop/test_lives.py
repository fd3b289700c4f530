"""Lives of runs that no file describes, drawn from a seed: `geotrain serve` behind TLS, loops that join by a token,
kills, halts, goodbyes, a server that moves. `OWN_LIVES_SEED` plays them again."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from geotrain.commands.operate import LiveRun
from geotrain.config import ConfigError
from geotrain.net.transport.grpc_client import Unreachable
from tests.support.drawn import seed_of
from tests.support.own_loops import AloneRun, own_runs
from tests.support.small_runs import status

H, FOR_EVER = 8, 1_000_000
PAUSES_S = 0.0, 0.1, 0.5, 3.0


class Life:
    """A run that has no end of its own, whose workers each go on until an operator stops it."""

    def __init__(self, run: AloneRun, seed: int) -> None:
        self.run, self.random, self.told = run, random.Random(seed), list[str]()
        self.server, self.restarts = run.serve(), 0
        self.workers: dict[str, Any] = {}
        self.before = dict[str, int]()  # updates of each when it came last
        self.left = list[Any]()  # processes that end by themselves
        self.comes()

    def play(self) -> None:
        for _ in range(self.random.randint(4, 9)):
            self._goes_on(self.random.choice([0, 0, 1, 20]))
            happens = self.random.choice(HAPPENS)
            self.told.append(happens.__name__)
            happens(self)
        for name, before in self.before.items():
            self.run.until(lambda name=name, before=before: self._updates(name) > before)
        self._steer("stop")
        self.run.ended(self.server, *self.workers.values(), *self.left)

    # -- what happens

    def comes(self, name: str = "") -> None:
        """A worker joins: a new one, or one that was there before."""
        if name or len(self.workers) < 3:
            name = name or f"w{len(self.workers)}"
            self.before[name] = self._updates(name)
            self.workers[name] = self.run.join(name, FOR_EVER)

    def dies(self) -> None:
        name = self.random.choice([*self.workers])
        self.run.kill(self.workers[name])
        time.sleep(self.random.choice(PAUSES_S))
        self.comes(name)

    def leaves(self) -> None:
        """One takes some steps, and says goodbye; others train what it was lent."""
        self.left.append(self.run.join(f"guest{len(self.left)}", self.random.randint(1, 5 * H)))

    def server_dies(self) -> None:
        self.run.kill(self.server)
        time.sleep(self.random.choice(PAUSES_S))
        self.server, self.restarts = self.run.serve(resume=True), self.restarts + 1

    def both_die(self) -> None:
        name = self.random.choice([*self.workers])
        self.run.kill(self.workers[name])
        self.server_dies()
        self.comes(name)

    def moves(self) -> None:
        """All are killed, and the run is served from another folder, at another port."""
        if self.run.run.name != "moved" and (self.run.run / "cluster.json").exists():
            if self.left:
                self.run.ended(*self.left)
                self.left.clear()
            self.run.kill(self.server, *self.workers.values())
            self.run.move()
            self.server, self.restarts = self.run.serve(resume=True), self.restarts + 1
            for name in self.workers:
                self.comes(name)

    def halts(self) -> None:
        process = self.random.choice([self.server, *self.workers.values()])
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(self.random.choice(PAUSES_S))
        os.kill(process.pid, signal.SIGCONT)

    def is_paused(self) -> None:
        self._steer("pause")
        time.sleep(self.random.choice(PAUSES_S))
        self._steer("resume")

    # -- inside

    def _steer(self, what: str) -> None:
        def done() -> bool:
            with suppress(Unreachable, ConfigError):  # nobody answers, or nobody has joined yet
                return bool(LiveRun(self.run.run).steer(what))
            return False

        self.run.until(done)

    def _updates(self, name: str = "") -> int:
        """How many of a worker's, or all, are applied."""
        members = [event["member"] for event in self.run.events("UpdateApplied")]
        return members.count(f"{name}-0") if name else len(members)

    def _goes_on(self, updates: int) -> None:
        """Wait for so many updates more."""
        seen = self._updates()
        self.run.until(lambda: self._updates() >= seen + updates)


HAPPENS = (
    Life.comes, Life.comes, Life.dies, Life.dies, Life.leaves, Life.server_dies, Life.both_die, Life.moves,
    Life.halts, Life.halts, Life.is_paused,
)  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    with own_runs(tmp_path, AloneRun) as made:
        yield made


def lives(runs: Any, seed: int) -> None:
    run = runs(f"life-{seed}")
    life = Life(run, seed)
    try:
        life.play()
    except BaseException as error:
        error.add_note(f"OWN_LIVES_SEED={seed}: {', '.join(life.told)}\n{run.said()}")
        raise
    ended, applied = status(run.run / "run.json", "global"), run.events("UpdateApplied")
    # Of an update at which the server was killed there may be no event, or two.
    unsure = H * life.restarts
    assert abs(ended["committed_samples"] - sum(event["samples"] for event in applied)) <= unsure
    assert ended["open_leases"] == 0
    # gRPC itself prints a traceback where a call is cancelled that has not begun.
    assert not re.search('File ".*/geotrain/(commands|net|outer|own_loop|worker)/', run.said()), run.said()


def test_a_life_that_the_commit_draws_loses_nothing(runs: Any) -> None:
    lives(runs, seed_of("OWN_LIVES_SEED"))


@pytest.mark.long("geotrain/own_loop", "geotrain/net", "geotrain/commands/serve.py", "examples")
@pytest.mark.parametrize("more", range(1, 20))
def test_more_lives(runs: Any, more: int) -> None:
    lives(runs, seed_of("OWN_LIVES_SEED") + more)
