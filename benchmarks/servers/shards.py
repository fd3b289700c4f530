"""Servers with shards in processes of their own: speed, work of ledgers and shards, whether bits are the same."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.servers.world import (
    REGION,
    WORKERS,
    ServerProcess,
    answered,
    start_worker,
    wait_until_quiet,
    write_files,
)
from geotrain.config import load_run, shard_name
from geotrain.net.storage.snapshots import SNAPSHOTS, SnapshotStore
from geotrain.net.transport import rpc
from geotrain.net.transport.operator_client import command
from geotrain.parameters.parameter_map import parameter_map_of

SERVERS = "global", REGION
PIECES = 4  # of a fragment, with any number of shards: each shard has some of every fragment of layers
QUIET_S = 120.0
SEED = 24


@dataclass(frozen=True)
class Lived:
    """Figures of a world, and its end. state: chunk and name → tensor, of both servers, at its end."""

    figures: dict[str, Any]
    state: dict[str, Tensor]


def measure(folder: Path, parameters: float, rounds: int, numbers: Sequence[int]) -> dict[str, Any]:
    """`shards` and `bitwise_equal_over_shards`, as `benchmarks.servers` tells them."""
    found, first, equal = {}, None, True
    for number in numbers:
        lived = live(folder / str(number), parameters, rounds, number)
        print(f"{number} shards a server: {lived.figures}", flush=True)
        found[str(number)] = lived.figures
        first = first or lived.state
        equal &= same(first, lived.state)
    return {"shards": found, "bitwise_equal_over_shards": equal}


def live(folder: Path, parameters: float, rounds: int, number: int) -> Lived:
    """A whole world: a round that warms up, those that are measured, and one in which every role is killed, where
    shards are processes. One update after another, and nothing depends on time. number: of shards a server; 1: in its
    process."""
    folder.mkdir(parents=True)
    far = number if number > 1 else 0
    run_path = write_files(folder, parameters, shards=far, pieces=PIECES)
    parameter_map = parameter_map_of(load_run(run_path))
    sizes = parameter_map.group_numel
    names = [*SERVERS, *(shard_name(server, i) for server in SERVERS for i in range(far))]
    servers = {name: ServerProcess(run_path, name) for name in names}
    pipes: list[Connection] = []
    try:
        with ThreadPoolExecutor(len(servers)) as starting:
            list(starting.map(ServerProcess.start, servers.values()))
        pipes = [start_worker(run_path, name, servers[REGION].address) for name in WORKERS]
        below = [servers[shard_name(REGION, i)] for i in range(far)] or [servers[REGION]]
        turns = [(group, pipe) for group in range(len(sizes)) for pipe in pipes]
        for turn in turns:
            update(below, *turn)
        times: list[tuple[int, float, float, float]] = []
        begin = time.perf_counter()
        spent = processor(
            servers.values(),
            lambda: times.extend((sizes[turn[0]], *update(below, *turn)) for _ in range(rounds) for turn in turns),
        )
        figures = _figures(times, spent, time.perf_counter() - begin)
        dice = random.Random(SEED + number)
        killed = dict(zip(dice.sample(range(len(turns)), len(roles(servers))), roles(servers), strict=True))
        for i, turn in enumerate(turns):
            victim = servers[killed[i]] if far and i in killed else None
            update(below, *turn, victim, figures["update_s"], dice)
        return Lived(figures | {"parameters": parameter_map.numel}, state_of(servers))
    finally:
        for pipe in pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)
        for server in servers.values():
            server.kill()
        shutil.rmtree(folder / "run", ignore_errors=True)


def roles(servers: dict[str, ServerProcess]) -> list[str]:
    """One process of each."""
    last = {(name.partition(".shard-")[0], ".shard-" in name): name for name in servers}
    return list(last.values())


def update(
    below: Sequence[ServerProcess], group: int, pipe: Connection, victim: ServerProcess | None = None,
    usual_s: float = 0.0, dice: random.Random | None = None,
) -> tuple[float, float, float]:  # fmt: skip
    """Send one update of a worker: seconds until it is on disk, until it is answered, and until what follows of it
    has come down to `below`, the region's processes with fragments. victim: is killed on the way, and started
    again."""
    begin = time.perf_counter()
    pipe.send(group)
    if victim is not None and dice is not None:
        time.sleep(dice.uniform(0, usual_s))
        victim.kill()
        victim.start(resume=True)
    pushed_s, took_s = answered(pipe)
    for server in below:
        wait_until_quiet(server)
    return pushed_s, took_s, time.perf_counter() - begin


def processor(servers: Any, work: Any) -> dict[str, float]:
    """Seconds of processor time of each while the work is done."""
    servers = list(servers)
    before = {server.name: server.cpu_s() for server in servers}
    work()
    return {server.name: server.cpu_s() - before[server.name] for server in servers}


def _figures(times: list[tuple[int, float, float, float]], spent: dict[str, float], wall_s: float) -> dict[str, Any]:
    done = sum(size for size, *_ in times)

    def share(of_shards: bool, server: str) -> float:
        """ns of processor time a parameter, of a server's own process or all its shards together."""
        own = [s for n, s in spent.items() if n.partition(".shard-")[0] == server and (".shard-" in n) == of_shards]
        return 1e9 * sum(own) / done

    far = any(".shard-" in name for name in spent)
    large = [each for each in times if each[0] > max(size for size, *_ in times) / 2]
    stages = {
        "push": median(1e9 * pushed / size for size, pushed, *_ in large),
        "answer": median(1e9 * (took - pushed) / size for size, pushed, took, _ in large),
        "up_and_down": sum(1e9 * (all_s - took) for _, _, took, all_s in times) / done,
    }
    stages |= {f"processor_of_{'ledger' if far else 'server'}_{server}": share(False, server) for server in SERVERS}
    if far:
        stages |= {f"processor_of_shards_{server}": share(True, server) for server in SERVERS}
    return {
        "parameters_per_s": done / wall_s,
        "update_s": median(all_s for *_, all_s in large),
        "ns_per_parameter": stages,
    }


def state_of(servers: dict[str, ServerProcess]) -> dict[str, Tensor]:
    """Read all that both servers and their shards hold for good, after a snapshot of now."""
    for server in servers.values():
        command(server.address, rpc.Control("snapshot"), QUIET_S)
    state: dict[str, Tensor] = {}
    for name, server in servers.items():
        newest, faults = SnapshotStore(server.folder / SNAPSHOTS).load_newest()
        if newest is None:
            raise RuntimeError(f"{name} has no snapshot: {faults}")
        place = name.partition(".shard-")[0]
        state |= {f"{place}: {tensor}": value.clone() for tensor, value in newest.tensors.items()}
    return state


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states are bit for bit the same; prints what differs. Which answers a process still keeps follows
    from the last update that it got, so those of one state alone are passed over."""
    differ = sorted(name for name in one.keys() ^ other.keys() if ": answer." not in name)
    differ += [name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])]
    for name in differ[:20]:
        print(f"differs: {name}", flush=True)
    return not differ
