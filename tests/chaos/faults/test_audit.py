"""The faults' audit of servers whose shards are processes of their own: it passes what incarnations and deaths have
left, and finds what was damaged in it afterwards."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from grpc import aio

from geotrain.common.names import GLOBAL
from geotrain.config import codec_config, shard_name
from geotrain.net.server.server_process import any_server, remote_shards, shard_server
from geotrain.net.server.shard_host import JOURNALED
from geotrain.net.storage.journal import Journal
from geotrain.net.storage.recovery import KINDS
from geotrain.net.storage.snapshots import Snapshot
from geotrain.outer.messages import Answer, UpdatePart
from geotrain.outer.shards.protocol import Apply, Freeze, HeldPart
from tests.chaos.faults.audit import segments, snapshots
from tests.chaos.faults.replay import ServerReplay, Written
from tests.simulation.network import site as site_of
from tests.simulation.worker import REGIONS
from tests.simulation.world import SHARDS, World, operate

# The recorded life is audited always (tests/runs/test_life.py).
pytestmark = pytest.mark.long("tests/chaos/faults", "tests/simulation", "geotrain/net", "geotrain/outer")

Kept = list[tuple[Snapshot, list[Any]]]  # snapshots, each with the journal that follows it


def read(run: Any, name: str) -> Kept:
    """All that a process has written, of which nothing was dropped."""
    kept, saved = list[tuple[Snapshot, list[Any]]](), snapshots(run, name)
    for number, messages in segments(run, name, JOURNALED if ".shard-" in name else KINDS):
        if number in saved:
            kept.append((saved[number](), list(messages)))
        elif kept:  # the snapshot before it failed
            kept[-1][1].extend(messages)
    return kept


def written(build: Callable[[], Any], kept: Kept) -> Written[Any]:
    def snapshot(number: int) -> Snapshot:
        saved = kept[number - 1][0]
        return replace(saved, tensors={n: t.clone() for n, t in saved.tensors.items()}, meta=deepcopy(saved.meta))

    def begin(machine: Any) -> None:
        machine.load(snapshot(1).tensors, snapshot(1).meta["state"])

    journals = [(number, messages) for number, (_, messages) in enumerate(kept, 1)]
    return Written(build, begin, journals, {number: partial(snapshot, number) for number, _ in journals})


class Server:
    """A record of all that a server's processes have ever written, to be damaged."""

    def __init__(self, world: World, kept: dict[str, Kept], site: str) -> None:
        self.world, self.site = world, site
        names = [shard_name(site, i) for i in range(SHARDS)]
        self.coordinator, *self.shards = [[(s, list(m)) for s, m in kept[name]] for name in (site, *names)]

    def audited(self) -> ServerReplay:
        run, cluster, site = self.world.run_config, self.world.cluster, self.site

        def build() -> Any:
            return any_server(run, cluster, site, remote_shards(run, cluster, site))

        shards = [written(partial(shard_server, run, cluster, site, i), kept) for i, kept in enumerate(self.shards)]
        return ServerReplay(written(build, self.coordinator), shards)


async def lives_and_deaths(world: World) -> None:
    """Every process dies twice; all of a server's write snapshots now and then. The run is cut short."""
    for name in [*world.addresses] * 2:
        await world.network.messages(20)
        world.kill(name, power_lost=world.random.random() < 0.5)
        await asyncio.sleep(1.0)
        world.start(name)
        await asyncio.sleep(5.0)
        with suppress(aio.AioRpcError):
            await operate(world, "snapshot", server=site_of(name))
    await world.network.messages(40)
    world.faults.append("enough")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Server]:
    """Two regions and their global server, with their shards, have lived, died and written snapshots."""
    folder = tmp_path_factory.mktemp("life")
    settings: Any = {"up": codec_config("int8"), "down": codec_config("int4"), "keep": 1000}
    world = World(3, folder, train_samples=1200, shards=(GLOBAL, *REGIONS), **settings)
    unseen = patch.object(world.account, "adopts", lambda *_: None)  # codecs of payloads from shard to shard
    with patch.object(Journal, "drop_before", lambda *_: None), unseen:
        world.play(lives_and_deaths, 2_000.0)
    assert world.faults == ["enough"]
    for name in world.addresses:
        place = world.processes[name].folder
        assert place is not None
        (folder / "archive").mkdir(exist_ok=True)
        (folder / "archive" / name).symlink_to(place)
    run = SimpleNamespace(archive=folder / "archive", run=world.run_config)
    return partial(Server, world, {name: read(run, name) for name in world.addresses})


