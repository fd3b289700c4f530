"""`python -m tests.simulation [--lives N] [--seed FIRST] [--trace]`: plays lives of consecutive seeds and
prints those that break something; the last line is one JSON object. Exit code 1: some did."""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from tests.simulation.lives import live, violations


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--lives", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first life")
    parser.add_argument("--trace", action="store_true", help="print all that happens in each life")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    began_s, broken, deaths, virtual_s = time.process_time(), list[int](), 0, 0.0
    for seed in range(asked.seed, asked.seed + asked.lives):
        world = live(seed)
        if asked.trace:
            for at_s, name, what in world.record:
                print(f"{at_s:10.3f} {name:6} {what}")
        for violation in violations(world):
            print(f"seed {seed}: {violation}")
        broken += [seed] if violations(world) else []
        deaths += sum(process.deaths for process in world.processes.values())
        virtual_s += world.loop.now_s
    seconds = time.process_time() - began_s
    figures = {
        "lives": asked.lives,
        "broken": len(broken),
        "deaths": deaths,
        "virtual_hours": round(virtual_s / 3600, 1),
        "lives_per_processor_minute": round(60 * asked.lives / seconds),
    }
    print(json.dumps(figures))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
