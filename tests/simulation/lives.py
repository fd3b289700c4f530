"""Lives of a run in the simulated world, each drawn from a seed: what befalls it, and what must hold."""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from grpc import aio

from geotrain.common.names import GLOBAL
from geotrain.config import codec_config
from geotrain.config.outer import OverlapConfig
from geotrain.monitor.events import SnapshotWritten
from geotrain.net.transport import rpc, wire
from geotrain.outer.events import Joined, UpdateStage
from geotrain.outer.messages import Lease, update_id
from tests.simulation.account import STEP
from tests.simulation.network import PROCESS, site
from tests.simulation.worker import HOME, REGIONS
from tests.simulation.world import DISK_LOST, EVERY_S, World, durable, operate

MEMORY = Path("/dev/shm")  # where there is one, files of a life cost no disk
SAMPLES = (12, 24, 36)  # of a run: whole rounds
WITHIN_S = 700.0  # virtual; a region that is cut off counts as dead after 60 s
SERVERS = (GLOBAL, *REGIONS)
LINKS = [*((r, GLOBAL) for r in REGIONS), *HOME.items()]


# -- what befalls a life


def in_rounds(world: World) -> bool:
    return world.run_config.outer.rule.synchronous


async def dies(world: World) -> None:
    """One process is killed, or two, or their machine loses power; they are started again a while later, perhaps
    with an empty disk."""
    names = world.random.sample([*world.addresses, *HOME], world.random.choice([1, 1, 2]))
    await world.network.messages(world.random.randint(1, 60))
    dead = [n for n in names if world.kill(n, power_lost=n not in HOME and world.random.random() < 0.5)]
    for name in dead:
        if name not in HOME and not in_rounds(world) and world.random.random() < 0.2:
            world.lose_disk(name)
    for name in dead:
        await asyncio.sleep(world.random.choice([0.1, 0.1, 1.0, 5.0, 40.0, 90.0]))
        world.start(name)
    if GLOBAL in world.account.older:  # its copy may be of while the run was paused
        await _until_heard(world, "resume")


async def dies_half_way(world: World, times: int = 3) -> None:
    """A region dies when it has a part of an update, and not the other: the first times that it has."""
    for _ in range(times):
        begun = len(world.record)
        while not any(isinstance(what, UpdateStage) and what.stage == "arrived" for *_, what in world.record[begun:]):
            if world.processes["eu"].ended or world.processes[GLOBAL].ended:  # nobody is there any more to tell it
                return
            await world.network.messages(1)
        if world.kill("eu"):
            await asyncio.sleep(1.0)
            world.start("eu")


async def is_cut_off(world: World) -> None:
    """Nothing passes over a link for a while."""
    shards = [(name, site(name)) for name in world.addresses if ".shard-" in name]
    below = [
        (name, above) for name, _ in shards for above, _ in shards if (site(name), site(above)) == ("eu", GLOBAL)
    ]
    world.cut(*world.random.choice([*LINKS, *shards, *below]), world.random.choice([0.5, 5.0, 40.0, 90.0]))


async def is_slow(world: World) -> None:
    """Every message takes far longer for a while."""
    world.network.slowness = world.random.choice([5.0, 50.0])
    world.absent |= set(world.processes)
    for name in REGIONS if world.network.slowness > 5.0 else ():  # a goodbye takes longer than a server lingers
        world.disturb(name)
    await asyncio.sleep(60.0)
    world.network.slowness = 1.0


async def disk_is_full(world: World) -> None:
    """A server's disk has no room for its journal for a while."""
    process = world.processes[world.random.choice([*world.addresses])]
    folder = process.folder
    assert folder is not None
    world.absent.add(site(process.name))
    joined = {what.member for *_, what in world.record if isinstance(what, Joined)}
    world.disturbed |= {worker for worker in HOME if worker not in joined}  # the run may be over when there is room
    world.disk.full.add(folder)
    await asyncio.sleep(world.random.choice([1.0, 20.0]))
    world.disk.full.discard(folder)


async def stands_still(world: World) -> None:
    """A process gets no time for a while, as where its machine swaps or is moved, and does not know it."""
    world.stop(world.random.choice([*world.addresses, *HOME]), world.random.choice([1.0, 10.0, 40.0]))


async def has_a_twin(world: World) -> None:
    """A worker is started again while its former incarnation lives."""
    await world.network.messages(world.random.randint(1, 60))
    world.twin(world.random.choice([*HOME]))


async def is_flaky(world: World) -> None:
    """Calls break after they were heard: what was said is said again."""
    world.network.flakiness = 0.3
    await asyncio.sleep(20.0)
    world.network.flakiness = 0.0


async def clock_is_set(world: World) -> None:
    """The wall clock jumps by up to a day."""
    world.machine.wall_s += world.random.uniform(-86400.0, 86400.0)


