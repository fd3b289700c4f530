"""Try what the delay between regions costs ours with Muon, and what shortens or corrects it, with one seed.

    python -m benchmarks.studies.delay                           all trials: twenty minutes of one core
    python -m benchmarks.studies.delay --trials "one worker a region"   some of them

The small model of the claims, in its world, at its length. A loss is of 5,000 windows of each held-out slice, the
mean of both; beside it that of the mean of the global weights over the last tenth of the run, and in later rows that
of the selection slice alone. Finished trials are kept in the results file (JSON lines), which is committed, and not
done again. The last line printed is one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import ROOT
from benchmarks.common import command_line
from benchmarks.studies.claims.exchange import world_for
from benchmarks.studies.claims.methods import METHODS, ONE_WORKER, OURS, SYNCHRONOUS, Settings, muon
from benchmarks.studies.claims.report import plain
from benchmarks.studies.claims.runs import Job
from benchmarks.studies.claims.study import FULL
from benchmarks.studies.learner.training import Curve, Learning, Study, training_task
from geotrain.config import OuterConfig, RegionMomentumConfig
from geotrain.outer.messages import ChunkWeights, Finished, Identity, Lease, LeaseRequest
from geotrain.outer.rules import Vectors
from geotrain.outer.rules.region_momentum import AveragingGlobal, MomentumRegion
from geotrain.outer.rules.rule import Inputs
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.parameters.parameter_map import ParameterMap
from geotrain.simulate.spec import RegionSpec, WorkerSpec, WorldSpec
from geotrain.simulate.worker import Learner
from geotrain.simulate.world import VirtualWorld

RESULTS = ROOT / "benchmarks/data/delay.jsonl"
WINDOWS = 5000
LAST = 0.1  # share of the run that the weights are averaged over
SHARES = (0.05, LAST, 0.2, 0.3)  # further ones that rows of `candidates` have
REGIONS = 4
BATCH = 4  # sequences of a device's step
ONE, SIXTEEN = muon(ONE_WORKER), muon(OURS)


class LookAhead(MomentumRegion):
    """At a merge the region goes on by `ahead` times what the others did since its last one, since as much will have
    happened when the next answer comes. Its base goes with it: nothing of that is sent up as its own."""

    def __init__(self, config: RegionMomentumConfig, workers: int, decay: float, ahead: float, regions: int) -> None:
        super().__init__(config, workers, decay)
        self.ahead, self.share = ahead, 1 / regions

    def progress(self, state: Vectors, inputs: Inputs) -> Tensor:
        delta = super().progress(state, inputs)
        state.vector("own").copy_(delta)
        return delta

    def merge(self, state: Vectors, x_global: Tensor) -> None:
        first = "seen" not in state.aux
        seen = state.vector("seen")
        others = x_global - seen + self.share * state.vector("own")
        seen.copy_(x_global)
        super().merge(state, x_global)
        if not first:
            state.x.add_(others, alpha=self.ahead)
            state.vector("base").add_(others, alpha=self.ahead)


class Foreseen(AveragingGlobal):
    """Delay correction with error feedback: a region's delta is taken to go on as it was, by `ahead` of it; with its
    next delta that is taken back."""

    def __init__(self, regions: int, ahead: float) -> None:
        super().__init__(regions)
        self.ahead = ahead

    def apply(self, state: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        before = state.vector(f"before.{member}")
        foreseen = torch.lerp(before, delta, 1 + self.ahead)
        before.copy_(delta)
        super().apply(state, member, foreseen, inputs)


class Agreeing(AveragingGlobal):
    """Cosine correction, parameter by parameter (after HeLoCo, arXiv 2606.00271): of a delta that points against what
    the global weights did since its sender last saw them, the part along that is left out."""

    def __init__(self, regions: int, parameter_map: ParameterMap) -> None:
        super().__init__(regions)
        self.parameter_map = parameter_map

    def apply(self, state: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        name = f"given.{member}"
        if name in state.aux:
            delta, since = delta.clone(), state.aux[name] - state.x
            parts = zip(self.parameter_map.split(0, delta), self.parameter_map.split(0, since), strict=True)
            for (_, mine), (_, moved) in parts:
                along = float((mine * moved).sum())
                if along < 0:
                    mine.sub_(moved, alpha=along / float(moved.square().sum()))
        super().apply(state, member, delta, inputs)
        state.vector(name).copy_(state.x)


def quasi_hyperbolic(share: float, rate: float) -> MakeRegion:
    """x −= rate · (ν·m + (1−ν)·Δ), with ν = share and m the region's momentum, the average of its deltas (Ma and
    Yarats, arXiv 1810.06801). The product's rule is this with ν = gain / (1 + gain), rate = 1 + gain."""

    def make(config: RegionMomentumConfig, workers: int, decay: float) -> MomentumRegion:
        rule = MomentumRegion(config, workers, decay)
        rule.gain, rule.weight = share / (1 - share), rate * (1 - share) / workers
        return rule

    return make


