"""A real delta to code: what some steps of AdamW change in the studies' small model, trained on Python's sources."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.studies.learner.optimizers import FlatOptimizer
from benchmarks.studies.learner.text import standard_library
from benchmarks.studies.learner.training import Study

WARMUP_STEPS, LOCAL_STEPS, RATE = 100, 32, 1e-3


def train() -> dict[str, Tensor]:
    """anchor − weights of each parameter after LOCAL_STEPS of AdamW that follow WARMUP_STEPS: 0.8 M parameters."""
    study = Study(WARMUP_STEPS + LOCAL_STEPS, hidden=128, layers=4, ffn=344, batch=8, length=128)
    model = study.model()
    optimizer, anchor = FlatOptimizer(study.inner, model.parameters), model.flat
    for step in range(study.steps):
        if step == WARMUP_STEPS:
            anchor = model.flat.clone()
        samples = standard_library().samples(step * study.batch, study.batch, study.length, study.seed)
        model.backward(torch.from_numpy(samples))
        optimizer.step(model.flat, model.gradient, RATE)
    parts = (anchor - model.flat).split([p.numel for p in model.parameters])
    return {p.name: part.view(p.shape) for p, part in zip(model.parameters, parts, strict=True)}
