"""A world whose servers have journals on disk, and whether two servers hold the same."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from geotrain.common.names import GLOBAL
from geotrain.net.storage.recovery import begin_snapshot, finish_snapshot, recover
from geotrain.outer.messages import Refused
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.server.server import Handled
from tests.support.outer_world import World


class JournaledWorld(World):
    """Tells its servers everything through journals on disk. `kill` drops one of them without a word, and recovers it
    from its folder.

    journaled: which servers; None: all.

    watch: is called with each message that one of them is told, and then with what came of it.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: Any,
        journaled: tuple[str, ...] | None = None,
        watch: Callable[[str, Any, Handled | Refused | None], None] = lambda *_: None,
        **settings: Any,
    ) -> None:
        self.folder, self.journaled, self.watch = folder, journaled, watch
        self.recovered: dict[str, Any] = {}
        self.lives: defaultdict[str, int] = defaultdict(int)
        super().__init__(*arguments, **settings)

    def begun(self, name: str) -> Any:
        if self.journaled is not None and name not in self.journaled:
            return super().begun(name)
        build, place = partial(self.build, name), self.folder / name
        self.recovered[name] = recover(build, self.begin, place, 2)
        server, journal = self.recovered[name].server, self.recovered[name].journal

        def handle(message: Any) -> Handled:
            journal.append(message)
            journal.flush()
            self.watch(name, message, None)
            try:
                handled = type(server).handle(server, message)
            except Refused as refused:
                self.watch(name, message, refused)
                raise
            self.watch(name, message, handled)
            return handled

        server.handle = handle
        self.lives[name] += 1
        server.incarnation = f"life-{self.lives[name]}"
        return server

    def kill(self, name: str, between: Callable[[Path], None] = lambda folder: None) -> list[str]:
        """Kill the server and recover it. between: is called with its folder meanwhile. Returns the faults that the
        recovery names."""
        self.recovered[name].journal.close()
        between(self.folder / name)
        server = self.begun(name)
        if name == GLOBAL:
            self.top = server
        else:
            self.regions[name] = server
        for region in [name] if name in self.regions else self.regions:
            self.connect(region)
        return self.recovered[name].faults

    def snapshot(self, name: str) -> None:
        r = self.recovered[name]
        finish_snapshot(r.store, r.journal, *begin_snapshot(r.server, r.store, r.journal, ended=False))

    def close(self) -> None:
        for recovered in self.recovered.values():
            recovered.journal.close()


def same_state(one: Any, other: Any) -> None:
    (tensors, meta), (tensors2, meta2) = one.state(), other.state()
    assert meta == meta2
    assert tensors.keys() == tensors2.keys()
    for name in tensors:
        assert torch.equal(tensors[name], tensors2[name]), name


def check_store(server: Any) -> None:
    """It holds what the server knows of, and no more: what is forgotten takes no memory."""
    for name, known in server.store.members.items():
        member = server.members[name]
        assert known.joins.keys() == member.joined.keys()
        exchanges = member.fragments.items()
        assert known.updates.keys() == {(f, own.sequence + 1) for f, own in exchanges if own.arriving}
        assert known.answers.keys() <= {f for f, own in exchanges if own.answer is not None}
    updates = server.uplink.in_flight.values() if isinstance(server, RegionServer) else ()
    travelling = {delta.chunk for update in updates for delta in update.deltas}
    assert server.store.in_flight.keys() == travelling


def frozen(server: Any) -> Any:
    tensors, meta = server.state()
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.dumps(meta)
