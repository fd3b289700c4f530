"""Real servers, with sockets, journal and disk, of a model of half a billion parameters.

    python -m benchmarks.servers [--parameters 0.5e9] [--rounds 4] [--folder DIR] [--record] [--rates] [--members]

One region and a global server as processes (`geotrain serve`), and two workers of two ranks each that push noise:
bf16 inside the region, int4 up and down, K 2. Each round updates every fragment of each worker, one update after
another, and waits until what goes up has come down. Between the updates of a round, a vector as long as the fragment
is copied. No round begins after four minutes. Then the same in small, with shards as processes. `--rates` measures
only what plan, dry-run and simulate count with, in five minutes, writes it into the product, and renews the table of
docs/operations.md; `--members` measures only how an update grows with members. The last line printed is one JSON
object:

region_bytes_per_parameter, global_bytes_per_parameter
                     the most resident memory of each process (without mapped files), snapshots included
at_rest              the same when all is answered and nothing is under way
update_vs_memcpy     seconds from the first byte that is pushed to the last byte of the answer, over those of copying
                     the update's fp32 vector once; median over the updates of large fragments, and its 95 % interval
ns_per_parameter     of an update: from end to end; processor time of each server; and of each stage, on one thread
simulated_over_measured
                     ns of an update as plan, dry-run and simulate count them (with `--rates`: from now on), over
                     those measured here; small, encrypted: the same of `--encrypted` parameters, without and with TLS
members_200_over_1   time of an update of one member of a region (4 M parameters) while 199 others are connected and
                     send heartbeats alone, over that without them
stall_at_snapshot    the longest update while snapshots of both servers are written, over the median one
recovery_s_per_gb    of the region's server, killed with -9: seconds until it listens again, less those of a server
                     without a state, over the snapshot's size
shards               by their number a server (1: in its process; more: processes), at 17 M parameters: parameters a
                     second of updates that come one after another, each until what it sends up has come down; ns a
                     parameter by stage (until it is on disk, until its answer, the way up and down) and of each
                     role's processor time
bitwise_equal_over_shards
                     all that both servers hold for good is the same with each number, though a process of each role
                     was killed with -9 on the way, where shards are processes
mirrors              of a global server with four regions, whose mirrors are in memory, and on the disk: the most
                     resident bytes a parameter, a snapshot included; the same with mapped files, which the kernel can
                     take, and with them at rest; ns a parameter of an update
first_weights_mb_s   speed at which the region and its first worker got the weights
"""

from __future__ import annotations

import shutil
import tempfile
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import command_line, report, spread, units_by_ending
from benchmarks.processes import PeakMemory
from benchmarks.servers import members, mirrors, rates, shards, stages
from benchmarks.servers.world import (
    QUIET_S,
    REGION,
    WORKERS,
    ServerProcess,
    answered,
    start_worker,
    state_bytes,
    wait_until_quiet,
    write_files,
)
from geotrain.config import load_run
from geotrain.net.transport import rpc
from geotrain.net.transport.operator_client import command
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.plan.model.server_rates import MEASURED

UNITS = {
    "_mb_s": "MB/s",
    "_per_gb": "s/GB",
    "per_parameter": "bytes",
    "memcpy": "ratio",
    "snapshot": "ratio",
    "measured": "ratio",
    "growth": "ratio",
    "over_1": "ratio",
    "per_update": "ms",
    "parameters_per_s": "parameters/s",
}
ROUNDS_S = 240.0
SHARDED_ROUNDS = 2
RATES_PARAMETERS, RATES_ROUNDS = 2.4e8, 2  # so that `--rates` ends in five minutes
MEMBERS_PARAMETERS = 4e6
QUICK = {
    "parameters": 4e6,
    "rounds": 1,
    "shards": [1, 2],
    "sharded": 1e6,
    "mirrored": 2e6,
    "encrypted": 2e6,
    "many": 8,
}


