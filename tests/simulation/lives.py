"""Lives of a run in the simulated world, each drawn from a seed: what befalls it, and what must hold."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from grpc import aio

from geotrain.common.names import GLOBAL
from geotrain.outer.events import UpdateApplied
from geotrain.outer.messages import Lease
from tests.simulation.world import HOME, REGIONS, World, operate

MEMORY = Path("/dev/shm")  # where there is one, files of a life cost no disk
SAMPLES = 40
WITHIN_S = 20_000.0  # virtual; a region that is cut off counts as dead after 600 s
SERVERS = (GLOBAL, *REGIONS)
LINKS = [*((r, GLOBAL) for r in REGIONS), *HOME.items()]


# -- what befalls a life


async def dies(world: World) -> None:
    """A process is killed, or its machine loses power; it is started again a while later."""
    name = world.random.choice([*SERVERS, *SERVERS, *HOME])
    await world.network.messages(world.random.randint(1, 60))
    if world.kill(name, power_lost=name in SERVERS and world.random.random() < 0.5):
        await asyncio.sleep(world.random.choice([0.1, 0.1, 1.0, 5.0, 30.0, 700.0]))
        world.start(name)


async def is_cut_off(world: World) -> None:
    """Nothing passes over a link for a while."""
    world.cut(*world.random.choice(LINKS), world.random.choice([0.5, 5.0, 60.0, 900.0]))


async def is_slow(world: World) -> None:
    """Every message takes far longer for a while."""
    world.network.slowness = world.random.choice([5.0, 50.0])
    await asyncio.sleep(60.0)
    world.network.slowness = 1.0


async def disk_is_full(world: World) -> None:
    """A server's disk has no room for its journal for a while."""
    process = world.processes[world.random.choice(SERVERS)]
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
    """Let up to ten things befall the run, some of them at the same time."""
    happening = []
    for _ in range(world.random.randint(0, 10)):
        await asyncio.sleep(world.random.expovariate(1 / 2.5))
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
    top = world.processes[GLOBAL].host
    assert top is not None
    leases = top.server.lease_table  # type: ignore[attr-defined]
    if leases.committed_samples != SAMPLES - 4 or leases.aside != [(4, 4)] or leases.open or leases.pool:
        found.append(
            f"{leases.committed_samples} of {SAMPLES} samples are committed; out: {leases.open} {leases.pool}"
        )
    trained = {(w.start + i) for _, _, w in world.record if isinstance(w, Lease) for i in range(w.samples)}
    wanted = set(range(SAMPLES)) - set(range(4, 8))  # whole steps of those that are skipped
    if trained != wanted:
        found.append(f"samples nobody should train, or nobody trained: {sorted(trained ^ wanted)}")
    if not top.server.ending:
        found.append("the run has ended, and others might join still")
    return found


def digest(world: World) -> str:
    """A fingerprint of all that happened, and when."""
    told = repr(world.record).replace(str(world.folder), "")  # a path in an error's text
    return hashlib.sha256(told.encode()).hexdigest()


def live(seed: int, **settings: object) -> World:
    """Play the life of that seed to its end."""
    folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    try:
        world = World(seed, folder, train_samples=SAMPLES, **settings)  # type: ignore[arg-type]
        world.play(befall, WITHIN_S)
        return world
    finally:
        shutil.rmtree(folder)
