"""Which worker evaluates the global weights, and when. Pure, as all that stands beside it."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from geotrain.outer.leases import LeaseBook
from geotrain.outer.messages import Refused, Validated


class Validations:
    """A task goes out with a lease: its worker evaluates before it trains that lease; nobody else waits.

    every_samples: committed samples from one task to the next; None: there are none. A task whose worker dies is
    lost, and the next one comes in its time.
    """

    def __init__(self, every_samples: int | None) -> None:
        self.every_samples = every_samples
        self.number = 0  # of the last task that was handed out
        self.due_samples = every_samples or 0
        self.latest: dict[str, Any] | None = None

    def task_for(self, worker: str, book: LeaseBook) -> int:
        """The number of the task that this worker would get now; 0: none.

        The fastest worker is the cheapest. When it has not asked for half a period, whoever asks first is taken.
        """
        if self.every_samples is None or book.committed_samples < self.due_samples:
            return 0
        fastest = min(book.step_s, key=lambda name: book.step_s[name], default=worker)
        late = book.committed_samples >= self.due_samples + self.every_samples // 2
        return self.number + 1 if worker == fastest or late else 0

    def handed_out(self, committed_samples: int) -> None:
        assert self.every_samples is not None
        self.number += 1
        self.due_samples = (committed_samples // self.every_samples + 1) * self.every_samples

    def on_validated(self, result: Validated, committed_samples: int) -> bool:
        """Whether it is news. Raises Refused."""
        if not 0 < result.number <= self.number or not isfinite(result.loss):
            raise Refused(f"{result.worker}: validation {result.number} with loss {result.loss} was not asked for")
        if self.latest is not None and result.number <= self.latest["number"]:
            return False
        self.latest = {**asdict(result), "samples": committed_samples}
        return True

    def state(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {"number": self.number, "due_samples": self.due_samples, "latest": self.latest}

    def load(self, state: dict[str, Any]) -> None:
        self.number, self.latest = state["number"], state["latest"]
        self.due_samples = state["due_samples"] or self.every_samples or 0
