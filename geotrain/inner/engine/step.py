"""What an optimizer step takes, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class StepReader(Protocol):
    """Gives a step its micro-batches: int64 [micro_batch, sequence_length + 1], the same on all ranks of a replica.

    An engine uses either `own` or, with `acco.balance`, `micro_batch`.
    """

    @property
    def own(self) -> Sequence[Tensor]:
        """This data-parallel replica's part of the batch: gradient_accumulation_steps micro-batches."""

    @property
    def micro_batch(self) -> Callable[[int], Tensor]:
        """Function that reads the i-th micro-batch of the worker's whole batch, 0 ≤ i < accumulation steps · dp_size.

        It serves replicas that divide the batch among them while they compute (`acco.balance`).
        """


class StepResult:
    """The numbers of one optimizer step, the same on every rank.

    loss: mean over the worker's batch, at the weights before the step. grad_norm: the L2 norm of the whole model's
    gradient, before clipping. lr: the learning rate used. tokens: how many the whole worker trained on.

    Reading a number but the learning rate waits for the device; with ACCO, whose steps are committed while the next
    one is computed, for the commit.
    """

    def __init__(self, lr: float, wait: Callable[[], None]) -> None:
        """Make a result whose numbers are still to come. wait: returns once `arrive` has been called."""
        self.lr, self._wait = lr, wait
        self._numbers: tuple[float, float, int] | None = None

    def arrive(self, loss: float, grad_norm: float, tokens: int) -> None:
        self._numbers = (loss, grad_norm, tokens)

    def read(self) -> tuple[float, float, int]:
        if self._numbers is None:
            self._wait()
        assert self._numbers is not None
        return self._numbers

    @property
    def loss(self) -> float:
        return self.read()[0]

    @property
    def grad_norm(self) -> float:
        return self.read()[1]

    @property
    def tokens(self) -> int:
        return self.read()[2]
