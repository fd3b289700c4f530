"""A server's state through its deaths: newest whole snapshot, then the journal through the state machine."""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from geotrain.net.journal import Journal
from geotrain.net.machine import AnyServer, take
from geotrain.net.remote import Remote, newest_snapshot
from geotrain.net.store import SNAPSHOTS, Store, StoreError
from geotrain.outer.messages import Message, Refused, Silence
from geotrain.outer.region_server import RegionServer

JOURNAL = "journal"  # within a server's folder


@dataclass(frozen=True)
class Restarted:
    """In a journal only: here the process died, and with it what `Server.state` leaves out."""


KINDS = (Restarted, *typing.get_args(Message))


@dataclass
class Recovered:
    """server: as it was when the last journaled message had been applied, with no member joined.
    faults: what was found damaged and passed over, for people. replayed: messages since the snapshot."""

    server: AnyServer
    store: Store
    journal: Journal
    faults: list[str]
    replayed: int


def recover(
    build: Callable[[], AnyServer],
    begin: Callable[[AnyServer], None],
    folder: Path,
    keep: int,
    remote: Remote | None = None,
) -> Recovered:
    """build: makes the server, without state. begin: gives a new one what it starts from. remote: where copies of
    the snapshots are, for a folder that has lost its own.

    Raises StoreError, JournalDamaged, OSError.
    """
    store = Store(folder / SNAPSHOTS, keep)
    snapshot, faults = newest_snapshot(store, remote)
    server = build()
    journal = Journal(folder / JOURNAL, KINDS, limit_bytes=8 * server.layout.numel + 65536)
    if snapshot is not None:
        server.load(snapshot.tensors, snapshot.meta["state"])
        if snapshot.meta["ended"]:
            server.begin_again()
    elif faults:
        faults.append(f"{store.folder}: no snapshot is whole; restore one from a copy, or begin in a new folder")
        raise StoreError("\n".join(faults))
    else:
        begin(server)
    replayed = 0
    for message in journal.replay(snapshot.meta["segment"] if snapshot else 1):
        replayed += 1
        server = _replay(build, server, message)
    if replayed:
        server = _forget(build, server)
    journal.append(Restarted())
    journal.flush()
    if journal.cut is not None:
        faults.append(str(journal.cut))
    return Recovered(server, store, journal, faults, replayed)


def _replay(build: Callable[[], AnyServer], server: AnyServer, message: Any) -> AnyServer:
    if isinstance(message, Restarted):
        return _forget(build, server)
    with suppress(Refused):  # it was then, too
        take(server, message)
    if isinstance(server, RegionServer):
        server.outgoing()  # sent then, or said again after the next join
    return server


def _forget(build: Callable[[], AnyServer], server: AnyServer) -> AnyServer:
    """What a restart leaves: the durable state."""
    fresh = build()
    fresh.load(*server.state())
    return fresh


def begin_snapshot(server: AnyServer, journal: Journal, ended: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A copy of the state, and a journal that goes on from it. Between two messages, on the machine's thread.

    ended: in good order, everyone having left. Raises JournalFull.
    """
    tensors, state = server.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    state = copy.deepcopy(state)  # it is written while the server goes on
    segment = journal.rotate()
    for name, member in server.members.items():
        # What the state leaves out is said again: joins, and halves of updates.
        for join in member.joined.values():
            journal.append(join)
        if member.silent:  # a join would say otherwise
            journal.append(Silence(name, member.incarnation))
        for parts in member.arriving.values():
            for part in parts.values():
                journal.append(part)
    journal.flush()
    return tensors, {"state": state, "segment": segment, "ended": ended}


def finish_snapshot(store: Store, journal: Journal, tensors: dict[str, Tensor], meta: dict[str, Any]) -> int:
    """Write it; then drop the journal that no snapshot needs any more. Returns its number. Raises StoreError."""
    number = store.save(tensors, meta)
    journal.drop_before(min(meta["segment"] for meta in store.metas()))
    return number
