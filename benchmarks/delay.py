"""What the delay between regions costs ours with Muon, and what shortens or corrects it: trials of one seed.

    python -m benchmarks.delay                                           all trials: a quarter of an hour of one core
    python -m benchmarks.delay --trials "one worker a region" --seed 1   some of them

The small model of claims.py, in its world, at its length. A loss is of 5,000 windows of each held-out slice, the mean
of both; beside it that of the mean of the global weights over the last tenth of the run. Finished trials are kept in
the results file (JSON lines), which is committed, and not done again. The last line printed is one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import ROOT
from benchmarks.claims.methods import ONE_WORKER, OURS, SYNCHRONOUS, Settings, muon
from benchmarks.claims.report import plain
from benchmarks.claims.runs import Job
from benchmarks.claims.study import FULL
from benchmarks.common import command_line
from benchmarks.learner.optimizers import MuonSettings
from benchmarks.learner.training import Curve, Study, training_task
from geotrain.config import OuterConfig, RegionMomentumConfig
from geotrain.layout import Layout
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.region_server import RegionServer
from geotrain.outer.rules import FragmentState
from geotrain.outer.rules.region_momentum import AveragingGlobal, MomentumRegion
from geotrain.outer.server import Identity
from geotrain.simulate.world import VirtualWorld

RESULTS = ROOT / "benchmarks/data/delay.jsonl"
WINDOWS = 5000
LAST = 0.1  # share of the run that the weights are averaged over
REGIONS = 4
ONE, SIXTEEN = muon(ONE_WORKER), muon(OURS)


class LookAhead(MomentumRegion):
    """At a merge the region goes on by `ahead` times what the others did since its last one, since as much will have
    happened when the next answer comes. Its base goes with it: nothing of that is sent up as its own."""

    def __init__(self, config: RegionMomentumConfig, workers: int, decay: float, ahead: float, regions: int) -> None:
        super().__init__(config, workers, decay)
        self.ahead, self.share = ahead, 1 / regions

    def take_progress(self, state: FragmentState) -> tuple[Tensor, int]:
        delta, weight = super().take_progress(state)
        state.vector("own").copy_(delta)
        return delta, weight

    def on_global_weights(self, state: FragmentState, x_global: Tensor) -> tuple[str, ...]:
        first = "seen" not in state.aux
        seen = state.vector("seen")
        others = x_global - seen + self.share * state.vector("own")
        seen.copy_(x_global)
        answered = super().on_global_weights(state, x_global)
        if not first:
            state.x.add_(others, alpha=self.ahead)
            state.vector("base").add_(others, alpha=self.ahead)
        return answered


class Foreseen(AveragingGlobal):
    """Delay correction with error feedback: a region's delta is taken to go on as it was, by `ahead` of it; with its
    next delta that is taken back."""

    def __init__(self, regions: int, ahead: float) -> None:
        super().__init__(regions)
        self.ahead = ahead

    def on_delta(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> tuple[str, ...]:
        before = state.vector(f"before.{member}")
        foreseen = torch.lerp(before, delta, 1 + self.ahead)
        before.copy_(delta)
        return super().on_delta(state, member, foreseen, weight)


class Agreeing(AveragingGlobal):
    """Cosine correction, parameter by parameter (after HeLoCo, arXiv 2606.00271): of a delta that points against what
    the global weights did since its sender last saw them, the part along that is left out."""

    def __init__(self, regions: int, layout: Layout) -> None:
        super().__init__(regions)
        self.layout = layout

    def on_delta(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> tuple[str, ...]:
        name = f"given.{member}"
        if name in state.aux:
            delta, since = delta.clone(), state.aux[name] - state.x
            parts = zip(self.layout.split(0, delta), self.layout.split(0, since), strict=True)
            for (_, mine), (_, moved) in parts:
                along = float((mine * moved).sum())
                if along < 0:
                    mine.sub_(moved, alpha=along / float(moved.square().sum()))
        answered = super().on_delta(state, member, delta, weight)
        state.vector(name).copy_(state.x)
        return answered


MakeRegion = Callable[[RegionMomentumConfig, int, float], MomentumRegion]
MakeGlobal = Callable[[Layout], AveragingGlobal]


@dataclass(frozen=True)
class Trial:
    """settings: changes of the method's run file, and the rate. momentum: Muon's, in place of its own. region,
    top: make the rules that stand in for the product's."""

    method: str
    settings: Settings
    momentum: float | None = None
    region: MakeRegion | None = None
    top: MakeGlobal | None = None


def two_bits(density: float = 1.0) -> Settings:
    codec = {"name": "topk2", "density": density}
    return {"up": codec, "down": codec}


def ahead(by: float) -> MakeRegion:
    return lambda config, workers, decay: LookAhead(config, workers, decay, by, REGIONS)


def trial(
    method: str,
    momentum: float | None = None,
    region: MakeRegion | None = None,
    top: MakeGlobal | None = None,
    **settings: Any,
) -> Trial:
    return Trial(method, {"momentum_share": 0.1, "lr": 0.016, **settings}, momentum, region, top)


