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
from geotrain.net.storage.journal import Journal
from geotrain.net.storage.snapshots import Snapshot
from geotrain.outer.messages import Facts, UpdatePart
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
    """A record of all that a server's processes have ever written, to be damaged: journals of its ledger and its
    shards, and how their snapshots are changed when they are read."""

    def __init__(self, run: Any, site: str) -> None:
        self.run, self.site = run, site
        self.journals: dict[str, Journals] = {
            name: [(number, list(messages)) for number, messages in segments(run, name)]
            for name in (site, *run.shards[site])
        }
        self.ledger, *self.shards = self.journals.values()
        self.flipped = ""

    def audited(self) -> ServerReplay:
        journals = patch.object(audit, "segments", lambda run, name: self.journals[name])
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
    with patch.object(Journal, "drop_before", lambda *_: None):
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
    assert len(found.applied) > 10 and (found.ledger.committed or site != GLOBAL)
    assert all(found.ledger.taken[number] for number in range(SHARDS))
    for process in found.processes:
        assert process.snapshots > 1 and process.recoveries > 0


# --------------------------------------------------------------------------------------------- seeded damage


def flipped(read: Callable[[], Snapshot]) -> Snapshot:
    """The last bit of the first element of a vector is another."""
    saved = read()
    name = next(name for name in sorted(saved.tensors) if name.endswith(".x"))
    saved.tensors[name].view(torch.int32)[0] ^= 1
    return saved


def flip_an_element(server: Server) -> None:
    server.flipped = shard_name(server.site, 0)


def put(journals: Journals, kind: type, become: Callable[[Any], list[Any]]) -> None:
    """Put other messages in place of the fourth of that kind, wherever it was said."""
    of_kind = [m for _, journal in journals for m in journal if isinstance(m, kind) and getattr(m, "facts", True)]
    for _, journal in journals:
        journal[:] = [each for m in journal for each in (become(m) if m == of_kind[3] else [m])]


def lose_an_update(server: Server) -> None:
    put(server.shards[0], UpdatePart, lambda part: [])


def change_a_payload(server: Server) -> None:
    def changed(part: UpdatePart) -> list[UpdatePart]:
        delta, *others = part.deltas
        payload = bytes([delta.payload[0] ^ 1, *delta.payload[1:]])
        return [replace(part, deltas=(replace(delta, payload=payload), *others))]

    put(server.shards[0], UpdatePart, changed)


def contain_less(server: Server) -> None:
    put(server.shards[0], UpdatePart, lambda part: [replace(part, contains=())])


def change_a_fact(server: Server) -> None:
    """The ledger has taken another one."""

    def changed(said: Facts) -> list[Facts]:
        return [replace(said, facts=(replace(said.facts[0], sequence=99), *said.facts[1:]))]

    put(server.ledger, Facts, changed)


def leave_facts_out(server: Server) -> None:
    put(server.ledger, Facts, lambda said: [])


DAMAGE = {
    flip_an_element: ("eu", r"^snapshot \d+: chunk\.\d+\.x$"),
    lose_an_update: ("us", r"^fact \d+ is Fact\(.*, its shard 0 says "),
    change_a_payload: ("us", r"^snapshot \d+: .*chunk\.\d+\."),
    contain_less: (GLOBAL, r"^lease \d+ is committed, and fragment \d+ does not contain it$"),
    change_a_fact: ("eu", r"^fact \d+ is Fact\(.*sequence=99"),
    leave_facts_out: (GLOBAL, r"^shard \d: facts up to \d+ were never taken$"),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_the_audit_finds(servers: Callable[[str], Server], damage: Callable[[Server], None]) -> None:
    site, told = DAMAGE[damage]
    server = servers(site)
    damage(server)
    found = server.audited()
    assert any(re.search(told, text) for _, text in found.mismatches), found.mismatches