@pytest.mark.parametrize("site", [GLOBAL, *REGIONS])
def test_what_lives_and_deaths_leave_is_whole(servers: Callable[[str], Server], site: str) -> None:
    found = servers(site).audited()
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
    saved, journal = server.shards[0][2]
    name = next(name for name in sorted(saved.tensors) if name.endswith(".x"))
    flipped = saved.tensors[name].clone()
    flipped.view(torch.int32)[0] ^= 1  # the last bit of the first element
    server.shards[0][2] = replace(saved, tensors={**saved.tensors, name: flipped}), journal


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


def put_for_a_payload(server: Server, become: Callable[[UpdatePart], list[UpdatePart]]) -> None:
    """Put other messages in place of one with payloads, wherever it was said."""
    at, i = place(server.shards[0], UpdatePart)
    key = at[i].member, at[i].sequence, at[i].part
    for _, journal in server.shards[0]:
        here = [isinstance(m, UpdatePart) and (m.member, m.sequence, m.part) == key for m in journal]
        journal[:] = [each for m, found in zip(journal, here, strict=True) for each in (become(m) if found else [m])]


def lose_a_payload(server: Server) -> None:
    put_for_a_payload(server, lambda part: [])


def change_a_payload(server: Server) -> None:
    def changed(part: UpdatePart) -> list[UpdatePart]:
        delta, *others = part.deltas
        payload = bytes([delta.payload[0] ^ 1, *delta.payload[1:]])
        return [replace(part, deltas=(replace(delta, payload=payload), *others))]

    put_for_a_payload(server, changed)


def lose_an_update(server: Server) -> None:
    """The coordinator has it no more."""
    journal, i = place(server.coordinator, HeldPart)
    del journal[i]


def lack_the_last_commands(server: Server) -> None:
    """Cut the record of a shard that was down at the end; no damage."""
    journal, before = server.shards[0][-1][1], len(server.shards[0][-1][1])
    while journal and not isinstance(journal[-1], UpdatePart | Answer):
        journal.pop()
    assert len(journal) < before, "it had commands"


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
def test_the_audit_finds(servers: Callable[[str], Server], damage: Callable[[Server], None]) -> None:
    site, told = DAMAGE[damage]
    server = servers(site)
    damage(server)
    found = server.audited()
    assert any(re.search(told, text) for _, text in found.mismatches), found.mismatches


def test_an_update_whose_payload_is_lost_counts_as_lost(servers: Callable[[str], Server]) -> None:
    server = servers("us")
    whole = server.audited().coordinator.applied
    lose_a_payload(server)
    left = server.audited().coordinator.applied
    assert len(left) == len(whole) - 1


def test_what_a_shard_has_not_executed_yet_is_given_to_it(servers: Callable[[str], Server]) -> None:
    """The payloads are on its disk: it comes to the state of the others."""
    server = servers("us")
    whole = server.audited().shards[0].now.state()
    lack_the_last_commands(server)
    found = server.audited()
    assert found.mismatches == [] and found.behind > 0
    tensors, meta = found.shards[0].now.state()
    assert meta == whole[1] and all(torch.equal(tensor, tensors[name]) for name, tensor in whole[0].items())


# ------------------------------------------------------------------------------------------------- on a disk
