"""Plays a scenario's world over two transports: in memory, and over real sockets in this process.

Each has the same servers, settings, journals and snapshots. `World` has a call for each command of the language.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.config import OuterConfig
from geotrain.net.transport import rpc
from geotrain.net.transport.grpc_client import AnswerPull, ConnectionLost, GrpcClient
from geotrain.net.transport.operator_client import command
from geotrain.outer.messages import (
    AnswerWanted,
    BadDelta,
    DataGone,
    Finished,
    Identity,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    LiftQuarantine,
    MemberSilent,
    Message,
    NotJoined,
    OperatorCommand,
    Recall,
    Refused,
    RunComplete,
    TakenBack,
    UpdatePart,
    UpdateRejected,
)
from geotrain.outer.server.liveness import liveness
from geotrain.outer.server.server import Handled
from geotrain.outer.server.waits import WaitTable, waits
from tests.support.local_servers import first_weights
from tests.support.net_worlds import BUSY_S, Cluster, Loop, tiny_layout, wait_for
from tests.support.outer_world import FakeWorker, halves, whole
from tests.support.recorded_world import JournaledWorld

STEP = 2  # samples
REFUSED = "far out of the ordinary, the scenario says"
Watch = Callable[[str, Any, Handled | Refused | None], None]


@dataclass(frozen=True)
class Plan:
    """Describes the run of a world. regions: region → its workers → how many ranks each has. samples: of the run."""

    regions: dict[str, dict[str, int]]
    outer: OuterConfig
    samples: int

    def slicings(self) -> dict[str, dict[str, Any]]:
        return {r: {w: (whole, halves)[n - 1] for w, n in workers.items()} for r, workers in self.regions.items()}


class World(ABC):
    """Calls the servers of one run on behalf of its members and its operator.

    workers: name → its region, and the worker, which makes its messages.
    """

    workers: dict[str, tuple[str, FakeWorker]]
    identity: Any

    def __init__(self, plan: Plan) -> None:
        self.parameter_map = tiny_layout(plan.outer)
        self.workers = {
            name: (
                GLOBAL if plan.outer.flat else region,
                FakeWorker(name, self.parameter_map, cut(self.parameter_map)),
            )
            for region, workers in plan.slicings().items()
            for name, cut in workers.items()
        }

    @abstractmethod
    def tell(self, server: str, message: Message) -> Any:
        """Tell a server a message of a member, or of the operator; returns its reply. Raises Refused."""

    @abstractmethod
    def pull(self, worker: str, incarnation: str, part: int, fragment: int, sequence: int) -> Any:
        """Pull the answer to that update; None: there is none yet."""

    @abstractmethod
    def lease(self, worker: str, incarnation: str, request: LeaseRequest) -> Any:
        """Ask for a lease; returns the reply, once the global server has said it. None: the run is paused."""

    @abstractmethod
    def rest(self) -> None:
        """Return when all that servers have to say to each other has arrived."""

    @abstractmethod
    def restart(self, server: str, between: Callable[[Path], None] = lambda folder: None) -> None:
        """Kill the server without a word, and start it again from its folder. between: is called with that folder."""

    @abstractmethod
    def refuse(self, region: str) -> None:
        """Have the global server refuse the region's next update for good."""

    @abstractmethod
    def snapshot(self, server: str) -> None: ...

    @abstractmethod
    def status(self, server: str) -> dict[str, Any]: ...

    def waits(self, server: str) -> list[dict[str, Any]]:
        """Return what the server waits for, as its status says."""
        waits: list[dict[str, Any]] = self.status(server)["waits"]
        return waits

    @abstractmethod
    def new_events(self, server: str) -> list[tuple[str, dict[str, Any]]]:
        """Return kind and fields of each event of the server since this was asked last."""

    @abstractmethod
    def close(self) -> None: ...


