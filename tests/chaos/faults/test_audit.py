"""The faults' audit of servers whose shards are processes of their own: it passes what incarnations and deaths have
left, and finds what was damaged in it afterwards."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.common.names import GLOBAL
from geotrain.config import codec_config
from geotrain.net.server.server_process import any_server, begin_server, begin_shard, remote_shards, shard_server
from geotrain.net.server.shard_host import JOURNALED
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.recovery import Restarted, begin_snapshot, finish_snapshot, recover
from geotrain.net.storage.snapshots import Snapshot, SnapshotStore
from geotrain.outer.messages import Answer, AnswerWanted, Join, UpdatePart
from geotrain.outer.server.server import identity_of
from geotrain.outer.server.shard_server import ShardServer
from geotrain.outer.shards.protocol import Apply, Freeze, HeldPart
from geotrain.outer.shards.remote import RemoteShards
from geotrain.parameters.parameter_map import parameter_map_of
from tests.chaos.faults.audit import accounts
from tests.chaos.faults.replay import ServerReplay, Written
from tests.chaos.faults.runner import FaultyRun
from tests.chaos.faults.world import make_world
from tests.support.outer_configs import outer_config
from tests.support.recorded_world import thawed
from tests.support.remote_shards_world import Double, FarShard, FarWorld
from tests.support.specified_world import REGIONS

Kept = list[tuple[Any, list[Any]]]  # snapshots, each with the journal that follows it


def written(build: Callable[[], Any], kept: Kept) -> Written[Any]:
    def snapshot(number: int, saved: Any) -> Snapshot:
        tensors, state = thawed(saved)
        return Snapshot(number, tensors, {"state": state})

    journals = enumerate((journal for _, journal in kept), 1)
    segments = [(n, [Restarted() if message is None else message for message in journal]) for n, journal in journals]
    snapshots = {n: partial(snapshot, n, saved) for n, (saved, _) in enumerate(kept, 1)}
    return Written(build, lambda machine: machine.load(*thawed(kept[0][0])), segments, snapshots)


class Server:
    """A record of all that a server's processes have ever written, as lists of its own, to be damaged."""

    def __init__(self, double: Double) -> None:
        self.double = double
        self.coordinator: Kept = [(saved, list(journal)) for saved, journal in double.written]
        self.shards: list[Kept] = [[(s, list(journal)) for s, journal in v.written] for v in double.processes]

    def audited(self) -> ServerReplay:
        double, far = self.double, self.double.far

        def build() -> Any:
            shards = RemoteShards(double.world.shape, double.shards, far.up, far.changes)
            return double.world.build_with(double.name, shards)

        def build_shard(process: FarShard) -> ShardServer:
            return process.build()

        shards = [
            written(partial(build_shard, v), kept) for v, kept in zip(double.processes, self.shards, strict=True)
        ]
        return ServerReplay(written(build, self.coordinator), shards)


@pytest.fixture(scope="module")
def world() -> FarWorld:
    """Two regions and their global server have lived, died and written snapshots."""
    config = outer_config(
        "halos", up=codec_config("int8"), down=codec_config("int4"), local_steps=2, updates_per_send=2
    )
    world, dice = FarWorld(config, 400, 1, chunk_elements=20), random.Random(3)
    for name in world.workers:
        world.join(name, anew=True)
    for turn in range(45):
        name = dice.choice(list(world.workers))
        region = world.workers[name].region
        world.ask(name)
        world.deliver_leases(region)
        if world.present(name):
            world.train(name)
        world.deliver_update(region)
        world.pull(region)
        if turn % 9 == 0:
            world.restart(dice.choice([GLOBAL, *REGIONS]))
        if turn % 7 == 0:
            world.snapshot(dice.choice([GLOBAL, *REGIONS]))
        if turn % 13 == 0:
            world.join(name, anew=True)
    return world


