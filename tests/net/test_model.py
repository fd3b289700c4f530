"""A server on its disk against a plain model, killed at any write, flush or rename: nothing acknowledged is lost,
nothing is applied twice, and what comes back has the same bits as a server that was never killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from geotrain.config import LimitsConfig, MomentumConfig
from geotrain.net.storage.recovery import JOURNAL, Recovered, begin_snapshot, finish_snapshot, recover
from geotrain.outer.messages import LeaseRequest, LiftQuarantine, MemberSilent, Refused, UpdatePart, UpdateRejected
from tests.support.outer_world import FakeWorker, World, config, halves, parameter_map, weights_of, whole
from tests.support.recorded_world import frozen, same_state, thawed

SECTOR_BYTES = 512  # a disk writes so many bytes as a whole


class Killed(BaseException):
    """SIGKILL: nobody catches it."""


class Disk:
    """Counts what reaches the disk; kills at the `kill_at`-th of them, before it, halfway or after it."""

    def __init__(self) -> None:
        self.operations, self.kill_at, self.how = 0, 0, 0
        self.synced: dict[str, int] = {}  # file → bytes that a power cut leaves

    def _do(self, real: Any, arguments: tuple[Any, ...], partial: Any = None) -> Any:
        self.operations += 1
        if self.operations != self.kill_at:
            return real(*arguments)
        if self.how == 1 and partial is not None:
            partial()
        elif self.how == 2:
            real(*arguments)
        raise Killed

    @contextmanager
    def attached(self) -> Iterator[None]:
        pwrite, rename, unlink, rmtree = os.pwrite, Path.rename, Path.unlink, shutil.rmtree

        def write(descriptor: int, content: Any, position: int) -> Any:
            half, end = bytes(content)[: len(content) // 2], position + len(content)
            if end <= os.fstat(descriptor).st_size and position // SECTOR_BYTES == (end - 1) // SECTOR_BYTES:
                half = b""  # what is overwritten within a sector is old or new
            return self._do(pwrite, (descriptor, content, position), lambda: pwrite(descriptor, half, position))

        def sync(descriptor: int) -> None:
            def real() -> None:
                self.synced[str(Path(f"/proc/self/fd/{descriptor}").readlink())] = os.fstat(descriptor).st_size

            self._do(real, ())

        with (
            patch.object(os, "pwrite", write),
            patch.object(os, "fdatasync", sync),
            patch.object(os, "fsync", sync),
            patch.object(Path, "rename", lambda path, target: self._do(rename, (path, target))),
            patch.object(Path, "unlink", lambda path, missing_ok=False: self._do(unlink, (path, missing_ok))),
            patch.object(shutil, "rmtree", lambda path, ignore_errors=False: self._do(rmtree, (path, ignore_errors))),
        ):
            yield


class KilledServers(RuleBasedStateMachine):
    """Two workers, one of two ranks. Deltas are whole numbers and the rule subtracts them: the model is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = parameter_map()
        self.settings = config(
            updates_per_send=3,
            region=MomentumConfig(lr_per_update=1.0, beta=0.0, buffer=1),
            limits=LimitsConfig(norm_deviations=None, strikes=2, strike_window=4),
        )
        self.workers = {n: FakeWorker(n, self.shape, cut(self.shape)) for n, cut in (("a", halves), ("b", whole))}
        self.world = World(self.settings, {"eu": list(self.workers.values())}, self._zeros(), self.shape)
        self.folder = Path(tempfile.mkdtemp())
        self.disk = Disk()
        self.lives = dict.fromkeys(self.workers, 1)
        self.acknowledged: dict[str, list[int]] = {n: [] for n in self.workers}  # the values of their updates
        self.doubtful: dict[str, int] = {}  # sent whole, but the server died before it said so
        self.recovered: Recovered = self._recover()
        self.twin = self.world.build("eu")  # never killed, but forgets what a restart forgets
        self._begin(self.twin)
        self._remember()

    def _zeros(self) -> list[torch.Tensor]:
        return [torch.zeros(f.numel) for f in self.shape.fragments]

    def _begin(self, server: Any) -> None:
        server.set_weights(self._zeros())
        for counts in server.fragments:
            server.rule.start(counts)
        for vectors in server.shards.all[0].vectors.values():
            server.rule.begin(vectors)

    def _recover(self) -> Recovered:
        with self.disk.attached():
            return recover(partial(self.world.build, "eu"), self._begin, self.folder, keep=2)

    def _copy(self) -> Any:
        """The twin as after a restart."""
        copy = self.world.build("eu")
        copy.load(*thawed(frozen(self.twin)))
        return copy

    def _remember(self) -> None:
        self.twin = self._copy()

    # -- what may happen

    def _tell(self, message: Any) -> bool:
        """Journal, flush, apply, as the machine does. Returns whether the server lived and took it."""
        with self.disk.attached():
            try:
                self.recovered.journal.append(message)
                self.recovered.journal.flush()
            except Killed:
                self._die(message)
                return False
        outcomes = []
        for server in (self.recovered.server, self.twin):
            try:
                server.handle(message)
                outcomes.append(True)
            except Refused:
                outcomes.append(False)
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    def _die(self, last: Any = None) -> None:
        """The process is gone, and perhaps the power: a new one comes back from the folder, which may have to die at
        its first steps, too. The message it was told last is part of its state or not; it cannot be in parts."""
        self.recovered.journal.close()
        self.disk.kill_at = self.disk.operations = 0
        self.recovered = self._recover()
        assert not [fault for fault in self.recovered.faults if "never written whole" not in fault]
        if last is not None and self._holds(last):
            with_it = True
            try:
                self.twin.handle(last)
            except Refused:
                with_it = False
            if with_it and isinstance(last, UpdatePart) and self.twin.members[last.member].sequence == last.sequence:
                self.acknowledged[last.member].append(self.doubtful[last.member])
        self._remember()
        same_state(self.recovered.server, self.twin)

    def _holds(self, last: Any) -> bool:
        """Whether the journal kept it: then the twin must take it, too."""
        return self.recovered.server.state()[1] != self._copy().state()[1]

    @initialize()
    def join_all(self) -> None:
        for name in self.workers:
            self._join(name)

    def _join(self, name: str) -> None:
        for join in self.workers[name].joins(self.world.identity, f"life-{self.lives[name]}"):
            self._tell(join)

    @rule(name=st.sampled_from("ab"), kill=st.integers(0, 8), how=st.integers(0, 2), anew=st.booleans())
    def join(self, name: str, kill: int, how: int, anew: bool) -> None:
        self.lives[name] += anew
        self._plan(kill, how)
        self._join(name)

    @rule(
        name=st.sampled_from("ab"),
        value=st.integers(-9, 9),
        kill=st.integers(0, 8),
        how=st.integers(0, 2),
        ranks=st.integers(1, 2),
        times=st.integers(1, 2),
    )
    def update(self, name: str, value: int, kill: int, how: int, ranks: int, times: int) -> None:
        """Its next update, from all of its ranks or one, once or twice."""
        worker, server = self.workers[name], self.recovered.server
        worker.sequence = worker.job = server.members[name].sequence
        version = min(state.version for state in server.fragments)
        deltas = {f.index: torch.full((f.numel,), float(value)) for f in self.shape.fragments}
        parts = worker.parts(deltas, incarnation=f"life-{self.lives[name]}", version=version)[:ranks]
        self.doubtful[name] = value
        self._plan(kill, how)
        for part in [p for p in parts for _ in range(times)]:
            before = self.recovered.server.members[name].sequence
            known = self.recovered.server
            self._tell(part)
            if self.recovered.server is known and known.members[name].sequence > before:
                self.acknowledged[name].append(value)  # the server has said so

    @rule(kill=st.integers(0, 40), how=st.integers(0, 2))
    def snapshot(self, kill: int, how: int) -> None:
        self._plan(kill, how)
        with self.disk.attached(), suppress(Killed):
            r = self.recovered
            finish_snapshot(r.store, r.journal, *begin_snapshot(r.server, r.store, r.journal, ended=False))
            return
        self._die()

    @rule(kill=st.integers(1, 12), how=st.integers(0, 2), power=st.booleans())
    def restart(self, kill: int, how: int, power: bool) -> None:
        """It dies, and once more while it comes back."""
        self.recovered.journal.close()
        if power:  # what was written and not flushed may be gone
            for file, size in self.disk.synced.items():
                if file.endswith(".journal") and Path(file).exists():
                    os.truncate(file, size)
        self._plan(kill, how)
        with suppress(Killed):
            self._recover().journal.close()
        self._die()

    @rule(
        name=st.sampled_from("ab"),
        kill=st.integers(0, 4),
        what=st.sampled_from([MemberSilent, UpdateRejected, LiftQuarantine]),
    )
    def other(self, name: str, kill: int, what: Any) -> None:
        self._plan(kill, 2)
        incarnation = f"life-{self.lives[name]}"
        messages = {
            MemberSilent: MemberSilent(name, incarnation),
            UpdateRejected: UpdateRejected(name, incarnation, "why"),
            LiftQuarantine: LiftQuarantine(name),
        }
        self._tell(messages[what])

    @rule(name=st.sampled_from("ab"))
    def lease(self, name: str) -> None:
        self._tell(LeaseRequest(name, self.recovered.server.members[name].job + 1))

    def _plan(self, kill: int, how: int) -> None:
        self.disk.operations, self.disk.kill_at, self.disk.how = 0, kill, how

    # -- what must hold

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        server = self.recovered.server
        for name, values in self.acknowledged.items():
            assert server.members[name].updates == len(values), name
        total = -float(sum(sum(values) for values in self.acknowledged.values()))
        for x in weights_of(server):
            assert torch.equal(x, torch.full_like(x, total))

    @invariant()
    def it_is_the_twin_bit_by_bit(self) -> None:
        same_state(self.recovered.server, self.twin)

    @precondition(lambda self: (self.folder / JOURNAL).exists())
    @invariant()
    def the_folder_gives_the_same_again(self) -> None:
        assert self.recovered.journal.segments()

    def teardown(self) -> None:
        self.recovered.journal.close()
        shutil.rmtree(self.folder)


TestKilledServers = KilledServers.TestCase
TestKilledServers.settings = settings(stateful_step_count=25)


def test_the_model_would_notice_what_is_doubled():
    machine = KilledServers()
    machine.join_all()
    machine.update("b", 3, 0, 0, 1, 1)
    machine.nothing_is_lost_or_doubled()
    machine.recovered.server.members["b"].sequence -= 1
    machine.update("b", 3, 0, 0, 1, 1)
    machine.acknowledged["b"].pop()
    with pytest.raises(AssertionError):
        machine.nothing_is_lost_or_doubled()
    machine.teardown()
