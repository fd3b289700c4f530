"""The production's server state machines as nodes of the virtual world: messages in, messages out, over a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from geotrain.outer.global_server import GlobalServer
from geotrain.outer.messages import (
    Answer,
    Finished,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    Release,
    UpdatePart,
    Welcome,
)
from geotrain.outer.region_server import RegionServer
from geotrain.simulate.clock import Clock, Promise
from geotrain.simulate.links import Network
from geotrain.simulate.sizes import LinkSizes


class Uplink:
    """A member's connection to the server above it (`geotrain.outer.exchange.Client`).

    A message of a member that has died meanwhile never arrives: its connection broke.
    """

    def __init__(self, clock: Clock, network: Network, node: Node, name: str) -> None:
        self.clock, self.network, self.node, self.name = clock, network, node, name
        self.incarnation = ""
        self.alive = True
        self.pulls: dict[int, tuple[tuple[int, ...], Promise[Answer]]] = {}
        self.leases: dict[int, Promise[Lease | Finished]] = {}  # by job
        self.on_lease: Callable[[Lease | Finished], None] = self._keep_lease
        self.on_delivered: Callable[[tuple[int, ...]], None] = lambda leases: None  # leases that the server has whole

    def join(self, join: Join) -> Welcome:
        self.incarnation = join.incarnation
        return self.node.server.on_join(join)

    def push(self, part: UpdatePart) -> Promise[None]:
        applied: Promise[None] = Promise()
        fragments = tuple(d.fragment for d in part.deltas)
        size_bytes = sum(self.node.sizes.up[f] for f in fragments)
        arrival = self.network.up(self.clock.now, self.name, size_bytes, fragments)
        self.clock.at(arrival, self._arrived, part, applied)
        return applied

    def pull(self, sequence: int, fragments: tuple[int, ...]) -> Promise[Answer]:
        """Asked for together with the push; the server answers once it can."""
        answer: Promise[Answer] = Promise()
        self.pulls[sequence] = (fragments, answer)
        if sequence == 0:
            self.clock.at(self.network.control_up(self.clock.now, self.name), self.node.answer, self, 0)
        return answer

    def lease(self, request: LeaseRequest) -> Promise[Lease | Finished]:
        granted: Promise[Lease | Finished] = Promise()
        self.leases[request.job] = granted
        self.say(request)
        return granted

    def leave(self) -> None:
        self.say(Leave(self.name))

    def say(self, message: Any) -> None:
        self.clock.at(self.network.control_up(self.clock.now, self.name), self._said, message)

    def granted(self, lease: Lease | Finished) -> None:
        """The server's reply to a lease request leaves for the member."""
        self.clock.at(self.network.control_down(self.clock.now, self.name), self._granted, lease)

    def answered(self, answer: Answer, size_bytes: int) -> None:
        """The server's answer leaves for the member."""
        fragments, promise = self.pulls.pop(answer.sequence)
        arrival = self.network.down(self.clock.now, self.name, size_bytes, fragments)
        self.clock.at(arrival, self._keep, promise, answer)

    def _arrived(self, part: UpdatePart, applied: Promise[None]) -> None:
        if self.alive:
            self.node.on_update(self, part)
            self.on_delivered(part.leases)
            applied.keep(None)

    def _said(self, message: Any) -> None:
        if self.alive:
            self.node.on_control(self, message)

    def _granted(self, lease: Lease | Finished) -> None:
        if self.alive:
            self.on_lease(lease)

    def _keep_lease(self, lease: Lease | Finished) -> None:
        if lease.job in self.leases:
            self.leases.pop(lease.job).keep(lease)

    def _keep(self, promise: Promise[Answer], answer: Answer) -> None:
        if self.alive:
            promise.keep(answer)


