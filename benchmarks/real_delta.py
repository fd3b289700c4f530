"""A real delta to code: what some steps of AdamW change in the studies' small model, trained on Python's sources."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.studies.learner.optimizers import Stacked, StackedOptimizer
from benchmarks.studies.learner.text import carried_text
from benchmarks.studies.learner.training import Study

WARMUP_STEPS, LOCAL_STEPS, RATE = 100, 32, 1e-3


def train() -> dict[str, Tensor]:
    """anchor − weights of each parameter after LOCAL_STEPS of AdamW that follow WARMUP_STEPS: 0.8 M parameters."""
    study = Study(WARMUP_STEPS + LOCAL_STEPS, hidden=128, layers=4, ffn=344, batch=8, length=128)
    model = study.model()
    optimizer, models, anchor = (
        StackedOptimizer(study.inner, model.parameters),
        Stacked.of(model.start, 1),
        model.start,
    )
    rates = torch.full((1,), RATE, dtype=torch.float64)
    for step in range(study.steps):
        if step == WARMUP_STEPS:
            anchor = models.weights[0].clone()
        samples = carried_text().samples(step * study.batch, study.batch, study.length, study.seed)
        _, gradients = model.gradients(models.weights, torch.from_numpy(samples)[None])
        optimizer.step(models, gradients, rates)
    parts = model.parts(anchor - models.weights[0])
    return {p.name: parts[p.name].view(p.shape) for p in model.parameters}
