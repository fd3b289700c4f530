"""A server that is told everything through a journal of its own, and whether two servers hold the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from geotrain.net.storage.recovery import recover
from geotrain.outer.messages import GLOBAL
from tests.support.outer_world import config, halves, make, weights_of


class Recorded:
    """A world (see tests.support.outer_world) of which one server is told everything through a journal of its own."""

    def __init__(self, folder: Path, which: str, **settings: Any) -> None:
        self.world = make(config(**settings), cut_a=halves)
        self.which, self.folder = which, folder
        self.start = [x.clone() for x in weights_of(self.world.top)]
        self.recovered = recover(self.build, self.begin, folder, keep=2)
        self.put_in_place()

    def build(self) -> Any:
        world = self.world
        if self.which == GLOBAL:
            names = {r: tuple(region.members) for r, region in world.regions.items()}
            return type(world.top)(
                world.identity, world.parameter_map, world.config, names, world.top.lease_table.train_samples, 1
            )
        old = world.regions[self.which]
        new = type(old)(self.which, world.identity, world.parameter_map, world.config, old.rule, tuple(old.members))
        new.incarnation = old.incarnation
        return new

    def begin(self, server: Any) -> None:
        if self.which == GLOBAL:
            server.set_weights([v.clone() for v in self.start])

    def put_in_place(self) -> None:
        """The world's server becomes this one: what it is told is journaled first. Members join it again."""
        world, server, journal = self.world, self.recovered.server, self.recovered.journal

        real = type(server).handle

        def journaled(message: Any) -> Any:
            journal.append(message)
            journal.flush()
            return real(server, message)

        server.handle = journaled
        if self.which == GLOBAL:
            for region in world.regions.values():
                journaled(region.join_message())
            world.top = server
        else:
            old, world.regions[self.which] = world.regions[self.which], server
            for worker in (w for r, w in world.workers.values() if r == self.which):
                for join in worker.joins(world.identity):
                    world.tell(self.which, join)
            if not server.fragments:
                world.answer(self.which, 0, tuple(range(len(old.fragments))))


def same_state(one: Any, other: Any) -> None:
    (tensors, meta), (tensors2, meta2) = one.state(), other.state()
    assert meta == meta2
    assert tensors.keys() == tensors2.keys()
    for name in tensors:
        assert torch.equal(tensors[name], tensors2[name]), name


def check_shards(server: Any) -> None:
    """They hold what the coordinator knows of, and no more: what is forgotten takes no memory."""
    for shard in server.shards.all:
        for name, known in shard.members.items():
            member = server.members[name]
            assert known.joins.keys() == member.joined.keys()
            assert known.updates.keys() == member.arriving.keys()
            assert known.answers.keys() <= member.answers.keys()
    updates = getattr(server, "in_flight", {}).values()  # of a region
    travelling = {delta.chunk for update in updates for delta in update.deltas}
    assert {chunk for shard in server.shards.all for chunk in shard.in_flight} == travelling


def frozen(server: Any) -> Any:
    tensors, meta = server.state()
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.dumps(meta)


def thawed(saved: Any) -> Any:
    tensors, meta = saved
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(meta)
