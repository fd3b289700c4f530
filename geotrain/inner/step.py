"""What a training step says of itself."""

from __future__ import annotations

from collections.abc import Callable


class StepResult:
    """One optimizer step, the same on every rank.

    loss: mean over the worker's batch, before the step. grad_norm: of all gradients, before clipping.
    lr: the rate used. tokens: trained by the whole worker. With ACCO all but the rate are known once the step is
    committed, during the next one: reading them earlier waits.
    """

    def __init__(self, lr: float, wait: Callable[[], None]) -> None:
        self.lr = lr
        self._wait = wait
        self._numbers: tuple[float, float, int] | None = None

    def arrive(self, loss: float, grad_norm: float, tokens: int) -> None:
        self._numbers = (loss, grad_norm, tokens)

    @property
    def loss(self) -> float:
        return self._arrived()[0]

    @property
    def grad_norm(self) -> float:
        return self._arrived()[1]

    @property
    def tokens(self) -> int:
        return self._arrived()[2]

    def _arrived(self) -> tuple[float, float, int]:
        if self._numbers is None:
            self._wait()
        assert self._numbers is not None
        return self._numbers
