"""The real state machines, joined by a transport that loses nothing but what dies with a process, and held against
`tests.support.specification` at every step. Tests say what happens next."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from contextlib import suppress
from itertools import cycle
from typing import Any

import torch

from geotrain.common.names import GLOBAL
from geotrain.config import OuterConfig
from geotrain.net.storage.recovery import left_out
from geotrain.outer.messages import (
    Answer,
    AnswerWanted,
    Finished,
    Identity,
    Lease,
    LeaseRequest,
    Leave,
    MemberSilent,
    Message,
    NotJoined,
    OperatorCommand,
    Refused,
    Release,
    TakeBack,
    Trained,
    UpdatePart,
    UpdateRejected,
)
from geotrain.outer.rules import region_rule
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.server.server import Handled, Server
from tests.support.outer_world import FakeWorker, by_chunk, halves, parameter_map, whole
from tests.support.recorded_world import check_shards, frozen, same_state, thawed
from tests.support.specification import Specification, Vector, close
from tests.support.specified_members import Uplink, Worker

REGIONS = {"eu": ("a", "b"), "us": ("c",)}
DECAY = 0.75


class SpecifiedWorld:
    """Two regions, three workers, one of two ranks. Every message that a server is told is kept as a journal."""

    def __init__(
        self, config: OuterConfig, samples: int, layers_per_fragment: int | None = None, chunk_elements: int = 1 << 27
    ) -> None:
        self.config, self.samples, self.shape = config, samples, parameter_map(layers_per_fragment, chunk_elements)
        self.shards = cycle((1, 2, 4))  # of the next incarnation of any server
        self.every_fragment = tuple(range(len(self.shape.fragments)))
        self.identity = Identity("test", "config", self.shape.digest, "toy")
        self.generator = torch.Generator().manual_seed(7)
        self.start = [torch.randn(f.numel, generator=self.generator) for f in self.shape.fragments]
        start = [*by_chunk(self.shape, dict(enumerate(self.start))).values()]
        self.spec = Specification(config, REGIONS, start, samples, DECAY)
        self.servers: dict[str, Server] = {}
        self.lives: defaultdict[str, int] = defaultdict(int)
        self.snapshots: dict[str, Any] = {}
        self.journals: dict[str, list[Message | None]] = {}  # None: the process died here
        self.uplinks = {name: Uplink() for name in REGIONS}
        self.drained = False  # any region, at any time
        self.taken: set[tuple[str, int, int]] = set()  # worker, fragment, job of every delta that was applied
        cuts = {"a": halves, "b": whole, "c": whole}
        self.workers = {
            name: Worker(FakeWorker(name, self.shape, cuts[name](self.shape)), region)
            for region, names in REGIONS.items()
            for name in names
        }
        for name in (GLOBAL, *REGIONS):
            self.servers[name] = self.build(name)
            self.servers[name].incarnation = f"{name}-0"
            if name == GLOBAL:
                self.servers[name].set_weights([x.clone() for x in self.start])
            self.snapshot(name)
        for name in REGIONS:
            self.connect(name)

    @property
    def top(self) -> GlobalServer:
        return self.servers[GLOBAL]  # type: ignore[return-value]

    def region(self, name: str) -> RegionServer:
        return self.servers[name]  # type: ignore[return-value]

    def build(self, name: str) -> Server:
        shards = next(self.shards)
        if name == GLOBAL:
            return GlobalServer(self.identity, self.shape, self.config, REGIONS, self.samples, 1, shards=shards)
        rule = region_rule(self.config.rule, REGIONS[name], 1.0, DECAY)
        return RegionServer(name, self.identity, self.shape, self.config, rule, REGIONS[name], shards=shards)

    # -- processes: snapshots, journals, deaths

    def snapshot(self, name: str) -> None:
        """A snapshot, and a journal that begins with what the state leaves out, as a server's process does it."""
        self.snapshots[name] = frozen(self.servers[name])
        self.journals[name] = [*left_out(self.servers[name])]

    def replayed(self, name: str) -> Server:
        """What the newest snapshot and the journal give."""
        server = self.build(name)
        server.load(*thawed(self.snapshots[name]))
        for message in [*self.journals[name], None]:
            if message is None:
                fresh = self.build(name)
                fresh.load(*thawed(frozen(server)))
                server = fresh
                continue
            with suppress(Refused):  # as it was then
                server.handle(message)
        return server

    def restart(self, name: str) -> None:
        """The process dies and comes back: replay gives the very state that was."""
        back = self.replayed(name)
        was = self.build(name)
        was.load(*thawed(frozen(self.servers[name])))
        same_state(back, was)
        self.journals[name].append(None)
        self.lives[name] += 1
        back.incarnation = f"{name}-{self.lives[name]}"
        self.servers[name] = back
        if name != GLOBAL:
            self.uplinks[name] = Uplink()
            if not self.region(name).done:  # else the process ends at once
                self.connect(name)

    # -- what is said

    def tell(self, name: str, message: Message) -> Any:
        """A message reaches a server. Returns its reply. Raises Refused."""
        self.journals[name].append(message)
        handled: Handled = self.servers[name].handle(message)
        self.note(name, message, handled)
        for send in handled.sends:
            if send.to == GLOBAL:
                uplink = self.uplinks[name]
                if isinstance(send.message, UpdatePart | Trained | Leave):
                    uplink.updates.append(send.message)
                    ledger = getattr(self.config.rule, "ledger", not self.top.rule.in_rounds)
                    assert not (ledger and isinstance(send.message, Trained)), "leases without their update"
                    if isinstance(send.message, UpdatePart):
                        self.spec.region_sends(name, send.message)
                elif send.message not in uplink.leases:
                    uplink.leases.append(send.message)  # type: ignore[arg-type]
            else:
                worker = self.workers[send.to]
                if worker.alive and worker.lease is None and send.message.job == worker.job:  # type: ignore[union-attr]
                    worker.lease = send.message  # type: ignore[assignment]
        return handled.reply

    def answer(self, server: str, *asked: Any) -> Answer | None:
        """A member pulls, as over a socket: what is frozen for it then stands in the journal."""
        if self.servers[server].lacks_answer(*asked):
            self.tell(server, AnswerWanted(*asked[:2], *asked[3:]))
        return self.servers[server].answer(*asked)

    def note(self, name: str, message: Message, handled: Handled) -> None:
        """Tell the specification what has been acknowledged."""
        if name != GLOBAL:
            if isinstance(message, Answer):
                self.merged(name, message)
            return
        if isinstance(message, UpdatePart) and handled.reply:
            self.spec.global_update(message.member, message)
        if isinstance(message, UpdatePart | Trained):
            for number in message.leases:
                self.spec.ledger.trained(number)
        elif isinstance(message, LeaseRequest) and isinstance(handled.reply, Lease):
            self.spec.ledger.granted(handled.reply)

    def merged(self, region: str, answer: Answer) -> None:
        for weights in answer.weights:
            self.spec.region_merges(region, weights)

    # -- a region's client

    def connect(self, name: str) -> None:
        """Join the global server, and say again what it may not have."""
        region, uplink = self.region(name), self.uplinks[name]
        join = region.join_message()
        before = self.top.members[name].incarnation
        try:
            welcome = self.tell(GLOBAL, join)
        except Refused:
            return  # quarantined, or gone
        if before != join.incarnation and not self.top.rule.in_rounds:
            for number in self.spec.ledger.open:
                lease = self.spec.ledger.leases[number]
                if lease.worker in REGIONS[name] and number not in join.leases:
                    self.spec.ledger.given_back(number)
        self.spec.ledger.lives(join.leases, welcome.gone)
        began, sent = bool(region.fragments), list(region.in_flight.values())
        assert self.tell(name, welcome) == 0, "an acknowledged update is lost"
        if began and not region.fragments:  # others have what it trained
            assert welcome.gone
            for update in (u for u in sent if u.sequence > self.top.members[name].sequence):
                self.spec.refused(name, update)
            return self.begin_again(name)
        if not region.fragments:
            answer = self.answer(GLOBAL, name, region.incarnation, 0, 0, tuple(range(len(self.shape.fragments))))
            assert answer is not None or self.top.rule.in_rounds
            if answer is None:
                return
            self.spec.region_begins(name, list(answer.weights))
            merge, self.merged = self.merged, lambda *_: None  # type: ignore[method-assign]
            self.tell(name, answer)
            self.merged = merge  # type: ignore[method-assign]
        else:
            for chunk in range(len(self.shape.chunks)) if not self.top.shards.fingerprints_of(name) else ():
                self.spec.mirror.pop((name, chunk), None)
        uplink.acknowledged.clear()
        uplink.updates = deque(send.message for send in region.resend())  # type: ignore[misc]
        if region.gone:
            uplink.updates.append(Leave(name))

    def deliver_update(self, name: str) -> None:
        uplink = self.uplinks[name]
        if not uplink.updates:
            return
        message = uplink.updates[0]
        if self.delivered(name, message) is None:
            return
        uplink.updates.popleft()
        if isinstance(message, UpdatePart):
            uplink.acknowledged.append(message)
        elif isinstance(message, Leave):
            self.returned_by(name)
            self.tell(name, message)

    def delivered(self, name: str, message: Message) -> tuple[Any] | None:
        """The global server's reply to what a region says, in a tuple; None: it did not take it."""
        try:
            if not isinstance(message, Leave):
                self.top.current(name, self.region(name).incarnation)
            return (self.tell(GLOBAL, message),)
        except NotJoined:
            self.connect(name)
        except Refused as refused:
            assert refused.retry_s is not None or self.top.members[name].quarantined, refused.reason
        return None

    def returned_by(self, name: str) -> None:
        """The global server gives what the region held to others."""
        for number in self.spec.ledger.open:
            if not self.top.rule.in_rounds and self.spec.ledger.leases[number].worker in REGIONS[name]:
                self.spec.ledger.given_back(number)

    def deliver_leases(self, name: str) -> None:
        for _ in range(1 + len(self.uplinks[name].leases)):
            self.deliver_lease(name)

    def deliver_lease(self, name: str) -> None:
        uplink = self.uplinks[name]
        if not uplink.leases:
            return
        message = uplink.leases[0]
        if (delivered := self.delivered(name, message)) is None:
            return
        (reply,) = delivered
        if isinstance(message, Release):
            for number in message.leases:
                if number in self.spec.ledger.leases and message.failed:
                    stays = number in self.top.lease_table.open if self.top.rule.in_rounds else None
                    most = max(0.05 * self.samples, 4 * self.config.local_steps)
                    self.spec.ledger.gave_nothing(number, most, stays)
                elif number in self.spec.ledger.leases and not self.top.rule.in_rounds:
                    self.spec.ledger.given_back(number)
        if isinstance(message, LeaseRequest):
            if reply is None:
                return  # paused: it is asked again, before any other
            self.tell(name, reply)
        if isinstance(message, TakeBack):
            self.spec.ledger.lives(message.leases, reply.gone)
            self.tell(name, reply)
        uplink.leases.remove(message)

    def pull(self, name: str) -> None:
        """The answers that are there reach the region."""
        region, uplink = self.region(name), self.uplinks[name]
        if not region.fragments:
            return self.connect(name)
        for update in list(uplink.acknowledged):
            try:
                fragments = self.shape.fragments_of([delta.chunk for delta in update.deltas])
                answer = self.answer(GLOBAL, name, region.incarnation, 0, update.sequence, fragments)
            except NotJoined:
                return self.connect(name)
            except Refused:
                assert self.top.members[name].quarantined
                return None
            if answer is not None:
                uplink.acknowledged.remove(update)
                self.tell(name, answer)
        return None

    def refuse(self, name: str) -> None:
        """The region's next update is refused for good: it starts over, as a new incarnation."""
        region = self.region(name)
        update = next((m for m in self.uplinks[name].updates if isinstance(m, UpdatePart)), None)
        if update is None or not region.in_flight or update.sequence <= self.top.members[name].sequence:
            return  # nothing is to be taken
        self.tell(name, UpdateRejected(name, region.incarnation, "as the test says", update.sequence))
        self.spec.refused(name, update)
        if region.rule.in_rounds:  # what the global server has not taken is to be trained again
            self.taken = {
                (worker, fragment, job)
                for worker, fragment, job in self.taken
                if worker not in REGIONS[name]
                or job <= self.spec.rounds[name, self.shape.chunks_of[fragment][0].index]
            }
        self.begin_again(name)

    def begin_again(self, name: str) -> None:
        """The region has started over: it joins as a new incarnation."""
        region, uplink = self.region(name), self.uplinks[name]
        self.spec.forget_link(name)
        uplink.updates.clear()
        uplink.acknowledged.clear()
        self.lives[name] += 1
        region.incarnation = f"{name}-{self.lives[name]}"
        self.connect(name)

    def region_falls_silent(self, name: str) -> None:
        self.tell(GLOBAL, MemberSilent(name, self.region(name).incarnation))
        if self.top.members[name].incarnation == self.region(name).incarnation:
            self.returned_by(name)

    def hang(self, name: str, worth: float) -> None:
        """A worker beats and trains no more, for so many times what the specification allows."""
        worker, region = self.workers[name], self.region(self.workers[name].region)
        held = [lease.steps for lease in region.holds(name).values()]
        allowed_s = self.spec.allowed_s(worker.step_s, held)
        if not worker.alive or not held or self.top.rule.in_rounds or region.members[name].away:
            return
        if worth * allowed_s > region.patience_s(name):
            assert worth > 1, f"{name} is taken for dead, and only slow"
            self.tell(worker.region, MemberSilent(name, worker.incarnation))
            self.deliver_leases(worker.region)
        assert worth < 1 or not region.holds(name), f"{name} hangs, and keeps its leases"

    def expel(self, name: str) -> None:
        if not self.top.rule.in_rounds:
            worker = self.workers[name]
            self.tell(worker.region, OperatorCommand("expel", name))
            worker.alive = False
            self.deliver_leases(worker.region)
            assert not self.region(worker.region).holds(name) and not self.present(name)

    def drain(self, name: str) -> None:
        if not self.top.rule.in_rounds:
            self.drained = True
            self.tell(GLOBAL, OperatorCommand("drain", name))

    # -- workers

    def join(self, name: str, anew: bool) -> None:
        worker = self.workers[name]
        worker.joins += anew
        try:
            for join in worker.fake.joins(self.identity, worker.incarnation):
                welcome = self.tell(worker.region, join)
        except Refused:
            return  # quarantined
        forgotten = welcome.sequence <= worker.fake.sequence
        worker.fake.sequence = welcome.sequence - 1
        if not anew and forgotten and worker.alive:  # what was acknowledged is not known any more: its process ends
            assert self.top.rule.in_rounds, "an acknowledged update is forgotten"
            self.join(name, anew=True)
        elif anew:
            worker.alive, worker.left, worker.lease = True, False, None
            worker.waits_for, worker.spoke_of = (0 if self.top.rule.in_rounds else None), self.every_fragment
            worker.sent, worker.told, worker.job = set(), False, welcome.job

    def present(self, name: str) -> bool:
        """Whether this incarnation of the worker may speak to its region's server; it joins again where that has
        forgotten it."""
        worker = self.workers[name]
        for _ in range(2):
            try:
                self.servers[worker.region].current(name, worker.incarnation)
                return True
            except NotJoined:
                self.join(name, anew=False)
            except Refused:
                member = self.servers[worker.region].members[name]
                if worker.alive and not member.quarantined and member.banned == worker.incarnation:
                    self.join(name, anew=True)  # its process ended, and is started again
                return False
        return False

    def ask(self, name: str) -> None:
        worker = self.workers[name]
        if not worker.alive or worker.lease is not None or not self.present(name):
            return
        try:
            worker.lease = self.tell(worker.region, LeaseRequest(name, worker.job, worker.step_s))
        except NotJoined:
            self.join(name, anew=False)

    def train(self, name: str, ranks: int = 2, early: bool = False) -> None:
        """Train the lease in hand and send its update, from all ranks or the first only. early: only its first
        fragment, which leaves before the job ends."""
        worker = self.workers[name]
        region = self.region(worker.region)
        if not worker.alive or not isinstance(worker.lease, Lease) or not self.present(name) or not region.fragments:
            return
        if worker.waits_for is not None:
            return self.adopt(name)
        early = early and len(self.every_fragment) > 1 and not worker.sent
        due = self.every_fragment[:1] if early else [f for f in self.every_fragment if f not in worker.sent]
        deltas = {f: torch.randn(self.shape.fragments[f].numel, generator=self.generator) for f in due}
        sequence, job, leases = worker.fake.sequence, worker.lease.job, () if early else (worker.lease.lease,)
        worker.fake.job = job - 1
        version = min(state.version for state in region.fragments)
        parts = worker.fake.parts(deltas, leases, worker.incarnation, version)[:ranks]
        try:
            for part in parts:
                region.admit(part)
        except Refused as refused:
            worker.fake.sequence = sequence
            return self.join(name, anew=False) if isinstance(refused, NotJoined) else None
        for part in parts:
            member = region.members[name]
            # Noted before it is told: what the region sends because of it contains it.
            if len({*member.arriving.get(part.sequence, {}), part.part}) == member.parts:
                new = {f: delta for f, delta in deltas.items() if not self.again(region, name, f, job)}
                self.spec.worker_update(worker.region, name, by_chunk(self.shape, new))
            self.tell(worker.region, part)
        if len(parts) == len(worker.fake.slicings):
            worker.sent |= set(due)
            if not early:
                worker.lease, worker.job, worker.sent, worker.told = None, job + 1, set(), False
            worker.spoke_of = tuple(due)
            worker.waits_for = worker.fake.sequence if region.rule.in_rounds else None
        else:
            worker.fake.sequence = sequence
        return None

    def again(self, region: RegionServer, name: str, fragment: int, job: int) -> bool:
        """In rounds, what a former incarnation sent of this job is not taken again."""
        known = (name, fragment, job) in self.taken
        self.taken.add((name, fragment, job))
        return region.rule.in_rounds and known

    def adopt(self, name: str) -> None:
        worker = self.workers[name]
        parts, asked = range(len(worker.fake.slicings)), (worker.waits_for, worker.spoke_of)
        if all([self.answer(worker.region, name, worker.incarnation, part, *asked) for part in parts]):
            worker.waits_for = None

    def leave(self, name: str) -> None:
        worker = self.workers[name]
        if not worker.alive or not isinstance(worker.lease, Finished) or not self.present(name):
            return
        if worker.waits_for is not None:
            self.adopt(name)
        elif not worker.told and not self.top.rule.in_rounds:
            worker.told, worker.job, worker.lease = True, worker.job + 1, None
            self.ask(name)
        else:
            self.tell(worker.region, Leave(name))
            worker.alive, worker.left = False, True

    # -- what must hold

    def check(self) -> None:
        coordinator, ledger = self.top.lease_table, self.spec.ledger
        assert coordinator.committed_samples == ledger.committed, "committed"
        assert set(coordinator.open) == ledger.open, "open leases"
        if coordinator.rounds is None:
            free = {sample for start, size in coordinator.pool for sample in range(start, start + size)}
            free |= set(range(coordinator.next_start, self.samples))
            assert coordinator.set_aside_samples == ledger.place.count("aside"), "set aside"
            assert free == {sample for sample, place in enumerate(ledger.place) if place == "free"}, "the pool"
        self.check_weights(self.top, self.spec.top)
        for name in REGIONS:
            self.check_weights(self.region(name), self.spec.region.get(name, []))
        for server in self.servers.values():
            json.dumps(server.status(), allow_nan=False)
            check_shards(server)

    def check_weights(self, server: Server, wanted: list[Vector]) -> None:
        for chunk, v in zip(self.shape.chunks if server.fragments else (), wanted, strict=False):
            in_a_round = server is not self.top and self.top.rule.in_rounds
            assert in_a_round or server.versions[chunk.fragment] == v.version
            close(server.shards.of[chunk.index].vectors[chunk.index].x, v.x)
