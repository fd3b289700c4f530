"""Promises of one engine besides its curve: rates, refusals, DeepSpeed's own features, quiet."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from geotrain.config import ConfigError, ParallelConfig
from geotrain.parameters.parameter_map import parameter_count
from tests.support.inner_worlds import (
    BATCH,
    LLAMA,
    QWEN,
    SEQUENCE,
    Given,
    canonical_weights,
    deepspeed_block,
    micro_batches,
    run_config,
    run_world,
    start,
    stop,
    train,
    write,
)


def one_rank(folder: str) -> dict[str, Any]:
    from geotrain.inner.build import build_engine

    seen: dict[str, Any] = {}
    with pytest.raises(ConfigError, match="tensor 2"):  # of what else is refused, see test_layout.py
        build_engine(run_config(LLAMA, deepspeed_block(1)), ParallelConfig(tensor=2), deepspeed_block(1))
    said, logged = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        engine = start(QWEN, ParallelConfig(), deepspeed_block(1))
    seen["noise"] = said.getvalue()
    seen["about"] = (
        engine.rank,
        engine.dp_rank,
        engine.dp_size,
        engine.is_metrics_rank,
        parameter_count(engine.architecture) == sum(s.numel for s in engine.shards()),
    )
    seen["rates"] = [engine.train_step(micro_batches(engine, 0), step).lr for step in (2, 3, 30, 30, 39, 10_000)]
    result = engine.train_step(micro_batches(engine, 0), 0)
    seen["tokens"] = result.tokens
    seen["errors"] = []
    good = micro_batches(engine, 0)
    for bad in (good[:-1], [*good[:-1], good[-1][:, :-1]], [*good[:-1], good[-1].int()]):
        try:
            engine.train_step(Given(bad), 0)
        except ValueError as error:
            seen["errors"].append(str(error))

    before = engine.evaluate(good)
    masters = [shard.master.clone() for shard in engine.shards()]
    for shard in engine.shards():
        shard.master.zero_()
    unrefreshed = engine.evaluate(good)
    engine.refresh()
    empty = engine.evaluate(good)
    for shard, master in zip(engine.shards(), masters, strict=True):
        shard.master.copy_(master)
    engine.refresh()
    seen["evaluations"] = (before, unrefreshed, empty, engine.evaluate(good))
    stop(engine)

    watched = deepspeed_block(
        1,
        wall_clock_breakdown=True,
        steps_per_print=1,
        log_level="info",
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"},
    )
    handler = logging.StreamHandler(logged)
    logging.getLogger("DeepSpeed").addHandler(handler)
    engine = start(QWEN, ParallelConfig(), watched)
    with contextlib.redirect_stdout(logged):
        seen["losses"] = [loss for loss, _ in train(engine, range(3))]
    logging.getLogger("DeepSpeed").removeHandler(handler)
    seen["log"] = logged.getvalue()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    stop(engine)

    seen["norms"], seen["small"], seen["threads"] = [], [], []
    for stage in (0, 1, 2):
        engine = start(LLAMA, ParallelConfig(), deepspeed_block(stage, gradient_clipping=0.0))
        with mock.patch.object(dist, "all_reduce", mock.Mock(side_effect=dist.all_reduce)) as reduce:
            seen["norms"].append(engine.train_step(micro_batches(engine, 0), 0).grad_norm)
        write(engine, canonical_weights(engine.architecture))
        few = Given(micro_batches(engine, 0)[:1])  # of four, as early in a batch that grows
        engine.set_train_batch_size(len(few[0]))
        small = engine.train_step(few, 1)
        seen["small"].append((small.grad_norm, small.loss, small.tokens))
        if stage == 0:
            seen["reduced"] = [call.args[0].numel() for call in reduce.call_args_list]
        expected = torch.stack([p.grad.norm() for p in gradients(engine, micro_batches(engine, 0))]).norm()
        seen["norms"].append(float(expected))
        found = gradients(engine, few)
        loss = engine.evaluate(few)
        seen["small"].append((float(torch.stack([p.grad.norm() for p in found]).norm()), loss, few[0].numel() - 2))
        stop(engine)
        del engine
        gc.collect()
        seen["threads"].append(len([*Path("/proc/self/task").iterdir()]))
    return seen


def gradients(engine: Any, batch: list[torch.Tensor]) -> list[torch.nn.Parameter]:
    """The parameters with the whole batch's gradients, by plain autograd."""
    from geotrain.inner.runtime import platform

    engine.module.zero_grad()
    hooks = engine.optimizer._grad_acc_hooks if hasattr(engine.optimizer, "_grad_acc_hooks") else []
    for hook in hooks:
        hook.remove()
    write(engine, canonical_weights(engine.architecture))
    tokens = torch.cat(batch)
    with platform.megatron_runtime():
        engine.module(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean().backward()
    return list(engine.module.parameters())


def test_one_engine(tmp_path: Path) -> None:
    (seen,) = run_world(1, one_rank, str(tmp_path))
    assert seen["noise"] == ""
    assert seen["about"] == (0, 0, 1, True, True)

    def rate(step: int) -> float:  # WarmupCosineLR: logarithmic warm-up over 4 steps, cosine to 1e-4 of it at 40
        if step < 4:
            return 5e-3 * math.log(step + 1) / math.log(4)
        progress = min(1.0, (step - 4 + 1) / 36)
        return 5e-3 * (1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * progress)) / 2)

    assert seen["rates"] == pytest.approx([rate(step) for step in (2, 3, 30, 30, 39, 10_000)])
    assert seen["tokens"] == BATCH * SEQUENCE
    assert "takes 4 micro-batches on each replica, not 3" in seen["errors"][0]
    assert "(2, 17)" in seen["errors"][1] and "(2, 16)" in seen["errors"][1]
    assert "int64" in seen["errors"][2] and "int32" in seen["errors"][2]

    before, unrefreshed, empty, after = seen["evaluations"]
    assert before == unrefreshed == after, "masters count from refresh() on, and evaluation changes nothing"
    assert empty == pytest.approx(math.log(LLAMA["vocab_size"]))  # type: ignore[call-overload]

    rows = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().split()[1:]
    assert [float(row.split(",")[1]) for row in rows] == pytest.approx(seen["losses"])
    assert (tmp_path / "job" / "Train_Samples_lr.csv").exists()
    assert "step=3" in seen["log"] and "fwd" in seen["log"]

    # Who has no replicas reduces no gradients: numbers of a micro-batch's tokens are the most.
    assert seen["reduced"] and max(seen["reduced"]) <= 2 * SEQUENCE
    for measured, expected in zip(seen["norms"][::2], seen["norms"][1::2], strict=True):
        assert measured == pytest.approx(expected, rel=1e-4)
    for measured, expected in zip(seen["small"][::2], seen["small"][1::2], strict=True):
        assert measured == pytest.approx(expected, rel=1e-4), "of a small batch, as the whole one"
    assert seen["threads"][0] == seen["threads"][2], "the process groups of engines that are closed are gone"


