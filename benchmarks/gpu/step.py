"""The step of one worker over all GPUs of this machine: ZeRO-1 and ACCO, peak memory against the estimate; on one
GPU, the same model in a plain PyTorch loop, as transformers has it and as torchtitan does where that is installed.

As a program it is one rank of several: python -m benchmarks.gpu.step RUN.json STEPS ROWS.jsonl
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.gpu.rows import Tell, told_to
from benchmarks.small_runs import deepspeed_block
from geotrain.config import HostConfig, RunConfig, WorkerConfig, load_run

WARM_STEPS = 2  # kernels compile, buffers are allocated
ACCO = {"synchronous_steps": 0}


def over(run: Path, ranks: int, steps: int, rows: Path) -> None:
    """Measured by so many ranks, each a process with the GPU of its number; rank 0 appends the figures to the rows.
    Raises RuntimeError if one fails."""
    from geotrain.launch.check import free_ports

    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.step", str(run), str(steps), str(rows)],
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        # Whoever fails first ends the wait: the others would wait for it. The part's own limit ends all.
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started):
                raise RuntimeError("a rank of the worker failed; see its words above")
            time.sleep(0.2)
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(run: RunConfig, steps: int, tell: Tell) -> None:
    """This process as one of the worker's ranks, RANK and the like being in the environment. The figures are told in
    the order of their worth, each as soon as it is known."""
    from geotrain.inner.runtime import parallel
    from geotrain.monitor.utilization import training_flops_per_token
    from geotrain.plan.model.memory import rank_memory

    ranks = int(os.environ["WORLD_SIZE"])
    plain = run.model_copy(update={"acco": None})
    zero1 = timed(plain, steps)
    tokens = run.samples_per_step * run.data.sequence_length
    flops = tokens * training_flops_per_token(run.architecture, run.data.sequence_length)
    worker = WorkerConfig(name="here", hosts=(HostConfig(host="localhost", slots=ranks),))
    estimate = rank_memory(plain, run.architecture, worker)
    estimated = sum(size for part, size in estimate.items() if part != "outer")  # which does not run here
    tell("step.ranks", ranks)
    tell("step.zero1_step_s", zero1["step_s"])
    tell("step.tokens_per_s", tokens / zero1["step_s"])
    tell("step.tflops_per_rank", flops / zero1["step_s"] / ranks / 1e12)
    tell("step.estimated_bytes", estimated)
    if zero1["peak_bytes"]:
        tell("step.peak_bytes", zero1["peak_bytes"])
        tell("step.memory_over_estimate", zero1["peak_bytes"] / estimated)
    if ranks == 1:
        for name, seconds in plain_step_s(run, steps):
            tell(f"step.{name}_step_s", seconds)
            tell(f"step.vs_{name}", seconds / zero1["step_s"])
    overlapped = timed(run, steps)
    tell("step.acco_step_s", overlapped["step_s"])
    tell("step.acco_speedup", zero1["step_s"] / overlapped["step_s"])
    parallel.shut_down()


def timed(run: RunConfig, steps: int) -> dict[str, float]:
    """step_s: of the median step. peak_bytes: of torch's allocations, 0 on a CPU."""
    import torch
    import torch.distributed as dist

    from geotrain.data.loader import StepBatch
    from geotrain.inner.build import build_engine
    from geotrain.inner.runtime import parallel

    engine = build_engine(run, run.parallel, run.deepspeed)
    cuda = engine.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    drawn = torch.Generator().manual_seed(engine.dp_rank)
    micro = int(run.deepspeed["train_micro_batch_size_per_gpu"])
    shape = micro, run.data.sequence_length + 1
    count = run.samples_per_step // (micro * engine.dp_size)
    batches = [torch.randint(0, engine.architecture.vocab_size, shape, generator=drawn) for _ in range(count)]
    times = []
    for step in range(WARM_STEPS + steps):
        dist.barrier()
        begin = time.perf_counter()
        engine.train_step(StepBatch(batches, batches.__getitem__), step)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    engine.settle()
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    engine.close()
    del engine
    gc.collect()
    parallel.shut_down(leave_world=False)
    return {"step_s": statistics.median(times[WARM_STEPS:]), "peak_bytes": peak}


def plain_step_s(run: RunConfig, steps: int) -> Iterator[tuple[str, float]]:
    """Whose model a plain PyTorch loop trains, and the seconds of its median step: fp32 weights under autocast to
    bf16, torch's fused AdamW, gradients clipped; as many tokens, none of them padded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.gpu import titan
    from benchmarks.throughput import torch_step

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length, config = run.data.sequence_length, AutoConfig.for_model(**run.model.config)

    def of_transformers() -> torch.nn.Module:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        return model.to(device)

    makers = {"torch": of_transformers}
    if titan.installed():
        makers["torchtitan"] = lambda: titan.Titan(run.architecture, length, device)
    micro = int(run.deepspeed["train_micro_batch_size_per_gpu"])
    shape = run.samples_per_step // micro, micro, length + 1
    drawn = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    for name, make in makers.items():
        step, times = torch_step(make().train(), list(drawn.to(device))), []
        for _ in range(WARM_STEPS + steps):
            begin = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16):
                step()  # ends with the loss on the host
            times.append(time.perf_counter() - begin)
        yield name, statistics.median(times[WARM_STEPS:])


def run_file(folder: Path, model: Path, sequence: int, micro_batch: int, micro_batches: int, ranks: int) -> Path:
    """A run of this model, in bf16 with ZeRO-1, AdamW and ACCO; its data is never read."""
    batch = micro_batch * micro_batches * ranks
    raw: dict[str, Any] = {
        "name": "gpu",
        "model": {"config": str(model)},
        "data": {"train": str(folder / "none"), "sequence_length": sequence, "train_samples": 1000 * batch},
        "deepspeed": deepspeed_block(batch, micro_batch, 1e-4, bf16={"enabled": True}),
        "acco": ACCO,
    }
    path = folder / "gpu.json"
    path.write_text(json.dumps(raw))
    return path


def main() -> None:
    run, steps, rows = sys.argv[1:]
    tell = told_to(Path(rows)) if os.environ["RANK"] == "0" else lambda metric, value: None
    measure(load_run(run), int(steps), tell)


if __name__ == "__main__":
    main()
