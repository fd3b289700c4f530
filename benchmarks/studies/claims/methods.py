"""The methods compared, each a run file of configs/runs/baselines, and the space that its settings are drawn from.

Each is there twice: with AdamW as its workers' optimizer, and, its name ending in MUON, with Muon on hidden matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from random import Random
from typing import Any, Literal

from benchmarks import ROOT
from benchmarks.studies.claims.exchange import world_for
from benchmarks.studies.environments import Environment
from benchmarks.studies.learner.optimizers import InnerSettings
from geotrain.config import OuterConfig, RegionMomentumConfig, load_run, parse
from geotrain.outer.rules.region_momentum import momentum_decay
from geotrain.simulate.spec import WorkerSpec

Settings = dict[str, Any]  # lr, and changes of the run file's outer block or of its rule, side by side


@dataclass(frozen=True)
class Method:
    """draw: one point of its search space. Rates and momenta are searched; when messages leave (H, K) and their codec
    are the method, and stay as its run file has them, but where the space names them. of: the run file that it shares
    with the method of that name. start: what stands in the run file in other words, for runs of any length.
    inner: the workers' optimizer. like: the method whose search it shares, but for rates at full length."""

    name: str
    title: str
    draw: Callable[[Random], Settings]
    of: str | None = None
    start: Settings = field(default_factory=dict)
    inner: Literal["adamw", "muon"] = "adamw"
    like: str | None = None

    def with_muon(self) -> Method:
        like = self.like and muon(self.like)
        title = f"{self.title}; Muon"
        return replace(self, name=muon(self.name), title=title, of=self.run_file, inner="muon", like=like)

    @property
    def run_file(self) -> str:
        return self.of or self.name

    @property
    def base(self) -> OuterConfig:
        """Without a reserve: no link is cut."""
        outer = load_run(ROOT / f"configs/runs/baselines/{self.run_file}.json").outer
        return outer.model_copy(update={"lease_reserve": 0})

    def outer(self, settings: Settings, environment: Environment, steps: int) -> OuterConfig:
        """The outer loop with these settings, for a run of so many steps of all workers."""
        return parse(OuterConfig, self._block(settings), f"settings of {self.name}")

    def optimizer(self, lr: float) -> InnerSettings:
        """The settings of the workers' optimizer, as far as they are not a part of the search."""
        muon = self.inner == "muon"
        return InnerSettings(lr=lr, muon=0.95 if muon else None, normalize_rows=muon)

    def momentum_decay(self, outer: OuterConfig, environment: Environment, steps: int) -> float | None:
        """Momentum decay of our rule, from the workers' true speeds, which a real run does not know in advance."""
        if not isinstance(outer.rule, RegionMomentumConfig):
            return None
        updates = updates_of_a_region(self.run_file, outer, environment, steps)
        return momentum_decay(updates, outer.rule.momentum_share)

    def published(self) -> Settings:
        """The run file as it stands."""
        return dict(self.start)

    def draws(self, count: int, seed: int) -> list[Settings]:
        """Points of the search space, without learning rates; no two alike, none of them what `published` is.

        Raises ValueError when the space has not so many."""
        # The same points with both optimizers.
        random, found = Random(f"{seed} {self.name.removesuffix(MUON)}"), list[Settings]()
        known = [self._point(self.published())]
        for _ in range(100 * count):
            if len(found) == count:
                break
            settings = self.draw(random)
            if (point := self._point(settings)) not in known:
                known.append(point)
                found.append(settings)
        if len(found) < count:
            raise ValueError(f"{self.name}: its search space has no {count} points besides the published one")
        return found

    def _block(self, settings: Settings) -> dict[str, Any]:
        block = self.base.model_dump(by_alias=True, mode="json")
        changes = {OF_RULE.get(key, key): value for key, value in settings.items() if key not in OTHER}
        of_rule = {key: value for key, value in changes.items() if key in block["rule"]}
        return _merged(block, {key: value for key, value in changes.items() if key not in of_rule}) | {
            "rule": _merged(block["rule"], of_rule)
        }

    def _point(self, settings: Settings) -> dict[str, Any]:
        return self._block(settings) | {key: settings[key] for key in OTHER if key in settings}


OTHER = ("lr", "lr_scale")  # settings that are no fields of the outer block: `lr` is the inner optimizer's
OF_RULE = {"sync_lr": "lr", "sync_momentum": "momentum", "momentum_gain": "gain"}


def job_steps(workers: Sequence[WorkerSpec], outer: OuterConfig) -> list[int]:
    """Inner steps of a job of each worker."""
    if not outer.scale_local_steps:
        return [outer.local_steps] * len(workers)
    fastest = min(w.step_s for w in workers)
    return [max(1, ceil(outer.local_steps * fastest / w.step_s)) for w in workers]


def whole_steps(outer: OuterConfig, environment: Environment, steps: int) -> int:
    """Steps that are trained of so many steps of all workers: a synchronous round, a job of every worker, is whole or
    not at all."""
    return steps - steps % sum(job_steps(environment.world.workers, outer)) if outer.rule.synchronous else steps


