"""Moves a rank's deltas and answers between GPU and host memory without making the training stream wait.

It implements for CUDA the interface `geotrain.outer.worker.Staging`. The exchange has its own CUDA stream for coding
and copying, and pinned host buffers that are allocated once, because pinning is slow and only pinned memory can be
copied while the host goes on. The two streams wait for each other on the device, by events. The host waits for the
exchange's stream on a thread of its own, and never for the stream that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
_ALIGNED = 16  # bytes: where a tensor begins in a buffer


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
    """In place of `torch.cuda`, its streams and events, where there is no GPU: all is done when a call returns."""

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


class CudaStaging:
    """One rank's staging. cuda: `torch.cuda`; tests without a GPU hand in a stand-in."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, thread: str = "deltas") -> None:
        self.device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread)
        self._buffers: dict[tuple[str, int], _HostBuffer] = {}

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is enqueued inside runs on the exchange's stream, after everything that training has enqueued."""
        self._stream.wait_stream(self._cuda.current_stream(self.device))
        with self._cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """An event that follows everything now enqueued on the exchange's stream."""
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

    def fetch(self, key: int, payload: Tensor, finite: Any, build: Callable[[bytes, bool], T]) -> Future[T]:
        """Copy both to the host; the future is of build(payload, finite), which runs on the staging thread.

        Call it inside `beside`. key: names the host buffer, which the next call with this key uses again.
        payload: 1-D uint8 on the device. finite: a boolean scalar on the device.
        """
        given = payload, torch.as_tensor(finite)
        return self.keep(key, given, lambda host: build(host[0].numpy().tobytes(), bool(host[1])))

    def keep(self, key: int, tensors: Sequence[Tensor], use: Callable[[Sequence[Tensor]], T]) -> Future[T]:
        """Copy tensors to the host; the future is of use(copies), which runs on the staging thread. The copies lie in
        a buffer, as for `fetch`, so they are good until `use` returns. What overwrites the tensors must `wait` for
        them."""
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
        """The payload as a uint8 tensor on the device. `check` sees it first, in host memory, and may raise.

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
        """The buffer of this name, after waiting until nothing uses it. Its last use was in the exchange before, so
        the wait is short."""
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
