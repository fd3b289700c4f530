"""One training of the small model of the claims, in their world, with what a trial changes.

A loss is of 5,000 windows of each held-out slice, the mean of both; beside it are that of the selection slice alone
and those of the means of the global weights over the last parts of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.claims.exchange import world_for
from benchmarks.studies.claims.methods import METHODS, Settings
from benchmarks.studies.claims.runs import Job
from benchmarks.studies.claims.study import FULL
from benchmarks.studies.learner.training import Curve, Study, training_task
from geotrain.config import OuterConfig, RegionMomentumConfig
from geotrain.outer.messages import Identity, Lease, Message
from geotrain.outer.rules.region_momentum import AveragingGlobal, MomentumRegion
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.parameters.parameter_map import ParameterMap
from geotrain.simulate.spec import RegionSpec, WorldSpec
from geotrain.simulate.world import VirtualWorld

WINDOWS = 5000
LAST = 0.1  # share of the run that the weights are averaged over
SHARES = (0.05, LAST, 0.2, 0.3)  # further ones that rows of `candidates` have
REGIONS = 4
BATCH = 4  # sequences of a device's step


MakeRegion = Callable[[RegionMomentumConfig, int, float], MomentumRegion]
MakeGlobal = Callable[[ParameterMap], AveragingGlobal]


@dataclass(frozen=True)
class Trial:
    """One trial. settings: changes of the method's run file, and the rate. muon: changes of the inner optimizer's
    settings. region_of, top: make the rules that stand in for the product's. during: changes a region's rule at each
    lease, by its gain and the share of the run that is lent. batch: sequences of a device's step, whose time follows
    them."""

    method: str
    settings: Settings
    muon: Settings = field(default_factory=dict)
    region_of: Callable[[ParameterMap], MakeRegion] | None = None
    top: MakeGlobal | None = None
    during: Callable[[MomentumRegion, float, float], None] | None = None
    batch: int = BATCH


OF_TRIAL = ("muon", "region_of", "top", "during", "batch")


def trial(method: str, **changes: Any) -> Trial:
    own = {name: changes.pop(name) for name in OF_TRIAL if name in changes}
    return Trial(method, {"momentum_share": 0.1, "lr": 0.016, **changes}, **own)


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
    steps: of all workers, at the size's batch (BATCH sequences unless it says so); as many tokens whatever the
    trial's own, which is the size's times trial.batch / BATCH."""
    torch.set_num_threads(1)
    size, steps = size or FULL.size, steps * BATCH // trial.batch
    size = size | {"batch": size.get("batch", BATCH) * trial.batch // BATCH}
    r = Job(trial.method, trial.settings, "published", seed, steps, size).resolved
    # Trials name the rows' normalization; the study's methods have it as shipped.
    study = replace(r.study, inner=replace(r.study.inner, **{"normalize_rows": False, **trial.muon}))
    task = training_task(study, r.outer, r.environment.numel, r.devices)
    make = trial.region_of and trial.region_of(task.parameter_map)
    region = RegionServer if make is None else _with_region_rule(make)
    top = GlobalServer if trial.top is None else _with_global_rule(trial.top)
    if trial.during is not None:
        region = _changing(region, trial.during, task.train_samples)
    task = replace(task, momentum_decay=r.momentum_decay, region_server=region, global_server=top)
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

        def _route(self, message: Message) -> Any:
            if isinstance(message, Lease):
                during(self.rule, self.gain, message.start / samples)
            return super()._route(message)

    return Server


def _with_region_rule(make: MakeRegion) -> type[RegionServer]:
    class Server(RegionServer):
        def __init__(
            self, name: str, identity: Identity, parameter_map: ParameterMap, config: OuterConfig,
            rule: MomentumRegion,
            workers: tuple[str, ...],
        ) -> None:  # fmt: skip
            assert isinstance(config.rule, RegionMomentumConfig)
            made = make(config.rule, rule.decay)  # type: ignore[call-arg]
            super().__init__(name, identity, parameter_map, config, made, workers)

    return Server


def _with_global_rule(make: MakeGlobal) -> type[GlobalServer]:
    class Server(GlobalServer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.rule = self.core.rule = self.store.rule = make(self.parameter_map)

    return Server
