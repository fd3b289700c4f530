"""A training of the engine to its end, on real ranks: what `benchmarks.hide.layouts` compares."""

from __future__ import annotations

import torch

from benchmarks.hide.ranks import WAYS, Job, Lesson, model_config, write
from benchmarks.small_runs import deepspeed_block
from geotrain.config import AccoConfig, DataConfig, ModelConfig, ParallelConfig, RunConfig
from geotrain.data.loader import StepBatch
from geotrain.inner.build import build_engine
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import canonical_parameters


def loss_of(job: Job, lesson: Lesson, text: torch.Tensor) -> float:
    """Held-out loss after a training on the text's bytes. All ranks of the job must call it."""
    size, way = job.size, WAYS[job.ways[0]]
    config, parallel = model_config(size), ParallelConfig(tensor=2)
    if lesson.layout == "experts":
        more = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
        config, parallel = {**config, **more, "router_aux_loss_coef": 0.02}, ParallelConfig()
    replicas = job.ranks // parallel.tensor
    batch, held_out = size.samples * replicas, 160
    zero = {"stage": 1} | (dict(zip(("gradient_bits", "weight_bits"), way.bits, strict=True)) if way.bits else {})
    name = {"muon": "Muon", "adamw": "AdamW"}[job.optimizer]
    params = {"lr": lesson.rate, "betas": [0.9, 0.95], "weight_decay": 0.1}
    block = deepspeed_block(batch, size.samples, lesson.rate, zero_optimization=zero, steps_per_print=None)
    schedule = {"total_num_steps": lesson.steps, "warmup_num_steps": lesson.steps // 10, "cos_min_ratio": 0.1}
    block |= {
        "optimizer": {"type": name, "params": params},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
    }
    run = RunConfig(
        name="lesson",
        model=ModelConfig(config=config, init_from=None),
        data=DataConfig(
            train="none", validation=None, tokenizer=None, sequence_length=size.sequence,
            train_samples=batch * lesson.steps,
        ),
        deepspeed=block,
        acco=AccoConfig(form=way.form, synchronous_steps=lesson.steps // 6) if way.form else None,
    )  # fmt: skip
    engine = build_engine(run, parallel, block, 120.0)
    write(engine, {p.name: initial_tensor(p, lesson.seed) for p in canonical_parameters(engine.architecture)})
    border = int(0.98 * len(text))

    def drawn(low: int, high: int, count: int, key: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * lesson.seed + key)
        starts = torch.randint(low, high - size.sequence - 1, (count,), generator=generator).tolist()
        rows = torch.stack([text[i : i + size.sequence + 1] for i in starts]).long()
        return list(rows.chunk(replicas)[engine.dp_rank].split(size.samples))

    for step in range(lesson.steps):
        batches = drawn(0, border, batch, step)
        engine.train_step(StepBatch(batches, batches.__getitem__), step)
    return float(engine.evaluate(drawn(border, len(text), held_out, lesson.steps)))
