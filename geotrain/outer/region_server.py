"""The region server's state machine: HALoS's "local parameter server"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from geotrain.config import OuterConfig
from geotrain.outer.codec import CodecError, NonFiniteError, make_codec, refusal, rounding_seed
from geotrain.outer.downlink import WeightsReceiver, from_bytes, to_bytes
from geotrain.outer.layout import Layout
from geotrain.outer.messages import (
    GLOBAL,
    Answer,
    Finished,
    FragmentDelta,
    FragmentWeights,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    Offence,
    Refused,
    Release,
    Send,
    Silence,
    UpdatePart,
    Validated,
    Welcome,
)
from geotrain.outer.rules import RegionRule, region_rule
from geotrain.outer.server import Identity, Server


class RegionServer(Server):
    """Applies its workers' deltas at once; every K of them, sends its own progress to the global server.

    Call `outgoing()` after every message for what should be sent now.
    """

    rule: RegionRule

    def __init__(
        self,
        name: str,
        identity: Identity,
        layout: Layout,
        config: OuterConfig,
        workers: tuple[str, ...],
        validates: bool = False,
    ) -> None:
        rule = region_rule(config, workers)
        super().__init__(identity, layout, rule, workers, config.local, config.local, config.limits)
        self.name = name
        self.up_codec = make_codec(config.up)
        self.downlink = WeightsReceiver(config.down)
        self.residuals: dict[int, Tensor] = {}
        self.global_versions = [0] * len(layout.fragments)
        self.sequence = 0  # of the last update sent up
        self.in_flight: dict[int, UpdatePart] = {}  # sequence → update without its answer
        self.leases: dict[str, dict[int, Lease]] = {name: {} for name in workers}  # worker → job → not trained yet
        self.reserve = config.lease_reserve if config.rule != "sync" else 0  # rounds are laid out with known speeds
        self.wanted: dict[str, set[int]] = {name: set() for name in workers}  # jobs that wait for their lease
        self.reserved_to = dict.fromkeys(workers, 0)  # the last job whose lease was asked for in this life
        self.trained: dict[int, set[int]] = {}  # lease trained here → fragments that must still go up with it
        self.newest: list[Tensor] | None = [] if validates else None  # global weights, for validation
        self.first_versions = [0] * len(layout.fragments)  # that the first weights get here
        self.over = False  # all data of the run is trained for good
        self.gone = False  # said goodbye to the global server
        self.done = False  # and it said goodbye: this region has nothing left to do
        self._outgoing: list[Send] = []

    # -- upwards

    def join_message(self) -> Join:
        whole = tuple(self.layout.whole(f.index) for f in self.layout.fragments)
        held = [lease.lease for jobs in self.leases.values() for lease in jobs.values()]
        held += list(self.trained)
        held += [n for update in self.in_flight.values() for n in update.leases]
        i = self.identity
        return Join(
            i.run,
            i.config_digest,
            i.layout_digest,
            i.model,
            self.name,
            self.incarnation,
            0,
            1,
            whole,
            whole,
            tuple(held),
            self.data,
        )

    def on_welcome(self, welcome: Welcome) -> int:
        """The global server knows us. Returns how many of our updates it had acknowledged and lost (restored from
        an older state); what is in flight is numbered anew then.

        It may also know more of our updates than we do, when this region's folder was lost, or restored from an older
        state: what that holds as pending went up later, so it begins again from the global weights.
        """
        known = welcome.sequence - 1
        if welcome.sequence < 1 or len(welcome.versions) not in (0, len(self.layout.fragments)):
            raise Refused(
                f"{self.name}: a welcome with sequence {welcome.sequence}, versions {welcome.versions} is none"
            )
        if known > self.sequence and self.fragments:
            self._start_over()
        oldest = min(self.in_flight, default=self.sequence + 1)
        lost = max(0, oldest - welcome.sequence)
        if lost:
            self.in_flight = {
                welcome.sequence + i: replace(u, sequence=welcome.sequence + i)
                for i, (_, u) in enumerate(sorted(self.in_flight.items()))
            }
            self.sequence = known + len(self.in_flight)
        self.sequence = max(self.sequence, known)
        if lost and welcome.versions:  # versions that it has lost, too, are none to start from
            self.global_versions = [min(v) for v in zip(self.global_versions, welcome.versions, strict=True)]
            self.in_flight = {
                s: replace(u, deltas=tuple(self._as_known(d) for d in u.deltas)) for s, u in self.in_flight.items()
            }
        return lost

    def _as_known(self, delta: FragmentDelta) -> FragmentDelta:
        return replace(delta, anchor_version=min(delta.anchor_version, self.global_versions[delta.fragment]))

    def _start_over(self) -> None:
        """Give back all data, forget all weights but their versions, and have the workers join again."""
        held = self.join_message().leases
        self.first_versions = [state.version for state in self.fragments]
        self.fragments = []
        for table in (self.in_flight, self.trained, self.residuals, self.downlink.mirror):
            table.clear()
        for name, member in self.members.items():
            member.forget()
            member.owed.clear()
            self.leases[name].clear()
            self.wanted[name].clear()
            self.reserved_to[name] = 0
        if held:
            self._outgoing.append(Send(GLOBAL, Release(held)))

    def set_weights(self, vectors: list[Tensor]) -> None:
        super().set_weights(vectors)
        for state, version in zip(self.fragments, self.first_versions, strict=True):
            state.version = version

    def on_global_weights(self, answer: Answer) -> None:
        """The answer to an update of ours, or (sequence 0) to our join. Raises Refused; then nothing has changed."""
        first = not self.fragments
        if not first and answer.sequence not in self.in_flight:
            return  # a second copy: a change must not be added to the mirror twice
        self._check_answer(answer, first)
        vectors = [self.decode_weights(w) for w in answer.weights]
        if self.newest is not None:
            self.newest = self.newest or [torch.empty(0) for _ in self.layout.fragments]
            for weights, vector in zip(answer.weights, vectors, strict=True):
                self.newest[weights.fragment] = vector.clone()
        if first:
            self.set_weights([v.clone() for v in vectors])
            self.global_versions = [w.version for w in answer.weights]
            for state in self.fragments:
                self.rule.start(state)
        else:
            del self.in_flight[answer.sequence]
            for weights in answer.weights:
                self.global_versions[weights.fragment] = weights.version
            for weights, vector in zip(answer.weights, vectors, strict=True):
                state = self.fragments[weights.fragment]
                self.answer_members(self.rule.on_global_weights(state, vector), weights.fragment)
        self._send_what_is_due()

    def _check_answer(self, answer: Answer, first: bool) -> None:
        whole = range(len(self.layout.fragments))
        wanted = list(whole) if first else [d.fragment for d in self.in_flight[answer.sequence].deltas]
        if sorted(w.fragment for w in answer.weights) != sorted(wanted) or any(w.version < 0 for w in answer.weights):
            raise Refused(f"{self.name}: the answer to update {answer.sequence} is not of fragments {wanted}")
        for weights in answer.weights:
            self.check_weights(weights)

    def outgoing(self) -> list[Send]:
        """Messages that should leave now; each is returned once."""
        out, self._outgoing = self._outgoing, []
        return out

    # -- leases: forwarded, and remembered until the delta that used them went up

    def on_lease_request(self, request: LeaseRequest) -> Lease | None:
        """The lease, if it is here already; otherwise None, and the request goes up. So do requests for the jobs
        after it, as far as the reserve reaches."""
        worker, job = request.worker, request.job
        self._member(worker).silent = False
        lease = self.leases[worker].get(job)
        if lease is None:
            self.wanted[worker].add(job)
            self._outgoing.append(Send(GLOBAL, request))
        for ahead in range(max(job, self.reserved_to[worker]) + 1, job + 1 + self.reserve):
            self._outgoing.append(Send(GLOBAL, replace(request, job=ahead)))
            self.reserved_to[worker] = ahead
        return lease

    def on_lease(self, lease: Lease | Finished) -> None:
        if lease.job <= self._member(lease.worker).job:
            return  # a second copy of an answer: that job is done
        if isinstance(lease, Lease):
            self.leases[lease.worker][lease.job] = lease
        if lease.job in self.wanted[lease.worker]:
            self.wanted[lease.worker].discard(lease.job)
            self._outgoing.append(Send(lease.worker, lease))

    # -- validation

    def on_validated(self, result: Validated) -> None:
        self.frozen = None
        self._outgoing.append(Send(GLOBAL, result))

    def validation_weights(self) -> list[Tensor]:
        newest = self.newest or []
        return newest if all(vector.numel() for vector in newest) else []

    def global_version_of(self, fragment: int) -> int:
        return self.global_versions[fragment]

    # -- members

    def on_join(self, join: Join) -> Welcome:
        known = self.data
        welcome = super().on_join(join)
        if self.data != known:  # the global server is told before any data is asked for
            self._outgoing.append(Send(GLOBAL, self.join_message()))
        return welcome

    def on_silence(self, silence: Silence) -> None:
        super().on_silence(silence)
        self._send_what_is_due()

    def on_offence(self, offence: Offence) -> bool:
        quarantined = super().on_offence(offence)
        if quarantined:
            self._send_what_is_due()
        return quarantined

    def on_over(self) -> None:
        """The global server says that nothing is left to train: the dead are not waited for any more."""
        self.over = True
        self._send_what_is_due()

    def on_new_life(self, name: str, join: Join) -> None:
        self.wanted[name].clear()
        self.reserved_to[name] = 0
        self.release_leases(name)

    def on_leave(self, name: str) -> None:
        super().on_leave(name)
        self.release_leases(name)  # asked for in reserve, and no longer wanted
        self._send_what_is_due()

    def on_farewell(self) -> None:
        """The global server took our Leave."""
        self.done = True

    def begin_again(self) -> None:
        super().begin_again()
        self.over = self.gone = self.done = False

    def on_applied(self, part: UpdatePart) -> None:
        """Leases that the worker does not hold (any more) do not count: others train them."""
        jobs = self.leases[part.member]
        held = {lease.lease: job for job, lease in jobs.items()}
        trained = [number for number in part.leases if number in held]
        for number in trained:
            del jobs[held[number]]
        pending = {f for f, state in enumerate(self.fragments) if self.rule.pending(state)}
        self.trained.update({number: set(pending) for number in trained})
        self._send_what_is_due()

    @property
    def lost_updates(self) -> int:
        """Updates that were applied here but never become part of the global weights (only without ledger)."""
        return sum(state.counts.get("lost", 0) for state in self.fragments)

    def status(self) -> dict[str, Any]:
        return {
            **super().status(),
            "region": self.name,
            "sent": self.sequence,
            "in_flight": len(self.in_flight),
            "pending": sum(state.counts.get("pending", 0) for state in self.fragments),
            "global_versions": list(self.global_versions),
            "lost_updates": self.lost_updates,
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = super().state()
        tensors.update({f"residual.{f}": r for f, r in self.residuals.items()})
        tensors.update({f"mirror.{f}": m for f, m in self.downlink.mirror.items()})
        for sequence, update in self.in_flight.items():
            for d in update.deltas:
                tensors[f"in_flight.{sequence}.{d.fragment}"] = from_bytes(d.payload)
        meta["region"] = {
            "sequence": self.sequence,
            "first_versions": list(self.first_versions),
            "over": self.over,
            "gone": self.gone,
            "done": self.done,
            "global_versions": list(self.global_versions),
            "leases": [
                [v.worker, v.job, v.lease, v.start, v.samples, v.steps, v.validate]
                for jobs in self.leases.values()
                for v in jobs.values()
            ],
            "trained": {str(lease): sorted(fragments) for lease, fragments in self.trained.items()},
            "in_flight": [
                [s, u.weight, list(u.leases), u.metrics, [[d.fragment, d.anchor_version] for d in u.deltas]]
                for s, u in self.in_flight.items()
            ],
        }
        return tensors, meta

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        super().load(tensors, meta)
        saved = meta["region"]
        self.residuals = {f: tensors[f"residual.{f}"] for f in _numbers(tensors, "residual.")}
        self.downlink.mirror = {f: tensors[f"mirror.{f}"] for f in _numbers(tensors, "mirror.")}
        self.sequence, self.global_versions = saved["sequence"], list(saved["global_versions"])
        self.over, self.gone, self.done = saved["over"], saved["gone"], saved["done"]
        self.first_versions = list(saved["first_versions"])
        self.leases = {name: {} for name in self.members}
        for worker, job, *rest in saved["leases"]:
            self.leases[worker][job] = Lease(worker, job, *rest)
        self.trained = {int(lease): set(fragments) for lease, fragments in saved["trained"].items()}
        for sequence, weight, leases, metrics, deltas in saved["in_flight"]:
            payloads = tuple(
                FragmentDelta(f, version, to_bytes(tensors[f"in_flight.{sequence}.{f}"])) for f, version in deltas
            )
            self.in_flight[sequence] = UpdatePart(
                self.name, self.incarnation, sequence, 0, payloads, 0, weight, tuple(leases), metrics
            )

    def resend(self) -> list[Send]:
        """After a new join: what is in flight, under this life's name. The receiver applies each only once."""
        self.in_flight = {s: replace(u, incarnation=self.incarnation) for s, u in sorted(self.in_flight.items())}
        return [Send(GLOBAL, u) for u in self.in_flight.values()]

    # -- between tensors and payloads

    def encode_progress(self, fragment: int, delta: Tensor) -> bytes:
        """The payload of the update that `sequence` numbers."""
        residual = None
        if self.up_codec.name != "fp32":
            if fragment not in self.residuals:
                self.residuals[fragment] = torch.zeros_like(delta)
            residual = self.residuals[fragment]
        try:
            seed = rounding_seed(self.name, 0, self.sequence, fragment)
            return to_bytes(self.up_codec.encode(delta, residual=residual, seed=seed).payload)
        except NonFiniteError:
            parameter = self.layout.not_finite(fragment, delta)
            what = f"parameter {parameter}" if parameter else "what earlier deltas left to be sent"
            raise refusal(f"region {self.name}: {what}") from None

    def check_weights(self, weights: FragmentWeights) -> None:
        """Raises Refused."""
        try:
            self.downlink.check(weights, self.layout.fragments[weights.fragment].numel)
        except CodecError as error:
            raise Refused(f"{self.name}: fragment {weights.fragment} of the global server: {error}") from None

    def decode_weights(self, weights: FragmentWeights) -> Tensor:
        return self.downlink.decode(weights, self.layout.fragments[weights.fragment].numel)

    # -- inside

    def release_leases(self, name: str) -> None:
        untrained, self.leases[name] = self.leases[name], {}
        if untrained:
            self._outgoing.append(Send(GLOBAL, Release(tuple(lease.lease for lease in untrained.values()))))

    def _send_what_is_due(self) -> None:
        for fragment, state in enumerate(self.fragments):
            if self.rule.may_send(state, flush=self.idle):
                delta, weight = self.rule.take_progress(state)
                self.sequence += 1
                payload = self.encode_progress(fragment, delta)
                update = UpdatePart(
                    self.name,
                    self.incarnation,
                    self.sequence,
                    0,
                    (FragmentDelta(fragment, self.global_versions[fragment], payload),),
                    weight=weight,
                    leases=self._leases_complete_with(fragment),
                    metrics=self._mean_metrics(),
                )
                self.in_flight[self.sequence] = update
                self._outgoing.append(Send(GLOBAL, update))
        if (self.empty or (self.over and self.idle)) and not self.gone and not self.in_flight:
            self.gone = True
            self._outgoing.append(Send(GLOBAL, Leave(self.name)))

    def _leases_complete_with(self, fragment: int) -> tuple[int, ...]:
        """Leases whose every fragment has gone up once this one has; the rest wait for their other fragments."""
        for fragments in self.trained.values():
            fragments.discard(fragment)
        complete = tuple(lease for lease, fragments in self.trained.items() if not fragments)
        for lease in complete:
            del self.trained[lease]
        return complete

    def _mean_metrics(self) -> dict[str, float]:
        """Of the workers that are here; at the end, of those that were here."""
        here = [m for m in self.members.values() if not m.left] or list(self.members.values())
        return mean_metrics([m.metrics for m in here])


def mean_metrics(workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """A region's numbers for people, from its workers': their rates together, the mean of the rest."""
    told: dict[str, list[float]] = {}
    for metrics in workers:
        for name, value in metrics.items():
            told.setdefault(name, []).append(value)
    told.pop("staleness", None)  # counted in the region's versions
    return {name: sum(v) if name in _ADDED_UP else sum(v) / len(v) for name, v in told.items()}


_ADDED_UP = frozenset(("tokens", "tokens_per_s", "steps"))


def _numbers(tensors: dict[str, Tensor], prefix: str) -> list[int]:
    return [int(k.removeprefix(prefix)) for k in tensors if k.startswith(prefix)]
