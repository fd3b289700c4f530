"""Short runs: what a region answers its workers with, beside synchronous rounds, where workers have few jobs.

    python -m benchmarks.studies.short                  all trials: about half an hour of one core
    python -m benchmarks.studies.short --runs 2x1x32x5  some: regions × workers of each × H × jobs of a worker
    python -m benchmarks.studies.short --runs 4x1x32x5x50   the slowest worker takes 50 % longer, not 10
    python -m benchmarks.studies.short --runs 4x1x32x20-dead  the last region is dead for a quarter of the run; -cut:
                                                            its link is; -slow: its workers take 2.5 times as long
    python -m benchmarks.studies.short --scales 0.5 1 2     each rule at the best of these rates

A model of 123,312 parameters in four layers; four sequences of 64 bytes a step; a link that carries all weights in
fp32 in 45 steps, as `benchmarks.rivals`' slow one does, 4 bits, fragments of two layers, ten steps of overlap. Losses
are means of 768 windows of each held-out slice. Finished trials are kept in the results file (JSON lines), which is
committed, and not done again. The last line printed is one JSON object. over_sync: of each run, optimizer and rule,
loss over that of synchronous rounds less 1, mean over the seeds, each at its best of the rates that all seeds were
run with. worst_over_sync: the largest of what is the default there. utilization_below_merged: the most by which the
default's utilization is below that of merged answers; negative: it is above everywhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.common import command_line
from benchmarks.studies.learner.optimizers import InnerSettings
from benchmarks.studies.learner.text import carried_text
from benchmarks.studies.learner.training import Study, training_task
from geotrain.config import SHORT_RUN, OuterConfig, parse
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import RegionSpec, WorkerSpec, WorldSpec
from geotrain.simulate.world import VirtualWorld

RESULTS = ROOT / "benchmarks/data/short.jsonl"
STEP_S, LATE = 0.05, (0.0, 0.3, 0.6, 1.0)  # seconds of a step; shares of the slowest's lag that workers have
SPREAD = 10  # percent that the slowest takes longer, where the shape does not say
MODEL_STEPS, LATENCY_STEPS, OVERLAP_STEPS = 45, 1, 10
TROUBLE, SLOWER = (0.35, 0.6), 2.5  # shares of a run's steps, from where until where; a straggler's step over its own
WINDOWS = 768
KEY = ("run", "optimizer", "rule", "seed", "scale")  # of a row
RATES = {"adamw": 3e-3, "muon": 0.016}
SYNC = {"name": "sync", "lr": 1.0, "momentum": 0.0}  # plain averaging
RULES: dict[str, dict[str, Any]] = {
    "sync": SYNC,
    "at_once": {"name": "region_momentum", "answers": "at_once", "updates_per_send": 1},
    "merged": {"name": "region_momentum", "answers": "merged"},
    "wait": {"name": "region_momentum", "answers": "wait"},
}


def world(regions: int, workers: int, spread: int, numel: int, steps: int, trouble: str) -> WorldSpec:
    """steps: of each worker, if all were as fast. trouble: of the last region, if any: dead, cut, slow."""
    span = tuple(share * steps * STEP_S for share in TROUBLE)
    link = LinkSpec(numel * 32 / (MODEL_STEPS * STEP_S) / 1e9, LATENCY_STEPS * STEP_S)

    def region(i: int) -> RegionSpec:
        here = trouble if i == regions - 1 else ""
        step_s = [STEP_S * (1 + spread / 100 * LATE[(i + j) % 4]) for j in range(workers)]
        away = ((span[0], span[1]),) if here == "dead" else ()
        slower = SLOWER if here == "slow" else 1.0
        mine = (WorkerSpec(f"r{i}-w{j}", slower * s, away) for j, s in enumerate(step_s))
        outages = ((span[0], span[1]),) if here == "cut" else ()
        return RegionSpec(f"r{i}", tuple(mine), replace(link, outages=outages))

    return WorldSpec(tuple(map(region, range(regions))))


def outer_of(rule: str, local_steps: int) -> OuterConfig:
    block: dict[str, Any] = {
        "rule": RULES[rule],
        "local_steps": local_steps,
        "fragments": {"layers_per_fragment": 2},
        "overlap": {"steps": min(OVERLAP_STEPS, local_steps // 3), "late": "continue", "adopt": "rebase"},
        "up": {"name": "int4"},
        "down": {"name": "int4"},
        **({} if rule == "sync" else {"lease_reserve": 0}),
    }
    return parse(OuterConfig, block, rule)


def run(shape: str, rule: str, optimizer: str, seed: int, scale: float) -> dict[str, float]:
    """Train a run, at the usual rate times scale; returns the final loss, seconds, utilization."""
    torch.set_num_threads(1)
    numbers, _, trouble = shape.partition("-")
    regions, workers, local_steps, jobs, *rest = map(int, numbers.split("x"))
    spread = rest[0] if rest else SPREAD
    rate, muon = scale * RATES[optimizer], 0.95 if optimizer == "muon" else None
    inner = InnerSettings(rate, warmup_share=0.1, muon=muon)
    steps = regions * workers * local_steps * jobs
    study = Study(steps, hidden=48, layers=4, ffn=128, seed=seed, inner=inner)
    model, text = study.model(), carried_text()
    task = training_task(study, outer_of(rule, local_steps), model.start.numel())
    spec = world(regions, workers, spread, model.start.numel(), local_steps * jobs, trouble)
    done = VirtualWorld(spec, task)
    report, server = done.run(), done.top.server
    fragments = range(len(task.parameter_map.fragments))
    named = {n: t for f in fragments for n, t in task.parameter_map.split(f, server.weights(f))}
    weights = torch.cat([named[p.name].flatten() for p in model.parameters])
    parts = [torch.from_numpy(text.windows(part, WINDOWS, study.length)) for part in (text.test, text.selection)]
    loss = mean(model.evaluate(weights, part) for part in parts)
    return {"loss": loss, "seconds": report["seconds"], "utilization": report["utilization"]}


def main() -> None:
    parser = command_line(__doc__, recorded=False)
    shapes = ["2x1x32x5", "2x2x32x5", "2x1x32x20", "2x1x8x20"]
    parser.add_argument("--runs", nargs="+", default=shapes, help="regions x workers x H x jobs [x percent]")
    parser.add_argument("--optimizers", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--scales", nargs="+", type=float, default=[1.0], help="of the usual rate")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines")
    arguments = parser.parse_args()
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    kept = ({"scale": 1.0, **row} for row in map(json.loads, lines))
    rows = {tuple(row[name] for name in KEY): row for row in kept}
    seeds, scales = arguments.seeds, arguments.scales
    over, worst, below = dict[str, float](), [-1.0], [-1.0]
    for shape, optimizer in product(arguments.runs, arguments.optimizers):
        best, utilization = dict[str, float](), dict[str, float]()
        for rule in arguments.rules:
            for scale, seed in product(scales, seeds):
                if (key := (shape, optimizer, rule, seed, scale)) not in rows:
                    rows[key] = dict(zip(KEY, key, strict=True)) | run(shape, rule, optimizer, seed, scale)
                    with arguments.results.open("a") as file:
                        file.write(json.dumps(rows[key]) + "\n")
                print(json.dumps(rows[key]), flush=True)
            means = (mean(rows[shape, optimizer, rule, seed, scale]["loss"] for seed in seeds) for scale in scales)
            best[rule] = min(means)
            utilization[rule] = mean(rows[shape, optimizer, rule, seed, scales[0]]["utilization"] for seed in seeds)
        jobs = int(shape.partition("-")[0].split("x")[3])
        default = "wait" if jobs < SHORT_RUN else "at_once"
        if default in best and "sync" in best:
            over |= {f"{shape} {optimizer} {rule}": loss / best["sync"] - 1 for rule, loss in best.items()}
            worst.append(best[default] / best["sync"] - 1)
        if default in best and "merged" in best:
            below.append(utilization["merged"] - utilization[default])
    print(json.dumps({"over_sync": over, "worst_over_sync": max(worst), "utilization_below_merged": max(below)}))


if __name__ == "__main__":
    main()
