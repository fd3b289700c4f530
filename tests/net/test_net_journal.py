"""The journal: torn tails cut off, damage told, a full disk survived; and the state it gives back, bit by bit."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.config import CodecConfig
from geotrain.net import journal as journal_module
from geotrain.net.journal import Journal, JournalDamaged, JournalFull
from geotrain.net.machine import take
from geotrain.net.recovery import JOURNAL, KINDS, Restarted, begin_snapshot, finish_snapshot, recover
from geotrain.outer.messages import GLOBAL, FragmentDelta, LeaseRequest, Leave, Refused, UpdatePart
from tests.outer.test_rules import config
from tests.outer.test_servers import halves, make, random_deltas

BIG = 1 << 24


def update(sequence: int, size: int = 100) -> UpdatePart:
    return UpdatePart("a", "1", sequence, 0, (FragmentDelta(0, 0, random.Random(sequence).randbytes(size)),))


def written(folder: Path, messages: list[Any], segments: int = 1) -> Journal:
    """A journal with these messages, all flushed, in so many segments."""
    journal = Journal(folder, KINDS, BIG)
    assert list(journal.replay(1)) == []
    for i, message in enumerate(messages):
        if i and i % -(-len(messages) // segments) == 0:
            journal.rotate()
        journal.append(message)
    journal.flush()
    return journal


def read(folder: Path, first: int = 1) -> tuple[list[Any], Journal]:
    journal = Journal(folder, KINDS, BIG)
    messages = list(journal.replay(first))
    journal.close()
    return messages, journal


MESSAGES = [
    Restarted(),
    update(1),
    LeaseRequest("a", 1, 0.5),
    update(2, 3_000_000),
    Leave("a"),
    update(3, 0),
    Restarted(),
]


@pytest.mark.parametrize("segments", [1, 3, 7])
def test_what_was_written_comes_back(tmp_path, segments):
    journal = written(tmp_path, MESSAGES, segments)
    journal.close()
    assert read(tmp_path)[0] == MESSAGES
    assert journal.segments() == list(range(1, segments + 1))
    if segments == 7:  # one message each
        journal.drop_before(5)
        assert journal.segments() == [5, 6, 7]
        assert read(tmp_path, 5)[0] == MESSAGES[4:]


def test_writing_goes_on_after_reading(tmp_path):
    written(tmp_path, MESSAGES, 2).close()
    journal = Journal(tmp_path, KINDS, BIG)
    assert list(journal.replay(1)) == MESSAGES
    journal.append(update(9))
    journal.rotate()
    journal.append(update(10))
    journal.flush()
    journal.close()
    assert read(tmp_path)[0] == [*MESSAGES, update(9), update(10)]


@settings(max_examples=60, deadline=None)
@given(flushed=st.integers(0, 5), cut=st.floats(0, 1), garbage=st.binary(max_size=40), stale=st.booleans())
def test_a_tail_torn_at_any_byte_is_cut_off_and_nothing_flushed_is_lost(flushed, cut, garbage, stale):
    """Killed at any byte of what was not flushed; then whatever the disk makes of the rest."""
    messages = [update(i, 50) for i in range(1, 6)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal = written(folder, messages[:flushed])
        path = folder / "00000001.journal"
        safe = path.stat().st_size
        head = path.read_bytes()[: journal_module.SEGMENT_HEAD_BYTES]
        for message in messages[flushed:]:
            journal.append(message)
        journal.close()
        content = path.read_bytes()
        end = safe + int(cut * (len(content) - safe))
        content = content[:end] + garbage
        if stale and flushed:  # the mark of the last flush may not have reached the disk
            content = journal_module._segment_head_bytes(1, flushed - 1) + content[len(head) :]
        path.write_bytes(content)
        found, journal = read(folder)
        assert found == messages[: len(found)] and len(found) >= flushed
        assert (journal.cut is not None) == (len(content) > path.stat().st_size)
        assert read(folder)[0] == found  # and now it is whole


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_to_what_was_acknowledged_stops_the_server(data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        messages = [update(i, 50) for i in range(1, 7)]
        written(folder, messages, 2).close()
        path = folder / f"0000000{data.draw(st.integers(1, 2))}.journal"
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del content[at:]
        path.write_bytes(content)
        with pytest.raises(
            JournalDamaged, match=r"0000000\d\.journal.*Bring the file back.*move the journal's folder"
        ):
            read(folder)


def test_a_missing_segment_stops_the_server(tmp_path):
    written(tmp_path, MESSAGES, 7).close()
    (tmp_path / "00000003.journal").unlink()
    with pytest.raises(JournalDamaged, match=r"00000003\.journal: is missing"):
        read(tmp_path)


def test_a_full_disk_refuses_and_recovers(tmp_path, monkeypatch):
    journal = written(tmp_path, [update(1)])
    room, real = 3_000_000, os.pwrite

    def pwrite(descriptor: int, content: Any, position: int) -> int:
        if position + len(content) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content, position)

    monkeypatch.setattr(journal_module.os, "pwrite", pwrite)
    for _ in range(2):
        with pytest.raises(JournalFull, match="no room for the journal"):
            journal.append(update(2, 4_000_000))
    journal.append(update(2, 1000))
    journal.flush()
    room = 1 << 30
    journal.append(update(3, 4_000_000))
    journal.flush()
    journal.close()
    assert read(tmp_path)[0] == [update(1), update(2, 1000), update(3, 4_000_000)]


# ------------------------------------------------------------------------------- the state that comes back


class Recorded:
    """A world (see tests.outer.world) of which one server is told everything through a journal of its own."""

    def __init__(self, folder: Path, which: str, **settings: Any) -> None:
        self.world = make(config(**settings), cut_a=halves)
        self.which, self.folder = which, folder
        self.start = [x.x.clone() for x in self.world.top.fragments]
        self.recovered = recover(self.build, self.begin, folder, keep=2)
        self.put_in_place()

    def build(self) -> Any:
        world = self.world
        if self.which == GLOBAL:
            names = {r: tuple(region.members) for r, region in world.regions.items()}
            return type(world.top)(world.identity, world.layout, world.config, names, world.top.book.train_samples, 1)
        old = world.regions[self.which]
        new = type(old)(self.which, world.identity, world.layout, world.config, tuple(old.members))
        new.incarnation = old.incarnation
        return new

    def begin(self, server: Any) -> None:
        if self.which == GLOBAL:
            server.set_weights([v.clone() for v in self.start])

    def put_in_place(self) -> None:
        """The world's server becomes this one: what it is told is journaled first. Members join it again."""
        world, server, journal = self.world, self.recovered.server, self.recovered.journal

        def tell(message: Any) -> Any:
            journal.append(message)
            journal.flush()
            return take(server, message)

        if self.which == GLOBAL:
            for region in world.regions.values():
                tell(region.join_message())
            server.on_part, server.on_lease_request = (
                recorder(server.on_part, tell),
                recorder(server.on_lease_request, tell),
            )
            world.top = server
        else:
            old = world.regions[self.which]
            for worker in (w for r, w in world.workers.values() if r == self.which):
                for join in worker.joins(world.identity):
                    tell(join)
            if not server.fragments:
                tell(world.top.answer(self.which, old.incarnation, 0, 0, tuple(range(len(old.fragments)))))
            server.on_part, server.on_lease = recorder(server.on_part, tell), recorder(server.on_lease, tell)
            server.on_global_weights = recorder(server.on_global_weights, tell)
            world.regions[self.which] = server


