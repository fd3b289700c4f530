"""The interface of staging, which moves a rank's masters and payloads to where its anchors lie, and back.

`SynchronousStaging` does everything at once; what works beside training on a GPU is in `geotrain.staging.cuda`. One
or the other is handed to `geotrain.outer`, because nothing there may run asynchronously by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Made = tuple[Tensor, Any]  # a payload (uint8, 1-D), and whether all that is in it was finite
Change = Callable[..., None]  # (masters, their parts of each vector): changes the masters in place


class Pending(Protocol[T_co]):
    """A future, as far as the outer loop needs one. `result` blocks, and raises what the future failed with."""

    def done(self) -> bool: ...
    def result(self) -> T_co: ...


@dataclass(frozen=True)
class Ready(Generic[T]):
    """A future whose result is known from the start."""

    value: T

    def done(self) -> bool:
        return True

    def result(self) -> T:
        return self.value


class Staging(Protocol):
    """Staging of one rank."""

    @property
    def device(self) -> torch.device:
        """Device of anchors, residuals and all that deltas are made of; not always that of the masters."""

    def read(self, masters: Sequence[Tensor], into: Tensor) -> None:
        """Copy the masters, one after another, into a vector on `device`. What training enqueues afterwards does not
        change the copy."""

    def change(self, masters: Sequence[Tensor], how: Change, *vectors: Tensor) -> None:
        """Call `how` with parts of the masters, and with the parts of each vector (on `device`) that lie beside them,
        on the masters' device: once with all, or with one part after another."""

    def beside(self) -> AbstractContextManager[None]:
        """Context whose computations run beside training, on the values that training's tensors have on entry."""

    def mark(self) -> Any:
        """Return a mark, such as an event, behind all work that was given to this staging so far."""

    def wait(self, mark: Any, *made: Tensor) -> None:
        """Let training's computations from now on begin only behind the mark (None: no mark yet). On a GPU the device
        waits, not the host. made: tensors made in `beside` that training will use."""

    def fetch(self, key: int, make: Callable[[], Made], build: Callable[[bytes, bool], T]) -> tuple[Pending[T], Any]:
        """Return the result of `build`, called with what `make` makes beside training once it is in host memory, and
        a mark behind the making. key: names the host buffer, which the next fetch with this key uses again."""

    def bring(self, key: int, payload: bytes, check: Callable[[Tensor], None]) -> Tensor:
        """Bring a payload to `device` (uint8, 1-D), after `check` has accepted it in host memory. key: as in
        `fetch`."""

    def when_fetched(self, call: Callable[[], Pending[T]]) -> Pending[T]:
        """Return the result of `call`, called once everything given to `fetch` so far is in host memory."""


class SameDevice:
    """Reads and changes masters that lie on the device of the anchors, as `Staging` says."""

    def read(self, masters: Sequence[Tensor], into: Tensor) -> None:
        if masters:
            torch.cat(list(masters), out=into)

    def change(self, masters: Sequence[Tensor], how: Change, *vectors: Tensor) -> None:
        if masters:
            sizes = [m.numel() for m in masters]
            how(masters, *(vector.split(sizes) for vector in vectors))


class SynchronousStaging(SameDevice):
    """Does everything at once, in the caller's thread: for training on a CPU, and for the simulator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> None:
        return None

    def wait(self, mark: Any, *made: Tensor) -> None:
        pass

    def fetch(self, key: int, make: Callable[[], Made], build: Callable[[bytes, bool], T]) -> tuple[Pending[T], None]:
        payload, finite = make()
        return Ready(build(payload.cpu().numpy().tobytes(), bool(finite))), None

    def bring(self, key: int, payload: bytes, check: Callable[[Tensor], None]) -> Tensor:
        return on_host(payload, check).to(self.device)

    def when_fetched(self, call: Callable[[], Pending[T]]) -> Pending[T]:
        return call()


def on_host(payload: bytes, check: Callable[[Tensor], None]) -> Tensor:
    """Bring a payload to the CPU: a uint8 tensor in host memory, after `check` has accepted it."""
    host = from_bytes(payload)
    check(host)
    return host


# Payloads are only read, so a tensor over a message's memory need not be writable. torch warns once, here.
with warnings.catch_warnings(action="ignore"):
    torch.frombuffer(b"0", dtype=torch.uint8)


def from_bytes(payload: bytes) -> Tensor:
    """View a message's payload as a tensor (uint8, 1-D, CPU) over the same memory, which must not be written to.
    `frombuffer` refuses an empty buffer, which a part that holds nothing of a fragment sends."""
    return torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)


def to_bytes(payload: Tensor) -> bytes:
    """View a payload (uint8, 1-D, on any device) as bytes for a message: in host memory the same memory, which must
    not be written to any more. On a GPU this waits for the device."""
    return cast(bytes, memoryview(payload.cpu().numpy()).toreadonly())  # type: ignore[arg-type]
