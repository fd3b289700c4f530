"""ACCO, evaluation and checkpoints under emulated CUDA: compute and communication share no memory unordered."""

from __future__ import annotations

import contextlib
import re
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from geotrain.config import ParallelConfig
from tests.support.cuda_emulator import Cuda, Event, Stream
from tests.support.inner_worlds import LLAMA, deepspeed_block, masters, micro_batches, run_world, start, stop

MODEL = {**LLAMA, "num_hidden_layers": 1}
STREAMS = ("Stream", "current_stream", "stream")
GPU = SimpleNamespace(HAS_CUDA=True, backend=lambda: "gloo", device=lambda: torch.device("cpu"))
FORMS = ("exact", "delayed")


def save_copies(tensors: dict[str, Tensor], *args: Any, **options: Any) -> None:
    """safetensors' own `save_file`, which reads memory in Rust: here torch reads it first, where the emulator
    looks."""
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, *args, **options)


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
            stack.enter_context(mock.patch.object(saving, "save_file", save_copies))
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
        seen[str(form)] = cuda.faults, len(cuda.current_stream().clock)
    return seen


@pytest.mark.parametrize("ranks", [1, 2])  # two share the device: what they exchange lies there, and gloo carries it
def test_every_use_waits_for_what_it_needs(tmp_path: Path, ranks: int) -> None:
    for seen in run_world(ranks, every_form, str(tmp_path)):
        for form, (faults, timelines) in seen.items():
            assert not faults and timelines > 2, (form, faults)


def leaving_out(waits: str) -> list[str]:
    """Faults where one of the two streams, whose name begins so, does not wait for the other."""
    cuda, wait = Cuda(), Stream.wait_event

    def wait_or_not(stream: Stream, event: Event) -> None:
        if not stream.name.startswith(waits):
            wait(stream, event)

    with mock.patch.object(Stream, "wait_event", wait_or_not):
        run(cuda, "exact")
    return cuda.faults


def reading_late() -> list[str]:
    """Faults where a prediction reads gradients beside the compute that changes them."""
    from geotrain.inner.acco.optimizer import AccoOptimizer

    cuda = Cuda()

    def predict(self: Any) -> None:
        in_flight, rates, count = self._buffers.in_flight, self._rates(), self._micro_batches
        gradients = self._buffers.gradients

        def job() -> None:
            in_flight.copy_(gradients)
            self._prediction_job(in_flight, rates, count)

        self._predicting = self.communication.start(job)

    with mock.patch.object(AccoOptimizer, "predict", predict):
        run(cuda, "exact")
    return cuda.faults


def every_omission() -> dict[str, list[str]]:
    return {
        "communication": leaving_out("stream"),
        "compute": leaving_out("training"),
        "gradients": reading_late(),
    }


def test_what_is_left_out_is_found() -> None:
    (found,) = run_world(1, every_omission)
    assert any("stream 1" in f and "does not wait for training" in f for f in found["communication"]), found
    assert any("training" in f and "does not wait for stream 1" in f for f in found["compute"]), found
    assert any("test_streams" in f or "inner.acco" in f for f in found["gradients"]), found


def every_omission_of_a_checkpoint(folder: str) -> dict[str, list[str]]:
    """By what is left out: faults of ZeRO-1's steps beside checkpoints."""
    from geotrain.checkpoint.saving import Checkpoints
    from geotrain.inner.engine.engine import GeoEngine
    from geotrain.staging.cuda import CudaStaging

    real_buffer = CudaStaging._buffer

    def in_use(staging: CudaStaging, direction: str, key: int, size: int) -> Any:
        found = staging._buffers.get((direction, key))
        return real_buffer(staging, direction, key, size) if found is None else found

    def unseen(checkpoints: Checkpoints) -> None:
        """The former checkpoint has ended, but nobody has looked."""
        if checkpoints._under_way is not None:
            futures.wait([checkpoints._under_way])

    no_wait: dict[str, list[tuple[Any, str, Any]]] = {
        "of the copy for the step before": [
            (CudaStaging, "beside", lambda staging: staging._cuda.stream(staging._stream))
        ],
        "of the next step for the copy": [(GeoEngine, "_wait_for_readers", lambda engine: None)],
        "of the writer for the copy": [(Event, "synchronize", lambda event: None)],
        "of the copy for the writer": [(CudaStaging, "_buffer", in_use), (Checkpoints, "wait", unseen)],
    }
    found = {}
    for which, omitted in no_wait.items():
        cuda = Cuda()
        with contextlib.ExitStack() as stack:
            for owner, name, stand_in in omitted:
                stack.enter_context(mock.patch.object(owner, name, stand_in))
            run(cuda, None, Path(folder) / str(len(found)))
        found[which] = cuda.faults
    return found


def test_what_is_left_out_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    (found,) = run_world(1, every_omission_of_a_checkpoint, str(tmp_path))
    words = {
        "of the copy for the step before": r"stream 1: .*geotrain\.staging\..* does not wait for training: ",
        "of the next step for the copy": r"training: .* does not wait for stream 1: .*geotrain\.staging\.",
        "of the writer for the copy": r"thread .*: .* does not wait for stream 1: .*geotrain\.staging\.",
        "of the copy for the writer": r"stream 1: .*geotrain\.staging\..* does not wait for thread ",
    }
    for which, faults in found.items():
        assert any(re.search(words[which], fault) for fault in faults), (which, faults)


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