def main() -> None:
    parser = command_line(__doc__, quick=QUICK)
    parser.add_argument("--parameters", type=float, default=0.5e9)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4], help="numbers of them")
    parser.add_argument("--sharded", type=float, default=1.6e7, help="parameters in the worlds with shards")
    parser.add_argument("--mirrored", type=float, default=4.8e7, help="parameters beside four regions")
    parser.add_argument("--encrypted", type=float, default=6.4e7, help="parameters where links have TLS")
    parser.add_argument("--many", type=int, default=200, help="members, for `members_200_over_1`")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--rates", action="store_true", help="renew geotrain/plan/model/server_rates.py and docs")
    only.add_argument("--members", action="store_true", help="measure `members_200_over_1` alone")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: a temporary one")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="servers-", dir=options.folder))
    servers: list[ServerProcess] = []
    try:
        if options.members:
            figures = {
                "parameters": MEMBERS_PARAMETERS,
                **members.measure(folder / "many", MEMBERS_PARAMETERS, 2, options.many),
            }
        else:
            figures = _figures(folder, options, servers)
    finally:
        for server in servers:
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    unit = units_by_ending(UNITS)
    note = f"{figures['parameters'] / 1e6:.0f} M parameters"
    report("servers", figures, options, lambda metric: "ns" if "ns_per_parameter" in metric else unit(metric), note)


def _figures(folder: Path, options: Namespace, servers: list[ServerProcess]) -> dict[str, Any]:
    parameters, rounds = options.parameters, options.rounds
    if options.rates:
        parameters, rounds = min(parameters, RATES_PARAMETERS), min(rounds, RATES_ROUNDS)
    figures = measure(folder, parameters, rounds, servers, whole=not options.rates)
    for server in servers:
        server.kill()
    ns = figures["ns_per_parameter"]
    for name, encrypted in (("small", False), ("encrypted", True)):
        ns[name] = small_ns(folder / name, options.encrypted, rounds, servers, encrypted)
    counted = MEASURED
    if options.rates:
        counted = rates.renew(figures, options.note or "python -m benchmarks.servers --rates")
    figures["simulated_over_measured"] = rates.simulated_ns(counted, False) / ns["end_to_end"]
    for name, encrypted in (("small", False), ("encrypted", True)):
        figures[name] = {"simulated_over_measured": rates.simulated_ns(counted, encrypted) / ns[name]}
    if not options.rates:
        figures |= shards.measure(folder / "shards", options.sharded, SHARDED_ROUNDS, options.shards)
        figures["mirrors"] = mirrors.measure(folder / "mirrors", options.mirrored, SHARDED_ROUNDS)
        figures |= members.measure(folder / "many", MEMBERS_PARAMETERS, SHARDED_ROUNDS, options.many)
    return figures