TRIALS = {
    "data parallel": Trial(muon(SYNCHRONOUS), {"lr": 0.01978}),
    "one worker a region": trial(ONE),
    "K 1": trial(ONE, updates_per_send=1),
    "2 bits, K 1": trial(ONE, updates_per_send=1, **two_bits()),
    "the tenth largest in 2 bits, K 1": trial(ONE, updates_per_send=1, **two_bits(0.1)),
    "merge_alpha 0.75": trial(ONE, merge_alpha=0.75),
    "gain 0.5, rate 0.032": trial(ONE, momentum_gain=0.5, lr=0.032),
    "look-ahead 0.5": trial(ONE, region=ahead(0.5)),
    "error-feedback delay correction 0.5": trial(ONE, top=lambda layout: Foreseen(REGIONS, 0.5)),
    "cosine correction": trial(ONE, top=lambda layout: Agreeing(REGIONS, layout)),
    "2 bits, K 1, merge_alpha 0.75": trial(ONE, updates_per_send=1, merge_alpha=0.75, **two_bits()),
    "2 bits, K 1, merge_alpha 1": trial(ONE, updates_per_send=1, merge_alpha=1.0, **two_bits()),
    "2 bits, K 1, look-ahead 0.5": trial(ONE, region=ahead(0.5), updates_per_send=1, **two_bits()),
    "16 workers": trial(SIXTEEN),
    "16 workers, 2 bits, K 2": trial(SIXTEEN, updates_per_send=2, **two_bits()),
    "16 workers, 2 bits, K 2, merge_alpha 0.75": trial(SIXTEEN, updates_per_send=2, merge_alpha=0.75, **two_bits()),
    "16 workers, merge_alpha 0.75": trial(SIXTEEN, merge_alpha=0.75),
    "16 workers, Muon's momentum 0.975": trial(SIXTEEN, momentum=0.975),
}


class Averaged(Curve):
    """Keeps the sum of the global weights over the last part of the run."""

    def __init__(self, study: Study) -> None:
        super().__init__(study, points=1, windows=WINDOWS)
        self.total, self.count = torch.zeros_like(self.model.flat), 0

    def watch(self, world: VirtualWorld) -> None:
        if world.top.server.book.committed_samples >= (1 - LAST) * world.task.train_samples:
            self.total += self._flat(world)
            self.count += 1
        super().watch(world)

    def losses(self, world: VirtualWorld) -> dict[str, float]:
        def loss(weights: Tensor) -> float:
            return (self.model.evaluate(weights, self.test) + self.model.evaluate(weights, self.selection)) / 2

        return {"loss": loss(self._flat(world)), "averaged": loss(self.total / self.count)}


def run(trial: Trial, seed: int, steps: int = FULL.steps, size: dict[str, int] | None = None) -> dict[str, Any]:
    """Loss at the end, that of the averaged weights, virtual seconds, versions of the global weights."""
    torch.set_num_threads(1)
    r = Job(trial.method, trial.settings, "published", seed, steps, size or FULL.size).resolved
    study = r.study
    if trial.momentum is not None:
        assert isinstance(study.inner, MuonSettings)
        study = replace(study, inner=replace(study.inner, momentum=trial.momentum))
    task = training_task(study, r.outer, r.environment.numel, r.devices)
    task = replace(
        task,
        momentum_decay=r.momentum_decay,
        region_server=RegionServer if trial.region is None else _with_region_rule(trial.region),
        global_server=GlobalServer if trial.top is None else _with_global_rule(trial.top),
    )
    curve = Averaged(study)
    world = VirtualWorld(r.world, task, curve.watch)
    report = world.run()
    return {"seconds": report["seconds"], "versions": report["global_versions"][0], **curve.losses(world)}


def _with_region_rule(make: MakeRegion) -> type[RegionServer]:
    class Server(RegionServer):
        def __init__(
            self, name: str, identity: Identity, layout: Layout, config: OuterConfig, rule: MomentumRegion,
            workers: tuple[str, ...],
        ) -> None:  # fmt: skip
            assert isinstance(config.rule, RegionMomentumConfig)
            super().__init__(name, identity, layout, config, make(config.rule, len(workers), rule.decay), workers)

    return Server


def _with_global_rule(make: MakeGlobal) -> type[GlobalServer]:
    class Server(GlobalServer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.rule = make(self.layout)

    return Server


def main() -> None:
    parser = command_line(__doc__, recorded=False)
    parser.add_argument("--trials", nargs="+", default=list(TRIALS), choices=list(TRIALS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines")
    arguments = parser.parse_args()
    kept = (
        [json.loads(line) for line in arguments.results.read_text().splitlines()]
        if arguments.results.exists()
        else []
    )
    rows = {(row["trial"], row["seed"]): row for row in kept}
    for name in arguments.trials:
        if (name, arguments.seed) not in rows:
            row = {"trial": name, "seed": arguments.seed, **plain(run(TRIALS[name], arguments.seed))}
            rows[name, arguments.seed] = row
            with arguments.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(json.dumps(rows[name, arguments.seed]), flush=True)
    print(json.dumps({name: rows[name, arguments.seed]["loss"] for name in arguments.trials}))


if __name__ == "__main__":
    main()
