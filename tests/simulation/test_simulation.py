"""Whole runs in virtual time: nothing is lost or applied twice, restarts find all, every run ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from geotrain.common.names import GLOBAL
from geotrain.net.transport import wire
from geotrain.outer.events import Merged, UpdateApplied
from geotrain.outer.messages import Answer
from tests.simulation import machine
from tests.simulation.lives import dies_half_way, digest, goes_on_without, live, settings_of, violations
from tests.simulation.world import World, operate
from tests.support.drawn import seed_of

ROOT = Path(__file__).parents[2]
TOLD = """
import sys
from tests.simulation.lives import digest, live
print(*(digest(live(int(seed))) for seed in sys.argv[1:]))
"""


# The last are the first that find faults of `tests/mutants` which those before do not, and some that found others: a
# join that a shard had missed, data that waited for a worker that was refused, ranks of a worker that had been shut
# out, a goodbye whose answer was lost, a last snapshot for which a shard had no room, a refusal whose reply was lost,
# snapshots that lacked tensors, a replay that gave another command, ranks of one worker that got two replies, a lease
# of which a part had gone up before its region started over, a worker's lease of before its region lost its disk,
# data that came back after the last weights. Of answers that wait: a deadline that passed while an update travelled,
# those who wait since before a restart; a shard whose ledger had its last word, of which it did not know; a shard
# without weights, whose ledger counted as dead and had nothing to say.
@pytest.mark.parametrize(
    "seeds",
    [
        *(range(10), range(10, 20), range(20, 30), [*range(30, 40), 44], [1197, 1330, 1400, 1543, 1720, 1771]),
        [7_700_088, 7_700_154, 7_700_310, 7_700_335, 7_700_586, 41_000_007, 555_010_038, 613_000_186],
        [47, 347, 58_000_073, 810_002_926],
    ],
)
def test_every_life_ends_and_loses_nothing(seeds: Sequence[int]) -> None:
    for seed in seeds:
        assert violations(live(seed)) == [], f"python -m tests.simulation --seed {seed} --lives 1 --trace"


@pytest.mark.parametrize("first", [seed_of("LIVES_SEED")], ids="LIVES_SEED={}".format)
def test_every_life_that_the_commit_draws_does(first: int) -> None:
    test_every_life_ends_and_loses_nothing(range(first, first + 5))


def test_a_part_that_a_dead_server_had_is_sent_again() -> None:
    seed = next(seed for seed in range(40) if settings_of(seed)["shards"] == ())
    world = live(seed, dies_half_way)
    assert violations(world) == [] and world.processes["eu"].deaths == 3


def test_a_run_goes_on_without_what_its_cluster_has_no_more() -> None:
    drawn = seed_of("LIVES_SEED")
    lives = {seed: live(seed, goes_on_without) for seed in (8, 71, *range(drawn, drawn + 4))}
    assert {seed: found for seed, world in lives.items() if (found := violations(world))} == {}
    assert lives[8].resumed and lives[71].resumed


async def loses_its_disk(world: World) -> None:
    while sum(name == "eu" and isinstance(what, UpdateApplied) for _, name, what in world.record) < 4:
        await world.network.messages(1)
    world.kill("eu")
    world.lose_disk("eu")
    await asyncio.sleep(1.0)
    world.start("eu")


def test_a_worker_whose_region_has_lost_its_disk_begins_anew_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its heartbeat hears first that the region has forgotten it."""
    monkeypatch.setattr(machine, "BEAT_S", 0.2)
    drawn = {seed: settings_of(seed) for seed in range(40)}
    for seed in [seed for seed, each in drawn.items() if each["shards"] == () and each["rule"] != "sync"][:4]:
        world = live(seed, loses_its_disk)
        assert violations(world) == [] and world.loop.now_s < 120.0


async def loses_copied_disks(world: World) -> None:
    """All servers of the site's ledgers, one after another, each with more that its copy lacks."""
    for name in [GLOBAL, "eu", GLOBAL] if "eu.shard-0" in world.processes else [GLOBAL] * 2:
        await asyncio.sleep(world.random.uniform(2.0, 15.0))
        if world.kill(name):
            world.lose_disk(name)
            await asyncio.sleep(world.random.choice([0.1, 5.0, 40.0]))
            world.start(name)


# The first finds members that a ledger has forgotten counted among those that take part, the second a goodbye that
# waits for facts which are lost. The last are of servers of one process.
@pytest.mark.parametrize("seed", [4, 66, 21, 45, 52, 59])
def test_what_a_ledger_came_back_without_is_trained_all_the_same(seed: int) -> None:
    world = live(seed, loses_copied_disks)
    assert violations(world) == [] and world.account.older