def sharing_momenta(make: MakeLearner) -> MakeLearner:
    """MT-DAO's averaging of momenta (arXiv 2510.05361), better than any network allows: whenever a worker takes new
    weights, its moments become the mean of all workers', at once. Second moments go with the first: a worker's own
    may be next to nothing where the others' gradients are not."""
    members: list[Learning] = []

    def learner(spec: WorkerSpec) -> Learner:
        mine = make(spec)
        assert isinstance(mine, Learning)
        members.append(mine)
        take = mine.on_weights

        def on_weights(weights: ChunkWeights, start: bool = False) -> None:
            take(weights, start)
            moments = [other.moments() for other in members]
            for i, own in enumerate(mine.moments()[:2]):
                own.copy_(torch.stack([theirs[i] for theirs in moments]).mean(0))

        mine.on_weights = on_weights  # type: ignore[method-assign]
        return mine

    return learner


MakeRegion = Callable[[RegionMomentumConfig, int, float], MomentumRegion]
MakeGlobal = Callable[[ParameterMap], AveragingGlobal]
MakeLearner = Callable[[WorkerSpec], Learner]


@dataclass(frozen=True)
class Trial:
    """One trial. settings: changes of the method's run file, and the rate. muon: changes of the inner optimizer's
    settings. region, top: make the rules that stand in for the product's; region_of: the first, of the model's
    parameters. learner: changes what workers learn with. cool_down: H and K of the run's last tenth. during: changes
    a region's rule at each lease, by its gain and the share of the run that is lent. batch: sequences of a device's
    step, whose time follows them."""

    method: str
    settings: Settings
    muon: Settings = field(default_factory=dict)
    region: MakeRegion | None = None
    region_of: Callable[[ParameterMap], MakeRegion] | None = None
    top: MakeGlobal | None = None
    learner: Callable[[MakeLearner], MakeLearner] | None = None
    cool_down: tuple[int, int] | None = None
    during: Callable[[MomentumRegion, float, float], None] | None = None
    batch: int = BATCH


def two_bits(density: float = 1.0) -> Settings:
    codec = {"name": "topk2", "density": density}
    return {"up": codec, "down": codec}


def ahead(by: float) -> MakeRegion:
    return lambda config, workers, decay: LookAhead(config, workers, decay, by, REGIONS)


SLOW: Settings = {"muon": 0.99, "momentum_share": 0.9}
OF_TRIAL = ("muon", "region", "region_of", "top", "learner", "cool_down", "during", "batch")


def trial(method: str, **changes: Any) -> Trial:
    own = {name: changes.pop(name) for name in OF_TRIAL if name in changes}
    return Trial(method, {"momentum_share": 0.1, "lr": 0.016, **changes}, **own)


def sixteen(updates_per_send: int = 2, **changes: Any) -> Trial:
    """Sixteen workers, in two bits."""
    return trial(SIXTEEN, updates_per_send=updates_per_send, **two_bits(), **changes)


