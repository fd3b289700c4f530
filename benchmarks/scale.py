"""How fast the simulator is without tensors: a day of a hundred regions of a hundred workers, on one core.

    python benchmarks/scale.py [--regions 100] [--workers 100] [--hours 24] [--local-steps 32 100] [--record]

A model of 70 billion parameters, inner steps of 60 to 78 s, 10 Gbit/s from every region. The last line printed is one
JSON object: of each H, jobs, events, and seconds of processor time.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from claims_methods import OURS, ROOT
from common import record

from geotrain.config import load_run
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import synthetic_world
from geotrain.simulate.world import World, one_block, timing_task

NUMEL, STEPS = 70 * 10**9, 10**9  # more steps than there is time for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regions", type=int, default=100)
    parser.add_argument("--workers", type=int, default=100, help="of each region")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--local-steps", type=int, nargs="+", default=[32, 100], help="H")
    parser.add_argument("--record", action="store_true", help="append to results.csv")
    arguments = parser.parse_args()
    found = {}
    for local_steps in arguments.local_steps:
        found[f"h{local_steps}"] = simulated(arguments.regions, arguments.workers, arguments.hours, local_steps)
        print(f"H {local_steps}: {found[f'h{local_steps}']}", flush=True)
    if arguments.record:
        world = f"{arguments.hours:g} h of {arguments.regions} regions of {arguments.workers} workers"
        record("scale", found, lambda metric: "s" if metric.endswith("_s") else "", world)
    print(json.dumps(found))


def simulated(regions: int, workers: int, hours: float, local_steps: int) -> dict[str, Any]:
    outer = load_run(ROOT / f"configs/runs/baselines/{OURS}.json").outer.model_copy(
        update={"local_steps": local_steps, "updates_per_send": 50, "scale_local_steps": False}
    )
    spec = synthetic_world(regions, workers, 60.0, LinkSpec(10.0, 0.05), spread=1.3)
    begin = time.process_time()
    report = World(spec, timing_task(outer, one_block(NUMEL), STEPS, 1)).run(until_s=3600 * hours)
    return {
        "cpu_s": time.process_time() - begin,
        "jobs": report["trained_steps"] // local_steps,
        "events": report["events"],
        "utilization": report["utilization"],
    }


if __name__ == "__main__":
    main()
