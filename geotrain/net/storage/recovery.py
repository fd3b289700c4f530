"""Recovers a server after its process died: loads the newest whole snapshot, then handles all later
messages again, which it reads from the journal, through the same `handle`."""

from __future__ import annotations

import copy
import typing
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.journal import Journal
from geotrain.net.storage.owner import Owner, check_origin
from geotrain.net.storage.remote_snapshots import RemoteSnapshots, newest_snapshot
from geotrain.net.storage.snapshots import SNAPSHOTS, SnapshotStore, StoreError
from geotrain.outer.messages import Join, MemberSilent, Message, Refused
from geotrain.outer.mirror_store import MirrorStore
from geotrain.outer.server.member_phase import MemberEvent
from geotrain.outer.server.server import Server
from geotrain.parameters.parameter_map import ParameterMap

JOURNAL = "journal"  # within a server's folder


@dataclass(frozen=True)
class Restarted:
    """Marks, in a server's journal, where its process was restarted and lost what `Server.state` leaves out, such as
    who had joined. A replay has to lose it at the same point, to get to the same state.

    settings: from here on (`Server.settings`); empty: those before. All that is handled again is so as it was then,
    whatever the run and cluster files say by now.
    """

    settings: bytes = b""


@dataclass(frozen=True)
class Older:
    """Marks, at the beginning of a server's journal, that its state came from a copy: what it did since that was made
    is lost. drawn: for `Server.comes_from_copy`."""

    drawn: int


@dataclass(frozen=True)
class Stopped:
    """Marks, in a server's journal, where its process ended in good order, and with it all who took part."""


@dataclass(frozen=True)
class StillJoined:
    """Marks, in a server's journal where its state was saved, that a rank had joined, which the state leaves out."""

    join: Join


@dataclass(frozen=True)
class Dismissed:
    """Marks, in a server's journal, that this shard of a server that has ended knows so, and does not come back."""

    shard: int


KINDS = (Restarted, Older, Stopped, StillJoined, Dismissed, *typing.get_args(Message))


@dataclass
class Recovered:
    """Holds a recovered server and where its state is kept.

    server: the state machine as it was when the last message in the journal had been applied, but with no member
    joined. faults: sentences about what was found damaged and passed over. replayed: how many messages were handled
    since the snapshot. snapshot: the JSON part of the newest one; None: there is none.
    ended: the server had ended in this launch, and stays ended. dismissed: which of its shards know that, then.
    """

    server: Server
    store: SnapshotStore
    journal: Journal
    faults: list[str]
    replayed: int
    snapshot: dict[str, Any] | None = None
    ended: bool = False
    dismissed: frozenset[int] = frozenset()


def recover(
    build: Callable[[], Server],
    begin: Callable[[Server], None],
    folder: Path,
    keep: int,
    mirror: RemoteSnapshots | None = None,
    mirror_store: MirrorStore | None = None,
    launch: str = "",
    read_only: bool = False,
    owner: Owner | None = None,
) -> Recovered:
    """Bring a server back from its folder, or begin a new one in an empty folder.

    A server that had ended begins again, perhaps with more data; but in the launch in which it ended it was started
    again because its process died too early, and stays ended.

    build: makes the state machine, without state. begin: gives a new one what it starts from. keep: how many
    snapshots stay. mirror: where copies of the snapshots are, for a folder that has lost its own. mirror_store: where
    the server's mirrors lie. launch: names that which this process is started by; "": one of its own. read_only:
    nothing is written, and the machine must not go on. owner: whose state it is to be.
    Raises StoreError, OtherOwnerError among them, JournalDamaged, ParameterMapError, OSError.
    """
    store = SnapshotStore(folder / SNAPSHOTS, keep, mirror_store)

    def built(settings: str = "") -> Server:
        machine = build()
        if settings not in ("", machine.settings):
            machine, incarnation = machine.remade(settings), machine.incarnation
            machine.incarnation = incarnation
        machine.store.set_mirror_store(store.mirror_store)
        return machine

    snapshot, faults = newest_snapshot(store, mirror, owner)
    meta, ended = snapshot.meta if snapshot else None, False
    server = built(meta.get("settings", "") if meta else "")
    if snapshot is not None:
        server.load(snapshot.tensors, snapshot.meta["state"])
        ended = snapshot.meta["ended"] and launch != "" and snapshot.meta["launch"] == launch
        if snapshot.meta["ended"] and not ended:
            server.begin_again()
    elif faults:
        faults.append(f"{store.folder}: no snapshot is whole: docs/servers.md says what to do")
        raise StoreError("\n".join(faults))
    else:
        begin(server)
    journal = Journal(folder / JOURNAL, KINDS, journal_limit(server.parameter_map), read_only)
    replayed, dismissed = 0, set[int]()
    for message in journal.replay(meta["segment"] if meta else 1):
        replayed += 1
        with suppress(Refused):  # what is refused now was refused then
            match message:
                case Restarted(settings):
                    server = restarted(partial(built, bytes(settings).decode() or server.settings), server)
                case Older(drawn):
                    server.comes_from_copy(drawn)
                case Stopped():
                    end_incarnations(server)
                case StillJoined(join):
                    server.membership.note_joined(join)
                case Dismissed(shard):
                    dismissed.add(shard)
                case _:  # what it sends is dropped: it was sent then, or will be sent again after the next join
                    server.handle(message)
    if meta is not None or replayed:
        check_origin(folder, server.origin)  # before anything is written
    if read_only:
        journal.close()
    else:
        before, now = server.settings, build().settings
        server = restarted(built, server) if replayed or before != now else server
        if meta is not None and journal.unused:  # first of all, so that a death here does not hide it
            drawn = uuid.uuid4().int % (1 << 16)
            journal.append(Older(drawn))
            server.comes_from_copy(drawn)
        journal.append(Restarted(b"" if before == now else now.encode()))
        journal.flush()
    if journal.cut is not None:
        faults.append(journal.cut)
    return Recovered(server, store, journal, faults, replayed, meta, ended, frozenset(dismissed if ended else ()))


