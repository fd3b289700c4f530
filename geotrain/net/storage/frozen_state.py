"""Freezes a server's tensors: they are read block by block as they were, beside the updates that change them.

Copy on write: nothing is copied when they are frozen. The server says of each tensor that it is about to change it,
and only what the reader has not taken of that tensor yet is copied first. The reader goes on behind the last change,
where the next is likely: what it has read before an update comes to it, nobody has to copy.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

CHUNK_BYTES = 2 << 20  # so much is read, checksummed and written at once; an update may wait for one to be read
PATIENCE_S = 30.0  # an update waits at most so long for copies to be written; then memory grows beyond the budget


class FrozenState:
    """Holds the values that `tensors` have now. One thread may read them, once, while another changes the tensors.

    tensors: name → contiguous tensor on the CPU. largest_share: of the state that one update may change, those of the
    largest fragment. That much is copied at most: an update that needs more waits until earlier copies were read.
    done: is called with each tensor that was read.

    It is `open` until everything was read or it was closed; then it holds nothing and copies nothing.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], largest_share: float = 1.0, done: Callable[[Tensor], None] | None = None
    ) -> None:
        self._done = done or (lambda tensor: None)
        self.kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        self.state_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.budget_bytes = largest_share * self.state_bytes
        self.most_copied_bytes = self._copied_bytes = 0  # that copies take: at most so far, and now
        self._left = {name: _bytes_of(tensor) for name, tensor in tensors.items()}  # what is still to be read
        self._order = list(tensors)
        self._places = {name: place for place, name in enumerate(self._order)}
        self._next = 0  # the place in `_order` from which on the reader looks for what nobody has copied
        self._waits = False  # whether an update waits for room
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._tensors = dict(tensors)  # keeps them alive, so that an id means the same tensor throughout
        self._copied: dict[str, int] = {}  # name → bytes of its copy
        self._changed = threading.Condition()

    @property
    def open(self) -> bool:
        return bool(self._left)

    def before_write(self, *tensors: Tensor) -> None:
        """Copy what is still to be read of tensors that are about to change; ignores those not of the state."""
        with self._changed:
            deadline_s = time.monotonic() + PATIENCE_S
            while True:
                names = {self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names}
                names = {name for name in names if name in self._left and name not in self._copied}
                bytes_needed = sum(self._left[name].numel() for name in names)
                left_s = deadline_s - time.monotonic()
                fits = self._copied_bytes + bytes_needed <= self.budget_bytes
                self._waits = not fits and bool(names and self._copied) and left_s > 0
                if not self._waits:
                    break
                self._changed.wait(left_s)
            self._next = min((self._places[name] for name in names), default=self._next)
            for name in names:
                self._copied[name] = self._left[name].numel()
                self._left[name] = self._left[name].clone()
            self._copied_bytes += bytes_needed
            self.most_copied_bytes = max(self.most_copied_bytes, self._copied_bytes)

    def names(self) -> Iterator[str]:
        """Yield the tensors' names in the order in which they are to be read: copies last, or when an update waits
        for their memory. Each must be read before the next is asked for."""
        while True:
            with self._changed:
                name = next(iter(self._copied), None)
                # Where no copy is left, an update that waits has room, and what it is to copy is still to be read.
                if len(self._copied) < len(self._left) and not (self._waits and self._copied):
                    while (name := self._order[self._next]) not in self._left or name in self._copied:
                        self._next = (self._next + 1) % len(self._order)
            if name is None:
                return
            yield name

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yield the tensor's bytes in blocks; each begins with a page of memory, and is valid until the next is asked
        for."""
        buffer = torch.frombuffer(mmap.mmap(-1, CHUNK_BYTES), dtype=torch.uint8)
        while True:
            with self._changed:
                left = self._left.get(name)
                if left is None or not left.numel():
                    read = self._drop(name)
                    break
                chunk = buffer[: left.numel()]
                chunk.copy_(left[: len(chunk)])
                self._left[name] = left[len(chunk) :]
            yield memoryview(chunk.numpy())  # type: ignore[arg-type]
        if read is not None:
            self._done(read)

    def close(self) -> None:
        """Drop what was not read, and copy nothing more."""
        with self._changed:
            for name in list(self._left):
                self._drop(name)

    def _drop(self, name: str) -> Tensor | None:
        self._left.pop(name, None)
        tensor = self._tensors.pop(name, None)
        self._names.pop(id(tensor), None)
        self._copied_bytes -= self._copied.pop(name, 0)
        self._changed.notify_all()
        return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """View the tensor's memory as a vector of bytes."""
    return tensor.detach().view(-1).view(torch.uint8)