@pytest.mark.parametrize("site", [GLOBAL, *REGIONS])
def test_what_lives_and_deaths_leave_is_whole(world: FarWorld, site: str) -> None:
    found = Server(world.doubles[site]).audited()
    assert found.mismatches == []
    assert (
        len(found.coordinator.applied) > 10 and found.coordinator.snapshots > 1 and found.coordinator.recoveries > 0
    )
    for shard in found.shards:
        assert shard.now.commands == len(found.coordinator.commands) > 10
        assert shard.others and shard.snapshots > 1 and shard.recoveries > 0


# --------------------------------------------------------------------------------------------- seeded damage


def place(kept: Kept, kind: type, number: int = 3, like: Callable[[Any], bool] = lambda message: True) -> Any:
    """(journal, index) of the `number`-th such message."""
    found = [(journal, i) for _, journal in kept for i, m in enumerate(journal) if isinstance(m, kind) and like(m)]
    return found[number]


def flip_an_element(server: Server) -> None:
    (tensors, meta), journal = server.shards[0][2]
    name = next(name for name in sorted(tensors) if name.endswith(".x"))
    flipped = tensors[name].clone()
    flipped.view(torch.int32)[0] ^= 1  # the last bit of the first element
    server.shards[0][2] = ({**tensors, name: flipped}, meta), journal


def leave_a_command_out(server: Server) -> None:
    journal, i = place(server.shards[0], Apply)
    del journal[i]


def give_a_command_twice(server: Server) -> None:
    journal, i = place(server.shards[0], Apply)
    journal.insert(i, journal[i])


def give_a_command_late(server: Server) -> None:
    """Weights are frozen after the next update, and not before."""
    journal, i = place(server.shards[0], Freeze)
    command = journal.pop(i)
    i = next(i for i in range(i, len(journal)) if isinstance(journal[i], Apply))
    journal.insert(i + 1, command)


def lose_a_payload(server: Server) -> None:
    at, i = place(server.shards[0], UpdatePart)
    part = at[i]
    for _, journal in server.shards[0]:  # a segment may begin with it once more
        journal[:] = [
            m
            for m in journal
            if not (
                isinstance(m, UpdatePart)
                and (m.member, m.sequence, m.part) == (part.member, part.sequence, part.part)
            )
        ]


def change_a_payload(server: Server) -> None:
    journal, i = place(server.shards[0], UpdatePart)
    delta, *others = journal[i].deltas
    payload = bytes([delta.payload[0] ^ 1, *delta.payload[1:]])
    journal[i] = replace(journal[i], deltas=(replace(delta, payload=payload), *others))


def lose_an_update(server: Server) -> None:
    """The coordinator has it no more."""
    journal, i = place(server.coordinator, HeldPart)
    del journal[i]


def lack_the_last_commands(server: Server) -> None:
    """Cut the record of a shard that was down at the end; no damage."""
    journal = server.shards[0][-1][1]
    while not isinstance(journal[-1], UpdatePart | Answer):
        journal.pop()