class InMemory(World):
    """Delivers messages by function calls, in a fixed order. Those of a region whose link is cut wait."""

    def __init__(self, plan: Plan, folder: Path, watch: Watch) -> None:
        super().__init__(plan)
        self.told = watch
        self.events: defaultdict[str, list[Any]] = defaultdict(list)
        regions = {region: [self.workers[name][1] for name in names] for region, names in plan.regions.items()}
        self.world = JournaledWorld(
            folder, plan.outer, regions, first_weights(self.parameter_map), self.parameter_map,
            watch=self.watch, train_samples=plan.samples, samples_per_step=STEP,
            identity=Identity("test", "0123", self.parameter_map.digest, "a tiny llama"),
        )  # fmt: skip
        self.identity = self.world.identity
        self.held: set[str] = set()  # regions whose link is cut
        self.refusing: set[str] = set()  # regions whose next update is refused for good
        self.needs: dict[str, float] = {}  # region → seconds in which it needs answers

    def servers(self, name: str) -> Any:
        return self.world.server(name)

    def answers(self, server: str, member: str) -> list[str]:
        of_each = sorted(self.servers(server).members[member].fragments.items())
        return [f"{fragment}.{own.answer}" for fragment, own in of_each if own.answer is not None]

    def watch(self, server: str, message: Any, outcome: Handled | Refused | None) -> None:
        if isinstance(outcome, Handled):
            self.events[server] += [(type(event).__name__, vars(event)) for event in outcome.events]
        self.told(server, message, outcome)

    def tell(self, server: str, message: Message) -> Any:
        try:
            reply = self.world.tell(server, message)
        except Refused as refused:
            member = getattr(message, "worker", getattr(message, "member", ""))
            judged = isinstance(message, UpdatePart | LeaseRequest) and not isinstance(refused, DataGone)
            if judged and refused.retry_s is None:  # as the service does it
                life, bad = self.servers(server).members[member].incarnation, isinstance(refused, BadDelta)
                of = getattr(message, "fragment", 0), getattr(message, "sequence", 0)
                self.tell(server, UpdateRejected(member, life, refused.reason, *of, message.job * bad))
            raise
        if isinstance(message, UpdatePart):  # as a sender is told
            own = self.servers(server).members[message.member].fragments[message.fragment]
            return own.sequence >= message.sequence
        return reply

    def pull(self, worker: str, incarnation: str, part: int, fragment: int, sequence: int) -> Any:
        server, asked = self.workers[worker][0], (worker, incarnation, part, fragment, sequence)
        if self.servers(server).lacks_answer(*asked):
            self.tell(server, AnswerWanted(worker, incarnation, fragment, sequence))
        return self.servers(server).answer(*asked)

    def lease(self, worker: str, incarnation: str, request: LeaseRequest) -> Any:
        region, _ = self.workers[worker]
        self.servers(region).membership.current(worker, incarnation)
        reply = self.tell(region, request)
        if reply is None:
            self.rest()
            reply = self.world.down.pop(worker, None)
        return reply if reply is None or reply.job == request.job else None

    def rest(self) -> None:
        while any([self.moves(region) for region in self.world.regions if region not in self.held]):
            pass

    def moves(self, region: str) -> bool:
        """Deliver all that the region has to say, and all answers that are there. Returns whether anything came of
        it."""
        said = [self.deliver(region) for _ in range(len(self.world.up[region])) if self.world.up[region]]
        return any([*said, self.answered(region)])

    def deliver(self, name: str) -> bool:
        """Deliver the region's next message to the global server. Returns False if it must be said again."""
        world, region, message = self.world, self.world.regions[name], self.world.up[name].popleft()
        try:
            if name in self.refusing and isinstance(message, UpdatePart):
                self.refusing.remove(name)
                world.top.handle(UpdateRejected(name, region.incarnation, REFUSED))
                raise Refused(REFUSED)
            world.top.membership.current(name, region.incarnation)
            if isinstance(message, UpdatePart) and name in self.needs:
                message = replace(message, need_s=self.needs[name])
            reply = world.top.handle(message).reply
        except NotJoined:
            world.connect(name)
            return True
        except Refused as refused:
            if again := refused.retry_s is not None:
                world.up[name].append(message)
            if again or not isinstance(message, UpdatePart):  # else its process ends
                return False
            about = refused.reason, message.fragment, message.sequence
            world.tell(name, UpdateRejected(name, region.incarnation, *about))
            world.lives[name] += 1
            region.incarnation = f"life-{world.lives[name]}"
            world.connect(name)
            return True
        if isinstance(message, LeaseRequest) and reply is None:
            world.up[name].append(message)
            return False
        if isinstance(reply, Lease | Finished | TakenBack):
            world.tell(name, reply)
        elif isinstance(message, Leave):
            world.tell(name, message)
        elif isinstance(message, AnswerWanted) and message.fragment not in (region.worker_data.final or ()):
            world.answer(name, message.fragment, message.sequence)
        return True

    def answered(self, name: str) -> bool:
        """Pull the answers to what the global server has taken, and take what heartbeats tell. Returns whether there
        was anything."""
        world, region = self.world, self.world.regions[name]
        above, sent = world.top.members[name].fragments, list(region.uplink.in_flight.values())
        found = [world.deliver_down(name, u) for u in sent if u.sequence <= above[u.fragment].sequence]
        if world.top.recalls(name) and any(region.worker_data.leases.spare(worker) for worker in region.members):
            found.append(world.tell(name, Recall()) is None)
        if world.top.over and not region.over:
            found.append(world.tell(name, RunComplete()) is None)
        return any(found)

    def restart(self, server: str, between: Callable[[Path], None] = lambda folder: None) -> None:
        self.world.kill(server, between)

    def refuse(self, region: str) -> None:
        self.refusing.add(region)

    def snapshot(self, server: str) -> None:
        self.world.snapshot(server)

    def status(self, server: str) -> dict[str, Any]:
        return json.loads(json.dumps(self.servers(server).status(), allow_nan=False))

    def waits(self, server: str) -> list[dict[str, Any]]:
        status = {"silent_limit_s": 60.0, "connected": server not in self.held, **self.status(server)}
        paused = status.get("phase") == "paused"
        judged = {name: {**m, "state": liveness(m, 0.0, 1.0, paused)} for name, m in status["members"].items()}
        return WaitTable().as_json(waits({**status, "members": judged}), 0.0)

    def new_events(self, server: str) -> list[tuple[str, dict[str, Any]]]:
        return self.events.pop(server, [])

    def close(self) -> None:
        self.world.close()


