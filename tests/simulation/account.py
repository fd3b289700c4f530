"""Holds the servers of a simulated life to `tests.support.specification`, message by message: weights, versions, and
where each sample is. Nothing that was acknowledged may be missing after a death, nor be there twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp
from typing import Any

import torch
from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import OuterConfig, RegionMomentumConfig
from geotrain.config.batches import BatchSchedule
from geotrain.outer.codec import make_codec
from geotrain.outer.events import Merged, StartedOver, UpdateApplied
from geotrain.outer.messages import (
    Answer,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    LiftQuarantine,
    MemberSilent,
    OperatorCommand,
    Recall,
    Refused,
    Release,
    Send,
    SkipSamples,
    TakeBack,
    Trained,
    UpdatePart,
    UpdateRejected,
    Welcome,
)
from geotrain.outer.server.member_phase import MemberPhase
from geotrain.outer.server.server import Handled, Server
from geotrain.outer.shards.protocol import HeldAnswer, HeldPart
from geotrain.outer.shards.remote import RemoteShards
from geotrain.outer.shards.shard import ServerShard
from geotrain.parameters.parameter_map import ParameterMap, StridedSlice, numel, scatter
from geotrain.staging.interface import from_bytes
from tests.support.recorded_world import check_shards
from tests.support.specification import Specification, Vector, close

STEP = 2  # samples of an inner step


class Account:
    """Is told what each server takes and sends. Raises AssertionError where a server differs.

    regions: region → its workers. start: the first weights, by fragment, which is one chunk here. absent: who may be
    taken for dead, since it was killed, cut off, or stood still.
    """

    def __init__(
        self,
        config: OuterConfig,
        parameter_map: ParameterMap,
        regions: dict[str, tuple[str, ...]],
        start: list[Tensor],
        samples: int,
        absent: set[str],
        batches: BatchSchedule,
    ) -> None:
        self.absent, self.samples, self.batches = absent, samples, batches
        self.config, self.parameter_map, self.regions = config, parameter_map, regions
        self.spec = Specification(config, regions, start, samples, decay=0.0)
        self.codec = make_codec(config.local)
        self.deltas: dict[tuple[str, str, int, int], Tensor] = {}  # worker, incarnation, fragment, sequence → delta
        self.taken: set[tuple[str, int, int]] = set()  # worker, fragment, job of every delta that was applied
        # region, fragment → all weights that it has had
        self.was: defaultdict[tuple[str, int], list[Tensor]] = defaultdict(list)
        # region, fragment → worker and job of what has been applied and not been sent
        self.ahead: defaultdict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
        self.flying: set[tuple[str, int]] = set()  # region, fragment whose update has not been answered
        self.strikes = Counter[str]()
        self.asked: dict[str, int] = {}  # worker → last job that its incarnation has asked for
        self.held: set[int] = set()  # leases that regions have for their workers
        self.trained: set[int] = set()  # those that updates have brought to their regions
        self.contained: defaultdict[int, set[int]] = defaultdict(
            set
        )  # lease → fragments of its region that contain it
        self.refusing: dict[str, bool] = {}  # region → whether its next update is refused; False: one was
        self.paused, self.local_steps = False, config.local_steps
        self.updates = 0.0  # of a region in the whole run, for its momentum's decay; 0: as its samples have it

    def watch(self, server: Server, lives: Callable[[], bool], fail: Callable[[str], None]) -> None:
        """Be told what this incarnation of a server does, as long as it lives. fail: is called with what is wrong."""
        take, go_on, admit = server.take, server.go_on, server.admit

        def watched(message: Any) -> Handled:
            before = ""  # the incarnation of a member that joins, or may have made what is refused
            if isinstance(message, Join | UpdateRejected) and message.member in server.members:
                member = server.members[message.member]
                silenced = member.quarantined or member.incarnation == member.banned
                before = "" if silenced and isinstance(message, UpdateRejected) else member.incarnation
            handled = take(message)
            told = message.part if isinstance(message, HeldPart) else message
            judge(self._took, told.answer if isinstance(told, HeldAnswer) else told, handled, before)
            judge(self._sent, handled.sends)
            return handled

        def went_on() -> Handled:
            handled = go_on()
            judge(self._sent, handled.sends)
            judge(check_shards)
            return handled

        def judge(look: Any, *told: Any) -> None:
            try:
                if lives():
                    look(server, *told)
            except (AssertionError, KeyError) as error:
                fail(f"{server.name}: {error!r} as it was told {told!r:.200}")

        def refusing(part: UpdatePart) -> bool:
            if self.refusing.get(part.member):
                self.refusing[part.member] = False
                raise Refused("a life says so")
            return admit(part)

        server.take, server.go_on = watched, went_on  # type: ignore[method-assign]
        if server.name == GLOBAL:
            server.admit = refusing  # type: ignore[method-assign]

    def trains(self, parts: Sequence[UpdatePart], slicing: Sequence[Sequence[tuple[StridedSlice, ...]]]) -> None:
        """A worker makes an update of each of some fragments, which its ranks are about to send."""
        for part in parts:
            update, fragment = _update(part), part.fragment
            if update not in self.deltas:
                self.deltas[update] = torch.zeros(self.parameter_map.fragments[fragment].numel)
            cut, (delta,) = slicing[part.part][fragment], part.deltas
            scatter(self.codec.decode(from_bytes(delta.payload), numel(cut)), cut, self.deltas[update])

    def begins(self, region: str) -> None:
        """A region has nothing of its own any more."""
        for worker in self.regions[region]:
            self.asked.pop(worker, None)
        if not self.config.rule.synchronous:
            theirs = {n for n, lease in self.spec.ledger.leases.items() if lease.worker in self.regions[region]}
            self.held -= theirs
            self.trained -= theirs
        self._nothing_ahead(region)
        self.spec.region_forgets(region)

    def _nothing_ahead(self, region: str) -> None:
        for fragment in range(len(self.parameter_map.fragments)):
            self.flying.discard((region, fragment))
            self.ahead[region, fragment].clear()

    def adopts(self, worker: str, fragment: int, weights: Tensor) -> None:
        """A worker has weights from its region, which must have had them."""
        region = next(name for name, workers in self.regions.items() if worker in workers)
        had = self.was[region, fragment]
        assert any(torch.allclose(x.float(), weights, atol=1e-4) for x in had), f"{region} never had these weights"

    def differing(self, server: str, shard: ServerShard) -> list[str]:
        """Say which weights of a shard in a process of its own are not, at the end, what they should be."""
        wanted = self.spec.top if server == GLOBAL else self.spec.region[server]
        apart = {chunk: float((v.x.double() - wanted[chunk].x).abs().max()) for chunk, v in shard.vectors.items()}
        return [f"{server}: chunk {chunk} is {far} off" for chunk, far in apart.items() if not far < 1e-4]

    # -- what servers take, and send

    def _took(self, server: Any, message: Any, handled: Handled, before: str) -> None:
        for event in handled.events:
            if isinstance(event, UpdateApplied) and isinstance(message, UpdatePart):
                self._check_norms(server.name, message, event)
        if isinstance(message, MemberSilent):
            here = self.spec.region.get(message.member, {})
            begins = server.name == GLOBAL and len(here) < len(self.parameter_map.fragments)  # no beats before that
            assert begins or message.member in self.absent, f"{message.member}, who was there, counts as dead"
        if server.name == GLOBAL:
            self._top_took(server, message, handled.reply, before)
        elif isinstance(message, Answer):
            if any(isinstance(event, Merged) for event in handled.events):
                self._merged(server, message)
        else:
            self._region_took(server, message, handled.reply, before)
            if any(isinstance(event, StartedOver) for event in handled.events):
                self.begins(server.name)
            self._leases_of_region(server, message, handled, before)

    def _share(self, server: Any) -> None:
        """Who has come, and is not away, takes part; and who ended as there was no data for it."""
        here = {
            name
            for name, m in server.members.items()
            if m.incarnation and (not m.away or (m.phase is MemberPhase.DONE and not m.quarantined))
        }
        assert server.sharing == here, f"{server.sharing} take part, not {here}"
        self.spec.sharing[server.name] = len(here)

    def _top_took(self, top: Any, message: Any, reply: Any, before: str) -> None:
        self._share(top)
        ledger = self.spec.ledger
        match message:
            case UpdatePart() if reply:
                self.spec.global_update(message.member, message)
                self._check(top, [d.chunk for d in message.deltas], self.spec.top)
            case Join():
                if before != message.incarnation:
                    theirs = {
                        n
                        for n in ledger.open & self.trained
                        if ledger.leases[n].worker in self.regions[message.member]
                    }
                    assert theirs <= {*message.leases}, (
                        f"leases {theirs} are trained, and only {message.leases} are named"
                    )
                    self._back(top, message.member, message.leases)
                ledger.lives(message.leases, reply.gone)
            case TakeBack():
                ledger.lives(message.leases, reply.gone)
            case MemberSilent() if top.members[message.member].incarnation == message.incarnation:
                self._back(top, message.member)
            case Leave():
                self._back(top, message.member)
            case Release() if not top.rule.in_rounds:
                for number in sorted(message.leases):
                    if message.failed:
                        ledger.gave_nothing(number, max(0.05 * self.samples, 4 * self.local_steps * STEP))
                    else:
                        ledger.given_back(number)
            case OperatorCommand("pause" | "resume"):
                self.paused = message.what == "pause"
            case OperatorCommand(what) if what.startswith("set "):
                self.local_steps = int(what.partition("=")[2])
            case SkipSamples():
                for first, last in zip(message.firsts, message.lasts, strict=True):
                    steps = map(self.batches.step_at, (first, last))
                    for sample in range(*(self.batches.first_sample(n + i) for i, n in enumerate(steps))):
                        ledger.place[sample] = "aside"
            case LeaseRequest() if isinstance(reply, Lease):
                if reply.lease not in ledger.leases and not top.rule.in_rounds:
                    assert not self.paused, f"lease {reply.lease} is granted though the run is paused"
                    assert reply.samples <= self.local_steps * STEP, f"{reply} has more steps than were set"
                ledger.granted(reply)
        for number in getattr(message, "contains", message.leases if isinstance(message, Trained) else ()):
            ledger.trained(number, message.fragment)
        table = top.lease_table
        assert table.committed_samples == ledger.committed, f"{table.committed_samples} are committed"
        assert set(table.open) == ledger.open, f"{set(table.open)} are out, {ledger.open} should be"

    def _back(self, top: Any, member: str, but: tuple[int, ...] = ()) -> None:
        """What the member held goes to others."""
        ledger = self.spec.ledger
        if not top.rule.in_rounds:
            open_now = ledger.open - set(but)
            for number in open_now:
                if ledger.leases[number].worker in self.regions[member]:
                    ledger.given_back(number)

    def _region_took(self, region: Any, message: Any, reply: Any, before: str) -> None:
        self._share(region)
        if isinstance(message, Welcome):
            assert reply == 0, "acknowledged updates are lost"
        if isinstance(message, UpdateRejected) and message.member != region.name:
            ours = message.incarnation == before
            self.strikes[message.member] += ours
            due = ours and self.strikes[message.member] >= self.config.limits.strikes
            assert reply == due, f"quarantined: {reply}, after {self.strikes[message.member]} strikes"
        if isinstance(message, LiftQuarantine):
            self.strikes[message.member] = 0
        if isinstance(message, UpdatePart) and reply:
            fragment, trained = message.fragment, (message.member, message.fragment, message.job)
            again = region.rule.in_rounds and trained in self.taken  # by a former incarnation
            self.taken.add(trained)
            if isinstance(self.config.rule, RegionMomentumConfig):
                home, workers = len(self.regions[region.name]), sum(map(len, self.regions.values()))
                updates = (
                    self.updates or self.batches.step_at(self.samples) / self.config.local_steps * home / workers
                )
                self.spec.decay = exp(-1 / max(1.0, self.config.rule.momentum_share * updates))
            if not again:
                self.spec.worker_update(region.name, message.member, {fragment: self.deltas[_update(message)]})
                self.ahead[region.name, fragment].add((message.member, message.job))
            self._check(region, [fragment], self.spec.region[region.name])

    def _merged(self, region: Any, answer: Answer) -> None:
        if answer.sequence:
            for weights in answer.weights:
                self.flying.discard((region.name, weights.chunk))
                self.spec.region_merges(region.name, weights)
        else:  # its workers may have asked for leases since it started over
            self.flying.discard((region.name, answer.fragment))
            self.ahead[region.name, answer.fragment].clear()
            self.spec.region_begins(region.name, answer.weights)
        self._check(region, [w.chunk for w in answer.weights], self.spec.region[region.name])

    def _leases_of_region(self, region: Any, message: Any, handled: Handled, before: str) -> None:
        """A recall takes back what no worker has asked for, and that alone."""
        match message:
            case LeaseRequest(worker, job):
                self.asked[worker] = max(job, self.asked.get(worker, 0))
            case Lease():
                self.held.add(message.lease)
            case UpdatePart() if handled.reply:
                for number in message.contains:
                    self.contained[number].add(message.fragment)
                    if len(self.contained[number]) == len(self.parameter_map.fragments):
                        self.held.discard(number)
                        self.trained.add(number)
            case Leave() | MemberSilent() | Join() if getattr(message, "incarnation", "") != before:
                self.asked.pop(message.member, None)
            case Recall() if not region.rule.in_rounds:
                known = [self.spec.ledger.leases[number] for number in self.held]
                spare = {
                    v.lease for v in known if v.worker in region.members and v.job > self.asked.get(v.worker, v.job)
                }
                back = {n for send in handled.sends if isinstance(send.message, Release) for n in send.message.leases}
                assert back == spare, f"leases {back} are recalled, not {spare}"

    def _sent(self, server: Server, sends: tuple[Send, ...]) -> None:
        for send in sends:
            if isinstance(send.message, Release):
                self.held -= set(send.message.leases)
            if send.to == GLOBAL and isinstance(send.message, UpdatePart):
                self.spec.region_sends(server.name, send.message)
                self._sent_up(server.name, send.message)

    def _sent_up(self, region: str, update: UpdatePart) -> None:
        """One update of a fragment travels at a time, and the leases that it contains were trained with it."""
        for sent in update.deltas:
            assert (region, sent.chunk) not in self.flying, f"fragment {sent.chunk} is sent before it was answered"
            self.flying.add((region, sent.chunk))
            self.ahead[region, sent.chunk].clear()
        for lease in [self.spec.ledger.leases[number] for number in update.contains]:
            assert (lease.worker, update.fragment, lease.job) in self.taken, f"{lease} is said to be in {update}"

    def _check_norms(self, server: str, part: UpdatePart, event: UpdateApplied) -> None:
        if server == GLOBAL:
            delta = self.spec.sent[part.member, part.fragment]
        else:
            delta = self.deltas[_update(part)]
        norm, told = float(delta.norm()), event.delta_norm
        near = 1e-3 if server != GLOBAL or self.config.up.name in ("fp32", "bf16") else 0.05  # decoded, and as it was
        assert told is not None and abs(told - norm) <= near * (1e-6 + norm), f"{told} for {norm}"

    def _check(self, server: Any, chunks: Iterable[int], wanted: Sequence[Vector] | Mapping[int, Vector]) -> None:
        for chunk in chunks:
            told = wanted[chunk]
            if server.name != GLOBAL:
                self.was[server.name, chunk].append(told.x)
            elif server.versions[chunk] != told.version:
                raise AssertionError(f"fragment {chunk}: version {server.versions[chunk]}, not {told.version}")
            if not isinstance(server.shards, RemoteShards):
                close(server.shards.of[chunk].vectors[chunk].x, told.x)


def _update(part: UpdatePart) -> tuple[str, str, int, int]:
    return part.member, part.incarnation, part.fragment, part.sequence
