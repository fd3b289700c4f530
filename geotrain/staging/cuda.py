"""Moves what a rank exchanges between GPU and host memory: the interface `geotrain.outer.worker.Staging` for CUDA.

`CudaStaging` has anchors and residuals on the GPU, and never makes the training stream wait. The exchange has its own
CUDA stream for coding and copying, and pinned host buffers that are allocated once, because pinning is slow and only
pinned memory can be copied while the host goes on. The two streams wait for each other on the device, by events. The
host waits for the exchange's stream on a thread of its own, and never for the stream that trains.

`HostStaging` has them in host memory, where deltas are made and coded, too, by a thread of its own. The masters cross
in chunks through two pinned buffers, while the host waits: that is its price for the GPU's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from geotrain.staging.interface import Change, Made, SameDevice, Staging, SynchronousStaging, on_host

T = TypeVar("T")
_ALIGNED = 16  # bytes: where a tensor begins in a buffer
CHUNK = 1 << 24  # elements of a pinned buffer of `HostStaging`, which has two: 64 MiB each


def staging_for(state_device: str, device: torch.device, masters: Sequence[Tensor]) -> Staging:
    """Make the staging of a rank that trains on `device`. state_device: `outer.state_device`."""
    if device.type != "cuda":
        return SynchronousStaging(device)
    offloaded = any(master.is_cpu for master in masters)
    return HostStaging(device) if offloaded or state_device == "host" else CudaStaging(device)


@dataclass(frozen=True)
class _Chained:
    """The result of a call that itself returns a future: it is done when both are."""

    outer: Future[Any]

    def done(self) -> bool:
        # A call that raised has no inner future; asking for it would raise here instead of in `result`.
        return self.outer.done() and (self.outer.exception() is not None or self.outer.result().done())

    def result(self) -> Any:
        return self.outer.result().result()


@dataclass
class _HostBuffer:
    """Pinned host memory that is copied from or to, asynchronously.

    last_copy: an event recorded after the last copy from or to it; None before the first one.
    reader: the staging thread's job that reads what was copied out; None for buffers that only bring something in.
    """

    bytes: Tensor
    last_copy: Any = None
    reader: Future[Any] | None = None


class NoStreams:
    """Stands in for `torch.cuda`, its streams and events, where there is no GPU: all is done when a call returns."""

    def Stream(self, device: torch.device) -> NoStreams:
        return self

    def current_stream(self, device: torch.device) -> NoStreams:
        return self

    def stream(self, stream: NoStreams) -> AbstractContextManager[None]:
        return nullcontext()

    def record_event(self) -> NoStreams:
        return self

    def wait_stream(self, other: NoStreams) -> None: ...
    def wait_event(self, event: NoStreams) -> None: ...
    def synchronize(self) -> None: ...


class CudaStaging(SameDevice):
    """One rank's staging, all on the GPU. cuda: `torch.cuda`; tests without a GPU hand in a stand-in."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, thread: str = "deltas") -> None:
        self.device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread)
        self._buffers: dict[tuple[str, int], _HostBuffer] = {}

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context in which work is enqueued on the exchange's stream, after everything that training has enqueued."""
        self._stream.wait_stream(self._cuda.current_stream(self.device))
        with self._cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """Record an event that follows everything now enqueued on the exchange's stream."""
        return self._stream.record_event()

    def wait(self, mark: Any, *made: Tensor) -> None:
        """Let what training enqueues from now on run after the mark (None: there is nothing to wait for).

        made: tensors that were allocated on the exchange's stream and that training will use.
        """
        if mark is None:
            return
        training = self._cuda.current_stream(self.device)
        training.wait_event(mark)
        for tensor in made:
            # When the tensor is freed, torch's allocator hands its memory to the stream that allocated it, at once.
            # Unless it knows of the other stream, the exchange could overwrite what training still reads.
            tensor.record_stream(training)

    def fetch(self, key: int, make: Callable[[], Made], build: Callable[[bytes, bool], T]) -> tuple[Future[T], Any]:
        """Make on the device (1-D uint8, and a boolean scalar), copy both to the host; the future is of `build`,
        which runs on the staging thread. key: names the host buffer."""
        with self.beside():
            payload, finite = make()
            given = payload, torch.as_tensor(finite)
            future = self.keep(key, given, lambda host: build(host[0].numpy().tobytes(), bool(host[1])))
            return future, self.mark()

    def keep(self, key: int, tensors: Sequence[Tensor], use: Callable[[Sequence[Tensor]], T]) -> Future[T]:
        """Copy tensors to the host; the future is of use(copies), which runs on the staging thread. The copies lie in
        a buffer, as for `fetch`, so they are good until `use` returns. What overwrites the tensors must `wait` for
        them. Call it inside `beside`."""
        *begins, size = accumulate((-(-t.nbytes // _ALIGNED) * _ALIGNED for t in tensors), initial=0)
        buffer = self._buffer("out", key, size)  # one buffer, one event
        copies = [
            buffer.bytes[begin : begin + t.nbytes].view(t.dtype).view(t.shape)
            for begin, t in zip(begins, tensors, strict=True)
        ]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        buffer.last_copy = self.mark()

        def read() -> T:
            buffer.last_copy.synchronize()
            return use(copies)

        future = buffer.reader = self._thread.submit(read)
        return future

    def bring(self, key: int, payload: bytes, check: Callable[[Tensor], None]) -> Tensor:
        """Bring the payload to the device, as a uint8 tensor. `check` sees it first, in host memory, and may raise.

        Call it inside `beside`. key: names the host buffer, as for `fetch`.
        """
        buffer = self._buffer("in", key, len(payload))
        host = buffer.bytes[: len(payload)]
        host.numpy()[:] = np.frombuffer(payload, dtype=np.uint8)
        check(host)
        moved = host.to(self.device, non_blocking=True)
        buffer.last_copy = self.mark()
        return moved

    def when_fetched(self, call: Callable[[], Any]) -> _Chained:
        """Run `call` once everything that `fetch` was asked for before is in host memory.

        It goes to the staging thread, which does its jobs one by one in their order.
        """
        return _Chained(self._thread.submit(call))

    def close(self) -> None:
        """End the thread, after its last job."""
        self._thread.shutdown()

    def _buffer(self, direction: str, key: int, size: int) -> _HostBuffer:
        """Return the buffer of this name, after waiting until nothing uses it. Its last use was in the exchange
        before, so the wait is short."""
        buffer = self._buffers.get((direction, key))
        if buffer is not None:
            if buffer.reader is not None:
                buffer.reader.exception()  # waits for the job, whether it fails or not
            if buffer.last_copy is not None:  # None if `check` refused the payload that it was made for
                buffer.last_copy.synchronize()
        if buffer is None or buffer.bytes.numel() < size:
            pinned = self.device.type == "cuda"
            buffer = _HostBuffer(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
            self._buffers[direction, key] = buffer
        return buffer


@dataclass
class _Pinned:
    """A pinned buffer of fp32. used: an event behind the last copy from it to the GPU; None: there was none."""

    values: Tensor
    used: Any = None


class HostStaging:
    """One rank's staging in host memory. device: where it trains. cuda: as for `CudaStaging`. chunk: elements."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, chunk: int = CHUNK) -> None:
        self.device = torch.device("cpu")
        self._on, self._cuda, self._chunk = device, cuda, chunk
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deltas")
        self._pinned: deque[_Pinned] = deque()
        self._made: Future[Any] | None = None  # the newest delta

    def read(self, masters: Sequence[Tensor], into: Tensor) -> None:
        """Copy the masters to the host in chunks: each is copied from its buffer while the next one crosses. The host
        waits for what training has enqueued, and so does all that it enqueues afterwards."""
        under_way: tuple[Tensor, Tensor, Any] | None = None
        for master, place in self._chunks(masters, into):
            if master.device != self._on:  # the optimizer was offloaded to the host
                place.copy_(master)
                continue
            crossed = self._next().values[: master.numel()]
            crossed.copy_(master, non_blocking=True)
            event = self._cuda.current_stream(self._on).record_event()
            if under_way is not None:
                self._take(*under_way)
            under_way = place, crossed, event
        if under_way is not None:
            self._take(*under_way)

    def change(self, masters: Sequence[Tensor], how: Change, *vectors: Tensor) -> None:
        for master, *parts in self._chunks(masters, *vectors):
            there = [part if master.device != self._on else self._over(part) for part in parts]
            how([master], *([part] for part in there))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context for work on what deltas in the making use: it waits for the newest of them. Nothing else runs
        beside training here."""
        self.wait(self._made)
        yield

    def mark(self) -> Any:
        return self._made

    def wait(self, mark: Any, *made: Tensor) -> None:
        if mark is not None:
            mark.exception()  # waits for the delta, whether it fails or not

    def fetch(self, key: int, make: Callable[[], Made], build: Callable[[bytes, bool], T]) -> tuple[Future[T], Any]:
        def work() -> T:
            payload, finite = make()
            return build(payload.numpy().tobytes(), bool(finite))

        future = self._made = self._thread.submit(work)
        return future, future

    def bring(self, key: int, payload: bytes, check: Callable[[Tensor], None]) -> Tensor:
        return on_host(payload, check)

    def when_fetched(self, call: Callable[[], Any]) -> _Chained:
        return _Chained(self._thread.submit(call))

    def _chunks(self, masters: Sequence[Tensor], *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Cut the masters into parts, with the parts of each vector that lie beside them, none longer than a
        buffer."""
        begin = 0
        for master in masters:
            beside = [vector[begin : begin + master.numel()] for vector in vectors]
            yield from zip(master.split(self._chunk), *(each.split(self._chunk) for each in beside), strict=True)
            begin += master.numel()

    def _next(self) -> _Pinned:
        """Return the buffer that was used longest ago, after waiting for that use's end."""
        if len(self._pinned) < 2:
            pinned = self._on.type == "cuda"
            self._pinned.append(_Pinned(torch.empty(self._chunk, dtype=torch.float32, pin_memory=pinned)))
        else:
            self._pinned.rotate()
        buffer = self._pinned[-1]
        if buffer.used is not None:
            buffer.used.synchronize()
        return buffer

    def _over(self, part: Tensor) -> Tensor:
        """Copy a part of a vector to the GPU, for what training enqueues."""
        buffer = self._next()
        there = buffer.values[: part.numel()]
        there.copy_(part)
        moved = there.to(self._on, non_blocking=True)
        buffer.used = self._cuda.current_stream(self._on).record_event()
        return moved

    @staticmethod
    def _take(place: Tensor, crossed: Tensor, event: Any) -> None:
        event.synchronize()
        place.copy_(crossed)
