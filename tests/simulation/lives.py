"""Lives of a run in the simulated world, each drawn from a seed: what befalls it, and what must hold."""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from grpc import aio

from geotrain.common.names import GLOBAL
from geotrain.config import codec_config
from geotrain.net.server.shard_host import ShardHost
from geotrain.outer.events import UpdateApplied, UpdateStage
from geotrain.outer.messages import Lease
from tests.simulation.worker import HOME, REGIONS
from tests.simulation.world import World, durable, operate

MEMORY = Path("/dev/shm")  # where there is one, files of a life cost no disk
SAMPLES = (12, 24, 36)  # of a run: whole rounds
WITHIN_S = 700.0  # virtual; a region that is cut off counts as dead after 60 s
SERVERS = (GLOBAL, *REGIONS)
LINKS = [*((r, GLOBAL) for r in REGIONS), *HOME.items()]


# -- what befalls a life


async def dies(world: World) -> None:
    """One process is killed, or two, or their machine loses power; they are started again a while later."""
    names = world.random.sample([*world.addresses, *HOME], world.random.choice([1, 1, 2]))
    await world.network.messages(world.random.randint(1, 60))
    dead = [n for n in names if world.kill(n, power_lost=n not in HOME and world.random.random() < 0.5)]
    for name in dead:
        await asyncio.sleep(world.random.choice([0.1, 0.1, 1.0, 5.0, 40.0, 90.0]))
        world.start(name)


async def dies_half_way(world: World) -> None:
    """A region dies when it has a part of an update, and not the other: the first three times that it has."""
    for _ in range(3):
        begun = len(world.record)
        while not any(isinstance(what, UpdateStage) and what.stage == "arrived" for *_, what in world.record[begun:]):
            await world.network.messages(1)
        world.kill("eu")
        await asyncio.sleep(1.0)
        world.start("eu")


async def is_cut_off(world: World) -> None:
    """Nothing passes over a link for a while."""
    world.cut(*world.random.choice(LINKS), world.random.choice([0.5, 5.0, 40.0, 90.0]))


async def is_slow(world: World) -> None:
    """Every message takes far longer for a while."""
    world.network.slowness = world.random.choice([5.0, 50.0])
    for name in REGIONS if world.network.slowness > 5.0 else ():  # a goodbye takes longer than a server lingers
        world.disturb(name)
    await asyncio.sleep(60.0)
    world.network.slowness = 1.0


async def disk_is_full(world: World) -> None:
    """A server's disk has no room for its journal for a while."""
    process = world.processes[world.random.choice([*world.addresses])]
    folder = process.folder
    assert folder is not None
    world.disk.full.add(folder)
    await asyncio.sleep(world.random.choice([1.0, 20.0]))
    world.disk.full.discard(folder)


async def is_steered(world: World) -> None:
    """An operator takes a snapshot, or pauses and resumes the run."""
    try:
        if world.random.random() < 0.5:
            await operate(world, "snapshot", server=world.random.choice(SERVERS))
        else:
            await operate(world, "pause")
            await asyncio.sleep(world.random.uniform(0.0, 60.0))
            while True:
                try:
                    await operate(world, "resume")
                    return
                except aio.AioRpcError:
                    if world.processes[GLOBAL].ended:
                        return
                    await asyncio.sleep(5.0)
    except aio.AioRpcError:  # its server is down
        pass


Kind = Callable[[World], Awaitable[None]]
KINDS: list[Kind] = [
    dies,
    dies,
    dies,
    is_cut_off,
    is_cut_off,
    is_slow,
    is_steered,
    disk_is_full,
]


async def befall(world: World) -> None:
    """Let up to fourteen things befall the run, some of them at the same time."""
    happening = []
    for _ in range(world.random.randint(0, 14)):
        await asyncio.sleep(world.random.expovariate(1 / 2.0))
        happening.append(asyncio.ensure_future(world.random.choice(KINDS)(world)))
    await asyncio.gather(*happening)


# -- what must hold


def violations(world: World) -> list[str]:
    """What a life has broken: beside what `World` finds itself, that a restart finds all that its server had."""
    found = [*world.faults, *(f"a handler raised: {error}" for error in world.network.errors)]
    if found:
        return found
    applied = Counter[tuple[str, str, int]]()
    for _, server, what in world.record:
        if isinstance(what, UpdateApplied):
            applied[server, what.member, what.sequence] += 1
    found += [f"{server} applied update {n} of {member} twice" for (server, member, n), k in applied.items() if k > 1]
    for worker, _, sequence in sorted(world.acknowledged):
        if not applied[HOME[worker], worker, sequence]:
            found.append(f"update {sequence} of {worker} was acknowledged, and never applied")
    for process in world.processes.values():
        if process.ended and isinstance(process.host, ShardHost):
            found += world.account.differing(process.host.setup.server, process.host.server.shard)
    top = world.processes[GLOBAL].host
    assert top is not None
    leases = top.server.lease_table  # type: ignore[attr-defined]
    samples = world.run_config.data.train_samples
    aside = set(range(4, 8)) if world.run_config.data.skip else set()  # whole steps of those that are skipped
    if leases.committed_samples + len(aside) != samples or leases.open or leases.pool:
        found.append(
            f"{leases.committed_samples} of {samples} samples are committed; out: {leases.open} {leases.pool}"
        )
    trained = {(w.start + i) for _, _, w in world.record if isinstance(w, Lease) for i in range(w.samples)}
    if trained != set(range(samples)) - aside:
        found.append(
            f"samples nobody should train, or nobody trained: {sorted(trained ^ (set(range(samples)) - aside))}"
        )
    if not top.server.ending:
        found.append("the run has ended, and others might join still")
    return found


def digest(world: World) -> str:
    """A fingerprint of all that happened, and when, and of what the servers hold at last."""
    hosts = [process.host for process in world.processes.values() if process.host is not None]
    told = repr((world.record, [durable(host.server) for host in hosts])).replace(
        str(world.folder), ""
    )  # a path in an error's text
    return hashlib.sha256(told.encode()).hexdigest()


def settings_of(seed: int) -> dict[str, Any]:
    """Draw the run's settings."""
    drawn = random.Random(-seed)
    rule = drawn.choice(["halos", "published", "region_momentum", "sync"])
    shards = drawn.choice([(), (), (GLOBAL,), (GLOBAL, "eu")])
    exact = "eu" in shards  # payloads that go from shard to shard are not seen by the account
    drawn_settings = {
        "train_samples": drawn.choice(SAMPLES),
        "rule": rule.replace("published", "halos"),
        "up": codec_config(drawn.choice(["fp32"] if exact else ["fp32", "int8"])),
        "down": codec_config(drawn.choice(["fp32"] if exact else ["fp32", "bf16", "int4"])),
        "shards": shards,
    }
    if rule != "sync":
        drawn_settings |= {"updates_per_send": drawn.randint(1, 3), "lease_reserve": drawn.choice([0, 0, 1, 2])}
    return drawn_settings | ({"ledger": False} if rule == "published" else {})


def live(seed: int, work: Kind = befall) -> World:
    """Play the life of that seed to its end. work: what befalls it."""
    folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    try:
        world = World(seed, folder, **settings_of(seed))
        world.play(work, WITHIN_S)
        return world
    finally:
        shutil.rmtree(folder)
