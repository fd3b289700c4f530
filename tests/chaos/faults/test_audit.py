"""The faults' audit of servers whose shards are processes of their own: it passes what incarnations and deaths have
left, and finds what was damaged in it afterwards."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
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
from geotrain.net.server.shard_host import JOURNALED
from geotrain.net.storage.journal import Journal
from geotrain.net.storage.recovery import KINDS
from geotrain.net.storage.snapshots import Snapshot
from geotrain.outer.messages import Answer, UpdatePart
from geotrain.outer.shards.protocol import Apply, Freeze, HeldPart
from tests.chaos.faults import audit
from tests.chaos.faults.audit import segments, snapshots
from tests.chaos.faults.replay import ServerReplay
from tests.simulation.network import site as site_of
from tests.simulation.worker import REGIONS
from tests.simulation.world import SHARDS, World, operate

# The recorded life is audited always (tests/runs/test_life.py).
pytestmark = pytest.mark.long("tests/chaos/faults", "tests/simulation", "geotrain/net", "geotrain/outer")

Journals = list[tuple[int, list[Any]]]  # segments, with their messages


class Server:
    """A record of all that a server's processes have ever written, to be damaged: journals of its coordinator and its
    shards, and how their snapshots are changed when they are read."""

    def __init__(self, run: Any, site: str) -> None:
        self.run, self.site = run, site
        names = site, *run.shards[site]
        kinds = KINDS, *[JOURNALED] * SHARDS
        self.journals: dict[str, Journals] = {
            name: [(number, list(messages)) for number, messages in segments(run, name, kind)]
            for name, kind in zip(names, kinds, strict=True)
        }
        self.coordinator, *self.shards = self.journals.values()
        self.flipped = ""

    def audited(self) -> ServerReplay:
        journals = patch.object(audit, "segments", lambda run, name, kinds: self.journals[name])
        with (
            journals,
            patch.object(audit, "snapshots", self.snapshots),
            patch.object(audit, "load_run", lambda path: self.run.run),
        ):
            return audit.replayed(self.run, self.site)

    def snapshots(self, run: Any, name: str) -> dict[int, Callable[[], Snapshot]]:
        found: Any = snapshots(run, name)
        if name == self.flipped:
            last = max(found)
            found[last] = partial(flipped, found[last])
        return found  # type: ignore[no-any-return]


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
    shards = {site: [shard_name(site, i) for i in range(SHARDS)] for site in (GLOBAL, *REGIONS)}
    run = SimpleNamespace(
        archive=folder / "archive", folder=folder, run=world.run_config, cluster=world.cluster, shards=shards
    )
    return partial(Server, run)


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


def place(journals: Journals, kind: type, number: int = 3) -> Any:
    """(journal, index) of the `number`-th such message."""
    return [(journal, i) for _, journal in journals for i, m in enumerate(journal) if isinstance(m, kind)][number]


def flipped(read: Callable[[], Snapshot]) -> Snapshot:
    """The last bit of the first element of a vector is another."""
    saved = read()
    name = next(name for name in sorted(saved.tensors) if name.endswith(".x"))
    saved.tensors[name].view(torch.int32)[0] ^= 1
    return saved


def flip_an_element(server: Server) -> None:
    server.flipped = shard_name(server.site, 0)


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
    key = at[i].member, at[i].fragment, at[i].sequence, at[i].part
    for _, journal in server.shards[0]:
        here = [isinstance(m, UpdatePart) and (m.member, m.fragment, m.sequence, m.part) == key for m in journal]
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


DAMAGE = {
    flip_an_element: ("eu", r"^snapshot \d+: chunk\.\d+\.x$"),
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
    journal = server.shards[0][-1][1]
    while not isinstance(journal[-1], UpdatePart | Answer):
        journal.pop()
    found = server.audited()
    assert found.mismatches == [] and found.behind > 0
    tensors, meta = found.shards[0].now.state()
    assert meta == whole[1] and all(torch.equal(tensor, tensors[name]) for name, tensor in whole[0].items())


# ------------------------------------------------------------------------------------------------- on a disk
