"""The one place that knows whether this process uses CUDA or a CPU, and what libraries need where there is no GPU.

Import this module before DeepSpeed or Megatron-core, because they read what it sets when they are imported.
Everything else in `geotrain.inner` asks `device()` and `backend()`, and wraps calls into Megatron-core in
`megatron_runtime()`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from geotrain.common.names import SHARE_DEVICES
from geotrain.kernels.devices import cuda_devices

# DeepSpeed 0.19 still calls functions by the names that torch 2.13 deprecates.
warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)

DEVICES = cuda_devices()  # that this rank sees
HAS_CUDA = DEVICES > 0
_UNUSED = ("torch.utils.tensorboard", "wandb")  # Megatron-core imports them where they are installed: 0.7 s of 3

if not HAS_CUDA:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed probes for accelerators and logs that


def placed(env: Mapping[str, str], devices: int) -> tuple[str, int | None]:
    """Choose a rank's backend of torch.distributed, and the number of its CUDA device; None: the CPU.

    env: the rank's environment. devices: how many it sees. NCCL refuses two ranks on a device, so all ranks of a
    worker that may share devices use gloo, which carries tensors through the host's memory.
    """
    if devices == 0:
        return "gloo", None
    number = int(env.get("LOCAL_RANK", "0"))
    return ("gloo", number % devices) if SHARE_DEVICES in env else ("nccl", number)


if HAS_CUDA and SHARE_DEVICES in os.environ:  # DeepSpeed takes the device of this number
    os.environ["LOCAL_RANK"] = str(placed(os.environ, DEVICES)[1])


def device() -> torch.device:
    """Device of this rank's tensors."""
    _, number = placed(os.environ, DEVICES)
    return torch.device("cpu") if number is None else torch.device("cuda", number)


def capability() -> tuple[int, int] | None:
    """CUDA's compute capability of this rank's device; None on a CPU."""
    return torch.cuda.get_device_capability(device()) if HAS_CUDA else None


def use_deterministic_algorithms(wanted: bool) -> None:
    """Let torch refuse, from now on, what does not give the same bits twice.

    `geotrain.launch.rank_environment` sets what must be set before CUDA starts.
    """
    torch.use_deterministic_algorithms(wanted)
    # It would write all memory before its first use.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def backend() -> str:
    """The torch.distributed backend for `device()`."""
    return placed(os.environ, DEVICES)[0]


def _not_compiled(function: Any = None, **_: Any) -> Any:
    """Stand in for torch.compile and compile nothing; works as a decorator with and without arguments."""
    return (lambda decorated: decorated) if function is None else function


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress warnings about optional packages while Megatron-core and DeepSpeed are imported.

    On a CPU torch.compile is disabled meanwhile: to decorate with it takes a third of the import's time.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"(megatron|deepspeed)\.")
        if not HAS_CUDA:
            stack.enter_context(mock.patch.object(torch, "compile", _not_compiled))
        for name in set(_UNUSED) - set(sys.modules):
            sys.modules[name] = None  # type: ignore[assignment]  # to import it is an ImportError now
            stack.callback(sys.modules.pop, name)
        yield


@contextlib.contextmanager
def quiet_construction() -> Iterator[None]:
    """Suppress the libraries' output, other than DeepSpeed's errors, while process groups and engines are built.

    It does nothing if GEOTRAIN_VERBOSE is set in the environment. Reports that DeepSpeed's configuration asks for
    during training are not affected, and neither is its `log_level`.
    """
    if os.environ.get("GEOTRAIN_VERBOSE"):
        yield
        return
    logger = logging.getLogger("DeepSpeed")
    # ERROR + 1 is a level that nobody else would set: it serves to recognize below whether DeepSpeed changed it.
    before, quiet = logger.level, logging.ERROR + 1
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        logger.setLevel(quiet)
        warnings.filterwarnings("ignore", module=r"(megatron|deepspeed)\.")
        try:
            yield
        finally:
            if logger.level == quiet:  # otherwise DeepSpeed set the level that its configuration asks for
                logger.setLevel(before)


class _HostStream:
    """Stands in for a CUDA stream where all work is done when a call returns."""

    def wait_stream(self, other: _HostStream) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self) -> _HostStream:
        return self


_all_gather = dist.all_gather  # torch's own


def _gather_unequal(received: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> Any:
    """Stand in for `torch.distributed.all_gather`, also of unequal parts, which gloo's all-to-all takes.

    Equal ones are gathered by gloo: ACCO's thread gathers such, while on another rank this stand-in may be away.
    """
    lengths = [len(part) for part in received]
    if len(set(lengths)) == 1:
        return _all_gather(received, own, group=group)
    sent, whole = torch.cat([own] * len(received)), torch.empty_like(torch.cat(received))
    dist.all_to_all_single(whole, sent, lengths, [len(own)] * len(received), group=group)
    for part, arrived in zip(received, whole.split(lengths), strict=True):
        part.copy_(arrived)
    return None


def _scatter_unequal(summed: torch.Tensor, sent: list[torch.Tensor], group: Any = None) -> None:
    """Stand in for `torch.distributed.reduce_scatter`, also of unequal parts."""
    summands, lengths = torch.cat([torch.empty_like(summed)] * len(sent)), [len(summed)] * len(sent)
    dist.all_to_all_single(summands, torch.cat(sent), lengths, [len(part) for part in sent], group=group)
    summed.copy_(summands.unflatten(0, (len(sent), len(summed))).sum(0))


def _gloo_stand_ins() -> list[tuple[Any, str, Any]]:
    """List (owner, attribute, stand-in) of each collective that gloo lacks: of tokens, among tensor ranks."""
    return [(dist, "all_gather", _gather_unequal), (dist, "reduce_scatter", _scatter_unequal)]


def _cpu_stand_ins() -> list[tuple[Any, str, Any]]:
    """List (owner, attribute, stand-in) of each CUDA function that Megatron-core calls even without CUDA."""
    with quiet_imports():
        from megatron.core.tensor_parallel import random as megatron_random
        from megatron.core.transformer.moe import token_dispatcher
    real_zeros = torch.zeros

    def zeros(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            options["device"] = device()
        return real_zeros(*size, **options)

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        tensor = tensor.to("cpu", non_blocking=True) if torch.is_tensor(tensor) else tensor
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return [
        (torch, "zeros", zeros),  # the pipeline schedules count tokens in a tensor on the device "cuda"
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),  # called for a tied embedding
        (torch.cuda, "current_device", device),  # where new weights, pipeline messages go
        (token_dispatcher, "maybe_move_tensor_to_cpu", on_host),  # it leaves what is there already as a tensor
        (torch.cuda, "Stream", _HostStream),  # on one the all-to-all dispatcher of tokens copies their counts
        (torch.cuda, "current_stream", _HostStream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
        (torch.cuda.random, "get_rng_state", lambda device=None: torch.get_rng_state()),
        (megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]


def compile_no_ops() -> None:
    """Keep DeepSpeed on a CPU from compiling its shared-memory collectives at start: only its inference uses them."""
    import deepspeed.ops

    if not HAS_CUDA:
        deepspeed.ops.__compatible_ops__ = {}


@contextlib.contextmanager
def megatron_runtime() -> Iterator[None]:
    """Let `cuda` mean the CPU inside this context, where there is no CUDA, and give gloo what it lacks; every call
    into Megatron-core belongs in it.

    The functions are replaced one by one, and not by a TorchFunctionMode, because a mode slows every torch call: it
    took a fifth of a small model's step.
    """
    stand_ins = [] if device().type == "cuda" else _cpu_stand_ins()
    if backend() != "nccl":
        stand_ins += _gloo_stand_ins()
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield
