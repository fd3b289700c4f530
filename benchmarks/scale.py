"""Measure how fast the simulator is without tensors: a day of a hundred regions of a hundred workers, on one core.

    python -m benchmarks.scale [--regions 100] [--workers 100] [--hours 24] [--local-steps 32 100] [--record]

A model of 70 billion parameters, inner steps of 60 to 78 s, 10 Gbit/s from every region. The last line printed is one
JSON object: of each H, jobs, events, and seconds of processor time.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks import ROOT
from benchmarks.common import command_line, report, units_by_ending
from benchmarks.studies.claims.methods import OURS
from benchmarks.studies.environments import one_block, synthetic_world
from geotrain.config import load_run
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.world import VirtualWorld, timing_task

NUMEL, STEPS = 70 * 10**9, 10**9  # more steps than there is time for


def main() -> None:
    parser = command_line(__doc__, quick={"regions": 10, "workers": 10})
    parser.add_argument("--regions", type=int, default=100)
    parser.add_argument("--workers", type=int, default=100, help="of each region")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--local-steps", type=int, nargs="+", default=[32, 100], help="H")
    arguments = parser.parse_args()
    found = {}
    for local_steps in arguments.local_steps:
        found[f"h{local_steps}"] = simulated(arguments.regions, arguments.workers, arguments.hours, local_steps)
        print(f"H {local_steps}: {found[f'h{local_steps}']}", flush=True)
    world = f"{arguments.hours:g} h of {arguments.regions} regions of {arguments.workers} workers"
    report("scale", found, arguments, units_by_ending({"_s": "s"}), world)


def simulated(regions: int, workers: int, hours: float, local_steps: int) -> dict[str, Any]:
    outer = load_run(ROOT / f"configs/runs/baselines/{OURS}.json").outer
    rule = outer.rule.model_copy(update={"updates_per_send": 50})
    outer = outer.model_copy(update={"rule": rule, "local_steps": local_steps, "scale_local_steps": False})
    spec = synthetic_world(regions, workers, 60.0, LinkSpec(10.0, 0.05), spread=1.3)
    begin = time.process_time()
    report = VirtualWorld(spec, timing_task(outer, one_block(NUMEL), STEPS, 1)).run(until_s=3600 * hours)
    return {
        "cpu_s": time.process_time() - begin,
        "jobs": report["trained_steps"] // local_steps,
        "events": report["events"],
        "utilization": report["utilization"],
    }


if __name__ == "__main__":
    main()
