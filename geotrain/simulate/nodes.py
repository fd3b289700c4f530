"""The production's server state machines as nodes of the virtual world.

A node gives each message to `Server.handle` when it arrives, and passes on what comes of it. What it means is the
server's affair; what is added here is when it arrives: every message travels over a virtual link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.outer.messages import (
    Answer,
    AnswersDue,
    Finished,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    Message,
    Send,
    UpdatePart,
    Welcome,
)
from geotrain.outer.server.answer_times import AnswerTimes
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.server.server import Server
from geotrain.outer.travel import Travel
from geotrain.plan.model.sizes import LinkSizes
from geotrain.simulate.clock import Clock, Promise
from geotrain.simulate.links import Star, Way
from geotrain.simulate.server_work import ServerWork


def nothing(*_: Any) -> None:
    """Do nothing: a call that is not needed. No lambda, which could not be pickled."""


class VirtualClient:
    """A member's connection to the server above it (`geotrain.outer.exchange.Client`).

    A message of a member that has died meanwhile never arrives: its connection broke.
    """

    def __init__(self, clock: Clock, network: Star, node: Node, name: str) -> None:
        self.clock, self.network, self.node, self.name = clock, network, node, name
        self.incarnation = ""
        self.alive = True
        self.pulls: dict[tuple[int, int], Promise[Answer]] = {}  # by fragment and sequence
        self.leases: dict[int, Promise[Lease | Finished]] = {}  # by job
        self.on_lease: Callable[[Lease | Finished], None] = self._keep_lease
        self.on_delivered: Callable[[tuple[int, ...]], None] = nothing  # leases that an update contains
        self.travel = Travel(clock.read)

    def join(self, join: Join) -> Welcome:
        self.incarnation = join.incarnation
        return self.node.on_join(join)

    def push(self, part: UpdatePart) -> Promise[None]:
        applied: Promise[None] = Promise()
        if part.need_s:
            part = self.travel.leaves(part, part.need_s)
        size_bytes = self.node.sizes.up[part.fragment]
        arrival = self.network.arrival("up", self.clock.now, self.name, size_bytes)
        self.clock.at(arrival, self._arrived, part, applied)
        return applied

    def pull(self, fragment: int, sequence: int) -> Promise[Answer]:
        """Return a promise of the answer, which was asked for together with the push; the server answers once it
        can."""
        answer: Promise[Answer] = Promise()
        self.pulls[fragment, sequence] = answer
        if sequence == 0:  # there is no push that would let the server look for an answer
            self._control("up", self.node.answer, self, fragment, 0)
        return answer

    def lease(self, request: LeaseRequest) -> Promise[Lease | Finished]:
        granted: Promise[Lease | Finished] = Promise()
        self.leases[request.job] = granted
        self.say(request)
        return granted

    def leave(self) -> None:
        self.say(Leave(self.name))

    def say(self, message: Message) -> None:
        self._control("up", self._if_alive, self.node.on_message, self, message)

    def granted(self, lease: Lease | Finished) -> None:
        """Send the server's reply to a lease request to the member."""
        self._control("down", self._if_alive, self.on_lease, lease)

    def answered(self, answer: Answer, size_bytes: int) -> None:
        """Send the server's answer to the member."""
        promise = self.pulls.pop((answer.fragment, answer.sequence))
        arrival = self.network.arrival("down", self.clock.now, self.name, size_bytes)
        self.clock.at(arrival, self._if_alive, self._came, promise, answer)

    def _came(self, promise: Promise[Answer], answer: Answer) -> None:
        self.travel.came(answer)
        promise.keep(answer)

    def _control(self, way: Way, call: Callable[..., None], *args: Any) -> None:
        """Schedule the call for when a message of a few bytes that leaves now has arrived."""
        self.clock.at(self.network.control_arrival(way, self.clock.now, self.name), call, *args)

    def _if_alive(self, call: Callable[..., None], *args: Any) -> None:
        if self.alive:
            call(*args)

    def _arrived(self, part: UpdatePart, applied: Promise[None]) -> None:
        if self.alive:
            self.node.on_message(self, part, partial(self._taken, part, applied))

    def _taken(self, part: UpdatePart, applied: Promise[None]) -> None:
        self.on_delivered(part.contains)
        applied.keep(None)

    def _keep_lease(self, lease: Lease | Finished) -> None:
        if lease.job in self.leases:
            self.leases.pop(lease.job).keep(lease)