def recorder(real: Any, tell: Any) -> Any:
    """Journal, then the real method; `take` calls it again with the same message."""
    busy = []

    def call(message: Any) -> Any:
        if busy:
            return real(message)
        busy.append(1)
        try:
            return tell(message)
        finally:
            busy.clear()

    return call


def same_state(one: Any, other: Any) -> None:
    (tensors, meta), (tensors2, meta2) = one.state(), other.state()
    assert meta == meta2
    assert tensors.keys() == tensors2.keys()
    for name in tensors:
        assert torch.equal(tensors[name], tensors2[name]), name


@pytest.mark.parametrize("which", [GLOBAL, "eu"])
@pytest.mark.parametrize("rule", ["halos", "region_momentum", "sync"])
def test_replay_gives_bitwise_the_state_that_was(tmp_path, rule, which):
    """After every update the folder is copied, as a kill would leave it, and recovered; snapshots come and go, one of
    them between the two halves of an update; the newest is lost once, and the one before it does."""
    recorded = Recorded(tmp_path / "live", which, rule=rule, up=CodecConfig(name="int4"), updates_per_send=2)
    world = recorded.world
    lost_snapshots = 0
    for i in range(10):
        for n, r in (("a", "eu"), ("b", "us")):
            lease = world.lease(n)
            deltas = random_deltas(world, 10 * i + ord(n))
            region, worker = world.regions[r], world.workers[n][1]
            parts = worker.parts(deltas, (lease.lease,) if lease else ())
            for p, part in enumerate(parts):
                region.on_part(part)
                if p == 0 and len(parts) > 1 and i % 4 == 1:
                    server, journal = recorded.recovered.server, recorded.recovered.journal
                    copy = begin_snapshot(server, journal, ended=False)
                    if i % 8 == 1:  # else the process died before the snapshot was written
                        finish_snapshot(recorded.recovered.store, journal, *copy)
            world._collect(r)
            while sent := world.deliver_up(r):
                world.deliver_down(r, sent)
            shutil.copytree(tmp_path / "live", tmp_path / "copy")
            if i == 9 and len(recorded.recovered.store.numbers()) == 2:
                newest = max(recorded.recovered.store.numbers())
                (tmp_path / "copy" / "snapshots" / f"{newest:08d}" / "meta.json").write_text("")
                lost_snapshots += 1
            again = recover(recorded.build, recorded.begin, tmp_path / "copy", keep=2)
            again.journal.close()
            same_state(again.server, recorded.recovered.server)
            shutil.rmtree(tmp_path / "copy")
    assert again.replayed > 0
    assert lost_snapshots or which == GLOBAL
    recorded.recovered.journal.close()