class Node(ABC):
    """A server and its members' uplinks."""

    server: GlobalServer | RegionServer

    def __init__(self, sizes: LinkSizes) -> None:
        self.sizes = sizes
        self.parked: dict[tuple[str, int], Uplink] = {}  # answers that are not due yet
        self.uplinks: dict[str, Uplink] = {}

    def on_update(self, uplink: Uplink, part: UpdatePart) -> None:
        self.server.on_part(part)
        self.after_message()
        self.answer(uplink, part.sequence)

    def answer(self, uplink: Uplink, sequence: int) -> None:
        """Send the member its answer, or keep it in mind."""
        if not uplink.alive:
            return
        fragments, _ = uplink.pulls[sequence]
        answer = self.server.answer(uplink.name, uplink.incarnation, 0, sequence, fragments)
        if answer is None:
            self.parked[uplink.name, sequence] = uplink
            return
        self.parked.pop((uplink.name, sequence), None)
        table = self.sizes.first if sequence == 0 else self.sizes.down
        uplink.answered(answer, sum(table[f] for f in fragments))

    def answer_parked(self) -> None:
        for (_, sequence), uplink in list(self.parked.items()):
            self.answer(uplink, sequence)

    def forget(self, uplink: Uplink) -> None:
        """Its member died."""
        uplink.alive = False
        self.parked = {key: other for key, other in self.parked.items() if other is not uplink}

    def on_control(self, uplink: Uplink, message: Any) -> None:
        if isinstance(message, LeaseRequest):
            self.on_lease_request(message)
        elif isinstance(message, Leave):
            self.server.on_leave(message.member)
        self.after_message()

    @abstractmethod
    def on_lease_request(self, request: LeaseRequest) -> None: ...

    def after_message(self) -> None:
        """The state machine has taken a message: something may be due now."""
        if self.parked:
            self.answer_parked()


class GlobalNode(Node):
    """applied: called after every update. ended: when everyone has left."""

    def __init__(
        self, server: GlobalServer, sizes: LinkSizes, applied: Callable[[], None], ended: Callable[[], None]
    ) -> None:
        super().__init__(sizes)
        self.server: GlobalServer = server
        self.applied, self.ended = applied, ended
        self.member_of: dict[str, str] = {w: m for m, names in server.workers_of.items() for w in names}

    def on_update(self, uplink: Uplink, part: UpdatePart) -> None:
        super().on_update(uplink, part)
        self.applied()

    def on_control(self, uplink: Uplink, message: Any) -> None:
        if isinstance(message, Release):
            self.server.on_release(message)
        super().on_control(uplink, message)
        if isinstance(message, Leave) and self.server.finished:
            self.ended()

    def on_lease_request(self, request: LeaseRequest) -> None:
        lease = self.server.on_lease_request(request)
        assert lease is not None, "nobody pauses a simulation"
        self.uplinks[self.member_of[request.worker]].granted(lease)


class RegionNode(Node):
    """A region server, and its own uplink to the global server."""

    def __init__(self, server: RegionServer, sizes: LinkSizes, uplink: Uplink) -> None:
        super().__init__(sizes)
        self.server: RegionServer = server
        self.uplink = uplink
        uplink.on_lease = self._on_lease

    def start(self) -> None:
        """Join the global server and ask for the weights."""
        self.server.on_welcome(self.uplink.join(self.server.join_message()))
        everything = tuple(range(len(self.server.layout.fragments)))
        self.uplink.pull(0, everything).then(self._on_weights)

    def on_lease_request(self, request: LeaseRequest) -> None:
        lease = self.server.on_lease_request(request)
        if lease is not None:
            self.uplinks[request.worker].granted(lease)

    def after_message(self) -> None:
        for send in self.server.outgoing():
            if isinstance(send.message, UpdatePart):
                fragments = tuple(d.fragment for d in send.message.deltas)
                self.uplink.push(send.message)
                self.uplink.pull(send.message.sequence, fragments).then(self._on_weights)
            elif isinstance(send.message, Lease | Finished):
                self.uplinks[send.to].granted(send.message)
            else:
                self.uplink.say(send.message)
        super().after_message()

    def _on_weights(self, answer: Answer) -> None:
        self.server.on_global_weights(answer)
        self.after_message()

    def _on_lease(self, lease: Lease | Finished) -> None:
        self.server.on_lease(lease)
        self.after_message()
