"""Measure what an exchange costs a worker by stage, and how that grows with the model, the workers and the regions.

    python -m benchmarks.exchange [--sizes 1e6 1e7 1e8 1e9] [--codec bf16] [--docs] [--record]

`sizes`: by parameters, ns a parameter of each stage of a worker's exchange (read, code, copy, frame: on one thread,
the product's own functions), and, over loopback from two ranks to a real region's server, until the update is on its
disk (send, framing included) and from there to the answer's last byte (answer). What would not fit into memory is
left out and told. `workers`, `regions`: by their number, of real processes that all send at once: `exchange`, ns a
parameter until the answer is there, and `server`, processor time of all servers a parameter of one worker's update;
the same on two cores, so processors are what they share. `simulated_workers`, `simulated_regions`: the share of
time in which training stands still, of a billion parameters, steps of 1 s and 1 Gbit/s from each region;
with_overlap: as ours is. `growth`: worker's stages a parameter at the largest size over those at the smallest.
The last line printed is one JSON object. --docs renews the tables of docs/delta_path.md.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.common import command_line, hardware, report
from benchmarks.exchange import many, stages
from benchmarks.studies.claims.report import replace_block, table

PAGE = ROOT / "docs/delta_path.md"
COUNTS = (1, 2, 4, 8, 16)


def main() -> None:
    parser = command_line(__doc__, quick={"sizes": [1e6], "rounds": 1, "processes": 2, "small": 1e6})
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e7, 1e8, 1e9], help="parameters")
    parser.add_argument("--codec", default="bf16", help="of a worker's deltas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=4, help="workers, and regions, that are processes: at most")
    parser.add_argument("--small", type=float, default=5e6, help="parameters of the runs with several processes")
    parser.add_argument("--folder", type=Path, help="on the disk of the servers; default: a temporary one")
    parser.add_argument("--docs", action="store_true", help="renew the tables in docs/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="exchange-", dir=options.folder))
    try:
        found = measure(folder, options.sizes, options.codec, options.rounds, options.processes, int(options.small))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.docs:
        replace_block(PAGE, "exchange", page(found, options.codec))
    report("exchange", found, options, unit, options.codec)


def unit(metric: str) -> str:
    return "share" if metric.startswith(("simulated", "others")) else "ratio" if metric == "growth" else "ns"


def measure(folder: Path, sizes: list[float], codec: str, rounds: int, processes: int, small: int) -> dict[str, Any]:
    by_size: dict[str, dict[str, float]] = {}
    for numel in map(int, sizes):
        if (left := stages.available_bytes()) < numel * stages.WORKER_BYTES:
            print(f"{numel:,} parameters: left out, {left / 1e9:.1f} GB of memory are free", flush=True)
            continue
        row = stages.of_a_worker(numel, codec, rounds)
        if stages.available_bytes() > numel * stages.SERVER_BYTES:
            row |= stages.sent(folder / f"size-{numel}", numel, rounds)
        by_size[f"{numel:.0e}"] = row
        print(f"{numel:,} parameters", json.dumps(row), flush=True)
    counts = [n for n in COUNTS if n <= processes]
    of_workers = {n: many.real(folder / f"workers-{n}", small, 1, n, rounds) for n in counts}
    of_regions = {n: many.real(folder / f"regions-{n}", small, n, 1, rounds) for n in counts}
    print("workers", json.dumps(of_workers), "regions", json.dumps(of_regions), flush=True)
    worker_ns = [sum(row[stage] for stage in stages.STAGES) for row in by_size.values()]
    return {
        "sizes": by_size,
        "workers": {str(n): row for n, row in of_workers.items()},
        "regions": {str(n): row for n, row in of_regions.items()},
        "simulated_workers": {str(n): standing_still(1, n) for n in COUNTS},
        "simulated_regions": {str(n): standing_still(n, 1) for n in COUNTS},
        "worker_ns_per_parameter": worker_ns[-1],
        "growth": worker_ns[-1] / worker_ns[0],
    }


def standing_still(regions: int, workers: int) -> dict[str, float]:
    return {name: many.simulated(regions, workers, name == "with_overlap") for name in ("blocking", "with_overlap")}


def page(found: dict[str, Any], codec: str) -> str:
    """The tables of sizes and of numbers, and what they were measured on."""
    names = (*stages.STAGES, "send", "answer")
    sizes = [
        [f"{float(size):,.0f}", *(f"{row[name]:.2f}" if name in row else "–" for name in names)]
        for size, row in found["sizes"].items()
    ]
    counts = [
        [n, *(f"{found[what][n][name]:.1f}" for what in ("workers", "regions") for name in ("exchange", "server"))]
        for n in found["workers"]
    ]
    said = f"Nanoseconds a parameter, {codec}, {hardware()}; –: not enough memory for worker and servers together."
    header = "at once", "exchange, of workers", "servers", "exchange, of regions", "servers"
    return f"{table(sizes, ('parameters', *names))}\n\n{table(counts, header)}\n\n{said}"


if __name__ == "__main__":
    main()