def measure(
    folder: Path, parameters: float, rounds: int, servers: list[ServerProcess], whole: bool = True
) -> dict[str, Any]:
    """Measure one world. whole: also updates while snapshots are written."""
    run_path = write_files(folder, parameters)
    parameter_map = parameter_map_of(load_run(run_path))
    sizes = [fragment.numel for fragment in parameter_map.fragments]
    print(f"{parameter_map.numel / 1e6:.1f} M parameters, {len(sizes)} fragments", flush=True)
    top, region = ServerProcess(run_path, "global"), ServerProcess(run_path, REGION)
    servers += [top, region]
    began_s = {server.name: server.start() for server in servers}
    memory = PeakMemory({server.name: server.resident_bytes for server in servers})
    begin = time.perf_counter()
    pipes = [start_worker(run_path, name, region.address) for name in WORKERS]
    weights_s = time.perf_counter() - begin
    print(f"servers listened after {began_s}, workers have their weights after {weights_s:.1f} s", flush=True)

    source, target = torch.ones(max(sizes)), torch.empty(max(sizes))
    before_s = {server.name: server.cpu_s() for server in servers}
    updates: list[tuple[float, float, int]] = []  # seconds, seconds of a copy, elements
    large = [size for size in sizes if size > max(sizes) / 2]  # the others' time is a call's, not a parameter's

    def update(pipe: Connection, fragment: int) -> float:
        pipe.send(fragment)
        return answered(pipe)[1]

    began = time.monotonic()
    for number in range(rounds + 1):
        if number > 1 and time.monotonic() - began > ROUNDS_S:
            break
        for fragment, size in enumerate(sizes):
            for pipe in pipes:
                took_s = update(pipe, fragment)
                begin = time.perf_counter()
                target[:size].copy_(source[:size])
                copied_s = time.perf_counter() - begin
                if number:  # the first round warms up
                    updates.append((took_s, copied_s, size))
            wait_until_quiet(region)
        print(f"round {number} of {rounds}", flush=True)
        if not number:
            before_s = {server.name: server.cpu_s() for server in servers}
    done = sum(size for *_, size in updates)
    processor = {server.name: (server.cpu_s() - before_s[server.name]) / done * 1e9 for server in servers}
    at_rest = {server.name: server.resident_bytes() / parameter_map.numel for server in servers}

    usual_s = {size: median(took for took, _, each in updates if each == size) for size in sizes}
    stalls = []
    if not whole:
        command(region.address, rpc.Control("snapshot"), QUIET_S)
    for server in servers if whole else ():
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(command, server.address, rpc.Control("snapshot"), QUIET_S)
            while not written.done():
                for fragment, size in enumerate(sizes):
                    stalls += [update(pipe, fragment) / usual_s[size] for pipe in pipes if size in large]
                    wait_until_quiet(region)
            written.result()
    peak = memory.close()

    for pipe in pipes:
        pipe.send(None)
    region.kill()
    recovered_s, size_gb = region.start(resume=True), state_bytes(region) / 1e9
    recovery = max(0.0, recovered_s - min(began_s[REGION], recovered_s)) / size_gb
    by_stage = stages.measure(folder, max(sizes))
    end_to_end = median(took / size * 1e9 for took, _, size in updates if size in large)
    return {
        "parameters": parameter_map.numel,
        "region_bytes_per_parameter": peak[REGION] / parameter_map.numel,
        "global_bytes_per_parameter": peak["global"] / parameter_map.numel,
        "at_rest": {f"{name}_bytes_per_parameter": value for name, value in at_rest.items()},
        **spread("update_vs_memcpy", [took / copied for took, copied, size in updates if size in large]),
        "ns_per_parameter": {
            "end_to_end": end_to_end,
            "memcpy": median(copied / size * 1e9 for _, copied, size in updates if size in large),
            "processor_of_the_region": processor[REGION],
            "processor_of_the_global_server": processor["global"],
            **by_stage,
        },
        **({"stall_at_snapshot": max(stalls)} if whole else {}),
        "recovery_s_per_gb": recovery,
        "snapshot_gb": size_gb,
        "first_weights_mb_s": 4 * parameter_map.numel / 1e6 / weights_s,
    }


def small_ns(folder: Path, parameters: float, rounds: int, servers: list[ServerProcess], encrypted: bool) -> float:
    """Measure ns a parameter of an update from end to end, over links with TLS or without."""
    folder.mkdir()
    run_path = write_files(folder, parameters, encrypted=encrypted)
    sizes = [fragment.numel for fragment in parameter_map_of(load_run(run_path)).fragments]
    top, region = ServerProcess(run_path, "global"), ServerProcess(run_path, REGION)
    servers += [top, region]
    for server in (top, region):
        server.start()
    pipes = [start_worker(run_path, name, region.address) for name in WORKERS]
    times = []
    for number in range(rounds + 1):
        for fragment, size in enumerate(sizes):
            for pipe in pipes:
                pipe.send(fragment)
                took_s = answered(pipe)[1]
                if number and size > max(sizes) / 2:  # the first round warms up
                    times.append(took_s / size * 1e9)
            wait_until_quiet(region)
    for pipe in pipes:
        pipe.send(None)
    for server in (top, region):
        server.kill()
    return median(times)


if __name__ == "__main__":
    main()
