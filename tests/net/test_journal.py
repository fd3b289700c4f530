"""The journal: torn tails cut off, damage told, a full disk survived; and the state it gives back, bit by bit."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.common.names import GLOBAL
from geotrain.net.storage import journal as journal_module
from geotrain.net.storage.journal import Journal, JournalDamaged, JournalFull
from geotrain.net.storage.recovery import JOURNAL, KINDS, Restarted, begin_snapshot, finish_snapshot, recover
from geotrain.net.storage.snapshots import OtherFormatError
from geotrain.outer.messages import ChunkDelta, LeaseRequest, Leave, UpdatePart
from geotrain.outer.server import intake
from geotrain.outer.server.parts import ServerPart
from tests.support.outer_world import config, halves, make, random_deltas
from tests.support.recorded_world import JournaledWorld, same_state

BIG = 1 << 24


def update(sequence: int, size: int = 100) -> UpdatePart:
    return UpdatePart("a", "1", 0, sequence, 0, (ChunkDelta(0, 0, random.Random(sequence).randbytes(size)),))


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
            content = journal_module._head(journal_module.LAST, 1, flushed - 1) + content[len(head) :]
        path.write_bytes(content)
        found, journal = read(folder)
        assert found == messages[: len(found)] and len(found) >= flushed
        assert (journal.cut is not None) == (len(content) > path.stat().st_size)
        assert read(folder)[0] == found  # and now it is whole


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


def test_another_format_is_refused_and_nothing_is_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "LAST", b"GeoTrnJ007.")
    written(tmp_path, [update(1, 50)]).close()
    monkeypatch.undo()
    path = tmp_path / "00000001.journal"
    content = path.read_bytes()
    with pytest.raises(
        OtherFormatError, match=r"00000001\.journal: its format is 7, and this version .* format 4 only"
    ):
        read(tmp_path)
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == content


@pytest.mark.parametrize("segments", [7, 3])
def test_a_missing_segment_stops_the_server(tmp_path, segments):
    """One between others, or the newest."""
    written(tmp_path, MESSAGES, segments).close()
    (tmp_path / "00000003.journal").unlink()
    with pytest.raises(JournalDamaged, match=r"00000003\.journal: is missing"):
        read(tmp_path)


@pytest.mark.parametrize("died", [False, True])
@pytest.mark.parametrize("torn", [False, True])
def test_a_rotation_that_failed_harms_nothing(tmp_path, monkeypatch, torn, died):
    """The folder's fsync fails, after the new segment has got its name: nothing is lost of what is written then,
    in the old segment. died: the process could not even remove the new one. torn: its last record is not whole."""
    journal = written(tmp_path, MESSAGES[:3])
    real_unlink = Path.unlink

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "sync", refuse)
        if died:
            patch.setattr(Path, "unlink", lambda path, missing_ok=False: refuse(path))
        with pytest.raises(JournalFull):
            journal.rotate()
    assert Path.unlink is real_unlink
    assert (tmp_path / "00000002.journal").exists() == died
    for message in MESSAGES[3:]:
        journal.append(message)
        journal.flush()
    if torn:
        journal.append(update(99, 10))
    journal.close()
    if torn:
        path = tmp_path / "00000001.journal"
        os.truncate(path, path.stat().st_size - 1)
    again = Journal(tmp_path, KINDS, BIG)
    assert list(again.replay(1)) == MESSAGES
    assert (again.cut is not None) == torn
    assert again.rotate() == 2  # and it can be done now
    again.append(update(5))
    again.flush()
    again.close()
    assert read(tmp_path)[0] == [*MESSAGES, update(5)]


@pytest.mark.parametrize("there", [11, 15, 27])  # bytes: the mark, half of the head, all but its checksum
def test_a_head_that_was_half_written_at_a_rotation_is_the_one_before(tmp_path, there):
    journal = written(tmp_path, MESSAGES)
    path = tmp_path / "00000001.journal"
    before = path.read_bytes()
    journal.rotate()
    journal.close()
    after = path.read_bytes()
    assert after[:there] != before[:there] and after[27:31] != before[27:31]
    path.write_bytes(after[:there] + before[there:])
    assert read(tmp_path)[0] == MESSAGES


def test_a_flush_that_failed_leaves_only_what_was_acknowledged(tmp_path, monkeypatch):
    """The next incarnation would read the rest from the kernel's cache and take it for safe, and lose it with the
    power."""
    journal = written(tmp_path, [update(1)])
    journal.append(update(2))

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "fdatasync", fail)
        with pytest.raises(OSError):
            journal.flush()
    journal.close()
    assert read(tmp_path)[0] == [update(1)]


def test_a_message_that_cannot_be_written_changes_nothing(tmp_path):
    journal = written(tmp_path, [update(1)])
    with pytest.raises(ValueError, match="a header of"):
        journal.append(LeaseRequest("a" * 10_000_000, 1, 0.5))
    journal.append(update(2))
    with pytest.raises(ValueError, match="a header of"):  # of several, all or none
        journal.append(update(3), update(4), LeaseRequest("a" * 10_000_000, 1, 0.5), update(5))
    journal.append(update(6), update(7))
    journal.flush()
    journal.close()
    assert read(tmp_path)[0] == [update(1), update(2), update(6), update(7)]


def test_new_folders_are_on_disk_in_their_parents(tmp_path, monkeypatch):
    """Of each folder that is made, the folder that holds its name is synced after it was made."""
    made: list[Path] = []
    synced: list[tuple[Path, frozenset[Path]]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        if place.is_dir():
            synced.append((place, frozenset(place.iterdir())))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    world = recorded(tmp_path / "runs" / "small", GLOBAL)
    world.snapshot(GLOBAL)
    world.close()
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) >= 5
    for folder in made:
        assert any(place == folder.parent and folder in names for place, names in synced), folder


def test_a_full_disk_refuses_and_recovers(tmp_path, monkeypatch):
    journal = written(tmp_path, [update(1)])
    room, real = 3_000_000, os.pwrite

    def pwrite(descriptor: int, content: Any, position: int) -> int:
        if position + len(content) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content, position)

    monkeypatch.setattr(journal_module.os, "pwrite", pwrite)
    whole = (tmp_path / "00000001.journal").stat().st_size
    for _ in range(2):
        with pytest.raises(JournalFull, match="no room for the journal"):
            journal.append(update(2, 4_000_000))
        assert (tmp_path / "00000001.journal").stat().st_size == whole, "half a record keeps the disk full"
    journal.append(update(2, 1000))
    journal.flush()
    room = 1 << 30
    journal.append(update(3, 4_000_000))
    journal.flush()
    journal.close()
    assert read(tmp_path)[0] == [update(1), update(2, 1000), update(3, 4_000_000)]


# ------------------------------------------------------------------------------- the state that comes back


def recorded(folder: Path, which: str, **settings: Any) -> JournaledWorld:
    """Make a world in which this server is told everything through a journal."""
    kind = partial(JournaledWorld, folder, journaled=(which,))
    world: JournaledWorld = make(config(**settings), cut_a=halves, kind=kind)
    return world


def test_a_journal_moved_away_leaves_the_snapshot(tmp_path):
    world = recorded(tmp_path, "eu")
    world.snapshot("eu")
    want = {name: t.clone() for name, t in world.regions["eu"].state()[0].items()}
    world.push("a", random_deltas(world, 1))
    world.close()
    shutil.move(tmp_path / "eu" / JOURNAL, tmp_path / "aside")
    again = recover(partial(world.build, "eu"), world.begin, tmp_path / "eu", keep=2)
    assert all(torch.equal(want[name], tensor) for name, tensor in again.server.state()[0].items())
    again.journal.close()


def test_what_a_shard_took_after_its_snapshot_is_there_again(tmp_path):
    """Its ledger has said before, once, that the member has joined; and has answered no fact since."""
    world = make(config(updates_per_send=1), fragments=1)
    standing, join = world.top.stand(), world.regions["eu"].join_message()
    build = partial(world.build, GLOBAL, ServerPart(((0,), (1,), (2,)), 1))
    mine = [slices if chunk == 1 else () for chunk, slices in enumerate(join.pushes)]
    shard = recover(build, lambda server: server.set_weights({1: world.start[1].clone()}), tmp_path, 2)

    def handle(*messages: Any) -> None:
        for message in messages:
            shard.journal.append(message)
            shard.journal.flush()
            shard.server.handle(message)

    handle(standing, replace(join, pushes=tuple(mine), holds=tuple(mine)))
    finish_snapshot(shard.store, shard.journal, *begin_snapshot(shard.server, shard.store, shard.journal, False))
    world.push("a", random_deltas(world, 1))
    updates = [message for message in world.up["eu"] if isinstance(message, UpdatePart) and message.fragment == 1]
    handle(*updates)
    assert shard.server.members["eu"].fragments[1].sequence == 1
    with patch.object(intake, "MOST_UNSAID", 0):
        again = recover(build, int, tmp_path, 2, read_only=True)
    same_state(again.server, shard.server)
    shard.journal.close()
