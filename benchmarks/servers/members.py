"""A region's server with one member, and with many more that are connected and send nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.servers.worker import Worker
from benchmarks.servers.world import REGION, ServerProcess, write_files


def measure(folder: Path, parameters: float, rounds: int, many: int) -> dict[str, float]:
    """`members_200_over_1`, with `many` in place of 200, and the milliseconds of an update that it is made of."""
    folder.mkdir(parents=True)
    names = [f"w{i}" for i in range(many)]
    run_path = write_files(folder, parameters, workers={REGION: names})
    servers = [ServerProcess(run_path, name) for name in ("global", REGION)]
    members: list[Worker] = []

    def join(name: str) -> None:
        members.append(Worker(run_path, name, servers[1].address, ranks=1))

    def update_ms() -> float:
        first, times = members[0], []
        for number in range(rounds + 1):
            for fragment, size in enumerate(first.fragment_sizes):
                took_s = first.timed(fragment)[1]
                if number and size > max(first.fragment_sizes) / 2:  # the first round warms up
                    times.append(1e3 * took_s)
        return median(times)

    try:
        for server in servers:
            server.start()
        join(names[0])
        alone_ms = update_ms()
        with ThreadPoolExecutor(4) as joining:
            list(joining.map(join, names[1:]))
        among_ms = update_ms()
    finally:
        for member in members:
            member.close()
        for server in servers:
            server.kill()
    return {
        f"members_{many}_over_1": among_ms / alone_ms,
        "alone.ms_per_update": alone_ms,
        "among.ms_per_update": among_ms,
    }