def journal_limit(parameter_map: ParameterMap) -> int:
    """The most bytes that the payloads of a message in a server's journal may have."""
    return 8 * parameter_map.numel + 65536


def end_incarnations(server: Server) -> None:
    """Do what `Stopped` means: the members' next incarnations follow no death."""
    for member in server.members.values():
        member.transition(MemberEvent.STOPS)


def restarted(build: Callable[[], Server], server: Server) -> Server:
    """Make a server with nothing but this one's durable state, as after the death of its process."""
    fresh = build()
    fresh.load(*server.state())
    return fresh


def begin_snapshot(
    server: Server,
    store: SnapshotStore,
    journal: Journal,
    ended: bool,
    launch: str = "",
    owner: Owner | None = None,
) -> tuple[FrozenState, dict[str, Any]]:
    """Freeze the state, and let the journal go on in a new segment from there; returns what `finish_snapshot` takes,
    which must be called: until then the server copies what it changes.

    It must be called on the server's thread, between two messages. ended: the run has ended in good order, everyone
    having left; launch: in which. checkpoint_id: None: a new one, of this process alone. owner: whose state it is.
    Raises JournalFull, and StoreError where the snapshot cannot fit.
    """
    tensors, state = server.state()
    # Without room nothing is begun: a snapshot that fails halfway would take the room that updates still find, and
    # leave another segment of the journal behind.
    store.check_room(sum(tensor.nbytes for tensor in tensors.values()))
    state = copy.deepcopy(state)  # it is written while the server goes on
    segment = journal.rotate()
    for message in left_out(server):
        journal.append(message)
    journal.flush()
    # Coded payloads are read first: the server drops them soon, and then they take memory for the snapshot alone.
    # Then chunk by chunk, as updates come to them.
    order = sorted(tensors, key=lambda name: (tensors[name].dtype is not torch.uint8, _chunk_of(name)))
    tensors = {name: tensors[name] for name in order}
    share = max(f.numel for f in server.parameter_map.fragments) / server.parameter_map.numel
    frozen = FrozenState(tensors, largest_share=share, done=store.mirror_store.release)
    server.store.will_change = frozen.before_write
    return frozen, {
        "state": state,
        "settings": server.settings,
        "segment": segment,
        "ended": ended,
        "checkpoint_id": store.new_checkpoint_id(),
        "launch": launch,
        "owner": owner and owner.plain(),
    }


def _chunk_of(tensor: str) -> int:
    """Read the chunk's number, the last number in the name of a tensor of a state."""
    return int(next(filter(str.isdecimal, reversed(tensor.split(".")))))


def left_out(server: Server) -> list[Message | StillJoined]:
    """List the messages with which a journal that follows the state must begin, so that its replay knows what the
    state leaves out: that a shard's ledger has spoken, who had joined, and the updates of which not all parts had
    arrived."""
    messages: list[Message | StillJoined] = []
    if server.as_shard.standing is not None and server.as_shard.open:
        messages.append(server.as_shard.standing)
    for name, member in server.members.items():
        messages += map(StillJoined, member.joined.values())
        messages += server.intake.left_out(name)
        if member.silent and server.ledger:  # to be said last: whoever joins or sends a part of an update is alive
            messages.append(MemberSilent(name, member.incarnation))
    return messages


def finish_snapshot(store: SnapshotStore, journal: Journal, state: FrozenState, meta: dict[str, Any]) -> int:
    """Write the snapshot and return its number; then drop segments of the journal that no snapshot needs any more.

    Raises StoreError.
    """
    # An older snapshot has to be good for a recovery, too, should the newest be damaged: hence the minimum of all.
    number = store.save(state, meta)
    journal.drop_before(min(meta["segment"] for meta in store.metas()))
    return number
