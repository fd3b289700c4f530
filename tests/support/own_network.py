"""A small network of a user's own, and a run file for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import geotrain
from geotrain.config import RunConfig, load_run

STEP, STEPS, LOCAL_STEPS = 4, 12, 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def write_run(folder: Path, **outer: Any) -> RunConfig:
    geotrain.save_parameters(folder / "model.safetensors", network())
    run = {
        "name": "own",
        "folder": str(folder / "out"),
        "model": {"weights": "model.safetensors"},
        "data": {"train_samples": STEP * STEPS, "samples_per_step": STEP},
        "outer": {
            "local_steps": LOCAL_STEPS, "rule": {"name": "sync", "lr": 1.0, "momentum": 0.0},
            "up": {"name": "fp32"}, "down": {"name": "fp32"}, **outer,
        },
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    return load_run(folder / "run.json")
