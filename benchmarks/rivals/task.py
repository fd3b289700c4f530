"""Describe what is trained, the same for all methods: model, text, order of the data, learning rate. Imports torch
when asked, and nothing of GeoTrain: the rivals' environment does not have it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.small_runs import llama

REGIONS = ("eu", "us")
LAYERS = 4
MODEL = llama(
    160, LAYERS, 4, 576, 256, 256, num_key_value_heads=2, head_dim=40, rms_norm_eps=1e-5, initializer_range=0.02,
    architectures=["LlamaForCausalLM"],
)  # fmt: skip
FRAGMENTS = 2  # of the methods that send the model in parts: layers 0-1, layers 2-3
LENGTH, BATCH, LOCAL_STEPS = 64, 4, 32
RATE = 7e-4  # where plain averaging ends lowest, of 5e-4 to 3e-3: docs/comparison.md
WARMUP, LEAST_RATE = 0.1, 0.1  # shares of the run, of the rate
OVERLAP_STEPS = 10  # τ of the methods that train on while they exchange


@dataclass(frozen=True)
class Task:
    """One worker's part of a run. method: a key of `methods.METHODS`. steps: of each worker; for how long it trains.
    schedule_steps: of a whole run, which sets the rate. folder: of the run, for marks and results. addresses: of the
    regions. alone_steps: trained without communication before and after. seed: of the order of the data. rate: the
    highest of the schedule."""

    method: str
    folder: str
    data: str
    steps: int
    schedule_steps: int
    alone_steps: int
    seed: int
    addresses: dict[str, str]
    ports: list[int] = field(default_factory=list)
    rate: float = RATE
    snapshot_every: int = LOCAL_STEPS

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Task:
        return cls(**json.loads(path.read_text()))


def rate_at(progress: float, highest: float) -> float:
    """The learning rate at a share of the run: a warm-up, then a cosine down to a tenth."""
    if progress < WARMUP:
        return highest * progress / WARMUP
    share = min(1.0, (progress - WARMUP) / (1 - WARMUP))
    return highest * (LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share)))


def samples_of(worker: int, steps: int) -> Iterator[range]:
    """The run's sample numbers of each step of a worker: in each round of H steps, the workers' parts stand one after
    another, as GeoTrain's synchronous rounds are dealt."""
    for step in range(steps):
        job, within = divmod(step, LOCAL_STEPS)
        first = ((job * len(REGIONS) + worker) * LOCAL_STEPS + within) * BATCH
        yield range(first, first + BATCH)


def new_model(weights: Path | None = None, seed: int = 0) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    if weights is not None:
        load(model, weights)
    return model


def load(model: Any, weights: Path) -> None:
    """Copy the parameters of a safetensors file into the model."""
    import torch
    from safetensors.torch import load_file

    values = load_file(weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def save(parameters: Any, path: Path) -> None:
    """Write (name, parameter) pairs as a safetensors file."""
    from safetensors.torch import save_file

    save_file({name: value.detach().clone().contiguous() for name, value in parameters}, path)