async def is_steered(world: World) -> None:
    """An operator takes a snapshot, or sets H."""
    try:
        if world.random.random() < 0.3:
            await operate(world, "snapshot", server=world.random.choice(SERVERS))
        else:
            await operate(world, f"set outer.local_steps={world.random.choice([1, 1, 3])}")
    except aio.AioRpcError:  # its server is down
        pass


async def _until_heard(world: World, what: str, name: str = "", server: str = GLOBAL) -> None:
    while not world.processes[server].ended:
        with suppress(aio.AioRpcError):
            await operate(world, what, name, server)
            return
        await asyncio.sleep(5.0)


async def is_paused(world: World) -> None:
    """An operator pauses the run, and resumes it later."""
    with suppress(aio.AioRpcError):  # it may be paused all the same
        await operate(world, "pause")
    await asyncio.sleep(world.random.uniform(0.0, 60.0))
    await _until_heard(world, "resume")


async def is_expelled(world: World) -> None:
    """An operator expels a worker, and lets it in again later."""
    name = world.random.choice([*HOME])
    world.disturb(name)
    world.absent.add(name)
    world.struck.add(name)
    with suppress(aio.AioRpcError):
        await operate(world, "expel", name, HOME[name])
    await asyncio.sleep(world.random.uniform(0.0, 40.0))
    await _until_heard(world, "unban", name, HOME[name])


async def is_drained(world: World) -> None:
    """A region leaves, and the other goes on alone."""
    if not in_rounds(world):
        world.disturb("us")
        await _until_heard(world, "drain", "us")


async def is_refused(world: World) -> None:
    """The global server refuses a region's next update for good, once."""
    if not in_rounds(world) and not world.account.refusing:
        name = world.random.choice([*REGIONS])
        world.disturb(name)
        world.account.refusing[name] = True


async def hangs(world: World) -> None:
    """A worker beats, and trains no more. Others get its data; in rounds, which wait for it, it goes on later."""
    if not world.hung:
        name = world.random.choice([*HOME])
        world.disturb(name)
        world.absent |= {name, HOME[name]}  # its region sends nothing, either
        world.note(name, "hangs")
        world.hung.add(name)
        if in_rounds(world):
            await asyncio.sleep(60.0)
            world.hung.clear()


Kind = Callable[[World], Awaitable[None]]
KINDS: list[Kind] = [
    dies,
    dies,
    dies,
    partial(dies_half_way, times=1),
    is_cut_off,
    is_cut_off,
    is_flaky,
    is_slow,
    is_steered,
    is_paused,
    is_expelled,
    is_drained,
    is_refused,
    hangs,
    disk_is_full,
    stands_still,
    has_a_twin,
    clock_is_set,
]


async def befall(world: World, kinds: Sequence[Kind] = KINDS) -> None:
    """Let up to fourteen things befall the run, some of them at the same time."""
    if not in_rounds(world) and world.random.random() < 0.25:
        first = world.random.randrange(0, world.run_config.data.train_samples, STEP)
        world.spoiled = range(first, first + STEP)
    secure = world.cluster.security is not None
    happening = [asyncio.ensure_future(is_mimicked(world))] if world.forming and secure else []
    for _ in range(world.random.randint(0, 14)):
        await asyncio.sleep(world.random.expovariate(1 / 2.0))
        happening.append(asyncio.ensure_future(world.random.choice(kinds)(world)))
    await asyncio.gather(*happening)


async def is_mimicked(world: World) -> None:
    """A worker with a certificate of its own speaks for another, and as the operator: nobody listens."""
    await asyncio.sleep(world.random.uniform(1.0, 20.0))
    server = world.processes["eu"].host
    member = server and server.server.members.get("a")  # type: ignore[attr-defined]
    if member is not None:
        leave = rpc.SayLeave("a", member.incarnation, 0, (99,) * len(world.parameter_map.fragments))
        PROCESS.set("b")
        calls = [("leave", leave), ("control", rpc.Control("expel", "a")), ("control", rpc.Control("snapshot"))]
        for call, said in calls:
            with suppress(aio.AioRpcError):
                await world.channel("worker", "b", "eu").unary_unary(f"/{rpc.SERVICE}/{call}")(wire.pack(said))
                world.faults.append(f"{said} of another was obeyed")


async def goes_on_without(world: World) -> None:
    """All die at once, whatever befalls them beside, and the run is resumed with a cluster that lacks a worker, or a
    region, which was drained before or not."""
    happening = asyncio.ensure_future(befall(world, [kind for kind in KINDS if kind is not is_drained]))
    await asyncio.sleep(world.random.uniform(2.0, 90.0))
    gone = world.random.choice(["a", "b", "us"])
    if gone == "us" and world.random.random() < 0.5:
        await is_drained(world)
    # In rounds such a worker takes with it what it had of the round.
    stay = [p for p in world.processes.values() if gone not in (p.name, site(p.name), HOME.get(p.name))]
    if not in_rounds(world) and not any(process.ended for process in stay):
        world.resume_without(gone)
    await happening


