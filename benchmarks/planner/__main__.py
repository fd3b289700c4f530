"""The planner's figures; the last line is one JSON object.

For each of DT-FM's five scenarios (benchmarks/data/dtfm_scenarios.json): `cost`, the worst of ten seeds, `cost_best`,
`seconds` (the worst search, by the clock) and `cpu_seconds` (the same, processor time). The placements go to
benchmarks/out/placement_<scenario>.json.
`scale`: seconds for synthesized clusters of 256 and 1,024 devices; `scale_detail` what they found.
`plan`: seconds of a whole plan (workers, server, outer loop) for 1,024 accelerators in 8 regions, and its tokens a
second over what they could reach without any waiting, by model.
`random_matrices`: of ten kinds, `--each` of them, ten at most (planner/random_matrices.py).
`worst_over_annealing`: the search's cost over that of plain annealing in ten times its processor time, the worst of
all; `kinds`: by kind.
With root, on emulated links (planner/runs.py): `placement_speedup`, measured step time of the naive rank order over
the planned one; `prediction_error`, the median of |predicted − measured| / measured over `runs`.

    python -m benchmarks.planner [--only search random runs] [--quick] [--record]
    python -m benchmarks.planner --only random --each 10     a hundred matrices: some forty minutes of processor time

`--only random` may be recorded from a machine that does other work besides: it counts processor time.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # one core; must stand before numpy is loaded

import json
import sys
from typing import Any

KINDS = ("search", "random", "runs")


def main() -> None:
    from benchmarks.common import command_line, report
    from benchmarks.planner import placements, random_matrices, runs
    from benchmarks.planner.random_matrices import ALL
    from geotrain.emulate.wan import cannot_emulate

    parser = command_line(__doc__, quick={})
    parser.add_argument("--only", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--each", type=int, default=1, help="random matrices of each kind")
    args = parser.parse_args()
    if not 1 <= args.each <= ALL:
        parser.error(f"--each: 1 to {ALL}")
    if "runs" in args.only and (reason := cannot_emulate()):
        sys.exit(f"links cannot be emulated here: {reason}; --only search and --only random work without")
    found: dict[str, Any] = {}
    if "search" in args.only:
        found |= placements.measure(args.quick)
    if "random" in args.only:
        found["random_matrices"] = random_matrices.measure(args.each, args.quick)
        print("random_matrices", json.dumps(found["random_matrices"]), flush=True)
    if "runs" in args.only:
        found |= runs.measure(args.quick)
    report("planner", found, args, unit, left_out=("planned_order",), timed=[*args.only] != ["random"])


def unit(metric: str) -> str:
    seconds = ("_s", "seconds", "cost", "cost_best", "quick_bound")
    return "s" if metric.endswith(seconds) or metric.startswith("scale.") else ""


if __name__ == "__main__":
    main()
