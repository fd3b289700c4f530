"""A server's time: one thread, which does one thing after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from geotrain.outer.messages import Answer, Message, UpdatePart
from geotrain.plan.model.server_rates import ServerRates
from geotrain.plan.model.servers import Place, merge_stages, send_stages, update_stages
from geotrain.simulate.clock import Clock
from geotrain.simulate.sizes import LinkSizes, Sizes


@dataclass(frozen=True)
class ServerSeconds:
    """Of each fragment. update: of a member's update, from its first byte to its answer's last. send, merge: of a
    region's update to the global server, and of the answer to it."""

    update: tuple[float, ...] = ()
    send: tuple[float, ...] = ()
    merge: tuple[float, ...] = ()

    @staticmethod
    def of(place: Place, sizes: Sizes, rates: ServerRates | None) -> ServerSeconds:
        """rates: None: a server takes no time."""
        if rates is None:
            return ServerSeconds()
        members, above = (sizes.local, sizes.wide) if place.above else (sizes.wide, None)
        update = [
            sum(update_stages(place, up, numel, down, rates).values())
            for numel, up, down in zip(sizes.numels, members.up, members.down, strict=True)
        ]
        return ServerSeconds(tuple(update), *_beyond(place, sizes.numels, above, rates))


def _beyond(
    place: Place, numels: tuple[int, ...], above: LinkSizes | None, rates: ServerRates
) -> tuple[tuple[float, ...], ...]:
    if above is None:
        return ()
    up, down = zip(numels, above.up, strict=True), zip(numels, above.down, strict=True)
    send = [sum(send_stages(numel, size, rates).values()) for numel, size in up]
    merge = [sum(merge_stages(place, numel, size, rates).values()) for numel, size in down]
    return tuple(send), tuple(merge)


class ServerWork:
    """busy_s: how long it has worked so far."""

    def __init__(self, clock: Clock, seconds: ServerSeconds) -> None:
        self.clock, self.seconds = clock, seconds
        self.busy_s = self._free_s = 0.0

    def on(self, message: Message, fragments: tuple[int, ...], call: Callable[..., None], *args: Any) -> None:
        """Have the call happen when the message has been worked on, after all that came before it."""
        of = self.seconds.update if isinstance(message, UpdatePart) else self.seconds.merge
        counts = isinstance(message, UpdatePart | Answer) and of
        self._after(sum(of[f] for f in fragments) if counts else 0.0, call, *args)

    def to_send(self, fragments: tuple[int, ...], call: Callable[..., None], *args: Any) -> None:
        """Have the call happen when an update of these fragments has been coded."""
        self._after(sum(self.seconds.send[f] for f in fragments) if self.seconds.send else 0.0, call, *args)

    def _after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._free_s = max(self.clock.now, self._free_s) + seconds
        self.busy_s += seconds
        if self._free_s > self.clock.now:
            self.clock.at(self._free_s, call, *args)
        else:
            call(*args)
