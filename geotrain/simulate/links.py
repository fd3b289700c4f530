"""Virtual links, which compute when bytes arrive that leave now. What the bytes mean plays no part.

A pipe is one direction of a link, a first-in-first-out queue in front of a fixed rate. On a shared link all senders
wait in one queue; on one that is not shared each sender has a queue of its own (the published environments are like
that).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LinkSpec:
    """A link. gbps: of each direction. latency_s: one way. shared: one queue for all senders. outages: (from_s, to_s)
    spans without any service, in order."""

    gbps: float
    latency_s: float = 0.0
    shared: bool = True
    outages: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.gbps > 0 or self.latency_s < 0:
            raise ValueError(f"{self}: gbps > 0 and latency_s ≥ 0 are needed")
        flat = [t for span in self.outages for t in span]
        if flat != sorted(flat):
            raise ValueError(f"outages {self.outages} must be (from_s, to_s) spans in order, without overlap")

    @property
    def bytes_per_s(self) -> float:
        return self.gbps * 1e9 / 8


@dataclass
class Usage:
    """Traffic of a pipe: bytes, messages, and seconds during which something was under way."""

    sent_bytes: int = 0
    messages: int = 0
    busy_s: float = 0.0

    def add(self, size_bytes: int, seconds: float) -> None:
        self.sent_bytes += size_bytes
        self.messages += 1
        self.busy_s += seconds


class Pipe:
    """One direction of a link."""

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self.bytes_per_s = spec.bytes_per_s
        self.usage = Usage()
        self._free: dict[str, float] = {}  # channel → when its queue is empty

    def arrival(self, now: float, size_bytes: int, sender: str) -> float:
        """Return when a message that is handed over now has arrived whole."""
        return self._serve(now, size_bytes, "" if self.spec.shared else sender) + self.spec.latency_s

    def control_arrival(self, now: float) -> float:
        """Return when a few bytes have arrived, which slip in between the packets of large messages."""
        return self._after_outage(now) + self.spec.latency_s

    def _serve(self, now: float, size_bytes: int, channel: str) -> float:
        # An outage stops the transfer where it is, and it goes on when the outage ends.
        end = start = self._after_outage(max(now, self._free.get(channel, 0.0)))
        left_s = size_bytes / self.bytes_per_s
        for begin, back in self.spec.outages:
            if end <= begin < end + left_s:
                left_s -= begin - end
                end = back
        end += left_s
        self._free[channel] = end
        self.usage.add(size_bytes, end - start)
        return end

    def _after_outage(self, time_s: float) -> float:
        for begin, back in self.spec.outages:
            if begin <= time_s < back:
                return back
        return time_s


Way = Literal["up", "down"]  # from the members to the server above them, or back


class Star:
    """Links between members (workers, region servers) and the server above them, in virtual time. Each member reaches
    it over a link; members named alike in `link_of` use the same one."""

    def __init__(self, links: dict[str, LinkSpec], link_of: dict[str, str]) -> None:
        self.link_of = link_of
        self.pipes: dict[Way, dict[str, Pipe]] = {
            way: {name: Pipe(spec) for name, spec in links.items()} for way in ("up", "down")
        }

    def arrival(self, way: Way, now: float, member: str, size_bytes: int) -> float:
        """Return when a message between the member and the server has arrived whole that is handed over now."""
        return self.pipes[way][self.link_of[member]].arrival(now, size_bytes, member)

    def control_arrival(self, way: Way, now: float, member: str) -> float:
        """Return when a message of a few bytes has arrived."""
        return self.pipes[way][self.link_of[member]].control_arrival(now)

    def usage(self) -> dict[str, Usage]:
        return {f"{name} {way}": pipe.usage for way, pipes in self.pipes.items() for name, pipe in pipes.items()}
