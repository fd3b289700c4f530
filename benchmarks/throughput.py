"""The engine's speed over a plain PyTorch loop's, and how much of data parallelism's communication it hides.

`dense_vs_torch`, `moe_vs_torch`: tokens a second of one rank of the engine (fp32, AdamW, no ZeRO) over those of
transformers' own model of the same weights with torch's fused AdamW: in one process, on the same threads and batches,
alternating. Their first losses must agree.

`hidden_communication`: two ranks with ZeRO-1 in network namespaces joined by an emulated link (needs root) over
which gradients, and weights, take a fourth of a micro-batch's compute each. In seconds a step, (communication after
the compute − beside it) over (after it − none at all): 1 is everything. Most of the compute is waited for, layer by
layer, as a host waits for its accelerator: where both cores compute, what gloo and the emulated link take of them
can be hidden behind nothing, and the figure would be theirs.

    python -m benchmarks.throughput [--quick] [--only dense|moe|hidden] [--record]
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import command_line, ratio, report, spread, units_by_ending
from benchmarks.hide.__main__ import run as run_ranks
from benchmarks.hide.ranks import Job, Size, model_config, write
from benchmarks.processes import be_only_rank
from benchmarks.small_runs import deepspeed_block, llama
from geotrain.config import LinkConfig, architecture_from_hf
from geotrain.emulate.wan import cannot_emulate
from geotrain.parameters.parameter_map import parameter_count

SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 256, 4, 2
DENSE = llama(
    384, 4, 6, 1024, 2048, SEQUENCE, head_dim=64, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False
)
MOE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}
MODELS = {"dense": DENSE, "moe": MOE}
SETTINGS: dict[str, Any] = {
    "lr": 1e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
}  # of `deepspeed_block`
CLIP = 1.0
HIDDEN = Size(192, 8, 512, 128, 2, 2)  # 3.6 M parameters, a micro-batch of 256 tokens
MICRO_BATCH_S = 0.4  # of which its arithmetic takes a fourth, on two cores that have nothing else to do
SHARE = 0.25  # of a micro-batch's compute that gradients, and weights, take over the link


def main() -> None:
    parser = command_line(__doc__, quick={"rounds": 1})
    parser.add_argument("--rounds", type=int, default=14, help="of each comparison")
    parser.add_argument("--only", choices=(*MODELS, "hidden"), action="append")
    args = parser.parse_args()
    parts = args.only or (*MODELS, "hidden")
    result: dict[str, Any] = {}
    if "hidden" in parts:
        if reason := cannot_emulate():
            sys.exit(f"the link cannot be emulated here: {reason}; --only dense --only moe works without")
        result |= hidden(-(-args.rounds // 2))
    for name in MODELS:
        if name in parts:
            result |= against_torch(name, args.rounds)
    units = units_by_ending({"tokens_per_s": "tokens/s", "_s": "s", "gbps": "Gbit/s"}, "ratio")
    report("throughput", result, args, units)


def hidden(rounds: int) -> dict[str, float]:
    one_way_bytes = 4 * parameter_count(architecture_from_hf(model_config(HIDDEN))) / 2  # a rank of two sends half
    rate = one_way_bytes / (SHARE * MICRO_BATCH_S)
    link = LinkConfig(regions=("here", "there"), gbps=8e-9 * rate, rtt_ms=1.0)
    seen = run_ranks(Job("hidden", HIDDEN, rounds=rounds, bf16=False, hold_s=MICRO_BATCH_S, optimizer="adamw"), link)
    after, beside, without = (seen[name] for name in ("after", "beside", "without"))
    shares = [(a - b) / (a - w) for a, b, w in zip(after, beside, without, strict=True)]
    return {
        **spread("hidden_communication", shares),
        "after_s": statistics.median(after),
        "beside_s": statistics.median(beside),
        "without_s": statistics.median(without),
        "link_gbps": link.gbps,
    }


def against_torch(name: str, rounds: int) -> dict[str, float]:
    import torch

    if "RANK" not in os.environ:
        be_only_rank()
    from geotrain.inner.runtime.parallel import shut_down

    batches = [
        torch.randint(0, DENSE["vocab_size"], (MICRO_BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(i))
        for i in range(MICRO_BATCHES)
    ]
    engine, model = engine_and_model(MODELS[name])
    there = engine.device  # both compute on it, also on a GPU
    ours, theirs = engine_step(engine, batches), torch_step(model.to(there), [each.to(there) for each in batches])
    first = ours(), theirs()
    if not math.isclose(*first, rel_tol=1e-4):
        sys.exit(f"{name}: the engine's first loss is {first[0]}, torch's {first[1]}: these are not the same models")
    ours(), theirs()
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for i in range(rounds):
        for what, step in (("ours", ours), ("theirs", theirs))[:: 1 if i % 2 else -1]:
            begin = time.perf_counter()
            step()
            times[what].append(time.perf_counter() - begin)
    engine.close()
    shut_down(leave_world=False)
    tokens = MICRO_BATCHES * MICRO_BATCH * SEQUENCE
    return {
        **ratio(f"{name}_vs_torch", times["theirs"], times["ours"]),
        f"{name}_tokens_per_s": tokens / statistics.median(times["ours"]),
        f"{name}_torch_tokens_per_s": tokens / statistics.median(times["theirs"]),
    }


def engine_and_model(config: dict[str, Any]) -> tuple[Any, Any]:
    """GeoEngine and transformers' model, with the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from geotrain.config import DataConfig, ModelConfig, ParallelConfig, RunConfig
    from geotrain.inner.build import build_engine
    from geotrain.parameters.hf_export import write_checkpoint
    from geotrain.parameters.parameter_map import canonical_parameters

    block = deepspeed_block(MICRO_BATCHES * MICRO_BATCH, MICRO_BATCH, SETTINGS["lr"], zero_optimization={"stage": 0})
    data = DataConfig(train="-", validation=None, tokenizer=None, sequence_length=SEQUENCE, train_samples=1 << 20)
    model = ModelConfig(config=config, init_from=None, recompute="none")
    run = RunConfig(name="throughput", model=model, data=data, deepspeed=block)
    engine = build_engine(run, ParallelConfig(), block)
    generator = torch.Generator().manual_seed(0)
    weights = {
        p.name: torch.ones(p.shape) if p.init == "ones" else p.init_std * torch.randn(p.shape, generator=generator)
        for p in canonical_parameters(engine.architecture)
    }
    write(engine, weights)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(weights.items(), config, Path(folder) / "out", None, "float32")
        theirs = AutoModelForCausalLM.from_pretrained(Path(folder) / "out", dtype=torch.float32)
    return engine, theirs.train()


def engine_step(engine: Any, batches: list[Any]) -> Callable[[], float]:
    from geotrain.data.loader import StepBatch

    batch = StepBatch(batches, batches.__getitem__)
    return lambda: float(engine.train_step(batch, 0).loss)


def torch_step(model: Any, batches: list[Any]) -> Callable[[], float]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)

    def step() -> float:
        total = 0.0
        for tokens in batches:
            logits = model(tokens[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / len(batches)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


if __name__ == "__main__":
    main()
