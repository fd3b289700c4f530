"""GeoTrain beside torch's DDP and PowerSGD, torchft and hivemind: two regions, one emulated link between them.

    python -m benchmarks.rivals                      about ten minutes
    python -m benchmarks.rivals --quick              a minute, to see that it works: ours alone, nothing is installed
    python -m benchmarks.rivals --full               two links, three orders of the data, longer: intervals; hours
    python -m benchmarks.rivals --go-on              what is missing: an earlier call was ended, or its time was over
    python -m benchmarks.rivals --docs               renews docs/comparison.md and results.csv

The rivals are the real packages, which it installs into an environment of their own (build/rivals), pinned in
requirements.txt here. One that does not install or run is told with its error. All train the same model, text, order
of the data, start weights, optimizer and schedule, by the same loop (`worker.py`). The link goes by the machine: a
step without communication is timed first, and the slow link takes as long as 45 steps for all weights in fp32, the
fast one a tenth of that, with a round trip of two steps. So a faster processor does not make a link look slower.

utilization      seconds of a step without communication (both regions at once; timed once for all methods, before the
                 first) over seconds of a step in the run, the last exchange included
standing_still   share of the time that a trainer's own thread is not on a processor: it waits for the link, for the
                 others, or for a processor. Some exchange within a step's call, so that calls do not tell them apart
bytes_per_token  received and sent at a region's device, over the tokens that its worker trained
loss             validation loss of the weights that a user would export, at equal tokens
seconds_to_loss  until the first region's weights reach the loss with which the worst method ends
busy             processor time of a step, servers' part too, over its seconds in the run
lost_s           by a region that is killed and started again at once, or whose link is cut for 20 s, and by the other
                 one: the time less what its steps took before; over what it takes and 10 s more

step_ms          of a step without communication, by which the links were set

DDP and PowerSGD exchange in every step: over the link only so many steps are trained as tell their speed; their loss
is of a run without a slow link, and their seconds to a loss are computed from both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import ROOT
from benchmarks.common import BUSY, CommandLine, command_line, others_share, report, spread
from benchmarks.rivals.links import LINKS, link
from benchmarks.rivals.methods import OUTER, TITLES
from benchmarks.rivals.report import markdown, unit
from benchmarks.rivals.runs import NO_LINK, Setting, faulted, losses, prepare, step_s_alone, time_to, train
from benchmarks.rivals.site import OWN, environment
from benchmarks.rivals.task import LOCAL_STEPS, RATE
from benchmarks.studies.claims.report import replace_block
from geotrain.common.files import write_whole

EVERY_STEP = {"ddp": (8, 2), "powersgd": (24, 6)}  # that exchange in every step: steps over the link, of them untimed
FAULTED = ("torchft-diloco", "hivemind", "ours")
FAULTS = ("kill", "cut")
ENDLESS = 4096 * LOCAL_STEPS  # steps of a run in which faults are watched; it is ended long before
STEP_S = "step without communication"  # of the parts that are kept
LEFT_OUT = "left out, since the time was over: --go-on measures it"
QUICK = {"rounds": 2, "alone_steps": 8, "faults": [], "methods": ["ours-streaming", "ours"], "patience_s": 600.0}


def command() -> CommandLine:
    parser = command_line(__doc__, quick=QUICK)
    parser.add_argument("--methods", nargs="+", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--links", nargs="+", default=["slow"], choices=list(LINKS))
    parser.add_argument("--rounds", type=int, default=5, help=f"of {LOCAL_STEPS} steps of each worker")
    parser.add_argument("--alone-steps", type=int, default=40, help="without communication, before and after")
    parser.add_argument("--rate", type=float, default=RATE, help="highest learning rate, of all methods")
    parser.add_argument("--seeds", type=int, default=1, help="orders of the data, and start weights")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no further part is begun")
    parser.add_argument("--patience-s", type=float, default=300.0, help="within which a run must begin, and end")
    parser.add_argument("--go-on", action="store_true", help="take up what an earlier call has measured")
    parser.add_argument("--full", action="store_true", help="two links, three seeds, ten rounds")
    parser.add_argument("--docs", action="store_true", help="renew docs/comparison.md, and record")
    return parser


def main() -> None:
    options = command().parse_args()
    if options.full:
        options.seeds, options.rounds, options.links, options.minutes = 3, 10, list(LINKS), 600.0
    options.record |= options.docs
    rivals, why_not = environment() if set(options.methods) - set(OUTER) else (None, "")
    with tempfile.TemporaryDirectory(prefix="geotrain-rivals-") as scratch:
        results = measure(Path(scratch), options, rivals, why_not)
    text = markdown(results, options)
    print(text)
    if options.docs and (others_share() or 0.0) <= BUSY:
        replace_block(ROOT / "docs/comparison.md", "rivals", text)
    report("rivals", results, options, unit)


def measure(folder: Path, options: argparse.Namespace, rivals: Path | None, why_not: str) -> dict[str, Any]:
    """Measure all parts, whole runs first. What is not begun when the time is over is left out, and said to be."""
    data = prepare(folder, options.seeds)
    kept, begin_s = Kept(OWN / "parts.json", options.go_on), time.monotonic()
    found: dict[str, Any] = {method: {} for method in options.methods}
    if STEP_S not in kept.parts:  # an earlier call's links are this one's
        kept.keep(STEP_S, {"step_s": step_s_alone(folder / "alone", data, options.alone_steps)})
    step_s = kept.parts[STEP_S]["step_s"]
    for method, name, setting in parts(options, step_s):
        key = f"{method} {name} {replace(setting, patience_s=0.0)} {options.seeds} {digest(method)}"
        if key not in kept.parts:
            if method not in OUTER and rivals is None:
                found[method][name] = {"fault": why_not}
                continue
            if time.monotonic() - begin_s > 60 * options.minutes:
                found[method][name] = {"fault": LEFT_OUT}
                continue
            kept.keep(key, one_part(method, name, folder, data, setting, options, rivals))
        found[method][name] = kept.parts[key]
    add_times(found)
    return found | judged(found) | {"step_ms": 1e3 * step_s}


def parts(options: argparse.Namespace, step_s: float) -> Iterator[tuple[str, str, Setting]]:
    """(method, part, how it is run): "slow_link", "fast_link", "no_link", "kill", "cut". step_s: of a step without
    communication."""
    steps = options.rounds * LOCAL_STEPS
    timed = {"patience_s": options.patience_s, "step_s": step_s}
    whole = Setting(0.0, 0.0, steps, steps, options.alone_steps, rate=options.rate, **timed)
    links = {name: link(name, step_s) for name in options.links}
    for name, (gbps, rtt_ms) in links.items():
        for method in options.methods:
            few, first = EVERY_STEP.get(method, (steps, 0))
            yield method, f"{name}_link", replace(whole, gbps=gbps, rtt_ms=rtt_ms, steps=few, first=first)
    for method in options.methods:
        if method in EVERY_STEP:
            yield method, "no_link", replace(whole, gbps=NO_LINK[0], rtt_ms=NO_LINK[1])
    gbps, rtt_ms = max(links.values())
    for what in options.faults:
        for method in options.methods:
            if method in FAULTED:  # so many steps that it is still training when all was seen
                yield method, what, replace(whole, gbps=gbps, rtt_ms=rtt_ms, steps=ENDLESS, alone_steps=0)


def digest(method: str) -> str:
    """Digest of the settings of one of our methods: figures that are kept are of these."""
    return hashlib.sha256(json.dumps(OUTER.get(method), sort_keys=True).encode()).hexdigest()[:12]


def one_part(
    method: str, name: str, folder: Path, data: Path, setting: Setting, options: argparse.Namespace,
    rivals: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Its figures, or {"fault": why there are none}: what fails is told, and the others go on."""
    own = folder / f"{method}-{name}"
    try:
        if name in FAULTS:
            found = faulted(method, name, own, data, setting, rivals)
            tell(method, name, found)
            return found
        return repeated(method, own, data, setting, options.seeds, rivals)
    except Exception as error:  # whatever it was, it is this part's
        found = {"fault": f"{type(error).__name__}: {error}"[-300:]}
        tell(method, name, found)
        return found