def test_lives_after_a_recovery_replay_too(tmp_path):
    """Several deaths with no snapshot between: halves of updates that died with a life are not applied on replay."""
    recorded = Recorded(tmp_path / "live", "eu")
    world = recorded.world
    for life in range(3):
        region, worker = world.regions["eu"], world.workers["a"][1]
        world.push("a", random_deltas(world, life))
        parts = worker.parts(random_deltas(world, 100 + life))
        region.on_part(parts[0])  # the other half never comes: the server dies
        worker.sequence -= 1
        worker.job -= 1
        recorded.recovered.journal.close()
        recorded.recovered = recover(recorded.build, recorded.begin, tmp_path / "live", keep=2)
        same_state(recorded.recovered.server, region)
        with suppress(Refused):  # journaled and refused: not every rank has joined again
            recorded.recovered.journal.append(parts[1])
            take(recorded.recovered.server, parts[1])
        recorded.put_in_place()
    assert world.regions["eu"].members["a"].updates == 3
    recorded.recovered.journal.close()


def test_a_journal_moved_away_leaves_the_snapshot(tmp_path):
    recorded = Recorded(tmp_path, "eu")
    world = recorded.world
    server, journal = recorded.recovered.server, recorded.recovered.journal
    finish_snapshot(recorded.recovered.store, journal, *begin_snapshot(server, journal, ended=False))
    want = {name: t.clone() for name, t in server.state()[0].items()}
    world.push("a", random_deltas(world, 1))
    journal.close()
    shutil.move(tmp_path / JOURNAL, tmp_path / "aside")
    again = recover(recorded.build, recorded.begin, tmp_path, keep=2)
    assert all(torch.equal(want[name], tensor) for name, tensor in again.server.state()[0].items())
    again.journal.close()


def test_a_snapshot_is_a_copy(tmp_path):
    """It is written to disk while the server goes on: numbers and tensors alike are of its moment."""
    recorded = Recorded(tmp_path, GLOBAL)
    server, journal = recorded.recovered.server, recorded.recovered.journal
    take(server, LeaseRequest("a", 1, 0.5))
    tensors, meta = begin_snapshot(server, journal, ended=False)
    before = json.dumps(meta["state"])
    take(server, LeaseRequest("a", 2, 0.25))
    for state in server.fragments:
        state.x.add_(1.0)
    assert json.dumps(meta["state"]) == before
    assert not any(torch.equal(tensors[f"fragment.{i}.x"], state.x) for i, state in enumerate(server.fragments))
    journal.close()
