"""The methods compared, each a run file of configs/runs/baselines, and the space that its settings are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, exp
from pathlib import Path
from random import Random
from typing import Any

from geotrain.config import OuterConfig, load_run, parse
from geotrain.simulate.spec import Environment

ROOT = Path(__file__).parents[1]
Settings = dict[str, Any]  # lr, and changes of the run file's outer block; "momentum_share" stands for momentum_decay


@dataclass(frozen=True)
class Method:
    """draw: one point of its search space. The first point tried is always the run file as it is, at LR."""

    name: str
    title: str
    draw: Callable[[Random], Settings]

    @property
    def base(self) -> OuterConfig:
        return load_run(ROOT / f"configs/runs/baselines/{self.name}.json").outer

    def outer(self, settings: Settings, environment: Environment, steps: int) -> OuterConfig:
        """The outer loop with these settings, for a run of so many steps of all workers."""
        changes = {key: value for key, value in settings.items() if key not in ("lr", "momentum_share")}
        merged = _merged(self.base.model_dump(by_alias=True, mode="json"), changes)
        outer = parse(OuterConfig, merged, f"settings of {self.name}")
        if "momentum_share" in settings:
            decay = momentum_decay(settings["momentum_share"], outer.local_steps, environment, steps)
            outer = outer.model_copy(update={"momentum_decay": decay})
        return outer

    def candidates(self, trials: int, seed: int) -> list[Settings]:
        """The search's points: the published settings with the learning rates of LADDER, then random draws."""
        random = Random(f"{seed} {self.name}")
        first = [{**self.published(), "lr": lr} for lr in LADDER]
        return [*first[:trials], *(self.draw(random) for _ in range(trials - len(first)))]

    def published(self) -> Settings:
        return {"momentum_share": 0.1} if self.name == "region-momentum" else {}


LADDER = (4e-3, 8e-3)


def momentum_decay(share: float, local_steps: int, environment: Environment, steps: int) -> float:
    """k for a time constant of that share of the run's tokens: k = exp(−1 / (share · updates of a region))."""
    workers = environment.world.workers
    fastest = min(w.step_s for w in workers)
    mean_steps = sum(max(1, ceil(local_steps * fastest / w.step_s)) for w in workers) / len(workers)
    updates = steps / mean_steps / len(environment.world.regions)
    return exp(-1 / (share * updates))


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        result[key] = {**base[key], **value} if isinstance(value, dict) else value
    return result


def _rate(random: Random) -> float:
    return round(random.choice((2e-3, 3e-3, 4e-3, 6e-3, 8e-3, 1.2e-2)), 6)


def _data_parallel(random: Random) -> Settings:
    return {"lr": random.choice((2e-3, 3e-3, 6e-3, 1.2e-2, 1.6e-2, 2.4e-2))}


def _diloco(random: Random) -> Settings:
    return {
        "lr": _rate(random),
        "local_steps": random.choice((8, 16, 32, 64)),
        "sync_lr": random.choice((0.5, 0.7, 0.9, 1.0)),
        "sync_momentum": random.choice((0.6, 0.8, 0.9)),
    }


def _async(random: Random) -> Settings:
    return {
        "lr": _rate(random),
        "global": {
            "lr_per_update": random.choice((0.03, 0.05, 0.08, 0.12)),
            "beta": random.choice((0.5, 0.8, 0.9)),
            "buffer": random.choice((8, 16, 32)),
        },
    }


def _halos(random: Random) -> Settings:
    return {
        "lr": _rate(random),
        "local_steps": random.choice((4, 8, 16)),
        "updates_per_send": random.choice((8, 16, 32)),
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


def _momentum(random: Random) -> Settings:
    return {
        "lr": _rate(random),
        "local_steps": random.choice((4, 8)),
        "updates_per_send": random.choice((2, 4)),
        "merge_alpha": random.choice((0.25, 0.5, 0.75)),
        "momentum_gain": random.choice((0.0, 0.5, 1.0, 2.0, 3.0)),
        "momentum_share": random.choice((0.05, 0.1, 0.2)),
    }


METHODS = {
    m.name: m
    for m in (
        Method("data-parallel", "data parallel, fp32 flat ring", _data_parallel),
        Method("diloco", "DiLoCo H 32, fp32 flat ring", _diloco),
        Method("diloco-dylu", "DiLoCo + DyLU, fp32 flat ring", _diloco),
        Method("diloco-fair", "DiLoCo + DyLU, hierarchical, 4 bit (fair)", _diloco),
        Method("async-local-sgd", "Async Local-SGD H 32", _async),
        Method("async-local-sgd-h128", "Async Local-SGD H 128", _async),
        Method("halos", "HALoS as published", _halos),
        Method("region-momentum", "ours: region momentum, ledger, 4 bit", _momentum),
    )
}
OURS = "region-momentum"
