"""Between a rank's device and the host: what leaves and what comes, beside training.

On a GPU the exchange has a stream of its own for coding and copying, pinned host buffers that are allocated once, and
events: the two streams wait for each other on the device, and the host waits for the exchange's stream only on a
thread of its own, never for the stream that trains. On a CPU the same calls do their work at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A future."""

    def done(self) -> bool: ...
    def result(self) -> T_co: ...


@dataclass(frozen=True)
class Ready(Generic[T]):
    """A future that was never pending."""

    value: T

    def done(self) -> bool:
        return True

    def result(self) -> T:
        return self.value


@dataclass(frozen=True)
class _Chained(Generic[T]):
    """Done when the future that a future gives is."""

    outer: Future[Pending[T]]

    def done(self) -> bool:
        return self.outer.done() and (self.outer.exception() is not None or self.outer.result().done())

    def result(self) -> T:
        return self.outer.result().result()


@dataclass
class _Slot:
    """A host buffer that copies use. used: recorded after the last copy from or to it; its reader has ended."""

    buffer: Tensor
    used: Any = None
    reader: Future[Any] | None = None


class Staging:
    """A rank's way to and from host memory.

    cuda: `torch.cuda`, or in tests what stands for it. Without it everything happens at once, on the CPU.
    """

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self.device = device
        self._cuda = torch.cuda if cuda is None and device.type == "cuda" else cuda
        self._slots: dict[tuple[str, int], _Slot] = {}
        if self._cuda:
            self._stream = self._cuda.Stream(device)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="deltas")

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is enqueued within runs on the exchange's stream, after all that the training's stream has now."""
        if not self._cuda:
            yield
            return
        self._stream.wait_stream(self._cuda.current_stream(self.device))
        with self._cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """An event after all that the exchange's stream has now; None on a CPU."""
        return self._stream.record_event() if self._cuda else None

    def wait(self, mark: Any, *made: Tensor) -> None:
        """What training enqueues from now on runs after the mark. made: tensors of the exchange's that it uses."""
        if mark is None:
            return
        training = self._cuda.current_stream(self.device)
        training.wait_event(mark)
        for tensor in made:
            tensor.record_stream(training)

    def fetch(self, key: int, payload: Tensor, finite: Any, build: Callable[[bytes, bool], T]) -> Pending[T]:
        """build(payload, finite) once both are in host memory. Call it within `beside`.

        key: names the buffer; what it held before must have been asked for.
        """
        if not self._cuda:
            return Ready(build(payload.numpy().tobytes(), bool(finite)))
        size = payload.numel()
        slot = self._slot("out", key, size + 1)
        slot.buffer[:size].copy_(payload, non_blocking=True)
        slot.buffer[size].copy_(finite, non_blocking=True)
        slot.used = self.mark()

        def read() -> T:
            slot.used.synchronize()
            host = slot.buffer.numpy()
            return build(host[:size].tobytes(), bool(host[size]))

        slot.reader = self._thread.submit(read)
        return slot.reader

    def bring(self, key: int, payload: bytes, check: Callable[[Tensor], None]) -> Tensor:
        """The payload on the device, checked while it was in host memory. Call it within `beside`."""
        if not self._cuda:
            return on_host(payload, check)
        slot = self._slot("in", key, len(payload))
        host = slot.buffer[: len(payload)]
        host.numpy()[:] = np.frombuffer(payload, dtype=np.uint8)
        check(host)
        moved = host.to(self.device, non_blocking=True)
        slot.used = self.mark()
        return moved

    def when_fetched(self, call: Callable[[], Pending[T]]) -> Pending[T]:
        """`call`, once everything that `fetch` was asked for is in host memory."""
        return _Chained(self._thread.submit(call)) if self._cuda else call()

    def _slot(self, way: str, key: int, size: int) -> _Slot:
        """The buffer, no longer in use: what used it last was a whole exchange ago."""
        slot = self._slots.get((way, key))
        if slot is not None:
            if slot.reader is not None:
                slot.reader.exception()
            if slot.used is not None:  # None: what it was made for was refused
                slot.used.synchronize()
        if slot is None or slot.buffer.numel() < size:
            pinned = self.device.type == "cuda"
            slot = self._slots[way, key] = _Slot(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
        return slot


def on_host(payload: bytes, check: Callable[[Tensor], None]) -> Tensor:
    """The payload as a tensor (uint8, 1-D, a copy), checked."""
    host = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    check(host)
    return host
