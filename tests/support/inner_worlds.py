"""Small worlds of CPU ranks for tests: start n processes, run a function on each, collect what they return."""

from __future__ import annotations

import gc
import os
import pickle
import queue
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import TCPStore

from geotrain.config import (
    AccoConfig,
    Architecture,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    architecture_from_hf,
)
from geotrain.parameters.parameter_map import StridedSlice, canonical_parameters
from tests.support.forks import FORKS, preload

SEQUENCE = 16
VOCABULARY = 96
BATCH = 8

LLAMA = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip
QWEN = {**LLAMA, "model_type": "qwen3", "head_dim": 12, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
QWEN_2 = {**QWEN, "num_hidden_layers": 2}  # of two layers
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}}


# torch imports its compiler when the first engine is built.
preload("geotrain.inner.build", "geotrain.checkpoint.saving", "torch._inductor", __name__)


def run_world(
    ranks: int, task: Callable[..., Any], *args: Any, deadline_s: float = 560.0, lost: Collection[int] = ()
) -> list[Any]:
    """task(*args) on each rank of a new world; its results by rank. Fails with the first rank's traceback.

    lost: ranks that will not answer; their result is None.
    """
    # It has its port from the start: one that was free before may be taken when rank 0 has imported torch.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers: Any = FORKS.Queue()
    workers = [
        FORKS.Process(target=_rank, args=(answers, rank, ranks, store.port, task, args), daemon=True)
        for rank in range(ranks)
    ]
    until = time.monotonic() + deadline_s
    results: dict[int, Any] = {}
    try:
        for worker in workers:
            worker.start()
        while len(results) < ranks - len(lost):
            try:
                rank, error, value = answers.get(timeout=max(0.1, until - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"ranks {sorted(set(range(ranks)) - set(results) - set(lost))} are late") from None
            if error:
                raise AssertionError("\n".join([f"rank {rank}:\n{error}", *_others(answers, workers)]))
            results[rank] = pickle.loads(value)
        for rank in results:
            workers[rank].join(timeout=max(0.1, until - time.monotonic()))
            assert workers[rank].exitcode == 0, f"a rank ended with {workers[rank].exitcode}"
        return [results.get(rank) for rank in range(ranks)]
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            if worker.pid:
                worker.join()


def _others(answers: Any, workers: list[Any]) -> list[str]:
    """What other ranks fail with soon after the first, or were killed by: who lost a rank often says so first."""
    found = []
    with suppress(queue.Empty):
        while True:
            rank, error, _ = answers.get(timeout=5.0)
            found += [f"rank {rank}:\n{error}"] if error else []
    return found + [f"rank {n} ended with {w.exitcode}" for n, w in enumerate(workers) if w.exitcode]


def _rank(answers: Any, rank: int, ranks: int, port: int, task: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    torch.set_num_threads(1)
    gc.freeze()  # what the parent has imported is never collected
    try:
        value = task(*args)
        from geotrain.inner.runtime.parallel import shut_down

        shut_down()
        answers.put((rank, None, pickle.dumps(value)))  # by value: a tensor's shared memory dies with its rank
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))


def deepspeed_block(stage: int, micro: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 40, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def run_config(
    model: dict[str, Any], block: dict[str, Any], recompute: Any = "none", acco: AccoConfig | None = None
) -> RunConfig:
    return RunConfig(
        name="test",
        model=ModelConfig(config=model, init_from=None, recompute=recompute),
        data=DataConfig(train="none", validation=None, tokenizer=None, sequence_length=SEQUENCE, train_samples=1000),
        deepspeed=block,
        acco=acco,
    )


def start(
    model: dict[str, Any],
    parallel: ParallelConfig,
    block: dict[str, Any],
    recompute: str = "none",
    acco: AccoConfig | str | None = None,
    precision: PrecisionConfig | None = None,
    end_of_document: int | None = None,
) -> Any:
    """Build an engine with the canonical test weights. acco: settings, or a form that predicts from step 1 on."""
    from geotrain.inner.build import build_engine

    if isinstance(acco, str):
        acco = AccoConfig(form=acco, synchronous_steps=1)  # type: ignore[arg-type]
    gc.collect()  # the threads of a former engine's groups, two dozen that look for work all the time, end with it
    run = run_config(model, block, recompute, acco)
    engine = build_engine(run, parallel, block, 120, end_of_document=end_of_document, precision=precision)
    write(engine, canonical_weights(engine.architecture))
    return engine


def stop(engine: Any) -> None:
    from geotrain.inner.runtime.parallel import shut_down

    engine.close()
    shut_down(leave_world=False)


def canonical_weights(architecture: Architecture, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        p.name: torch.randn(p.shape, generator=generator) * (0.1 if p.init == "zeros" else p.init_std)
        + (1 + 0.1 * torch.randn(p.shape, generator=generator) if p.init == "ones" else 0)
        for p in canonical_parameters(architecture)
    }


def at(flat: torch.Tensor, run: StridedSlice) -> torch.Tensor:
    """The [count, length] view of a run in its flattened canonical parameter."""
    return torch.as_strided(flat, (run.count, run.length), (run.stride or run.length, 1), run.start)


def write(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    for shard in engine.shards():
        shard.master.copy_(torch.cat([at(weights[run.parameter].view(-1), run).reshape(-1) for run in shard.runs]))
    engine.refresh()


def pushed(engine: Any) -> list[tuple[StridedSlice, torch.Tensor]]:
    """Runs, with their values, that this rank pushes."""
    result = []
    for shard in engine.shards():
        if shard.pushes:
            values = shard.master.clone().split([run.numel for run in shard.runs])
            result += list(zip(shard.runs, values, strict=True))
    return result


def assemble(
    architecture: Architecture, ranks: list[list[tuple[StridedSlice, torch.Tensor]]]
) -> dict[str, torch.Tensor]:
    """The canonical weights from what all ranks push; fails unless every element is pushed exactly once."""
    weights = {p.name: torch.zeros(p.numel) for p in canonical_parameters(architecture)}
    seen = {name: torch.zeros(flat.numel(), dtype=torch.int) for name, flat in weights.items()}
    for runs in ranks:
        for run, values in runs:
            at(weights[run.parameter], run).copy_(values.view(run.count, run.length))
            at(seen[run.parameter], run).add_(1)
    for name, count in seen.items():
        assert (count == 1).all(), f"{name}: pushed {sorted(set(count.tolist()))} times"
    return weights


def batch(step: int) -> torch.Tensor:
    """The worker's batch of a step, int64 [BATCH, SEQUENCE + 1]; learnable: few sequences come again and again."""
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step % 3))


class Given(list[torch.Tensor]):
    """This replica's micro-batches as a step reader: those of other replicas cannot be had."""

    @property
    def own(self) -> Sequence[torch.Tensor]:
        return self

    def micro_batch(self, i: int) -> torch.Tensor:
        raise AssertionError("replicas share no batch here")


def micro_batches(engine: Any, step: int) -> Given:
    mine = batch(step).chunk(engine.dp_size)[engine.dp_rank]
    return Given(mine.split(engine.train_micro_batch_size_per_gpu()))


def train(engine: Any, steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    results = [engine.train_step(micro_batches(engine, step), step) for step in steps]
    return [(result.loss, result.grad_norm) for result in results]


def architecture(model: dict[str, Any]) -> Architecture:
    return architecture_from_hf(model)


def masters(engine: Any) -> torch.Tensor:
    engine.settle()
    return torch.cat([shard.master for shard in engine.shards()])
