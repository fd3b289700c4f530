"""CUDA or CPU: the one place that knows which, and what Megatron-core and DeepSpeed need where there is no GPU.

Import this module before DeepSpeed or Megatron-core: it sets what they read at import. Everything else in
`geotrain.inner` asks `device()` and `backend()` and wraps calls into Megatron-core in `megatron_runtime()`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

# DeepSpeed 0.19 still calls what torch 2.13 renames.
warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)

HAS_CUDA = os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available()

if not HAS_CUDA:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed probes for accelerators, and says so


def choose_queues(tensor_parallel: int, overlaps_steps: bool) -> None:
    """Before CUDA starts. With one hardware queue Megatron-core's tensor-parallel collectives start before the
    compute that hides them. ACCO's, of another thread, would hold up compute there: it keeps CUDA's several."""
    if tensor_parallel > 1 and not overlaps_steps:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def device() -> torch.device:
    """Where this rank's tensors live."""
    if not HAS_CUDA:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def backend() -> str:
    """The torch.distributed backend for `device()`."""
    return "nccl" if HAS_CUDA else "gloo"


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """In place of torch.compile."""
    return (lambda decorated: decorated) if function is None else function


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Import Megatron-core and DeepSpeed without their advice on optional packages; on a CPU also without torch's
    compiler: Megatron-core's fusions, for which it is loaded, are for GPUs, and it takes a third of the import."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"(megatron|deepspeed)\.")
        if not HAS_CUDA:
            stack.enter_context(mock.patch.object(torch, "compile", _as_it_is))
        yield


@contextlib.contextmanager
def quiet_construction() -> Iterator[None]:
    """Build process groups and engines with only DeepSpeed's errors; GEOTRAIN_VERBOSE in the environment undoes it.

    What DeepSpeed reports while it trains, as its configuration asks for, is not touched; nor its `log_level`.
    """
    if os.environ.get("GEOTRAIN_VERBOSE"):
        yield
        return
    logger = logging.getLogger("DeepSpeed")
    before, quiet = logger.level, logging.ERROR + 1
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        logger.setLevel(quiet)
        warnings.filterwarnings("ignore", module=r"(megatron|deepspeed)\.")
        try:
            yield
        finally:
            if logger.level == quiet:
                logger.setLevel(before)


def _cpu_stand_ins() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, stand-in) for each thing of CUDA that Megatron-core uses without asking."""
    with quiet_imports():
        from megatron.core.tensor_parallel import random as megatron_random
    real_zeros = torch.zeros

    def zeros(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return real_zeros(*size, **options)

    def to_cuda(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return tensor

    def get_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    return [
        (torch, "zeros", zeros),  # the schedules count tokens on the device "cuda"
        (torch.Tensor, "cuda", to_cuda),  # of a tied embedding
        (torch.cuda, "current_device", lambda: torch.device("cpu")),  # new weights, pipeline messages
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", get_state),
        (torch.cuda.random, "get_rng_state", get_state),
        (megatron_random, "_set_cuda_rng_state", set_state),
    ]


def compile_no_ops() -> None:
    """Keep DeepSpeed from compiling its shared-memory collectives at start on a CPU; only its inference uses them."""
    import deepspeed.ops

    if not HAS_CUDA:
        deepspeed.ops.__compatible_ops__ = {}


@contextlib.contextmanager
def megatron_runtime() -> Iterator[None]:
    """Calls into Megatron-core belong in here. On CUDA it does nothing; else `cuda` means the CPU inside.

    Plain stand-ins and no TorchFunctionMode: that costs a fifth of a small model's step.
    """
    if HAS_CUDA:
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in _cpu_stand_ins():
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield
