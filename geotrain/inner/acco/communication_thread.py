"""The background thread on which ACCO communicates. It has its own process groups and, on CUDA, its own stream."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from geotrain.inner.runtime import platform
from geotrain.inner.runtime.parallel import LostRank, group_like
from geotrain.inner.zero.buckets import PartGathering
from geotrain.parallelism.mesh import RankMesh

with platform.quiet_imports():
    import deepspeed.comm as ds_comm  # torch's collectives, counted by DeepSpeed's comms_logger

Result = TypeVar("Result")
_UNDER_WAY = 5  # pieces of an exchange: over gloo one alone leaves the link idle for a fifth of the time
_EXCHANGE_BYTES = 1 << 23  # a reduction over gloo sends so much at once, which bounds its scratch


class AccoError(LostRank):
    """The overlapped communication failed. The message says in which step, and which of the weights are whole."""


@dataclass(frozen=True)
class CommunicationJob(Generic[Result]):
    """A job of the communication thread that is waiting, running or done."""

    _future: Future[tuple[Result, torch.cuda.Event | None]]

    def wait(self, timeout_s: float) -> Result:
        """Returns the job's result, or raises what it raised.

        On CUDA the job's kernels may still run then. What the current stream does next comes after them.
        """
        result, event = self._future.result(timeout_s)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        return result


class CommunicationThread:
    """Runs jobs one at a time, in the order in which they were started.

    The collectives below may be called by its jobs only. All ranks start the same jobs in the same order, so no two
    ranks can wait for each other in different collectives.
    """

    def __init__(self, mesh: RankMesh, timeout_s: float) -> None:
        """Make the thread and its process groups: every rank of the worker must call it.

        No collective waits longer than timeout_s.
        """
        self.rank, self.ranks = mesh.dp_rank, mesh.dp_size
        # One rank of each part of a replica's tokens, one that knows the loss.
        self._speaks = mesh.is_last_stage and mesh.tp_rank == 0
        timeout = timedelta(seconds=timeout_s)
        self._over_nccl = platform.backend() == "nccl"
        self._group = group_like(mesh.dp_group, platform.backend(), timeout)
        self._world = dist.new_group(timeout=timeout, backend="gloo")  # for a few numbers, on the host
        # NCCL waits for a lost rank without end and does not raise. So before each collective of NCCL, the ranks
        # enter one of gloo, which has a deadline and raises.
        self._meeting = group_like(mesh.dp_group, "gloo", timeout) if self._over_nccl else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="acco", initializer=_use_own_device)
        self._stream = torch.cuda.Stream() if platform.HAS_CUDA else None
        self._scratch: Tensor | None = None

    def start(self, job: Callable[[], Result]) -> CommunicationJob[Result]:
        """Run job() on the thread; its kernels run after everything now enqueued on the current stream."""
        stream, ready = self._stream, None
        if stream is not None:
            ready = torch.cuda.Event()
            ready.record()

        def run() -> tuple[Result, torch.cuda.Event | None]:
            with torch.no_grad():  # torch keeps this setting for each thread
                if stream is None or ready is None:
                    return job(), None
                with torch.cuda.stream(stream):
                    stream.wait_event(ready)
                    result = job()
                    done = torch.cuda.Event()
                    done.record()
                    return result, done

        return CommunicationJob(self._thread.submit(run))

    def close(self) -> None:
        """Wait for the last job, whose collectives have their own deadlines, and destroy the process groups."""
        self._thread.shutdown()
        for group in (self._group, self._world, self._meeting):
            if group is not None:
                dist.destroy_process_group(group)

    # ---------------------------------------------------------------------------------- collectives, in jobs

    def own(self, flat: Tensor) -> Tensor:
        """A view of this rank's part of a flat tensor, which holds equal parts of all data-parallel ranks."""
        size = flat.numel() // self.ranks
        return flat[self.rank * size : (self.rank + 1) * size]

    def reduce_scatter(self, flat: Tensor) -> None:
        """Sum `own(flat)` over the data-parallel ranks, in place. The rest of `flat` is left undefined."""
        if self.ranks == 1:
            return
        if self._over_nccl:
            with self._collective():
                ds_comm.reduce_scatter_fn(self.own(flat), flat, group=self._group)
            return
        # gloo implements reduce-scatter by an all-reduce, which sends twice the bytes. Instead each rank sends every
        # other its part, and the parts are summed here, in fp32.
        if self._scratch is None:
            self._scratch = flat.new_empty(2 * _EXCHANGE_BYTES // flat.element_size())
        parts, own = flat.view(self.ranks, -1), self.own(flat)
        step = _EXCHANGE_BYTES // flat.element_size() // self.ranks
        for begin in range(0, own.numel(), step):
            width = min(step, own.numel() - begin)
            sent, received = self._scratch[: 2 * self.ranks * width].view(2, self.ranks, width)
            sent.copy_(parts[:, begin : begin + width])
            self.exchange([received.view(-1)], [sent.view(-1)])
            own[begin : begin + width] = received.sum(0, dtype=torch.float32)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """All-to-all, of several pieces: part i of each sent one goes to data-parallel rank i, part i of each
        received one comes from it. All hold as many equal parts as there are ranks."""
        under_way = deque[Any]()
        with self._collective():
            for into, outof in zip(received, sent, strict=True):
                if len(under_way) == _UNDER_WAY:
                    under_way.popleft().wait()
                under_way.append(ds_comm.all_to_all_single(into, outof, group=self._group, async_op=True))
            for work in under_way:
                work.wait()

    def all_gather(self, flat: Tensor) -> None:
        """Collect every rank's `own(flat)` in `flat`, on every rank."""
        if self.ranks > 1:
            with self._collective():
                ds_comm.allgather_fn(flat, self.own(flat), group=self._group)

    def gather_parts(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Bring parts, (owner, view), from their owners to every rank. The same ones on all ranks."""
        if self.ranks > 1 and parts:
            with self._collective():
                PartGathering(parts, self._group).wait()

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Surround a collective on the device. Raises if another rank does not come to it in time.

        Afterwards this thread waits until the device has finished the collective. Otherwise kernels that depend on it
        could already stand in a hardware queue, ahead of compute that shares the queue; with tensor or pipeline
        parallelism two ranks could then wait for each other for ever.
        """
        if self._meeting is not None:
            dist.all_reduce(torch.zeros(1), group=self._meeting)
        yield
        if self._stream is not None:
            self._stream.synchronize()

    def sum(self, *of_ranks: float, of_replicas: Sequence[float]) -> list[float]:
        """Sum each of `of_ranks` over all ranks of the worker, and each of `of_replicas` over its replicas.

        Returns all sums in the order of the arguments.
        """
        # In fp64 and in one collective. The ranks that do not speak for their replica add zeros.
        tensor = torch.tensor([*of_ranks, *(x if self._speaks else 0 for x in of_replicas)], dtype=torch.float64)
        dist.all_reduce(tensor, group=self._world)
        return tensor.tolist()


def _use_own_device() -> None:
    """Choose this rank's device, since a new thread begins with the machine's first one."""
    if platform.HAS_CUDA:
        torch.cuda.set_device(platform.device())
