"""A global server that sends changes to several regions, with its mirrors in memory and on the disk."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import PeakMemory
from benchmarks.servers.worker import Worker
from benchmarks.servers.world import ServerProcess, write_files
from geotrain.net.transport import rpc
from geotrain.net.transport.operator_client import command

MEMBERS = tuple(f"r{i}" for i in range(4))  # what the server does for a region, it does for a worker in a flat run
WHERE, WAIT_S = ("memory", "disk"), 300.0


def measure(folder: Path, parameters: float, rounds: int) -> dict[str, Any]:
    """`mirrors`, as `benchmarks.servers` tells them."""
    return {"regions": len(MEMBERS), **{where: _live(folder / where, parameters, rounds, where) for where in WHERE}}


def _live(folder: Path, parameters: float, rounds: int, where: str) -> dict[str, float]:
    folder.mkdir(parents=True)
    run_path = write_files(folder, parameters, workers={"eu": MEMBERS})
    block = json.loads(run_path.read_text())
    for key in ("local", "server_state"):
        del block["outer"][key]
    block["outer"] |= {"levels": 1, "rule": {"name": "region_momentum"}, "mirrors": where}
    block["outer"]["fragments"]["layers_per_fragment"] *= 5  # as chunks of large models, none is kept by malloc
    run_path.write_text(json.dumps(block))
    server = ServerProcess(run_path, "global")
    members: list[Worker] = []
    try:
        server.start()
        bare_bytes = server.resident_bytes(), server.resident_bytes(mapped=True)  # with the weights, and no mirror
        memory, all_of_it = (
            PeakMemory({"global": lambda mapped=mapped: server.resident_bytes(mapped)}) for mapped in (False, True)
        )
        members += [Worker(run_path, name, server.address, ranks=1) for name in MEMBERS]
        sizes = members[0].sizes
        numel = sum(sizes)
        times = []
        for number in range(rounds + 1):
            for fragment, size in enumerate(sizes):
                begin = time.perf_counter()
                for member in members:
                    member.timed(fragment)
                if number:  # the first round copies each mirror away from the payload that it began as
                    times.append((time.perf_counter() - begin) / len(members) / size)
        command(server.address, rpc.Control("snapshot"), WAIT_S)
        at_rest = server.resident_bytes(mapped=True)
        peak, all_peak = memory.close()["global"], all_of_it.close()["global"]
    finally:
        for member in members:
            member.close()
        server.kill()
    return {
        "bytes_per_parameter": (peak - bare_bytes[0]) / numel + 4,
        "with_files_bytes_per_parameter": (all_peak - bare_bytes[1]) / numel + 4,
        "at_rest_bytes_per_parameter": (at_rest - bare_bytes[1]) / numel + 4,
        "update_ns_per_parameter": 1e9 * median(times),
    }
