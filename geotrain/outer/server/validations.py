"""Decides when the global weights are evaluated, and by whom."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.outer.messages import Refused, Validated
from geotrain.outer.metrics import MOST
from geotrain.outer.server.leases import LeaseTable
from geotrain.outer.server.member import attributes


class Validations:
    """Decides when a worker gets the task to evaluate the global weights, and keeps the newest result.

    A task goes out with a lease; the worker evaluates before it trains that lease, and nobody else waits for it.
    A task whose worker dies is lost. The next one comes in its time, since a validation only informs people. When all
    data is committed and the workers have left, the global server evaluates the final weights itself.
    every_samples: committed samples between two tasks; None: there are no validations.
    """

    def __init__(self, every_samples: int | None) -> None:
        self.every_samples = every_samples
        self.number = 0  # of the last task that was handed out
        self.due_samples = every_samples or 0
        self.latest: dict[str, Any] | None = None

    def task_for(self, worker: str, lease_table: LeaseTable) -> int:
        """Return the number of the task that this worker would get with a lease now; 0: none.

        The fastest worker gets it, since it loses the least time. If it has not asked within half a period (it may be
        dead, or cut off), whoever asks next gets the task.
        """
        if self.every_samples is None or lease_table.committed_samples < self.due_samples:
            return 0
        fastest = min(lease_table.step_s, key=lambda name: lease_table.step_s[name], default=worker)
        late = lease_table.committed_samples >= self.due_samples + self.every_samples // 2
        return self.number + 1 if worker == fastest or late else 0

    def handed_out(self, committed_samples: int) -> None:
        """Note that the task has gone out with a lease."""
        assert self.every_samples is not None
        self.number += 1
        # The next multiple: a task that went out late does not shift the ones after it, nor does any pile up.
        self.due_samples = (committed_samples // self.every_samples + 1) * self.every_samples

    def final_task(self, lease_table: LeaseTable) -> int:
        """Return the number of the final weights' validation; 0: it is not due yet, is done, or there are none."""
        if self.every_samples is None or not lease_table.finished:
            return 0
        last = self.latest
        done = last is not None and last["worker"] == GLOBAL and last["samples"] >= lease_table.committed_samples
        return 0 if done else self.number + 1

    def on_validated(self, result: Validated, lease_table: LeaseTable) -> bool:
        """Take a worker's result, or the global server's own. Returns whether it is a new one: it is sent again when
        the reply was lost. Raises Refused for a validation that was not asked for, or a loss that is not finite."""
        numbers = abs(result.loss) <= MOST and 0 <= result.seconds <= MOST  # which NaN is not
        if result.worker == GLOBAL:
            self.number = max(self.number, self.final_task(lease_table))
        if not 0 < result.number <= self.number or not numbers or result.version < 0:
            raise Refused(f"{result.worker}: validation {result.number} with loss {result.loss} was not asked for")
        if self.latest is not None and result.number <= self.latest["number"]:
            return False
        self.latest = {**asdict(result), "samples": lease_table.committed_samples}
        return True

    def state(self) -> dict[str, Any]:
        """Return plain JSON data, from which `load` restores the state."""
        return attributes(self, ("number", "due_samples", "latest"))

    def load(self, state: dict[str, Any]) -> None:
        self.number, self.latest = state["number"], state["latest"]
        self.due_samples = state["due_samples"] or self.every_samples or 0