# -- what must hold


def violations(world: World) -> list[str]:
    """What a life has broken: beside what `World` finds itself, that a restart finds all that its server had."""
    found = [*world.faults, *(f"a handler raised: {error}" for error in world.network.errors)]
    if found:
        return found
    for worker, _, *update in sorted(world.acknowledged):
        if (HOME[worker], worker, *update) not in world.account.ever:
            found.append(f"update {update_id(worker, *update)} was acknowledged, and never applied")
    top = world.processes[GLOBAL].host
    assert top is not None
    leases = top.server.lease_table  # type: ignore[attr-defined]
    samples = world.run_config.data.train_samples
    skipped = set(range(4, 8)) if world.run_config.data.skip else set()  # whole steps
    aside = {sample for sample, place in enumerate(world.account.spec.ledger.place) if place == "aside"}
    if GLOBAL in world.account.older:
        aside = {sample for first, many in leases.aside for sample in range(first, first + many)}
    granted = [
        (at_s, set(range(w.start, w.start + w.samples))) for at_s, _, w in world.record if isinstance(w, Lease)
    ]
    lost_s = max([at_s for at_s, name, what in world.record if (name, what) == (GLOBAL, DISK_LOST)], default=0.0)
    before = set().union(*[those for at_s, those in granted if at_s < lost_s])
    if (leases.pool and world.account.copied) or (leases.left and before | aside | skipped == set(range(samples))):
        return found  # a disk was lost when the workers had left
    if leases.committed_samples + len(aside) != samples or leases.open or leases.pool:
        found.append(
            f"{leases.committed_samples} of {samples} samples are committed; out: {leases.open} {leases.pool}"
        )
    trained = set().union(*[those for _, those in granted])
    if trained & skipped or trained | aside != set(range(samples)):
        found.append(f"samples that nobody should train, or nobody did: {sorted(trained ^ set(range(samples)))}")
    contained = [lease for lease, fragments in world.account.reached.items() if len(fragments) == len(top.server.all)]
    whole = set().union(*[range(lease.start, lease.start + lease.samples) for lease in contained])
    if not world.account.copied and whole | aside != set(range(samples)):
        missing = sorted(set(range(samples)) - aside - whole)
        found.append(f"samples count as trained, and the weights contain no training of them: {missing}")
    snapshots = Counter(name for _, name, what in world.record if isinstance(what, SnapshotWritten))
    if any(many > world.loop.now_s / EVERY_S + 20 for many in snapshots.values()):  # also at starts, and as is asked
        found.append(f"many snapshots in {world.loop.now_s} s: {snapshots}")
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
    drawn_settings: dict[str, Any] = {
        "train_samples": drawn.choice(SAMPLES),
        "rule": rule.replace("published", "halos"),
        "up": codec_config(drawn.choice(["fp32", "int8"])),
        "down": codec_config(drawn.choice(["fp32", "bf16", "int4"])),
        "shards": shards,
        "pieces": drawn.choice([1, 2]) if shards else 1,
        "copies": drawn.random() < 0.5 if shards else seed % 7 == 3,
        "secure": seed % 3 == 0,
    }
    if rule != "sync":
        drawn_settings |= {"updates_per_send": drawn.randint(1, 3), "lease_reserve": drawn.choice([0, 0, 1, 2])}
    if rule != "sync" and seed % 6 == 0:  # synchronous ones train whole rounds
        drawn_settings["ramp"] = 1, 1, 4  # four steps of one sample: the places of what is skipped stay
    if rule == "region_momentum":
        drawn_settings["momentum_share"] = 0.5  # of a run so short, a smaller one is always one update
        if seed % 3 == 2:
            overlap = OverlapConfig(steps=1, adopt="rebase")  # how long answers wait: see SimulatedWorker
            drawn_settings |= {"answers": "wait", "updates_per_send": 4, "overlap": overlap}
            drawn_settings["scale_local_steps"] = seed % 2 == 0  # then lengths follow clocks
    return drawn_settings | ({"ledger": False} if rule == "published" else {})


def live(seed: int, work: Kind = befall) -> World:
    """Play the life of that seed to its end. work: what befalls it."""
    folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    try:
        world = World(seed, folder, **settings_of(seed))
        if work is befall:
            coming = random.Random(f"who comes late in {seed}")  # apart, so that the rest of a life stays
            at_s = [5.0, 30.0, 120.0]
            world.late = {name: coming.choice(at_s) for name in (*REGIONS, *HOME) if coming.random() < 0.08}
            if seed % 10 in (2, 9):  # none of the seeds that are kept for what they found
                world.forming = random.Random(f"who loses hosts in {seed}")
        world.play(work, WITHIN_S)
        return world
    finally:
        shutil.rmtree(folder)