class OverSockets(World):
    """Runs the servers on threads and sockets of this process, and calls them as members do, with a single attempt a
    call, so that a refusal is seen. now_s: by the clock of their failure detectors, which look at their members only
    when time passes here."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan)
        self.loop, self.regions = Loop(), tuple(plan.regions)
        self.links: dict[tuple[str, str], GrpcClient] = {}
        self.cluster = Cluster(self.loop, folder, plan.outer, plan.slicings(), plan.samples, STEP)
        self.identity, self.now_s = self.cluster.identity, 0.0
        for server in (GLOBAL, *self.regions):
            self.hold_clock(server)

    def hold_clock(self, server: str) -> None:
        detector = self.running(server).service.failure_detector
        self.loop.loop.call_soon_threadsafe(detector.stop)
        detector.clock = lambda: self.now_s
        detector._alive_s = dict.fromkeys(detector._alive_s, self.now_s)

    def passes(self, server: str, seconds: float, heard: list[tuple[str, int]], late_s: float) -> None:
        """Let seconds pass, and the server's failure detector look. heard: member and rank of whom it has heard at
        their end. late_s: for how long its process stood still."""
        self.now_s += seconds
        detector = self.running(server).service.failure_detector
        for rank in heard:
            detector.note_alive(*rank)
        self.loop.do(detector.look(self.now_s - late_s))

    def servers(self, name: str) -> Any:
        return self.running(name).server

    def running(self, server: str) -> Any:
        return self.cluster.top if server == GLOBAL else self.cluster.regions[server]

    def address(self, server: str) -> str:
        return self.running(server).address

    def connection(self, worker: str, incarnation: str) -> GrpcClient:
        async def made() -> GrpcClient:
            return GrpcClient(self.address(self.workers[worker][0]), worker, incarnation)

        if (worker, incarnation) not in self.links:
            self.links[worker, incarnation] = self.loop.do(made())
        return self.links[worker, incarnation]

    def call(self, attempt: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Make a call; make it again where the connection is lost, as after a restart."""
        deadline_s = time.monotonic() + BUSY_S
        while True:
            try:
                return self.loop.do(attempt())
            except ConnectionLost:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)

    def tell(self, server: str, message: Message) -> Any:
        match message:
            case MemberSilent():  # its failure detector says so
                return self.loop.do(self.running(server).server_thread.say(message))
            case Join():
                link = self.connection(message.member, message.incarnation)
                return self.call(lambda: link.join(message))
            case UpdatePart():
                link = self.connection(message.member, message.incarnation)
                return self.call(lambda: link.push(message)) >= message.sequence
            case OperatorCommand():
                return command(self.address(server), rpc.Control(message.what, message.region), BUSY_S)
            case LiftQuarantine():
                return command(self.address(server), rpc.Control("unban", message.member), BUSY_S) and None
            case Leave():
                _, fake = self.workers[message.member]
                [link] = [link for (name, _), link in list(self.links.items())[::-1] if name == message.member][:1]

                async def all_ranks() -> None:
                    await asyncio.gather(
                        *[link.leave(part, tuple(fake.sequences)) for part in range(len(fake.slicings))]
                    )

                return self.call(all_ranks)
        raise NotImplementedError(f"a scenario over sockets cannot say {type(message).__name__}")

    def lease(self, worker: str, incarnation: str, request: LeaseRequest) -> Any:
        link, deadline_s = self.connection(worker, incarnation), time.monotonic() + BUSY_S
        while (reply := self.call(lambda: link.lease(request, 0.2))) is None:
            if self.status(GLOBAL)["phase"] == "paused":
                return None
            assert time.monotonic() < deadline_s, "all data is with others, and over sockets nobody can wait for it"
        return reply

    def pull(self, worker: str, incarnation: str, part: int, fragment: int, sequence: int) -> Any:
        link = self.connection(worker, incarnation)
        return self.call(lambda: link.pull(AnswerPull(part, fragment, sequence, 1 << 24, wait_s=0.0)))

    def rest(self) -> None:
        wait_for(lambda: all(self.is_quiet(region) for region in self.regions))

    def is_quiet(self, region: str) -> bool:
        """Whether the region has nothing under way and is known above, or has left in good order."""
        below, above = self.status(region), self.status(GLOBAL)["members"][region]
        server = self.servers(region)
        if server._last_words():
            return False
        if all(member["left"] for member in below["members"].values()):  # and it knows that its goodbye was taken
            return bool(above["left"] and server.done)
        queued = self.status(GLOBAL)["phase"] != "paused" and below.get("queued")  # else leases are asked for
        busy = below["in_flight"] or queued or not below["versions"]
        return bool(below["connected"] and above["joined"] and not busy)

    def restart(self, server: str, between: Callable[[Path], None] = lambda folder: None) -> None:
        running = self.running(server)
        running.kill()
        between(running.folder)
        if server == GLOBAL:
            self.cluster.top = running.again()
        else:
            self.cluster.regions[server] = running.again()
        self.hold_clock(server)

    def refuse(self, region: str) -> None:
        top, admit = self.cluster.top.server, self.cluster.top.server.intake.admit

        def refuse_once(part: UpdatePart) -> bool:
            if part.member != region:
                return admit(part)  # type: ignore[no-any-return]
            top.intake.admit = admit
            raise Refused(REFUSED)

        top.intake.admit = refuse_once

    def snapshot(self, server: str) -> None:
        self.running(server).snapshot()

    def status(self, server: str) -> dict[str, Any]:
        return self.running(server).service.status()

    def new_events(self, server: str) -> list[tuple[str, dict[str, Any]]]:
        events, running = [], self.running(server)
        while running.events:
            event = running.events.popleft()
            events.append((type(event).__name__, vars(event)))
        return events

    def close(self) -> None:
        for link in self.links.values():
            self.loop.do(link.close())
        self.cluster.close()
        self.loop.close()