def updates_of_a_region(run_file: str, outer: OuterConfig, environment: Environment, steps: int) -> float:
    """Updates of a region in a run of so many steps of all devices, whose jobs follow the workers' speed."""
    workers = world_for(run_file, outer, environment).workers
    jobs = job_steps(workers, outer)
    devices = len(environment.world.workers) / len(workers)
    return steps / devices / (sum(jobs) / len(jobs)) / len(environment.world.regions)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        result[key] = {**base[key], **value} if isinstance(value, dict) else value
    return result


def _data_parallel(random: Random) -> Settings:
    """Nothing but the learning rate: further ones around the ladder's best."""
    return {"lr_scale": round(2 ** random.uniform(-0.9, 0.9), 3)}


def _diloco(random: Random) -> Settings:
    return {"sync_lr": random.choice((0.5, 0.7, 0.9, 1.0)), "sync_momentum": random.choice((0.5, 0.7, 0.8, 0.9))}


def _streaming(random: Random) -> Settings:
    return {"sync_lr": random.choice((0.3, 0.4, 0.55, 0.7)), "sync_momentum": random.choice((0.5, 0.7, 0.8, 0.9))}


def _async(random: Random) -> Settings:
    return {
        "global": {
            "lr_per_update": random.choice((0.03, 0.05, 0.08, 0.12)),
            "beta": random.choice((0.5, 0.8, 0.9)),
            "buffer": random.choice((8, 16, 32)),
        },
    }


def _halos(random: Random) -> Settings:
    return {
        "merge_alpha": random.choice((0.25, 0.5, 0.75)),
        "region": {
            "lr_per_update": random.choice((0.1, 0.2, 0.3)),
            "beta": random.choice((0.5, 0.8, 0.9)),
            "buffer": random.choice((4, 8, 16)),
        },
        "global": {
            "lr_per_update": random.choice((0.15, 0.25, 0.4)),
            "beta": random.choice((0.3, 0.5)),
            "buffer": random.choice((2, 4)),
        },
    }


def _halos_tuned(random: Random) -> Settings:
    return {
        **_halos(random),
        "local_steps": random.choice((2, 4, 8, 16)),
        "updates_per_send": random.choice((4, 8, 16, 32)),
    }


def _momentum(random: Random) -> Settings:
    """H from 2: a server's own time for an update is not simulated, and H 1 would ask most of it."""
    return {
        "local_steps": random.choice((2, 4, 8)),
        "updates_per_send": random.choice((2, 4, 8)),
        "merge_alpha": random.choice((0.25, 0.5, 0.75)),
        "momentum_gain": random.choice((0.5, 1.0, 2.0, 3.0)),
        "momentum_share": random.choice((0.05, 0.1, 0.2)),
    }


def _one_worker(random: Random) -> Settings:
    """H 1: the devices of a region take every step together already."""
    drawn = _momentum(random)
    return {key: value for key, value in drawn.items() if key != "local_steps"}


MUON = "-muon"  # the end of a method's name


def muon(method: str) -> str:
    """The name of the same method with Muon."""
    return method + MUON


OURS = "region-momentum"
ONE_WORKER = "region-momentum-one-worker"
OURS_2BIT, ONE_WORKER_2BIT = f"{OURS}-2bit", f"{ONE_WORKER}-2bit"
_SHARE: Settings = {"momentum_share": 0.1}
SYNCHRONOUS = "data-parallel"  # what losses at equal tokens are held against
WITH_ADAMW = {
    m.name: m
    for m in (
        Method(SYNCHRONOUS, "data parallel, fp32 flat ring", _data_parallel),
        Method("diloco", "DiLoCo H 32, fp32 flat ring", _diloco),
        Method("diloco-dylu", "DiLoCo + DyLU, fp32 flat ring", _diloco),
        Method("diloco-fair", "DiLoCo + DyLU, hierarchical, 4 bit (fair)", _diloco),
        Method("streaming-diloco", "Streaming DiLoCo H 100", _streaming),
        Method("async-local-sgd", "Async Local-SGD H 32", _async),
        Method("async-local-sgd-h128", "Async Local-SGD H 128", _async),
        Method("halos", "HALoS as published", _halos),
        Method("halos-tuned", "HALoS, H and K searched", _halos_tuned, of="halos"),
        Method(OURS, "ours: region momentum, ledger, 4 bit", _momentum, start=_SHARE),
        Method(ONE_WORKER, "ours, a region is one worker", _one_worker, start=_SHARE),
        Method(OURS_2BIT, "ours, 2 bit", _momentum, start=_SHARE, like=OURS),
        Method(ONE_WORKER_2BIT, "ours, a region is one worker, 2 bit", _one_worker, start=_SHARE, like=ONE_WORKER),
    )
}
METHODS = WITH_ADAMW | {muon(name): m.with_muon() for name, m in WITH_ADAMW.items()}
