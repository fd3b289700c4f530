"""ACCO, evaluation and checkpoints under emulated CUDA: compute and communication share no memory unordered."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from geotrain.common.files import save_tensors
from geotrain.config import ParallelConfig
from tests.support.cuda_emulator import Cuda
from tests.support.inner_worlds import LLAMA, deepspeed_block, masters, micro_batches, run_world, start, stop

MODEL = {**LLAMA, "num_hidden_layers": 1}
STREAMS = ("Stream", "current_stream", "stream")
GPU = SimpleNamespace(HAS_CUDA=True, backend=lambda: "gloo", device=lambda: torch.device("cpu"))
FORMS = ("exact", "delayed")


def save_copies(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """`save_tensors`, whose library reads memory in Rust: here torch reads it first, where the emulator
    looks."""
    save_tensors(path, {name: tensor.clone() for name, tensor in tensors.items()}, metadata)


def run(cuda: Cuda, form: str | None, folder: Path | None = None) -> None:
    """Steps of an engine, with ACCO's form or ZeRO-1. With a folder also checkpoints, beside which it trains; an
    evaluation; and steps from a checkpoint."""
    from geotrain.checkpoint import saving
    from geotrain.inner.acco import communication_thread
    from geotrain.inner.runtime import platform

    # What takes CUDA's place for Megatron-core on a CPU takes it from all threads.
    stand_ins = [s for s in platform._cpu_stand_ins() if s[1] not in STREAMS]
    with contextlib.ExitStack() as stack:
        for module in (communication_thread, saving):
            stack.enter_context(mock.patch.object(module, "platform", GPU))
        stack.enter_context(mock.patch.object(platform, "_cpu_stand_ins", lambda: stand_ins))
        with cuda.in_place():
            engine = start(MODEL, ParallelConfig(), deepspeed_block(1, micro=2), acco=form)
        given = [micro_batches(engine, step) for step in range(3)]
        stack.enter_context(cuda.emulated())
        for batches in given:
            cuda.on_host(*batches)
        for step in range(3):
            engine.train_step(given[step], step)
        if folder is not None:
            stack.enter_context(mock.patch.object(saving, "save_tensors", save_copies))
            checkpoints = saving.Checkpoints(engine, folder, keep=1)
            for turn in range(2):  # the second into the buffer of the first
                checkpoints.save(f"job-{turn}", {})
                engine.train_step(given[turn], 3 + turn)
            checkpoints.save("a", {})
            engine.evaluate_swapped_in(contextlib.nullcontext(), given[0])
            engine.train_step(given[0], 5)
            checkpoints.load("a")
            engine.train_step(given[0], 6)
            checkpoints.close()
        masters(engine).sum().item()
    stop(engine)


def every_form(folder: str) -> dict[str, Any]:
    seen = {}
    for form in (None, *FORMS):
        cuda = Cuda()
        run(cuda, form, Path(folder) / str(form))
        seen[str(form)] = cuda.faults, len(cuda.current_stream().clock)  # type: ignore[attr-defined]
    return seen


@pytest.mark.parametrize("ranks", [1, 2])  # two share the device: what they exchange lies there, and gloo carries it
def test_every_use_waits_for_what_it_needs(tmp_path: Path, ranks: int) -> None:
    for seen in run_world(ranks, every_form, str(tmp_path)):
        for form, (faults, timelines) in seen.items():
            assert not faults and timelines > 2, (form, faults)


def waits_of_a_save(engine: Any, folder: str, cuda: Cuda) -> list[str]:
    from geotrain.checkpoint import saving

    with mock.patch.object(saving, "platform", GPU):
        checkpoints = saving.Checkpoints(engine, folder, keep=1)
        checkpoints.save("first", {})  # tries out who sees the folder
        checkpoints.wait()
        cuda.syncs.clear()
        checkpoints.save("next", {})
        waited = [where for where in cuda.syncs if re.search(r"geotrain\.(checkpoint\.saving|staging\.)", where)]
        checkpoints.close()
    return waited


def waits(folder: str) -> dict[str, list[str]]:
    """By kind of engine: where a thread of the host waits for the device in a step; and in a save."""
    from geotrain.inner.runtime import platform

    stand_ins = [s for s in platform._cpu_stand_ins() if s[1] not in STREAMS]
    found = {}
    for kind, stage, more in (("ZeRO-1", 1, {}), ("ZeRO-1 in bf16", 1, {"bf16": {"enabled": True}}), ("fp32", 0, {})):
        cuda = Cuda()
        engine = start(MODEL, ParallelConfig(), deepspeed_block(stage, micro=4, **more))
        given = [micro_batches(engine, step) for step in range(2)]
        with cuda.emulated(), mock.patch.object(platform, "_cpu_stand_ins", lambda: stand_ins):
            for step, batches in enumerate(given):
                cuda.on_host(*batches)
                cuda.syncs.clear()  # of the step before, which makes what a first one makes
                result = engine.train_step(batches, step)
            found[kind] = list(cuda.syncs)
            cuda.syncs.clear()
            assert result.loss > 0 and result.grad_norm > 0
            found[f"{kind}, its numbers"] = list(cuda.syncs)
            if stage == 1:
                found["a save"] = waits_of_a_save(engine, folder, cuda)
            assert not cuda.faults, cuda.faults
        stop(engine)
    return found


def test_a_step_waits_for_the_device_once_at_most(tmp_path: Path) -> None:
    """Where a norm that is not finite must skip the update; its numbers wait when one of them is asked for."""
    (found,) = run_world(1, waits, str(tmp_path))
    assert found.pop("a save") == []
    places = {kind: [where.rpartition(" ")[2] for where in waited] for kind, waited in found.items()}
    norm, numbers = ["OverlappedZero1.step"], ["GeoEngine.train_step.<locals>.to_host"]
    assert places == {
        **{"ZeRO-1": norm, "ZeRO-1 in bf16": norm, "fp32": []},
        **{f"{kind}, its numbers": numbers for kind in ("ZeRO-1", "ZeRO-1 in bf16", "fp32")},
    }
