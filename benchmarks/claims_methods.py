"""The methods compared, each a run file of configs/runs/baselines, and the space that its settings are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

from geotrain.config import OuterConfig, load_run, parse
from geotrain.outer.rules import momentum_decay
from geotrain.simulate.spec import Environment

ROOT = Path(__file__).parents[1]
Settings = dict[str, Any]  # lr, and changes of the run file's outer block; "momentum_share" stands for momentum_decay


@dataclass(frozen=True)
class Method:
    """draw: one point of its search space: rates and momenta. When messages leave (H, K) and their codec are the
    method, and stay as its run file has them. settings_of: another method whose search is taken."""

    name: str
    title: str
    draw: Callable[[Random], Settings]
    settings_of: str | None = None

    @property
    def base(self) -> OuterConfig:
        return load_run(ROOT / f"configs/runs/baselines/{self.name}.json").outer

    def outer(self, settings: Settings, environment: Environment, steps: int) -> OuterConfig:
        """The outer loop with these settings, for a run of so many steps of all workers."""
        changes = {key: value for key, value in settings.items() if key not in ("lr", "momentum_share")}
        merged = _merged(self.base.model_dump(by_alias=True, mode="json"), changes)
        outer = parse(OuterConfig, merged, f"settings of {self.name}")
        if "momentum_share" in settings:
            updates = updates_of_a_region(outer.local_steps, environment, steps)
            decay = momentum_decay(updates, settings["momentum_share"])
            outer = outer.model_copy(update={"momentum_decay": decay})
        return outer

    def published(self) -> Settings:
        return {"momentum_share": 0.1} if self.name == "region-momentum" else {}

    def draws(self, count: int, seed: int) -> list[Settings]:
        """Points of the search space, no two alike, without learning rates."""
        random, found = Random(f"{seed} {self.name}"), list[Settings]()
        while len(found) < count:
            point = self.draw(random)
            if point not in found:
                found.append(point)
        return found


LADDER = (8e-3, 1.6e-2, 4e-3, 3.2e-2)  # inner learning rates, tried in this order with the published settings


def updates_of_a_region(local_steps: int, environment: Environment, steps: int) -> float:
    """In a run of so many steps of all workers, whose jobs follow their speed."""
    workers = environment.world.workers
    fastest = min(w.step_s for w in workers)
    mean_steps = sum(max(1, ceil(local_steps * fastest / w.step_s)) for w in workers) / len(workers)
    return steps / mean_steps / len(environment.world.regions)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        result[key] = {**base[key], **value} if isinstance(value, dict) else value
    return result


def _data_parallel(random: Random) -> Settings:
    """Nothing but the learning rate: further rungs of the ladder."""
    return {"lr": round(random.uniform(2.5e-3, 2.4e-2), 4)}


def _diloco(random: Random) -> Settings:
    return {"sync_lr": random.choice((0.5, 0.7, 0.9, 1.0)), "sync_momentum": random.choice((0.5, 0.7, 0.8, 0.9))}


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


def _momentum(random: Random) -> Settings:
    return {
        "merge_alpha": random.choice((0.25, 0.5, 0.75)),
        "momentum_gain": random.choice((0.5, 1.0, 2.0, 3.0)),
        "momentum_share": random.choice((0.05, 0.1, 0.2)),
    }


METHODS = {
    m.name: m
    for m in (
        Method("data-parallel", "data parallel, fp32 flat ring", _data_parallel),
        Method("diloco", "DiLoCo H 32, fp32 flat ring", _diloco),
        Method("diloco-dylu", "DiLoCo + DyLU, fp32 flat ring", _diloco, "diloco-fair"),
        Method("diloco-fair", "DiLoCo + DyLU, hierarchical, 4 bit (fair)", _diloco),
        Method("async-local-sgd", "Async Local-SGD H 32", _async),
        Method("async-local-sgd-h128", "Async Local-SGD H 128", _async),
        Method("halos", "HALoS as published", _halos),
        Method("region-momentum", "ours: region momentum, ledger, 4 bit", _momentum),
    )
}
OURS = "region-momentum"