TRIALS = {
    "data parallel": Trial(muon(SYNCHRONOUS), {"lr": 0.01978}),
    "one worker a region": trial(ONE),
    "K 1": trial(ONE, updates_per_send=1),
    "2 bits, K 1": trial(ONE, updates_per_send=1, **two_bits()),
    "the tenth largest in 2 bits, K 1": trial(ONE, updates_per_send=1, **two_bits(0.1)),
    "merge_alpha 0.75": trial(ONE, merge_alpha=0.75),
    "gain 0.5, rate 0.032": trial(ONE, momentum_gain=0.5, lr=0.032),
    "look-ahead 0.5": trial(ONE, region=ahead(0.5)),
    "error-feedback delay correction 0.5": trial(ONE, top=lambda parameter_map: Foreseen(REGIONS, 0.5)),
    "cosine correction": trial(ONE, top=lambda parameter_map: Agreeing(REGIONS, parameter_map)),
    "2 bits, K 1, merge_alpha 0.75": trial(ONE, updates_per_send=1, merge_alpha=0.75, **two_bits()),
    "2 bits, K 1, merge_alpha 1": trial(ONE, updates_per_send=1, merge_alpha=1.0, **two_bits()),
    "2 bits, K 1, look-ahead 0.5": trial(ONE, region=ahead(0.5), updates_per_send=1, **two_bits()),
    "16 workers": trial(SIXTEEN),
    "16 workers, 2 bits, K 2": sixteen(),
    "16 workers, 2 bits, K 2, merge_alpha 0.75": sixteen(merge_alpha=0.75),
    "16 workers, merge_alpha 0.75": trial(SIXTEEN, merge_alpha=0.75),
    "16 workers, Muon's momentum 0.975": trial(SIXTEEN, muon={"muon": 0.975}),
    "16 workers, 2 bits, K 1": sixteen(1),
    "16 workers, 2 bits, K 2, H 1": sixteen(local_steps=1),
    "16 workers, 2 bits, K 2, cool-down H 1, K 1": sixteen(cool_down=(1, 1)),
    "16 workers, 2 bits, K 2, Muon's momentum 0.9": sixteen(muon={"muon": 0.9}),
    "16 workers, 2 bits, K 2, outer nu 0.7, rate 2": sixteen(region=quasi_hyperbolic(0.7, 2.0)),
    "16 workers, 2 bits, K 2, inner momentum 0.99, nu 0.9": sixteen(muon=SLOW),
    "16 workers, 2 bits, K 2, servers' state in bf16": sixteen(server_state="bf16"),
    "16 workers, 2 bits, K 2, momenta averaged": sixteen(learner=sharing_momenta),
}


class Averaged(Curve):
    """Keeps sums of the global weights over the last parts of the run."""

    def __init__(self, study: Study) -> None:
        super().__init__(study, points=1, windows=WINDOWS)
        self.sums = {share: torch.zeros_like(self.model.start) for share in SHARES}
        self.counts = dict.fromkeys(SHARES, 0)

    def watch(self, world: VirtualWorld) -> None:
        done = world.top.server.lease_table.committed_samples / world.task.train_samples
        if passed := [share for share in SHARES if done >= 1 - share]:
            weights = self._flat(world)
            for share in passed:
                self.sums[share] += weights
                self.counts[share] += 1
        super().watch(world)

    def losses(self, world: VirtualWorld) -> dict[str, Any]:
        """loss: the mean of both slices'. averaged: that of the mean weights, and of all SHARES with the selection
        slice's beside it."""

        def loss(weights: Tensor) -> tuple[float, float]:
            test, selection = (self.model.evaluate(weights, part) for part in (self.test, self.selection))
            return (test + selection) / 2, selection

        both, selection = loss(self._flat(world))
        means = {str(share): loss(total / self.counts[share]) for share, total in self.sums.items()}
        return {"loss": both, "selection": selection, "averaged": means[str(LAST)][0], "means": means}