class Kept:
    """Parts that an earlier call has measured: it may have been ended, or its time was over. go_on: whether they
    count."""

    def __init__(self, path: Path, go_on: bool) -> None:
        self.path = path
        self.parts: dict[str, dict[str, Any]] = {}
        if go_on and path.exists():
            self.parts = json.loads(path.read_text())

    def keep(self, key: str, part: dict[str, Any]) -> None:
        """Keep a part. One that failed is kept for this call only: the next one tries it again."""
        self.parts[key] = part
        write_whole(self.path, json.dumps({k: v for k, v in self.parts.items() if "fault" not in v}))


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
    best_over_best_rival: of those that ran; none where the time was over before one of them."""
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
    left_out = any(
        at.endswith("_link") and part.get("fault") == LEFT_OUT
        for mine in found.values()
        if isinstance(mine, dict)
        for at, part in mine.items()
    )
    if ours and rivals and not left_out:
        ratios["best_over_best_rival_loss"] = min(ours) / min(rivals)
    return ratios


def add_times(found: dict[str, Any]) -> None:
    """Add to each method's figures over a link the seconds to the loss with which the worst of them ends."""
    ends = [part["loss"] for mine in found.values() for part in mine.values() if "loss" in part]
    target = max(ends, default=0.0)
    for mine in found.values():
        for at, part in mine.items():
            if at not in {f"{name}_link" for name in LINKS} or "fault" in part:
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