@pytest.mark.parametrize(("server", "away_s"), [("eu", 100.0), (GLOBAL, 300.0)])
def test_who_calls_while_a_shard_is_missing_is_not_taken_for_dead(server: str, away_s: float) -> None:
    """However long that is: nobody can send anything meanwhile, so nobody counts as one that hangs."""

    async def lacks_a_shard(world: World) -> None:
        await world.network.messages(60)
        world.kill(f"{server}.shard-0")
        await asyncio.sleep(away_s)
        world.start(f"{server}.shard-0")

    drawn = {seed: settings_of(seed) for seed in range(60)}
    for seed in [seed for seed, each in drawn.items() if server in each["shards"] and each["rule"] != "sync"][:2]:
        assert violations(live(seed, lacks_a_shard)) == []


async def has_no_room_under_a_shard(world: World) -> None:
    await world.network.messages(60)
    await operate(world, "pause")
    await asyncio.sleep(30.0)
    folder = world.processes["global.shard-0"].folder
    assert folder is not None
    world.disk.full.add(folder)
    began_s = world.loop.time()
    with pytest.raises(aio.AioRpcError, match="no room for the journal"):
        await operate(world, "snapshot", server="global.shard-0")
    assert world.loop.time() - began_s < 5.0
    world.disk.full.discard(folder)
    await operate(world, "snapshot", server="global.shard-0")
    await operate(world, "resume")


def test_a_snapshot_for_which_a_shard_has_no_room_is_refused_at_once() -> None:
    drawn = {seed: settings_of(seed) for seed in range(60)}
    for seed in [seed for seed, each in drawn.items() if GLOBAL in each["shards"] and each["rule"] != "sync"][:2]:
        assert violations(live(seed, has_no_room_under_a_shard)) == []


@pytest.mark.parametrize(("killed", "late_s"), [(True, 0.0), (True, 20.0), (False, 20.0)])
def test_a_region_learns_whether_the_weights_that_it_has_made_are_still_the_first(
    monkeypatch: pytest.MonkeyPatch, killed: bool, late_s: float
) -> None:
    """Between its join and its first pull the global server dies, or others' updates come: with these the weights go
    whole, else none of them."""
    sent: list[tuple[list[int], bool]] = []  # versions, and whether weights went
    answers, frames = list[Answer](), wire.frames

    def noted(message: Any, first: int = 0) -> Iterator[bytes]:
        if isinstance(message, Answer) and not message.sequence:
            answers.append(message)
        return frames(message, first)

    monkeypatch.setattr(wire, "frames", noted)

    async def happens(world: World) -> None:
        answers.clear()
        eu = next(name for name in ("eu.shard-0", "eu") if name in world.processes)
        while (host := world.processes[eu].host) is None or not host.server.origin:  # type: ignore[union-attr]
            await asyncio.sleep(0.0005)  # shorter than any message takes: its pull has not come
        world.absent.add("eu")
        if late_s:
            world.stop(eu, late_s)
        if killed:
            world.kill(GLOBAL)
            await asyncio.sleep(1.0)
            world.start(GLOBAL)
        while not (first := [w for _, name, w in world.record if name == eu and isinstance(w, Merged)]):
            await world.network.messages(1)
        top = {p.host.server.incarnation for name, p in world.processes.items() if name.startswith(GLOBAL) and p.host}
        sent.append((first[0].global_versions, any(answer.incarnation in top for answer in answers)))

    drawn = {seed: settings_of(seed) for seed in range(100)}
    kinds = {(each["down"].name, "eu" in each["shards"]): s for s, each in drawn.items() if each["rule"] != "sync"}
    assert kinds.keys() == {(name, shards) for name in ("fp32", "bf16", "int4") for shards in (False, True)}
    for kind, seed in sorted(kinds.items()):
        assert violations(live(seed, happens)) == [], kind
        versions, whole = sent.pop()
        assert whole == any(versions) == bool(late_s), kind


async def is_refused_at_once(world: World) -> None:
    world.disturb("eu")
    world.account.refusing["eu"] = True


def test_a_region_of_shards_starts_over_with_the_weights_that_it_had_at_first() -> None:
    """They are the same, and its shards must fetch them again all the same."""
    drawn = {seed: settings_of(seed) for seed in range(60)}
    for seed in [seed for seed, each in drawn.items() if "eu" in each["shards"] and each["rule"] != "sync"][:3]:
        world = live(seed, is_refused_at_once)
        assert violations(world) == [] and not world.account.refusing["eu"]
        assert world.loop.now_s < 80.0, "a worker waited until it counted as one that hangs"


@pytest.mark.long("geotrain/net", "geotrain/outer", "tests/simulation")
@pytest.mark.parametrize("first", range(1_000, 1_500, 100))
def test_every_one_of_five_hundred_lives(first: int) -> None:
    for seed in range(first, first + 100):
        assert violations(live(seed)) == [], f"python -m tests.simulation --seed {seed} --lives 1 --trace"


def test_a_seed_replays_a_life_to_the_last_event_also_in_another_process() -> None:
    seeds = 0, 9
    here = [digest(live(seed)) for seed in seeds]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", TOLD, *map(str, seeds)]
    there = subprocess.check_output(command, cwd=ROOT, env=environment, text=True, timeout=300)
    assert there.split() == here
    assert len(set(here)) == len(seeds)
