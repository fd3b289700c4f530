"""GeoTrain beside torch's DDP and PowerSGD, torchft and hivemind: two regions, one emulated link between them.

    python -m benchmarks.rivals                      about ten minutes
    python -m benchmarks.rivals --quick              a minute, to see that it works
    python -m benchmarks.rivals --full               two rates, three orders of the data, longer: intervals; hours
    python -m benchmarks.rivals --docs               renews docs/comparison.md and results.csv

The rivals are the real packages, which it installs into an environment of their own (build/rivals), pinned in
requirements.txt here. One that does not install or run is told with its error. All train the same model, text, order
of the data, start weights, optimizer and schedule, by the same loop (`worker.py`).

utilization      seconds of a step without communication (both regions at once, just before and after) over seconds of
                 a step in the run, the last exchange included
standing_still   share of the time that a trainer is not in a step: waiting, or working on the exchange
bytes_per_token  received and sent at a region's device, over the tokens that its worker trained
loss             validation loss of the weights that a user would export, at equal tokens
seconds_to_loss  until the first region's weights reach the loss with which the worst method ends
lost_s           by a region that is killed and started again at once, or whose link is cut for 20 s, and by the other
                 one: the time less what its steps took before; over what it takes and 10 s more

DDP and PowerSGD exchange in every step: over the link only so many steps are trained as tell their speed; their loss
is of a run without a slow link, and their seconds to a loss are computed from both.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import ROOT
from benchmarks.claims.report import replace_block
from benchmarks.common import BUSY, command_line, others_share, report, spread
from benchmarks.rivals.methods import OUTER, TITLES
from benchmarks.rivals.report import markdown, unit
from benchmarks.rivals.runs import Setting, faulted, losses, prepare, time_to, train
from benchmarks.rivals.site import environment
from benchmarks.rivals.task import LOCAL_STEPS

SLOW, FAST = 0.02, 0.2  # Gbit/s
RTT_MS = 100.0
EVERY_STEP = {"ddp": (8, 2), "powersgd": (24, 6)}  # that exchange in every step: steps over the link, of them untimed
NO_LINK = (10.0, 0.2)  # Gbit/s, ms: of the run that tells their loss
FAULTED = ("torchft-diloco", "hivemind", "ours")
QUICK = {"rounds": 2, "alone_steps": 12, "gbps": [FAST], "methods": ["torchft-diloco", "ours"], "faults": []}


def main() -> None:
    parser = command_line(__doc__, quick=QUICK)
    parser.add_argument("--methods", nargs="+", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--gbps", nargs="+", type=float, default=[SLOW], help="rates of the link")
    parser.add_argument("--rounds", type=int, default=5, help=f"of {LOCAL_STEPS} steps of each worker")
    parser.add_argument("--alone-steps", type=int, default=40, help="without communication, before and after")
    parser.add_argument("--seeds", type=int, default=1, help="orders of the data, and start weights")
    parser.add_argument("--faults", nargs="*", default=["kill", "cut"], choices=["kill", "cut"])
    parser.add_argument("--full", action="store_true", help="two rates, three seeds, ten rounds")
    parser.add_argument("--docs", action="store_true", help="renew docs/comparison.md, and record")
    options = parser.parse_args()
    if options.full:
        options.seeds, options.rounds, options.gbps = 3, 10, [SLOW, FAST]
    options.record |= options.docs
    rivals, why_not = environment()
    with tempfile.TemporaryDirectory(prefix="geotrain-rivals-") as scratch:
        results = measure(Path(scratch), options, rivals, why_not)
    text = markdown(results, options)
    print(text)
    if options.docs and (others_share() or 0.0) <= BUSY:
        replace_block(ROOT / "docs/comparison.md", "rivals", text)
    report("rivals", results, options, unit)


def measure(folder: Path, options: argparse.Namespace, rivals: Path | None, why_not: str) -> dict[str, Any]:
    data = prepare(folder, options.seeds)
    steps = options.rounds * LOCAL_STEPS
    whole = Setting(0.0, RTT_MS, steps, steps, options.alone_steps)
    found: dict[str, Any] = {}
    for method in options.methods:
        if method not in OUTER and rivals is None:
            found[method] = {"environment": {"fault": why_not}}
            continue
        mine: dict[str, Any] = {}
        for gbps in options.gbps:
            setting = replace(whole, gbps=gbps)
            if method in EVERY_STEP:
                few, first = EVERY_STEP[method]
                setting = replace(setting, steps=few, first=first)
            at = f"{round(1000 * gbps)}_mbit"
            mine[at] = repeated(method, folder / f"{method}-{at}", data, setting, options.seeds, rivals)
        if method in EVERY_STEP and options.gbps:
            setting = Setting(*NO_LINK, steps, steps, options.alone_steps)
            mine["no_link"] = repeated(method, folder / f"{method}-no-link", data, setting, options.seeds, rivals)
        for what in options.faults if method in FAULTED else ():
            # So many steps that it is still training when all was seen.
            setting = replace(whole, gbps=max(options.gbps), steps=400 * LOCAL_STEPS, alone_steps=0)
            mine[what] = faulted(method, what, folder / f"{method}-{what}", data, setting, rivals)
            tell(method, what, mine[what])
        found[method] = mine
    add_times(found)
    return found | judged(found)


def repeated(
    method: str, folder: Path, data: Path, setting: Setting, seeds: int, rivals: Path | None
) -> dict[str, Any]:
    """The figures of the runs with each seed: their median, and their interval where there are several."""
    runs = []
    for seed in range(seeds):
        own = folder.with_name(f"{folder.name}-{seed}")
        run = train(method, own, data, setting, seed, rivals)
        if "fault" not in run and setting.steps == setting.schedule_steps:
            run |= losses(method, own, data)
        tell(method, folder.name, run)
        if "fault" in run:
            return run
        runs.append(run)
    figures: dict[str, Any] = {}
    for key, value in runs[0].items():
        if isinstance(value, float):
            values = [run[key] for run in runs]
            figures |= spread(key, values) if seeds > 1 else {key: value}
    return {**figures, **({"curves": [run["curve"] for run in runs]} if "curve" in runs[0] else {})}


def judged(found: dict[str, Any]) -> dict[str, float]:
    """Our losses over others'. same_algorithm: ours over torchft's, both blocking in fp32 with plain averaging.
    best_over_best_rival: of those that ran."""
    losses = {
        method: [part["loss"] for part in mine.values() if "loss" in part]
        for method, mine in found.items()
        if isinstance(mine, dict)
    }
    means = {method: mean(values) for method, values in losses.items() if values}
    ours, rivals = [[v for m, v in means.items() if (m in OUTER) == own] for own in (True, False)]
    ratios = {}
    if {"ours-blocking", "torchft-diloco"} <= means.keys():
        ratios["same_algorithm_loss_ratio"] = means["ours-blocking"] / means["torchft-diloco"]
    if ours and rivals:
        ratios["best_over_best_rival_loss"] = min(ours) / min(rivals)
    return ratios


def add_times(found: dict[str, Any]) -> None:
    """To each method's figures over a link: seconds to the loss with which the worst of them ends."""
    ends = [part["loss"] for mine in found.values() for part in mine.values() if "loss" in part]
    target = max(ends, default=0.0)
    for mine in found.values():
        for at, part in mine.items():
            if not at.endswith("_mbit") or "fault" in part:
                continue
            curves = part.get("curves")
            if curves is None and "curves" in mine.get("no_link", {}):  # steps of there, speed of here
                slower = part["step_ms"] / mine["no_link"]["step_ms"]
                curves = [[(slower * s, loss) for s, loss in curve] for curve in mine["no_link"]["curves"]]
            times = [time_to(curve, target) for curve in curves or ()]
            if times and all(t is not None for t in times):
                part["seconds_to_loss"] = mean(t for t in times if t is not None)
    for mine in found.values():
        for part in mine.values():
            if isinstance(part, dict):
                part.pop("curves", None)
    found["target_loss"] = target


def tell(method: str, what: str, run: dict[str, Any]) -> None:
    told = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in run.items() if k != "curve")
    print(f"{method}, {what}: {told}", flush=True)


if __name__ == "__main__":
    main()
