"""Traces a step of the real engine: Megatron-core's model, DeepSpeed's engine, the optimizer's arithmetic, for a rank
of any worker, with torch's fake process group.

`on_meta` changes what libraries read when they are imported, so it is for a process of its own (`benchmarks.trace`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.trace.recorder import Recorder, fused, recorded
from geotrain.config import ParallelConfig, RunConfig

META = torch.device("meta")


@dataclass(frozen=True)
class Traced:
    """A step of one rank. launches: by phase and name; flops: of products, by phase; waits: (phase, what the host
    waits for).

    Phases: `compute` is forward and backward of the micro-batches with the sum of gradients, `exchange` what the
    ranks of ZeRO-1 do to send gradients and weights, `optimizer` the rest.
    """

    launches: Counter[tuple[str, str]]
    flops: Counter[str]
    waits: list[tuple[str, str]]

    def total(self, phase: str = "compute") -> Figures:
        """(launches, FLOPs of products, waits) of a phase."""
        launches = sum(count for (of, _), count in self.launches.items() if of == phase)
        return Figures(launches, self.flops[phase], sum(of == phase for of, _ in self.waits))


class Figures(NamedTuple):
    launches: int
    product_flops: int
    waits: int

    def less(self, other: Figures) -> Figures:
        return Figures(*(own - others for own, others in zip(self, other, strict=True)))


@contextmanager
def on_meta() -> Iterator[None]:
    """A context in which the engine takes "meta" for its GPU. Enter it before DeepSpeed and Megatron-core are
    imported."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from geotrain.inner.runtime import platform

    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(platform, "HAS_CUDA", True)
        replace(platform, "device", lambda: META)
        replace(platform, "backend", lambda: "fake")
        replace(platform, "compile_no_ops", lambda: None)
        replace(torch, "compile", fused)
        replace(torch.cuda, "set_device", lambda device: None)
        replace(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        replace(nn.functional, "rms_norm", fused(nn.functional.rms_norm))
        replace(nn.functional, "scaled_dot_product_attention", _attention)
        import deepspeed.ops
        from deepspeed.accelerator import get_accelerator

        from geotrain.inner.model import attention, model

        replace(deepspeed.ops, "__compatible_ops__", {})
        for name in ("device_name", "current_device_name", "current_device", "device"):
            replace(
                get_accelerator(), name, lambda index=None, kind=str if name != "device" else torch.device: kind(META)
            )
        made = model.stacked

        def on_device(*parts: Any, **settings: Any) -> nn.Module:
            with META:  # what a constructor puts on the host is moved later; from there to "meta" there is no way
                return made(*parts, **settings)

        replace(model, "stacked", on_device)
        replace(attention, "suits_varlen", lambda query, value: query.shape[-1] == value.shape[-1])
        yield


def _attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The kernel that torch picks on CUDA for causal attention in bf16: FlashAttention where queries and values have
    one width, else the memory-efficient one."""
    assert options["attn_mask"] is None and options["is_causal"], "a mask would have to be read, too"
    same, scale = query.shape[-1] == value.shape[-1], options["scale"]
    if same:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale)[0]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, None, True, 0.0, True, scale=scale)[0]


@contextmanager
def fake_world(rank: int, ranks: int) -> Iterator[None]:
    """torch.distributed in it knows so many ranks, and sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start, new_group = dist.init_process_group, dist.new_group
    place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}

    def made(*args: Any, **options: Any) -> Any:
        given = dict(zip(("ranks", "timeout"), args, strict=False)) | options
        return new_group(given.get("ranks"), given.get("timeout"), "fake")

    def one_by_one(messages: Sequence[Any]) -> list[Any]:
        return [message.op(message.tensor, message.peer, message.group) for message in messages]

    with (
        mock.patch.dict(os.environ, place),
        mock.patch.object(
            dist, "init_process_group", lambda *_, **__: start("fake", rank=rank, world_size=ranks, store=FakeStore())
        ),
        mock.patch.object(dist, "new_group", made),
        mock.patch.object(dist, "batch_isend_irecv", one_by_one),  # together they ask for a backend of "meta"
    ):
        yield


class _Batches(list[Tensor]):
    @property
    def own(self) -> Sequence[Tensor]:
        return self


def traced_step(run: RunConfig, rank: int, ranks: int) -> Traced:
    """The second step of a rank, after what a first one only does. The DeepSpeed block must suit the ranks. Inside
    `on_meta`."""
    from geotrain.inner.build import build_engine
    from geotrain.inner.runtime import parallel, platform
    from geotrain.inner.zero.buckets import Bucket

    with platform.quiet_imports():
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
    architecture, block = run.architecture, run.deepspeed
    micro = int(block["train_micro_batch_size_per_gpu"])
    tokens = micro * run.data.sequence_length // run.parallel.context
    if run.parallel.sequence:
        tokens //= run.parallel.tensor
    recorder = Recorder(routed=tokens * architecture.experts.per_token if architecture.experts else 0)

    def in_phase(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, recorder.phase = recorder.phase, phase
            try:
                return function(*args, **kwargs)
            finally:
                recorder.phase = before

        return call

    def waits(stream: Any) -> None:
        recorder.waits.append((recorder.phase, "synchronize"))

    with fake_world(rank, ranks), ExitStack() as stack:
        for name in ("begin_reduction", "finish_reduction", "begin_gathering", "finish_gathering"):
            stack.enter_context(mock.patch.object(Bucket, name, in_phase("exchange", getattr(Bucket, name))))
        stack.enter_context(mock.patch.object(platform._HostStream, "synchronize", waits))
        ends = 0 if run.data.attention == "document" else None
        engine = build_engine(run, run.parallel, block, end_of_document=ends)
        engine._run_schedule = in_phase("compute", engine._run_schedule)  # type: ignore[method-assign]
        shape = micro, run.data.sequence_length + 1
        batches = _Batches(torch.zeros(shape, dtype=torch.int64) for _ in range(engine.gradient_accumulation_steps()))
        with recorded(recorder):
            for step in range(2):
                recorder.launches.clear()
                recorder.flops.clear()
                recorder.waits.clear()
                recorder.phase = "optimizer"
                engine.train_step(batches, step)
        engine.close()
        parallel.shut_down()
        get_moe_layer_wise_logging_tracker().clear()  # it has room for as many layers as this model had
    return Traced(recorder.launches, recorder.flops, recorder.waits)


def sized(run: RunConfig, layers: int, micro_batches: int, replicas: int) -> RunConfig:
    """The run with so many layers a pipeline stage, micro-batches a step, and replicas."""
    config = {**run.model.config, "num_hidden_layers": layers * run.parallel.pipeline}
    micro = int(run.deepspeed["train_micro_batch_size_per_gpu"])
    block = {**run.deepspeed, "train_batch_size": micro * micro_batches * replicas}
    model = run.model.model_copy(update={"config": config})
    return run.model_copy(update={"model": model, "deepspeed": block, "acco": None})


def stage_rank(parallel: ParallelConfig, stage: int, ranks: int) -> int:
    """The first rank of a pipeline stage."""
    return stage * (ranks // parallel.pipeline)