def run(trial: Trial, seed: int, steps: int = FULL.steps, size: dict[str, int] | None = None) -> dict[str, Any]:
    """Loss at the end, that of the averaged weights, virtual seconds, versions of the global weights.
    steps: of all workers, with BATCH sequences each; as many tokens whatever the trial's batch."""
    torch.set_num_threads(1)
    size, steps = {"batch": trial.batch} | (size or FULL.size), steps * BATCH // trial.batch
    r = Job(trial.method, trial.settings, "published", seed, steps, size).resolved
    study = r.study
    if trial.muon:
        study = replace(study, inner=replace(study.inner, **trial.muon))
    task = training_task(study, r.outer, r.environment.numel, r.devices)
    make = trial.region_of(task.parameter_map) if trial.region_of else trial.region
    region = RegionServer if make is None else _with_region_rule(make)
    top = GlobalServer if trial.top is None else _with_global_rule(trial.top)
    if trial.cool_down is not None:
        region, top = _cooling_down(*trial.cool_down, (1 - LAST) * task.train_samples)
    if trial.during is not None:
        region = _changing(region, trial.during, task.train_samples)
    learner = task.learner if trial.learner is None else trial.learner(task.learner)
    task = replace(task, momentum_decay=r.momentum_decay, region_server=region, global_server=top, learner=learner)
    curve = Averaged(study)
    environment = replace(r.environment, world=_faster(r.environment.world, trial.batch / BATCH))
    world = VirtualWorld(world_for(METHODS[trial.method].run_file, r.outer, environment), task, curve.watch)
    report = world.run()
    return {"seconds": report["seconds"], "versions": report["global_versions"][0], **curve.losses(world)}


def _faster(world: WorldSpec, share: float) -> WorldSpec:
    """The world whose workers' steps take that share of the time."""

    def of(region: RegionSpec) -> RegionSpec:
        return replace(region, workers=tuple(replace(w, step_s=share * w.step_s) for w in region.workers))

    return replace(world, regions=tuple(map(of, world.regions)))


def _changing(
    server: type[RegionServer], during: Callable[[MomentumRegion, float, float], None], samples: int
) -> type[RegionServer]:
    class Server(server):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.gain = self.rule.gain

        def _on_lease(self, lease: Lease | Finished) -> None:
            if isinstance(lease, Lease):
                during(self.rule, self.gain, lease.start / samples)
            super()._on_lease(lease)

    return Server


def _with_region_rule(make: MakeRegion) -> type[RegionServer]:
    class Server(RegionServer):
        def __init__(
            self, name: str, identity: Identity, parameter_map: ParameterMap, config: OuterConfig,
            rule: MomentumRegion,
            workers: tuple[str, ...],
        ) -> None:  # fmt: skip
            assert isinstance(config.rule, RegionMomentumConfig)
            super().__init__(
                name, identity, parameter_map, config, make(config.rule, len(workers), rule.decay), workers
            )

    return Server


def _with_global_rule(make: MakeGlobal) -> type[GlobalServer]:
    class Server(GlobalServer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.rule = make(self.parameter_map)
            for shard in self.shards.all:
                shard.rule = self.rule

    return Server


def _cooling_down(
    local_steps: int, updates_per_send: int, after: float
) -> tuple[type[RegionServer], type[GlobalServer]]:
    """Servers that take this H and K once so many samples of the run are committed or, in a region, lent."""

    class Region(RegionServer):
        def _on_lease(self, lease: Lease | Finished) -> None:
            if isinstance(lease, Lease) and lease.start >= after:
                assert isinstance(self.rule, MomentumRegion)
                self.rule.every = updates_per_send
            super()._on_lease(lease)

    class Top(GlobalServer):
        def _on_lease_request(self, request: LeaseRequest) -> Lease | Finished | None:
            if self.lease_table.next_start >= after:
                self.lease_table.local_steps = local_steps
            return super()._on_lease_request(request)

    return Region, Top


def main() -> None:
    parser = command_line(__doc__, recorded=False)
    parser.add_argument("--trials", nargs="+", default=list(TRIALS), choices=list(TRIALS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines")
    arguments = parser.parse_args()
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    rows = {(row["trial"], row["seed"]): row for row in map(json.loads, lines)}
    for name in arguments.trials:
        if (name, arguments.seed) not in rows:
            row = {"trial": name, "seed": arguments.seed, **plain(run(TRIALS[name], arguments.seed))}
            del row["means"]
            rows[name, arguments.seed] = row
            with arguments.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(json.dumps(rows[name, arguments.seed]), flush=True)
    print(json.dumps({name: rows[name, arguments.seed]["loss"] for name in arguments.trials}))


if __name__ == "__main__":
    main()