DAMAGE = {
    flip_an_element: ("eu", r"^snapshot 3: chunk\.\d+\.x$"),
    leave_a_command_out: ("eu", r"^command \d+ is "),
    give_a_command_twice: (GLOBAL, r"^command \d+ is Apply\(.*, the coordinator gave "),
    give_a_command_late: ("eu", r"^Freeze of \w after \d+ commands: the coordinator gave it at no such place$"),
    lose_a_payload: ("us", r"^no shard has the payload \('c', "),
    change_a_payload: ("us", r"^no shard has said \('c', "),
    lose_an_update: ("eu", r"^snapshot \d+: "),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_the_audit_finds(world: FarWorld, damage: Callable[[Server], None]) -> None:
    site, told = DAMAGE[damage]
    server = Server(world.doubles[site])
    damage(server)
    found = server.audited()
    assert any(re.search(told, text) for _, text in found.mismatches), found.mismatches


def test_an_update_whose_payload_is_lost_counts_as_lost(world: FarWorld) -> None:
    server = Server(world.doubles["us"])
    whole = server.audited().coordinator.applied
    lose_a_payload(server)
    left = server.audited().coordinator.applied
    assert len(left) == len(whole) - 1


def test_what_a_shard_has_not_executed_yet_is_given_to_it(world: FarWorld) -> None:
    """The payloads are on its disk: it comes to the state of the others."""
    server = Server(world.doubles["us"])
    whole = server.audited().shards[0].now.state()
    lack_the_last_commands(server)
    found = server.audited()
    assert found.mismatches == [] and found.behind > 0
    tensors, meta = found.shards[0].now.state()
    assert meta == whole[1] and all(torch.equal(tensor, tensors[name]) for name, tensor in whole[0].items())


# ------------------------------------------------------------------------------------------------- on a disk


def written_by_servers(run: FaultyRun) -> None:
    """Both regions' servers begin an incarnation, and the global one, which one region joins and asks for its
    weights."""
    for site, names in run.shards.items():
        folder = run.folder / "servers" / site
        far = remote_shards(run.run, run.cluster, site)
        assert isinstance(far, RemoteShards)
        coordinator = recover(partial(built, run, site, far), partial(begin_server, run=run.run), folder, keep=2)
        finish_snapshot(
            coordinator.store,
            coordinator.journal,
            *begin_snapshot(coordinator.server, coordinator.store, coordinator.journal, ended=False),
        )
        shards = []
        for i, name in enumerate(names):
            build = partial(shard_server, run.run, run.cluster, site, i)
            begin = partial(begin_shard, run=run.run)
            shard = recover(build, begin, folder.with_name(name), keep=2, kinds=JOURNALED)
            machine, store, journal = shard.server, shard.store, shard.journal
            finish_snapshot(store, journal, *begin_snapshot(machine, store, journal, ended=False))
            shards.append((machine, store, journal))

        def say(message: Any, coordinator: Any = coordinator) -> None:
            coordinator.journal.append(message)
            coordinator.server.handle(message)

        said: list[Any] = []

        def command(command: Any, shards: Any = shards, said: Any = said) -> None:
            for machine, _, journal in shards:
                journal.append(command)
                said += [send.message for send in machine.handle(command).sends]

        far.emit = command
        far.begin_incarnation("incarnation-1")
        if site == GLOBAL:
            i, layout = identity_of(run.run, coordinator.server.parameter_map), coordinator.server.parameter_map
            slices = tuple(layout.whole(chunk.index) for chunk in layout.chunks)
            say(Join(i.run, i.config_digest, i.parameter_map_digest, i.model, "eu", "eu-1", 0, 1, slices, slices))
            say(AnswerWanted("eu", "eu-1", 0, tuple(range(len(layout.fragments)))))
        for message in said:
            say(message)
        for machine, store, journal in [*shards, (coordinator.server, coordinator.store, coordinator.journal)]:
            finish_snapshot(store, journal, *begin_snapshot(machine, store, journal, ended=False))
            journal.close()


def built(run: FaultyRun, site: str, far: RemoteShards) -> Any:
    return any_server(run.run, run.cluster, site, far)


def test_what_processes_have_left_on_a_disk_is_read(tmp_path: Path) -> None:
    run = FaultyRun(*make_world(tmp_path, pace_s=0.0, shards=2), tmp_path / "archive")
    run.folder.mkdir()
    shutil.copy(run.files[0], run.folder / "run.json")
    written_by_servers(run)
    run.keep_journals()
    shutil.rmtree(run.folder / "servers")
    found = accounts(run)
    assert found["mismatches"] == [] and found["replay_mismatches"] == 0
    commands = 2 + len(parameter_map_of(run.run).fragments)  # mirrors are forgotten at the join and at its answer
    assert found["snapshots_compared"] == 6 and found["shards"] == {
        "processes": 6, "commands": 2 * commands, "behind": 0, "snapshots_compared": 12, "recoveries_compared": 6,
    }  # fmt: skip
    store = SnapshotStore(run.archive / "global.shard-1" / "snapshots")
    newest, _ = store.load_newest()
    assert newest is not None
    name = next(name for name in newest.tensors if name.startswith("held.eu."))
    newest.tensors[name][0] += 1.0
    shutil.rmtree(store.path(newest.number))
    assert store.save(FrozenState(newest.tensors), newest.meta) == newest.number
    assert accounts(run)["mismatches"] == [f"global.shard-1: snapshot {newest.number}: {name}"]