class Node:
    """A server and its members' connections to it. work: its time."""

    def __init__(self, server: Server, sizes: LinkSizes, work: ServerWork) -> None:
        self.server, self.sizes, self.work = server, sizes, work
        self.uplinks: dict[str, VirtualClient] = {}
        self._parked: dict[tuple[str, int, int], VirtualClient] = {}  # answers that are not due yet
        self._of_joins: list[Send] = []
        self.times = AnswerTimes(server, work.clock.read)

    def on_join(self, join: Join) -> Welcome:
        """Join a member, which takes no time. What the server sends because of it leaves with its next message."""
        handled = self.server.handle(join)
        self._of_joins += handled.sends
        welcome: Welcome = handled.reply
        return welcome

    def on_message(self, uplink: VirtualClient | None, message: Message, taken: Callable[[], None] = nothing) -> None:
        """Handle a message that has come over this connection of a member; None: from the server above. taken: called
        when it has been handled, unless the member dies before."""
        self.work.on(message, self._fragments(message), self._if_there, uplink, message, taken)

    def _if_there(self, uplink: VirtualClient | None, message: Message, taken: Callable[[], None]) -> None:
        if uplink is None or uplink.alive:
            self._handle(uplink, message)
            taken()

    def _fragments(self, message: Message) -> tuple[int, ...]:
        match message:
            case UpdatePart() | Answer():
                return (message.fragment,)
        return ()

    def _handle(self, uplink: VirtualClient | None, message: Message) -> Any:
        handled = self.server.handle(message)
        for name, fragment, wait_s in self.times.news():
            sequence = self.server.members[name].fragments[fragment].sequence
            self.work.clock.after(wait_s, self._due, name, fragment, sequence)
        if uplink is not None and isinstance(handled.reply, Lease | Finished):
            uplink.granted(handled.reply)
        sends, self._of_joins = [*self._of_joins, *handled.sends], []
        for send in sends:
            self.send(send)
        for (_, fragment, sequence), waiting in list(self._parked.items()):
            self.answer(waiting, fragment, sequence)
        if uplink is not None and isinstance(message, UpdatePart):
            self.answer(uplink, message.fragment, message.sequence)
        return handled.reply

    def _due(self, name: str, fragment: int, sequence: int) -> None:
        """The answer to this update would come too late if it waited for longer."""
        same = self.server.members[name].fragments[fragment].sequence == sequence
        if same and name in self.server.answers.held(fragment):
            self._handle(None, AnswersDue((name,), fragment))

    def send(self, send: Send) -> None:
        """Deliver a server's message to one of its workers: a lease that it had to ask for first."""
        assert isinstance(send.message, Lease | Finished)
        self.uplinks[send.to].granted(send.message)

    def answer(self, uplink: VirtualClient, fragment: int, sequence: int) -> None:
        """Send the member its answer, or keep in mind that it waits for one."""
        self._parked.pop((uplink.name, fragment, sequence), None)
        if not uplink.alive:
            return
        answer = self.server.answer(uplink.name, uplink.incarnation, 0, fragment, sequence)
        if answer is None:
            self._parked[uplink.name, fragment, sequence] = uplink
            return
        table = self.sizes.first if sequence == 0 else self.sizes.down
        uplink.answered(self.times.held(uplink.name, answer), table[fragment])

    def forget(self, uplink: VirtualClient) -> None:
        """Forget a member that died."""
        uplink.alive = False


class GlobalNode(Node):
    """The global server. applied: called after every update. ended: when everyone has left."""

    server: GlobalServer

    def __init__(
        self, server: GlobalServer, sizes: LinkSizes, work: ServerWork, applied: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(server, sizes, work)
        self.applied, self.ended = applied, ended
        self._waiting: list[tuple[VirtualClient, LeaseRequest]] = []  # for data that may come back

    def _handle(self, uplink: VirtualClient | None, message: Message) -> Any:
        if isinstance(message, LeaseRequest):
            message = replace(message, at_s=self.work.clock.now)
        reply = super()._handle(uplink, message)
        if uplink is not None and isinstance(message, LeaseRequest) and reply is None:
            self._waiting.append((uplink, message))
        due = [each for each in self._waiting if each[0].alive and self.server.lease_is_due(each[1].worker)]
        self._waiting = [each for each in self._waiting if each[0].alive and each not in due]
        for each in due:
            self._handle(*each)
        if isinstance(message, UpdatePart):
            self.applied()
        elif isinstance(message, Leave) and self.server.finished:
            self.ended()
        return reply


class RegionNode(Node):
    """A region server, and its own uplink to the global server."""

    server: RegionServer

    def __init__(self, server: RegionServer, sizes: LinkSizes, work: ServerWork, uplink: VirtualClient) -> None:
        super().__init__(server, sizes, work)
        self.uplink, self.times.above = uplink, uplink.travel
        uplink.on_lease = partial(self.on_message, None)

    def start(self) -> None:
        """Join the global server and ask for the weights."""
        self.server.handle(self.uplink.join(self.server.join_message()))
        for fragment in self.server.numbers:
            self._ask_for_weights(fragment, 0)

    def send(self, send: Send) -> None:
        message = send.message
        if send.to != GLOBAL:
            super().send(send)
        elif isinstance(message, UpdatePart):
            self.work.to_send(self._fragments(message), self._send_up, message)
        else:
            self.uplink.say(message)

    def _send_up(self, update: UpdatePart) -> None:
        if self.server.answers.waits:
            need_s = self.times.left_s(self.server.going_up(update.fragment), update.fragment)
            update = replace(update, need_s=need_s)
        self.uplink.push(update)
        self._ask_for_weights(update.fragment, update.sequence)

    def _ask_for_weights(self, fragment: int, sequence: int) -> None:
        self.uplink.pull(fragment, sequence).then(partial(self.on_message, None))
