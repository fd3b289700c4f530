"""Counts a server's time: one thread, which does one thing after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geotrain.outer.messages import Answer, Message, UpdatePart
from geotrain.plan.model.servers import ServerSeconds
from geotrain.simulate.clock import Clock


class ServerWork:
    """The work of one server. busy_s: how long it has worked so far."""

    def __init__(self, clock: Clock, seconds: ServerSeconds) -> None:
        self.clock, self.seconds = clock, seconds
        self.busy_s = self._free_s = 0.0

    def on(self, message: Message, fragments: tuple[int, ...], call: Callable[..., None], *args: Any) -> None:
        """Schedule the call for when the message has been worked on, after all that came before it."""
        of = self.seconds.update if isinstance(message, UpdatePart) else self.seconds.merge
        counts = isinstance(message, UpdatePart | Answer) and of
        self._after(sum(of[f] for f in fragments) if counts else 0.0, call, *args)

    def to_send(self, fragments: tuple[int, ...], call: Callable[..., None], *args: Any) -> None:
        """Schedule the call for when an update of these fragments has been coded."""
        self._after(sum(self.seconds.send[f] for f in fragments) if self.seconds.send else 0.0, call, *args)

    def _after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._free_s = max(self.clock.now, self._free_s) + seconds
        self.busy_s += seconds
        if self._free_s > self.clock.now:
            self.clock.at(self._free_s, call, *args)
        else:
            call(*args)
