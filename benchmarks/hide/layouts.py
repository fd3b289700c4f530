"""Loss of ACCO's default over ZeRO-1's where ranks share matrices or experts: the engine itself, on real ranks.

    python -m benchmarks.hide.layouts [--quick]
    python -m benchmarks.hide.layouts --layouts "tensor 2" --optimizers muon --seeds 1     ten minutes

Four ranks train some 0.46 M parameters over bytes, in fp32: two replicas of two tensor ranks, or four replicas of a
model of four experts a layer (ACCO does not go with divided ones). Finished trainings are kept in the results file
(JSON lines), and not done again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import command_line, hardware, report, units_by_ending
from benchmarks.hide.__main__ import run
from benchmarks.hide.loss import kept_rows
from benchmarks.hide.ranks import DEFAULT, WAYS, ZERO, Job, Lesson, Size

RESULTS = ROOT / "benchmarks/data/hide_layouts.jsonl"
MODELS = {"tensor 2": Size(104, 4, 208, 64, 4, 1), "experts": Size(96, 4, 64, 64, 2, 1)}  # samples of a replica


def main() -> None:
    parser = command_line(__doc__, quick={"steps": 12, "seeds": 1, "optimizers": ["muon"], "results": None})
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rate", type=float, default=8e-3)
    parser.add_argument("--layouts", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--optimizers", nargs="+", default=["muon", "adamw"], choices=("muon", "adamw"))
    parser.add_argument("--ways", nargs="+", default=[ZERO, DEFAULT], choices=WAYS)
    parser.add_argument("--results", default=str(RESULTS), help="JSON lines")
    args = parser.parse_args()
    path = None if args.results is None else Path(args.results)
    known = {json.dumps({**row, "loss": None}): row["loss"] for row in kept_rows(path)}
    result: dict[str, Any] = {}
    for layout in args.layouts:
        for optimizer in args.optimizers:
            found: dict[str, list[float]] = {way: [] for way in args.ways}
            for seed in range(args.seeds):
                for way in args.ways:
                    row = {"layout": layout, "optimizer": optimizer, "seed": seed, "way": way, "steps": args.steps}
                    row |= {"rate": args.rate, "loss": None}
                    if (loss := known.get(json.dumps(row))) is None:
                        lesson = Lesson(layout, seed, args.steps, args.rate)
                        job = Job("learned", MODELS[layout], (way,), bf16=False, optimizer=optimizer, ranks=4)
                        loss = run(Job(**{**vars(job), "lesson": lesson}))
                        row["loss"] = round(loss, 5)
                        print(json.dumps(row), flush=True)
                        if path is not None:
                            with path.open("a") as file:
                                file.write(json.dumps(row) + "\n")
                    found[way].append(loss)
            if ZERO in found:
                over = {w: [a / b for a, b in zip(x, found[ZERO], strict=True)] for w, x in found.items()}
                result[f"{layout}, {optimizer}"] = {
                    way: [round(r, 4) for r in ratios] for way, ratios in over.items()
                }
    result["setting"] = {**vars(args), "hardware": hardware()}
    report("hide_layouts", result, args, units_by_ending({}), left_out=("setting",))


if __name__ == "__main__":
    main()
