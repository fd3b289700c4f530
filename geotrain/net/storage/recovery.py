"""How a server gets its state back after its process died: it loads the newest whole snapshot, then handles all later
messages again, which it reads from the journal, through the same `Server.handle`."""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.journal import Journal
from geotrain.net.storage.remote_snapshots import RemoteSnapshots, newest_snapshot
from geotrain.net.storage.snapshots import SNAPSHOTS, SnapshotStore, StoreError
from geotrain.outer.messages import MemberSilent, Message, Refused
from geotrain.outer.mirror_store import MirrorStore
from geotrain.outer.server.member_phase import MemberEvent
from geotrain.outer.server.server import Server
from geotrain.outer.server.shard_server import ShardServer
from geotrain.outer.shards.local import LocalShards
from geotrain.outer.shards.protocol import FromShards, HeldPart
from geotrain.outer.shards.remote import RemoteShards

JOURNAL = "journal"  # within a server's folder


@dataclass(frozen=True)
class Restarted:
    """A record that stands in journals only. At this point the process was restarted, and what `Server.state` leaves
    out, such as who had joined, was lost. A replay has to lose it at the same point, to get to the same state."""


@dataclass(frozen=True)
class Stopped:
    """Another such record. At this point the process ended in good order, and with it all who took part."""


@dataclass(frozen=True)
class Dismissed:
    """Another. This shard of a server that has ended knows that, and does not come back."""

    shard: int


KINDS = (Restarted, Stopped, Dismissed, *typing.get_args(Message), *typing.get_args(FromShards))


@dataclass
class Recovered:
    """What `recover` gives.

    server: as it was when the last message in the journal had been applied, but with no member joined.
    faults: sentences about what was found damaged and passed over. replayed: how many messages since the snapshot.
    ended: the server had ended in this launch, and stays ended. dismissed: which of its shards know that, then.
    """

    server: Server
    store: SnapshotStore
    journal: Journal
    faults: list[str]
    replayed: int
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
) -> Recovered:
    """Bring a server back from its folder, or begin a new one in an empty folder.

    One that had ended begins again, perhaps with more data; but in the launch in which it ended it was started again
    because its process died too early, and stays ended.

    build: makes the server, without state. begin: gives a new server what it starts from. keep: how many snapshots
    stay. mirror: where copies of the snapshots are, for a folder that has lost its own; None: there are none, or the
    server's shards have theirs (see `geotrain.net.storage.timeline`). mirror_store: where the server's mirrors lie.
    launch: names that which this process is started by; "": one of its own.
    Raises StoreError, JournalDamaged, OSError.
    """
    store = SnapshotStore(folder / SNAPSHOTS, keep, mirror_store)
    snapshot, faults = newest_snapshot(store, mirror)
    server, ended, dismissed = build(), False, set[int]()
    journal = Journal(folder / JOURNAL, KINDS, limit_bytes=8 * server.parameter_map.numel + 65536)
    if snapshot is not None:
        server.load(snapshot.tensors, snapshot.meta["state"])
        ended = bool(snapshot.meta["ended"] and launch and snapshot.meta.get("launch") == launch)
        if snapshot.meta["ended"] and not ended:
            server.begin_again()
    elif faults:
        faults.append(f"{store.folder}: no snapshot is whole; restore one from a copy, or begin in a new folder")
        raise StoreError("\n".join(faults))
    else:
        begin(server)
    replayed = 0
    for message in journal.replay(snapshot.meta["segment"] if snapshot else 1):
        replayed += 1
        if isinstance(message, Restarted):
            server = restarted(build, server)
            continue
        if isinstance(message, Stopped):
            end_incarnations(server)
            continue
        if isinstance(message, Dismissed):
            dismissed.add(message.shard)
            continue
        # A message that is refused now was refused then. What the server sends is dropped here: it was sent then, or
        # will be sent again after the next join.
        with suppress(Refused):
            server.handle(message)
    if replayed:
        server = restarted(build, server)
    journal.append(Restarted())
    journal.flush()
    if journal.cut is not None:
        faults.append(journal.cut)
    return Recovered(server, store, journal, faults, replayed, ended, frozenset(dismissed if ended else ()))


def end_incarnations(server: Server) -> None:
    """What `Stopped` means: the members' next lives follow no death."""
    for member in server.members.values():
        member.meet(MemberEvent.STOPS)


def restarted(build: Callable[[], Server], server: Server) -> Server:
    """A server with nothing but this one's durable state, as after the death of its process."""
    fresh = build()
    if isinstance(fresh.shards, RemoteShards) and isinstance(server.shards, RemoteShards):
        fresh.shards.kept = server.shards.kept  # the shards live on, and may lack these commands
    fresh.load(*server.state())
    return fresh


def begin_snapshot(
    server: Server | ShardServer,
    store: SnapshotStore,
    journal: Journal,
    ended: bool,
    checkpoint_id: str | None = None,
    launch: str = "",
) -> tuple[FrozenState, dict[str, Any]]:
    """Freeze the state, and let the journal go on in a new segment from there; returns what `finish_snapshot` takes,
    which must be called: until then the server copies what it changes.

    It must be called on the server's thread, between two messages. ended: the run has ended in good order, everyone
    having left; launch: in which. moment: its name; None: one of this process alone. Raises JournalFull, and
    StoreError where the snapshot cannot fit.
    """
    tensors, state = server.state()
    # Without room nothing is begun: a snapshot that fails halfway would take the room that updates still find, and
    # leave another segment of the journal behind.
    store.check_room(sum(tensor.nbytes for tensor in tensors.values()))
    state = copy.deepcopy(state)  # it is written while the server goes on
    segment = journal.rotate()
    for message in server.left_out() if isinstance(server, ShardServer) else left_out(server):
        journal.append(message)
    journal.flush()
    # Coded payloads are read first: the server drops them soon, and then they take memory for the snapshot alone.
    tensors = dict(sorted(tensors.items(), key=lambda named: named[1].dtype is not torch.uint8))
    share = max(f.numel for f in server.parameter_map.fragments) / server.parameter_map.numel
    frozen = FrozenState(tensors, largest_share=share, done=store.mirror_store.page_out)
    if isinstance(server.shards, LocalShards):
        server.shards.watch(frozen.before_write)
    checkpoint_id = store.new_checkpoint_id() if checkpoint_id is None else checkpoint_id
    return frozen, {
        "state": state,
        "segment": segment,
        "ended": ended,
        "checkpoint_id": checkpoint_id,
        "launch": launch,
    }


def left_out(server: Server) -> list[Message | HeldPart]:
    """The messages with which a journal that follows the state must begin, so that its replay knows what the state
    leaves out: who had joined, and the updates of which not all parts had arrived."""
    messages: list[Message | HeldPart] = []
    for name, member in server.members.items():
        mirrors = server.mirrors_of(name)
        for join in member.joined.values():  # as if said now, when it has, or will have, what it was sent
            messages.append(replace(join, mirrors=mirrors))
        if member.silent:  # to be said after the joins, since a join makes a member alive
            messages.append(MemberSilent(name, member.incarnation))
        messages += server.left_out(name)
    return messages


def finish_snapshot(store: SnapshotStore, journal: Journal, state: FrozenState, meta: dict[str, Any]) -> int:
    """Write the snapshot and return its number; then drop segments of the journal that no snapshot needs any more.

    Raises StoreError.
    """
    # An older snapshot has to be good for a recovery, too, should the newest be damaged: hence the minimum of all.
    number = store.save(state, meta)
    journal.drop_before(min(meta["segment"] for meta in store.metas()))
    return number
