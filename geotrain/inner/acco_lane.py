"""Where ACCO's communication happens: a background thread with process groups, and on CUDA a stream, of its own."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from geotrain.inner import platform
from geotrain.inner.parallel import LostRank, Mesh, group_like

with platform.quiet_imports():
    import deepspeed.comm as ds_comm  # torch's collectives, counted by DeepSpeed's comms_logger

Result = TypeVar("Result")
_EXCHANGE_BYTES = 1 << 23  # scratch of a reduction over gloo


class AccoError(LostRank):
    """The overlapped communication failed. The message says in which step, and what of the state is intact."""


@dataclass(frozen=True)
class Interval:
    """What this rank did from begin_s to end_s (`time.perf_counter`): "compute", or a job of the lane."""

    what: str
    begin_s: float
    end_s: float


class Journey(Generic[Result]):
    """A job of the lane, under way or done."""

    def __init__(self, future: Future[tuple[Result, torch.cuda.Event | None]]) -> None:
        self._future = future

    def wait(self, timeout_s: float) -> Result:
        """Its result; what the current stream does next, it does after the job. Raises what the job raised."""
        result, event = self._future.result(timeout_s)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        return result


class Lane:
    """Runs one job at a time, in order. Collectives below are for its jobs, which run on all ranks in the same order.

    timeline: the last intervals of this rank; on CUDA, of its host threads.
    """

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        """Makes process groups: every rank of the worker must call it. No collective waits longer than timeout_s."""
        self.rank, self.ranks = mesh.dp_rank, mesh.dp_size
        self._speaks = mesh.is_last_stage and mesh.tp_rank == 0
        timeout = timedelta(seconds=timeout_s)
        self._group = group_like(mesh.dp_group, platform.backend(), timeout)
        self._world = dist.new_group(timeout=timeout, backend="gloo")  # for a few numbers, on the host
        # NCCL waits for a lost rank without end, and does not raise: the hosts meet first, with a deadline.
        self._meeting = group_like(mesh.dp_group, "gloo", timeout) if platform.HAS_CUDA else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="acco", initializer=_use_device)
        self._stream = torch.cuda.Stream() if platform.HAS_CUDA else None
        self._scratch: Tensor | None = None
        self.timeline: deque[Interval] = deque(maxlen=256)

    def start(self, what: str, job: Callable[[], Result]) -> Journey[Result]:
        """Run job() after what the current stream holds."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        return Journey(self._thread.submit(self._run, what, job, ready))

    def _run(
        self, what: str, job: Callable[[], Result], ready: torch.cuda.Event | None
    ) -> tuple[Result, torch.cuda.Event | None]:
        with self.timed(what), torch.no_grad():
            if self._stream is None or ready is None:
                return job(), None
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                result = job()
                done = torch.cuda.Event()
                done.record()
                return result, done

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.timeline.append(Interval(what, begin, time.perf_counter()))

    def close(self) -> None:
        """Wait for the last job, which has its own deadlines, and drop the groups."""
        self._thread.shutdown()
        for group in (self._group, self._world, self._meeting):
            if group is not None:
                dist.destroy_process_group(group)

    # ---------------------------------------------------------------------------------- collectives, in jobs

    def own(self, flat: Tensor) -> Tensor:
        """This rank's part of a flat tensor."""
        size = flat.numel() // self.ranks
        return flat[self.rank * size : (self.rank + 1) * size]

    def reduce_scatter(self, flat: Tensor) -> None:
        """`own(flat)` becomes the sum of that part over the data-parallel ranks. The rest is left undefined."""
        if self.ranks == 1:
            return
        if platform.HAS_CUDA:
            with self._collective():
                ds_comm.reduce_scatter_fn(self.own(flat), flat, group=self._group)
            return
        # gloo's reduce-scatter is an all-reduce inside, which sends twice the bytes.
        if self._scratch is None:
            self._scratch = torch.empty(2 * _EXCHANGE_BYTES // flat.element_size(), dtype=flat.dtype)
        parts, own = flat.view(self.ranks, -1), self.own(flat)
        step = _EXCHANGE_BYTES // flat.element_size() // self.ranks
        for begin in range(0, own.numel(), step):
            width = min(step, own.numel() - begin)
            sent, received = self._scratch[: 2 * self.ranks * width].view(2, self.ranks, width)
            sent.copy_(parts[:, begin : begin + width])
            self.exchange(received.view(-1), sent.view(-1))
            own[begin : begin + width] = received.sum(0, dtype=torch.float32)

    def exchange(self, received: Tensor, sent: Tensor) -> None:
        """Equal parts of `sent`, one for each data-parallel rank; part i of `received` comes from rank i."""
        with self._collective():
            ds_comm.all_to_all_single(received, sent, group=self._group)

    def all_gather(self, flat: Tensor) -> None:
        """Every rank's `own(flat)`, on every rank, in place."""
        if self.ranks > 1:
            with self._collective():
                ds_comm.allgather_fn(flat, self.own(flat), group=self._group)

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Around each on the device. Raises if a rank does not come to it in time.

        Afterwards the host waits until it is done: what depends on it would, launched earlier, stand before compute
        in a hardware queue that they share, and with tensor or pipeline parallelism two ranks could so wait for each
        other for ever. Only this thread waits."""
        if self._meeting is not None:
            dist.all_reduce(torch.zeros(1), group=self._meeting)
        yield
        if self._stream is not None:
            self._stream.synchronize()

    def sum(self, *of_ranks: float, of_replicas: Sequence[float]) -> list[float]:
        """Sum each over all ranks, or all replicas, of the worker. One rank speaks for its replica, the first of its
        last stage, which knows the loss."""
        tensor = torch.tensor([*of_ranks, *(x if self._speaks else 0 for x in of_replicas)], dtype=torch.float64)
        dist.all_reduce(tensor, group=self._world)
        return tensor.tolist()


def _use_device() -> None:
    """A new thread would use the machine's first device."""
    if platform.HAS_CUDA:
        torch.cuda.set_device(platform.device())
