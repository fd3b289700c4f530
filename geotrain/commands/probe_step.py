"""Measures how fast one host trains a run's model, by a short DeepSpeed job on all its accelerators, each a replica
of its own.

As a script, given to `deepspeed`, it is one rank of that job: python probe_step.py JOB, base64 of a JSON object.
"""

from __future__ import annotations

import base64
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from geotrain.config import ParallelConfig, RunConfig, parse
from geotrain.config.deepspeed import completed
from geotrain.launch.check import free_ports
from geotrain.launch.launchers.base import host_launcher
from geotrain.launch.launchers.ssh import over_ssh
from geotrain.launch.machine import this_machine
from geotrain.launch.supervisor import guarded, guarded_there

MICRO_BATCHES = 4
WARM_STEPS, MAX_STEPS, MIN_STEPS = 2, 20, 3
JOB_S = 600.0  # the whole job, imports and all
FULL = 0.9  # of the memory: as much as the job may need by the estimate
ANSWER = "probe-step: "


def reduced(run: RunConfig, slots: int, memory_bytes: float) -> RunConfig:
    """The run as one host can train it: pipelines left out, and as many layers as fit. Raises ConfigError."""
    from geotrain.parallelism.memory import memory_per_rank

    tensor = run.parallel.tensor if slots % run.parallel.tensor == 0 else 1
    context = run.parallel.context if slots % (tensor * run.parallel.context) == 0 else 1
    parallel = ParallelConfig(tensor=tensor, context=context, sequence=run.parallel.sequence and tensor > 1)
    micro = int(run.deepspeed["train_micro_batch_size_per_gpu"])
    whole = completed(run.deepspeed, run.total_steps)
    block = {k: v for k, v in whole.items() if k != "gradient_accumulation_steps"}
    block["train_batch_size"] = micro * MICRO_BATCHES * slots // parallel.replica_ranks
    layers, a = int(run.model.config["num_hidden_layers"]), run.architecture
    least = max(1, a.predicting, a.experts.dense_layers + 1 if a.experts else 1)
    while True:
        model = run.model.model_copy(update={"config": {**run.model.config, "num_hidden_layers": layers}})
        small = run.model_copy(update={"model": model, "parallel": parallel, "deepspeed": block, "acco": None})
        needed = memory_per_rank(
            small.architecture, parallel, slots, block, run.data.sequence_length, run.model.recompute
        )
        if needed.total_bytes <= FULL * memory_bytes or layers <= least:
            return small
        layers = max(least, layers // 2)


def run_step(
    run: Mapping[str, Any], slots: int, memory_bytes: float, seconds: float, env: Mapping[str, str], host: str | None
) -> dict[str, Any]:
    """Run a short training job on one host and return what it measured, as `main` prints it. host: where to run it,
    by ssh; None: here.

    Raises ConfigError, OSError when it fails: with the end of what it said.
    """
    config = reduced(parse(RunConfig, run, "run"), slots, memory_bytes)
    job = {"run": config.model_dump(by_alias=True, mode="json"), "seconds": seconds}
    text = base64.b64encode(json.dumps(job).encode()).decode()
    command: tuple[str, ...] = (
        *host_launcher({"localhost": range(slots)}, 0, "127.0.0.1", free_ports(1)[0]),
        *(str(Path(__file__).resolve()), text),
    )
    machine, settings, brings = this_machine(), {}, b""
    if not machine.devices:
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, machine.cores // slots)))
        settings = {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": threads}
    if host is not None:
        command, brings = guarded_there(command, env)
        command = over_ssh(host, None, command)
    else:
        command = guarded(command)
    where, environment = host or "this machine", {**os.environ, **settings, **env}
    pipe, stdout = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=stdout, text=True) as started:
        assert started.stdin is not None and started.stdout is not None
        timer = threading.Timer(JOB_S, started.stdin.close)  # then the guard ends the job, with all that it started
        timer.start()
        with suppress(BrokenPipeError):
            started.stdin.write(brings.decode())
            started.stdin.flush()
        said = started.stdout.read()
        late = timer.finished.is_set()
        timer.cancel()
    if late:
        raise OSError(f"{where}: the short training job did not end within {JOB_S:g} s")
    answers = [line.partition(ANSWER)[2] for line in said.splitlines() if ANSWER in line]
    if started.returncode or not answers:
        tail = "\n".join(said.splitlines()[-15:])
        raise OSError(f"{where}: the short training job of the run's model failed; it said:\n{tail}")
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer


def main() -> None:
    """One rank. Prints, as JSON: step_s: median of some steps, of the slowest rank. memory_bytes: of the fullest, at
    its peak; on the CPU the whole process. flops: arithmetic of a step, all ranks. layers: of the trained model."""
    import resource

    import torch
    import torch.distributed as dist

    from geotrain.data.loader import StepBatch
    from geotrain.inner.build import build_engine
    from geotrain.plan.model.work import stage_flops

    job = json.loads(base64.b64decode(next(a for a in sys.argv[1:] if not a.startswith("--"))))
    run = parse(RunConfig, job["run"], "job")
    engine = build_engine(run, run.parallel, run.deepspeed)
    sequence, micro = run.data.sequence_length, int(run.deepspeed["train_micro_batch_size_per_gpu"])
    vocabulary = engine.architecture.vocab_size
    drawn = torch.Generator().manual_seed(engine.dp_rank)
    batches = [torch.randint(0, vocabulary, (micro, sequence + 1), generator=drawn) for _ in range(MICRO_BATCHES)]
    times: list[float] = []
    begin = time.perf_counter()
    more = torch.ones(1)
    while more.item():
        dist.barrier()
        before = time.perf_counter()
        engine.train_step(StepBatch(batches, batches.__getitem__), 0).read()  # waits for the device
        times.append(time.perf_counter() - before)
        counted = len(times) - WARM_STEPS
        enough = counted >= MAX_STEPS or (counted >= MIN_STEPS and time.perf_counter() - begin > job["seconds"])
        more = torch.tensor([0.0 if enough else 1.0])
        # All ranks stop at the same step: a rank that went on alone would wait for the others for ever.
        dist.all_reduce(more, dist.ReduceOp.MIN, group=engine.mesh.control_group)
    cuda = engine.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if cuda else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worst = torch.tensor([statistics.median(times[WARM_STEPS:]), float(peak)], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=engine.mesh.control_group)
    a = engine.architecture
    flops = sum(stage_flops(a, sequence, range(a.layers), run.model.recompute))
    if os.environ.get("RANK", "0") == "0":
        found = {
            "step_s": worst[0].item(),
            "memory_bytes": int(worst[1].item()),
            "flops": flops * sequence * engine.train_batch_size(),
            "layers": a.layers,
        }
        print(ANSWER + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
