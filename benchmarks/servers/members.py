"""A region's server with one member, and with many more that are connected and send nothing but heartbeats."""

from __future__ import annotations

import asyncio
import multiprocessing
import uuid
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from benchmarks.servers.world import QUIET_S, REGION, ServerProcess, answered, start_worker, write_files
from geotrain.config import load_run
from geotrain.net.transport import rpc
from geotrain.net.transport.grpc_client import AnswerPull, GrpcClient
from geotrain.outer.identity import identity_of
from geotrain.outer.messages import Join
from geotrain.parameters.parameter_map import parameter_map_of

JOINING_AT_ONCE = 4


def idle(pipe: Connection, run_path: Path, names: list[str], address: str) -> None:
    """Processes of members that have their weights and train: their heartbeats are all that they say. Says "ready",
    and lives until it is killed.

    They share one event loop. gRPC wakes every loop of a process at each event of any, so with a loop a member this
    process would take the processor time that is measured; each worker has a process of its own.
    """
    asyncio.run(_idle(pipe, run_path, names, address))


async def _idle(pipe: Connection, run_path: Path, names: list[str], address: str) -> None:
    run = load_run(run_path)
    parameter_map, turn = parameter_map_of(run), asyncio.Semaphore(JOINING_AT_ONCE)
    identity, whole = (
        identity_of(run, parameter_map),
        tuple(parameter_map.whole(c.index) for c in parameter_map.chunks),
    )

    async def joined(name: str) -> GrpcClient:
        i, client = identity, GrpcClient(address, name, uuid.uuid4().hex)
        names = i.run, i.config_digest, i.parameter_map_digest, i.model, name, client.incarnation
        async with turn:
            await client.persist(lambda: client.join(Join(*names, 0, 1, whole, whole)), QUIET_S)
            for fragment in range(len(parameter_map.fragments)):
                wanted = AnswerPull(0, fragment, 0, 8 * parameter_map.numel)
                await client.persist(partial(client.pull, wanted), QUIET_S)
        return client

    clients = await asyncio.gather(*map(joined, names))
    pipe.send("ready")
    while True:
        for client in clients:
            await client.beat(0)
            await asyncio.sleep(rpc.BEAT_S / len(clients))


def measure(folder: Path, parameters: float, rounds: int, many: int) -> dict[str, float]:
    """`members_200_over_1`, with `many` in place of 200, and the milliseconds that it is made of: of an update, and
    of the server's processor time for it."""
    folder.mkdir(parents=True)
    names = [f"w{i}" for i in range(many)]
    run_path = write_files(folder, parameters, workers={REGION: names})
    servers = [ServerProcess(run_path, name) for name in ("global", REGION)]
    region = servers[1]
    others = None

    def timed() -> tuple[float, float]:
        """Milliseconds of an update, and of the region's processor time."""
        times, before_s = [], region.cpu_s()
        for _ in range(rounds):
            for fragment, size in enumerate(sizes):
                pipe.send(fragment)
                took_s = answered(pipe)[1]
                if size > max(sizes) / 2:
                    times.append(1e3 * took_s)
        return median(times), 1e3 * (region.cpu_s() - before_s) / (rounds * len(sizes))

    try:
        for server in servers:
            server.start()
        sizes = [fragment.numel for fragment in parameter_map_of(load_run(run_path)).fragments]
        pipe = start_worker(run_path, names[0], region.address)
        timed()  # warms up
        alone = timed()
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        others = context.Process(target=idle, args=(there, run_path, names[1:], region.address), daemon=True)
        others.start()
        if not here.poll(QUIET_S) or here.recv() != "ready":
            raise RuntimeError(f"{many - 1} members have no weights after {QUIET_S:g} s")
        among = timed()
        pipe.send(None)
    finally:
        if others is not None:
            others.kill()
        for server in servers:
            server.kill()
    return {
        f"members_{many}_over_1": among[0] / alone[0],
        "alone.ms_per_update": alone[0],
        "among.ms_per_update": among[0],
        "alone.processor_ms_per_update": alone[1],
        "among.processor_ms_per_update": among[1],
    }
