"""Try published outer rules and inner optimizers with Muon, and data parallelism tuned by as many trials as ours.

    python -m benchmarks.studies.candidates                    all trials: an hour and a half of one core
    python -m benchmarks.studies.candidates --trials one --seeds 0 1 2      some of them
    python -m benchmarks.studies.candidates --table            no run: the table of all that are kept
    python -m benchmarks.studies.candidates --size 1m --trials one     with the larger model: 45 minutes each

Model, world and tokens are those of the claims. A smaller batch takes as many more
steps, each in so much less time. Finished trials are kept in the results file (JSON lines), which is committed, and
not done again. Data parallelism's batch, rate, schedule and mean of the last weights are chosen by the selection
slice and a seed of its own, as ours; the last line printed is one JSON object: loss of each trial over that of data
parallelism with the same recipe, and over the best found, less 1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import command_line
from benchmarks.studies.claims.baseline import RESULTS, Rows, best_parallel, kept, losses
from benchmarks.studies.claims.methods import ONE_WORKER, ONE_WORKER_2BIT, OURS_2BIT, SYNCHRONOUS, Settings, muon
from benchmarks.studies.claims.report import interval, plain, table
from benchmarks.studies.claims.search import SEED
from benchmarks.studies.claims.study import FULL
from benchmarks.studies.confirm import SIZES, TOKENS, steps_of
from benchmarks.studies.trials import LAST, REGIONS, MakeRegion, Trial, run, trial
from geotrain import kernels
from geotrain.config import RegionMomentumConfig
from geotrain.outer.rules import Vectors
from geotrain.outer.rules.region_momentum import AveragingGlobal, MomentumRegion
from geotrain.outer.rules.rule import Inputs
from geotrain.parameters.parameter_map import ParameterMap

DEVICES = 16


class Matrices:
    """The hidden matrices of a fragment's flat vector: those that Muon steps."""

    def __init__(self, parameter_map: ParameterMap) -> None:
        self.parameter_map = parameter_map
        (fragment,) = parameter_map.fragments
        self.names = {p.name for p in fragment.parameters if p.layer is not None and len(p.shape) == 2}

    def of(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of the vector, by name."""
        return {n: part for n, part in self.parameter_map.split(0, vector) if n in self.names}


class RadialRegion(MomentumRegion):
    """Scales each matrix of what is applied by min(√EMA‖Δ‖² / ‖EMA Δ‖, √n)^p, with the momentum's mean and n the
    run's workers: RDA (arXiv 2604.21428) for deltas that come one by one."""

    def __init__(
        self, matrices: Matrices, workers: int, power: float, config: RegionMomentumConfig, decay: float
    ) -> None:
        super().__init__(config, decay)
        self.matrices, self.most, self.power = matrices, sqrt(workers), power
        self.squares = dict.fromkeys(matrices.names, 0.0)

    def apply(self, v: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        before = {name: part.clone() for name, part in self.matrices.of(v.x).items()}
        super().apply(v, member, delta, inputs)
        moved, deltas, momenta = (self.matrices.of(t) for t in (v.x, delta, v.vector("momentum")))
        for name, x in moved.items():
            square = self.decay * self.squares[name] + (1 - self.decay) * float(deltas[name].square().sum())
            self.squares[name] = square
            ratio = sqrt(square) / max(float(momenta[name].norm()), 1e-20)
            torch.lerp(before[name], x, max(1.0, min(ratio, self.most)) ** self.power, out=x)


class RadialGlobal(AveragingGlobal):
    """Scales each matrix of a region's delta by mean norm over norm of the mean of all regions' last deltas (RDA)."""

    def __init__(self, matrices: Matrices, power: float) -> None:
        self.matrices, self.power = matrices, power

    def apply(self, state: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        state.vector(f"last.{member}").copy_(delta)
        last = [self.matrices.of(t) for name, t in state.aux.items() if name.startswith("last.")]
        delta = delta.clone()
        for name, mine in self.matrices.of(delta).items():
            all_of = torch.stack([of[name] for of in last])
            of_mean = max(float(all_of.mean(0).norm()), 1e-20)
            mine.mul_((float(all_of.flatten(1).norm(dim=1).mean()) / of_mean) ** self.power)
        super().apply(state, member, delta, inputs)


def isotropic(matrix: Tensor) -> Tensor:
    """σ̄·UVᵀ of a matrix UΣVᵀ, with σ̄ the mean of Σ: the direction by Newton–Schulz."""
    direction = kernels.orthogonalize(matrix[None])[0]
    return direction * ((matrix * direction).sum() / direction.square().sum())


class IsotropicGlobal(AveragingGlobal):
    """Moves matrices along the mean of all regions' last deltas, made isotropic (IsoLoCo, arXiv 2607.03011)."""

    def __init__(self, matrices: Matrices) -> None:
        self.matrices = matrices

    def apply(self, state: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        state.vector(f"last.{member}").copy_(delta)
        last = [t for name, t in state.aux.items() if name.startswith("last.")]
        delta = delta.clone()
        means = self.matrices.of(torch.stack(last).mean(0))
        for name, mine in self.matrices.of(delta).items():
            mine.copy_(isotropic(means[name]))
        super().apply(state, member, delta, inputs)


class IsotropicRegion(MomentumRegion):
    """Makes each matrix of Δ + c·m isotropic before it is applied."""

    def __init__(self, matrices: Matrices, config: RegionMomentumConfig, decay: float) -> None:
        super().__init__(config, decay)
        self.matrices = matrices

    def apply(self, v: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        before = {name: part.clone() for name, part in self.matrices.of(v.x).items()}
        super().apply(v, member, delta, inputs)
        for name, x in self.matrices.of(v.x).items():
            x.copy_(before[name] + isotropic(x - before[name]))


def ramp(first: float, alpha: bool = True) -> Callable[[MomentumRegion, float, float], None]:
    """The gain falls to 0 from that share of the run to its end; alpha: α rises to 1 meanwhile."""

    def during(rule: MomentumRegion, gain: float, share: float) -> None:
        left = min(1.0, (1 - share) / (1 - first))
        rule.gain = gain * left
        if alpha:
            rule.alpha = 1 - 0.5 * left

    return during


def by_rate(rule: MomentumRegion, gain: float, share: float) -> None:
    """The gain follows the learning rate, from 16 to 77 % of the run."""
    rule.gain = 1.5 * gain * (1 - share) if 0.16 <= share < 0.77 else 0.0


def parallel(lr: float = 0.01978, outer: Settings | None = None, **own: Any) -> Trial:
    return Trial(muon(SYNCHRONOUS), {"lr": lr, **(outer or {})}, **own)


def one(**changes: Any) -> Trial:
    """One worker a region, in two bits, K 1: the published run file."""
    return trial(muon(ONE_WORKER_2BIT), **changes)


def sixteen(**changes: Any) -> Trial:
    return trial(muon(OURS_2BIT), updates_per_send=2, **changes)


def radial(power: float, workers: int) -> Callable[[ParameterMap], MakeRegion]:
    return lambda parameter_map: lambda *rest: RadialRegion(Matrices(parameter_map), workers, power, *rest)


def isotropic_region(parameter_map: ParameterMap) -> MakeRegion:
    return lambda *rest: IsotropicRegion(Matrices(parameter_map), *rest)


def isotropic_global(parameter_map: ParameterMap) -> AveragingGlobal:
    return IsotropicGlobal(Matrices(parameter_map))


TO_ZERO = {"final_share": 0.0}
ROWS = {"normalize_rows": True}
AHEAD = {"lookahead": 0.6}
SNOO = {"local_steps": 30, "sync_lr": 0.7, "sync_momentum": 0.6}  # arXiv 2510.15830; MuLoCo with one worker
SEARCHED = {
    f"data parallel, {DEVICES * batch} sequences, rate {lr:g}": parallel(lr, batch=batch)
    for batch, rates in ((4, (0.02, 0.01, 0.04)), (2, (0.014, 0.01, 0.02)), (1, (0.01, 0.007, 0.014)))
    for lr in rates
}
TRIALS = {
    **SEARCHED,
    "data parallel, as searched before": parallel(),
    "data parallel, rows normalized": parallel(muon=ROWS),
    "data parallel, 32 sequences, rate 0.01, rows normalized": parallel(0.01, batch=2, muon=ROWS),
    "data parallel, rate to 0": parallel(muon=TO_ZERO),
    "data parallel, EMA-Nesterov": parallel(muon=AHEAD),
    "data parallel, SNOO": parallel(outer=SNOO),
    "one": one(),
    "one, gain to 0 and whole merges": one(during=ramp(0.8)),
    "one, gain to 0": one(during=ramp(0.8, alpha=False)),
    "one, gain by rate": one(during=by_rate),
    "one, gain 0": one(momentum_gain=0.0),
    "one, EMA-Nesterov": one(muon=AHEAD),
    "one, RDA 0.5": one(region_of=radial(0.5, REGIONS)),
    "one, RDA 1": one(region_of=radial(1.0, REGIONS)),
    "one, RDA at the global server": one(top=lambda parameter_map: RadialGlobal(Matrices(parameter_map), 1.0)),
    "one, IsoLoCo at the global server": one(top=isotropic_global),
    "one, IsoLoCo in the region": one(region_of=isotropic_region),
    "one, rows normalized": one(muon=ROWS),
    "one, rows normalized, rate 0.011": one(muon=ROWS, lr=0.011),
    "one, rows normalized, rate 0.023": one(muon=ROWS, lr=0.023),
    "one, rows normalized, gain to 0 and whole merges": one(muon=ROWS, during=ramp(0.8)),
    "one, rows normalized, 8 sequences, rate 0.011": one(muon=ROWS, batch=2, lr=0.011),
    "one, the best together": one(muon=ROWS, batch=2, lr=0.011, during=ramp(0.8)),
    "one, the best together, rate 0.008": one(muon=ROWS, batch=2, lr=0.008, during=ramp(0.8)),
    "one, the best together, 4 bits": trial(
        muon(ONE_WORKER), updates_per_send=1, muon=ROWS, batch=2, lr=0.011, during=ramp(0.8)
    ),
    "one, 8 sequences, rate 0.011": one(batch=2, lr=0.011),
    "one, 8 sequences, rate 0.016": one(batch=2),
    "sixteen": sixteen(),
    "sixteen, gain to 0 and whole merges": sixteen(during=ramp(0.8)),
    "sixteen, RDA 0.5": sixteen(region_of=radial(0.5, DEVICES)),
    "sixteen, IsoLoCo at the global server": sixteen(top=isotropic_global),
    "sixteen, rows normalized": sixteen(muon=ROWS),
    "sixteen, rows normalized, rate 0.011": sixteen(muon=ROWS, lr=0.011),
    "sixteen, rows normalized, half the batch": sixteen(muon=ROWS, batch=2),
    "sixteen, rows normalized, half the batch, rate 0.011": sixteen(muon=ROWS, batch=2, lr=0.011),
    "sixteen, rows normalized, gain to 0 and whole merges": sixteen(muon=ROWS, during=ramp(0.8)),
    "sixteen, half the batch, rate 0.011": sixteen(batch=2, lr=0.011),
}


RECIPE = "data parallel, as searched before"
SMALL = "0.1m"  # the model of the claims


def results_of(size: str) -> Path:
    return RESULTS if size == SMALL else RESULTS.with_stem(f"{RESULTS.stem}-{size}")


def gaps(rows: Rows, name: str) -> dict[str, dict[str, Any]]:
    """Loss of a trial over data parallelism's less 1, seed by seed. last: both with their last weights; mean: both
    with the mean over their last tenth; best: the trial's better one by the selection slice over the best found."""
    best = best_parallel(rows)
    found: dict[str, list[float | None]] = {"last": [], "mean": [], "best": []}
    for seed in (seed for tried, seed in rows if tried == name):
        mine = losses(rows[name, seed])
        if recipe := rows.get((RECIPE, seed)):
            for which, share in (("last", None), ("mean", str(LAST))):
                found[which].append(mine[share][0] / losses(recipe)[share][0] - 1)
        if best and (other := rows.get((best.trial, seed))):
            loss, _ = min(mine.values(), key=lambda both: both[1])
            found["best"].append(loss / losses(other)[best.share][0] - 1)
    return {which: interval(values) for which, values in found.items()}


def markdown(rows: Rows) -> str:
    def of(name: str) -> tuple[str, ...]:
        mine = [row for (tried, _), row in rows.items() if tried == name]
        middles = (fmean(losses(row)[share][0] for row in mine) for share in (None, str(LAST)))
        seeds = ", ".join(str(row["seed"]) for row in mine)
        return (
            name, seeds, *(f"{middle:.4f}" for middle in middles), *map(_percent, gaps(rows, name).values()),
            f"{mine[0]['versions']:,}", f"{mine[0]['seconds']:,.0f}",
        )  # fmt: skip

    header = (
        "trial", "seeds", "last weights", "mean of the last tenth", "gap, %", "gap of the means, %",
        "to the best data parallelism, %", "global updates", "virtual s",
    )  # fmt: skip
    text = table([of(name) for name in TRIALS if any(tried == name for tried, _ in rows)], header)
    best = best_parallel(rows)
    return f"{text}\n\nBest data parallelism found: {best.told}.\n" if best else f"{text}\n"


def _percent(gap: dict[str, Any]) -> str:
    if gap["mean"] is None:
        return "–"
    half = "" if gap["half_width"] is None else f" ± {100 * gap['half_width']:.1f}"
    return f"{100 * gap['mean']:.1f}{half}"


def main() -> None:
    parser = command_line(__doc__, recorded=False)
    parser.add_argument("--trials", nargs="+", default=list(TRIALS), choices=list(TRIALS))
    parser.add_argument("--seeds", nargs="+", type=int, help=f"default: 0, and {SEED} of what is searched")
    parser.add_argument("--size", default=SMALL, choices=[SMALL, "1m"], help="parameters, as `confirm` names them")
    parser.add_argument("--results", type=Path, help="JSON lines; default: benchmarks/data/candidates*.jsonl")
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    results, size = arguments.results or results_of(arguments.size), SIZES.get(arguments.size)
    steps = FULL.steps if size is None else steps_of(size, TOKENS[arguments.size][0])
    rows = kept(results)
    for name in () if arguments.table else arguments.trials:
        for seed in arguments.seeds or [SEED if name in SEARCHED else 0]:
            if (name, seed) not in rows:
                begin_s = time.process_time()
                row = plain({"trial": name, "seed": seed, **run(TRIALS[name], seed, steps, size)})
                rows[name, seed] = row | {"cpu_s": round(time.process_time() - begin_s, 1)}
                with results.open("a") as file:
                    file.write(json.dumps(rows[name, seed]) + "\n")
            print(json.dumps(rows[name, seed]), flush=True)
    print(markdown(rows))
    print(json.dumps(plain({name: gaps(rows, name) for name in TRIALS if any(tried == name for tried, _ in rows)})))


if __name__ == "__main__":
    main()
