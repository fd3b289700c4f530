"""Holds the servers of a simulated life to `tests.support.specification`, message by message: weights, versions, and
where each sample is. Nothing that was acknowledged may be missing after a death, nor be there twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, exp
from typing import Any

import torch
from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import OuterConfig, RegionMomentumConfig
from geotrain.config.batches import BatchSchedule
from geotrain.config.cluster import shard_name
from geotrain.outer.codec import make_codec
from geotrain.outer.events import FactsLost, Merged, StartedOver
from geotrain.outer.messages import (
    Answer,
    Fact,
    Facts,
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
    WentBack,
)
from geotrain.outer.server.member_phase import MemberPhase
from geotrain.outer.server.server import Handled, Server
from geotrain.parameters.parameter_map import ParameterMap, StridedSlice, numel, scatter
from geotrain.staging.interface import from_bytes
from tests.support.recorded_world import check_store
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
        self.flying: set[tuple[str, int]] = set()  # region, fragment whose update has not been answered
        self.strikes = Counter[str]()
        self.asked: dict[str, int] = {}  # worker → last job that its incarnation has asked for
        self.held: set[int] = set()  # leases that regions have for their workers
        self.trained: set[int] = set()  # those that updates have brought to their regions
        self.contained: defaultdict[int, set[int]] = defaultdict(set)  # lease → its region's fragments with it
        # Process → each update that it has applied: member, fragment, sequence. It may have lost some with its disk.
        self.applied: defaultdict[str, Counter[tuple[str, int, int]]] = defaultdict(Counter)
        self.ever: set[tuple[str, str, int, int]] = set()  # server, and the same of it
        self.facts: defaultdict[str, list[Fact]] = defaultdict(list)  # shard → all that it has reported
        self.former: defaultdict[str, list[Fact]] = defaultdict(list)  # before a lost disk, as its ledger knows it
        self.known = Counter[str]()  # shard → how many of them its ledger has taken
        self.kept: dict[tuple[str, str], Any] = {}  # shard, checkpoint id → what it has then
        # Whatever ledgers say: a region's leases; fragments of the global weights that contain them; of updates.
        self.given: dict[tuple[str, int], Lease] = {}
        self.reached: defaultdict[Lease, set[int]] = defaultdict(set)
        self.within: dict[tuple[str, int, int], list[Lease]] = {}
        self.refusing: dict[str, bool] = {}  # region → whether its next update is refused; False: one was
        # Server, member that is gone, or begins anew and names these leases, until its shards have confirmed that.
        self.waits: dict[tuple[str, str], tuple[int, ...] | None] = {}
        self.copied = False  # whether global weights came back from a copy
        self.older: set[str] = set()  # servers whose ledger came back from a copy: where data is, only they know
        self.paused, self.local_steps = False, config.local_steps
        self.updates = 0.0  # of a region in the whole run, for its momentum's decay; 0: as its samples have it

    def watch(self, server: Server, lives: Callable[[], bool], fail: Callable[[str], None]) -> None:
        """Be told what this incarnation of a server does, as long as it lives. fail: is called with what is wrong."""
        take, go_on, admit = server.take, server.go_on, server.intake.admit
        on_fact, reject = server._on_fact, server.membership.count_strike
        shard = server.part.shard

        def watched(message: Any) -> Handled:
            before = ""  # the incarnation of a member that joins
            if isinstance(message, Join) and message.member in server.members:
                before = server.members[message.member].incarnation
            handled = take(message)
            if shard is not None and lives():
                said = self.facts[process_of(server)]
                said += server.as_shard.unsaid[len(said) - server.as_shard.said :]
            judge(self._took, message, handled, before)
            judge(self._sent, handled.sends)
            return handled

        def noted(fact: Fact) -> None:
            on_fact(fact)
            judge(self._noted, fact)

        def lost(said: Facts) -> int:
            facts = forgotten(said)
            self.known[shard_name(server.name, said.shard)] += facts
            return facts

        def rejected(strike: UpdateRejected) -> bool:
            member = server.members[strike.member]
            silenced = member.quarantined or member.incarnation == member.banned
            ours = not silenced and strike.incarnation == member.incarnation
            quarantined = reject(strike)
            judge(self._rejected, strike, ours, quarantined)
            return quarantined

        def went_on() -> Handled:
            handled = go_on()
            judge(self._sent, handled.sends)
            judge(check_store)
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
        if server.ledger and server.part.dealt:
            forgotten = server.as_ledger.lost
            server._on_fact, server.as_ledger.lost = noted, lost  # type: ignore[method-assign]
        if server.ledger and server.name != GLOBAL:
            server.membership.count_strike = rejected  # type: ignore[method-assign]
        if server.name == GLOBAL:
            server.intake.admit = refusing  # type: ignore[method-assign]

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

    def keeps(self, shard: str, server: Server, checkpoint_id: str) -> None:
        """A process's snapshot is of this moment."""
        reported = server.as_shard.said + len(server.as_shard.unsaid), [*server.as_ledger.taken]
        here = {fragment for region, fragment in self.flying if region == server.name}
        taken = {each for each in self.taken if each[0] in server.members and each[1] in server.numbers}
        weights = self.spec.weights_of(server.name, server.numbers)
        self.kept[shard, checkpoint_id] = server.name, server.numbers, reported, here, taken, weights

    def restores(self, shard: str, checkpoint_id: str) -> None:
        """A process has lost its disk, and has what that copy of a snapshot has; "": nothing."""
        self.applied.pop(shard, None)
        kept = self.kept[shard, checkpoint_id or min(each for of, each in self.kept if of == shard)]
        server, numbers, (reported, known), flying, taken, weights = kept
        self.copied |= server == GLOBAL and bool(numbers)
        if "shard" not in shard:
            self.older.add(server)
            for i, facts in enumerate(known):
                self.known[shard_name(server, i)] = facts
            if server != GLOBAL:
                self.begins(server)
        self.former[shard] = max(self.former[shard], list(self.facts[shard]), key=len)
        del self.facts[shard][reported if checkpoint_id else 0 :]
        workers = self.regions.get(server, ())
        self.taken = {each for each in self.taken if each[0] not in workers or each[1] not in numbers}
        self.flying -= {(server, fragment) for fragment in numbers}
        if checkpoint_id:
            self.taken |= taken
            self.flying |= {(server, fragment) for fragment in flying if fragment in numbers}
            self.spec.go_back(server, weights)
        else:
            self.spec.region_forgets(server, numbers)

    def adopts(self, worker: str, fragment: int, weights: Tensor) -> None:
        """A worker has weights from its region, which must have had them."""
        region = next(name for name, workers in self.regions.items() if worker in workers)
        had = self.was[region, fragment]
        assert any(torch.allclose(x.float(), weights, atol=1e-4) for x in had), f"{region} never had these weights"

    # -- what servers take, and send

    def _took(self, server: Any, message: Any, handled: Handled, before: str) -> None:
        if isinstance(message, UpdatePart) and handled.reply:
            self._applied(server, message)
        if isinstance(message, Facts | WentBack):
            lost = [event for event in handled.events if isinstance(event, FactsLost)]
            shard = shard_name(server.name, message.shard)
            if isinstance(message, WentBack):
                self.known[shard] = message.facts
                self.former.pop(shard, None)
            assert (not lost or server.name in self.older) and server.as_ledger.taken[message.shard] == self.known[
                shard
            ], f"facts of {shard} are missing"
        if isinstance(message, MemberSilent):
            here = self.spec.region.get(message.member, {})
            begins = server.name == GLOBAL and len(here) < len(self.parameter_map.fragments)  # no beats before that
            # Where answers come from the global server, a worker sends nothing while anybody on the way is away.
            waits = bool(self.absent) and getattr(self.config.rule, "answers", "") == "wait"
            # Nobody knows what a lost disk had not reported: only time brings such leases back.
            expected = begins or waits or self.copied or self.older or message.member in self.absent
            assert expected, f"{message.member}, who was there, counts as dead"
        if server.name == GLOBAL:
            self._top_took(server, message, handled.reply, before)
        elif isinstance(message, Answer):
            if any(isinstance(event, Merged) for event in handled.events):
                self._merged(server, message)
            elif (server.name, message.fragment) in self.flying and not message.sequence:
                final = server.worker_data.final
                for weights in message.weights if final is not None and message.fragment not in final else ():
                    self.spec.received(server.name, weights)  # it is passed over
        else:
            self._region_took(server, message, handled.reply)
            if any(isinstance(event, StartedOver) for event in handled.events):
                self.begins(server.name)
            if not server.fragments:  # it has started over, or has nothing yet
                self.flying -= {(server.name, fragment) for fragment in server.numbers}
                self.spec.region_forgets(server.name, server.numbers)
            if server.ledger and not {GLOBAL, server.name} & self.older:
                self._leases_of_region(server, message, handled, before)

    def _applied(self, server: Any, part: UpdatePart) -> None:
        update = part.member, part.fragment, part.sequence
        applied = self.applied[process_of(server)]
        applied[update] += 1
        assert applied[update] == 1, f"update {update} is applied twice"
        self.ever.add((server.name, *update))
        self._check_norms(server, part)
        if not server.ledger:
            fact = self.facts[process_of(server)][-1]
            about = fact.what, fact.member, fact.fragment, fact.sequence, fact.job, fact.contains
            assert about == ("applied", *update, part.job, part.contains), f"{part!r:.200} is reported as {fact}"

    def _noted(self, ledger: Any, fact: Fact) -> None:
        """A server of shards takes a fact, each once, as it was reported."""
        for i, taken in enumerate(ledger.as_ledger.taken):
            if taken > self.known[shard := shard_name(ledger.name, i)]:
                self.known[shard] += 1
                said = [each[taken - 1 : taken] for each in (self.facts[shard], self.former[shard])]
                assert [fact] in said and self.known[shard] == taken, (
                    f"fact {taken} of {shard} was {said}, not {fact}"
                )
        if ledger.name in self.older:
            return
        if fact.what in ("applied", "contained") and ledger.name == GLOBAL:
            for number in fact.contains:
                self.spec.ledger.trained(number, fact.fragment, fact.version, late=True)
        elif fact.what == "applied":
            self._has_trained(fact.contains, fact.fragment)

    def _rejected(self, region: Any, strike: UpdateRejected, ours: bool, quarantined: bool) -> None:
        if region.name in self.older:
            return
        self.strikes[strike.member] += ours
        due = ours and self.strikes[strike.member] >= self.config.limits.strikes
        assert quarantined == due, f"quarantined: {quarantined}, after {self.strikes[strike.member]} strikes"

    def _has_trained(self, leases: Iterable[int], fragment: int) -> None:
        for number in leases:
            self.contained[number].add(fragment)
            if len(self.contained[number]) == len(self.parameter_map.fragments):
                self.held.discard(number)
                self.trained.add(number)

    def _share(self, server: Any) -> None:
        """Who has come, and is not away, takes part; and who ended as there was no data for it."""
        joined = server.members if server.ledger else server.as_shard.stands
        here = {
            name
            for name, m in server.members.items()
            if (name in joined and joined[name].incarnation)
            and (not m.away or (m.phase is MemberPhase.DONE and not m.quarantined))
        }
        assert server.membership.sharing == here, f"{server.membership.sharing} take part, not {here}"
        self.spec.sharing[server.name] = len(here)

    def _top_took(self, top: Any, message: Any, reply: Any, before: str) -> None:
        self._share(top)
        if isinstance(message, UpdatePart) and reply:
            self.spec.global_update(message.member, message)
            for lease in self.within[message.member, message.fragment, message.sequence]:
                self.reached[lease].add(message.fragment)
            self._check(top, [d.chunk for d in message.deltas], self.spec.top)
        if isinstance(message, Trained):
            for number in message.leases:
                self.reached[self.given[message.member, number]].add(message.fragment)
        if top.ledger and GLOBAL not in self.older:
            self._ledger_took(top, message, reply, before)
        elif isinstance(reply, Lease):
            assert reply.lease > 1 << 20 or reply.lease in self.spec.ledger.leases, "a number of before the loss"
            assert self.spec.ledger.leases.setdefault(reply.lease, reply) == reply, "one number, two leases"

    def _ledger_took(self, top: Any, message: Any, reply: Any, before: str) -> None:
        ledger = self.spec.ledger
        match message:
            case WentBack():
                versions = dict(zip(top.part.dealt[message.shard], message.versions, strict=True))
                ledger.go_back(versions, top.rule.in_rounds)
            case Join():
                if before != message.incarnation:
                    self.waits[GLOBAL, message.member] = message.leases
                ledger.lives(message.leases, reply.gone)
            case TakeBack():
                ledger.lives(message.leases, reply.gone)
            case MemberSilent() if top.members[message.member].incarnation == message.incarnation:
                self.waits.setdefault((GLOBAL, message.member), None)
            case Leave():
                self.waits.setdefault((GLOBAL, message.member), None)
            case Release() if not top.rule.in_rounds:
                for number in sorted(message.leases):
                    if message.failed:
                        ledger.report_nonfinite_delta(number, max(0.05 * self.samples, 4 * self.local_steps * STEP))
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
                    most = self.local_steps
                    if self.config.scale_local_steps:  # jobs come to end together
                        most += ceil(most / 2)
                    assert reply.samples <= most * STEP, f"{reply} has more steps than were set"
                ledger.granted(reply)
        said = getattr(message, "contains", message.leases if isinstance(message, Trained) else ())
        for number in () if top.part.dealt else said:
            ledger.trained(number, message.fragment)
        for member, named in self._settled(top):
            if named is not None:
                of_member = {n for n in ledger.open if ledger.leases[n].worker in self.regions[member]}
                lost = of_member & self.trained - {*named}
                assert not lost, f"leases {lost} are trained, and only {named} are named"
                self._back(top, member, named)
            if top.members[member].away:
                self._back(top, member)
        table = top.lease_table
        assert table.committed_samples == ledger.committed, f"{table.committed_samples} are committed"
        assert set(table.open) == ledger.open, f"{set(table.open)} are out, {ledger.open} should be"

    def _settled(self, server: Any) -> list[tuple[str, tuple[int, ...] | None]]:
        """Members whose shards have confirmed that they are gone, or begin anew; with these the leases they name."""
        of = [key for key in self.waits if key[0] == server.name and key[1] not in server.as_ledger.unsettled]
        return [(key[1], self.waits.pop(key)) for key in of]

    def _back(self, top: Any, member: str, but: tuple[int, ...] = ()) -> None:
        """What the member held goes to others."""
        ledger = self.spec.ledger
        if not top.rule.in_rounds:
            open_now = ledger.open - set(but)
            for number in open_now:
                if ledger.leases[number].worker in self.regions[member]:
                    ledger.given_back(number)

    def _region_took(self, region: Any, message: Any, reply: Any) -> None:
        self._share(region)
        if isinstance(message, Welcome):
            assert reply == 0 or self.copied, "acknowledged updates are lost"
        if isinstance(message, Lease):
            self.given[region.name, message.lease] = message
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
            self._check(region, [fragment], self.spec.region[region.name])

    def _merged(self, region: Any, answer: Answer) -> None:
        if answer.sequence:
            for weights in answer.weights:
                self.flying.discard((region.name, weights.chunk))
                self.spec.region_merges(region.name, weights)
        else:  # its workers may have asked for leases since it started over
            self.flying.discard((region.name, answer.fragment))
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
                self._has_trained(message.contains, message.fragment)
            case Join() if message.incarnation != before:
                self.waits[region.name, message.member] = ()
            case Leave() | MemberSilent() if message.member in region.members:
                self.waits.setdefault((region.name, message.member), None)
            case Recall() if not region.rule.in_rounds:
                known = [self.spec.ledger.leases[number] for number in self.held]
                spare = {
                    v.lease for v in known if v.worker in region.members and v.job > self.asked.get(v.worker, v.job)
                }
                back = {n for send in handled.sends if isinstance(send.message, Release) for n in send.message.leases}
                assert back == spare, f"leases {back} are recalled, not {spare}"
        for member, begins in self._settled(region):
            if begins is not None or region.members[member].away:
                self.asked.pop(member, None)

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
        self.within[region, update.fragment, update.sequence] = [self.given[region, n] for n in update.contains]
        for lease in self.within[region, update.fragment, update.sequence]:
            assert (lease.worker, update.fragment, lease.job) in self.taken, f"{lease} is said to be in {update}"

    def _check_norms(self, server: Any, part: UpdatePart) -> None:
        if server.name == GLOBAL:
            delta = self.spec.sent[part.member, part.fragment]
        else:
            delta = self.deltas[_update(part)]
        norm, told = float(delta.norm()), server.members[part.member].fragments[part.fragment].norm
        exact = server.name != GLOBAL or self.config.up.name in ("fp32", "bf16")
        near = 1e-3 if exact else 0.05  # decoded, and as it was
        assert abs(told - norm) <= near * (1e-6 + norm), f"{told} for {norm}"

    def _check(self, server: Any, chunks: Iterable[int], wanted: Sequence[Vector] | Mapping[int, Vector]) -> None:
        for chunk in chunks:
            told = wanted[chunk]
            if server.name != GLOBAL:
                self.was[server.name, chunk].append(told.x)
            elif server.versions[chunk] != told.version:
                raise AssertionError(f"fragment {chunk}: version {server.versions[chunk]}, not {told.version}")
            close(server.store.vectors[chunk].x, told.x)


def process_of(server: Server) -> str:
    return server.name if server.part.shard is None else shard_name(server.name, server.part.shard)


def _update(part: UpdatePart) -> tuple[str, str, int, int]:
    return part.member, part.incarnation, part.fragment, part.sequence