def test_imports_leave_torch_as_it_was() -> None:
    """The CPU stand-ins must not leak into the process."""
    import geotrain.inner.build  # noqa: F401
    from geotrain.inner.runtime import platform

    if platform.HAS_CUDA:
        pytest.skip("nothing is replaced where there is CUDA")
    original = torch.cuda.current_device, torch.zeros, torch.Tensor.cuda
    with platform.megatron_runtime():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2).cuda().device.type == "cpu"
        assert torch.ones(3, device=torch.cuda.current_device()).sum() == 3
    assert (torch.cuda.current_device, torch.zeros, torch.Tensor.cuda) == original
    if not torch.cuda.is_available():  # HAS_CUDA says what ranks use
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2, device="cuda")


def test_a_rank_on_a_cpu_starts_without_what_it_does_not_use() -> None:
    """Torch's compiler and the boards take half of the time. Whoever asks for them afterwards gets them."""
    code = (
        "import importlib.util, sys, torch; real = torch.compile; import geotrain.inner.build; "
        "assert torch.compile is real; assert 'torch._inductor.compile_fx' not in sys.modules; "
        "boards = 'tensorboard', 'torch.utils.tensorboard', 'wandb'; assert not set(boards) & set(sys.modules); "
        "assert all(map(importlib.util.find_spec, boards))"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=True, timeout=500)
