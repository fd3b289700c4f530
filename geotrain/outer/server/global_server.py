"""The global server's state machine: it holds the run's weights and accounts for its training data."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from typing import Any, Literal

from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import OuterConfig
from geotrain.config.batches import Ramp
from geotrain.outer.events import SetAside, ShardWentBack, Steered, ValidationDone
from geotrain.outer.messages import (
    DataGone,
    Fact,
    Facts,
    Finished,
    Identity,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    Message,
    NotJoined,
    OperatorCommand,
    Refused,
    Release,
    RunComplete,
    SkipSamples,
    TakeBack,
    TakenBack,
    Trained,
    UpdateRejected,
    Validated,
    Welcome,
    WentBack,
)
from geotrain.outer.metrics import credible
from geotrain.outer.rules import global_rule
from geotrain.outer.server.lease_requests import check_numbers
from geotrain.outer.server.leases import LeaseTable, Range
from geotrain.outer.server.limits import changed_number
from geotrain.outer.server.loss_watch import LossWatch
from geotrain.outer.server.member import MOST_WEIGHT, attributes, set_attributes
from geotrain.outer.server.member_phase import MemberEvent
from geotrain.outer.server.parts import JOIN_RETRY_S, WHOLE, ServerPart
from geotrain.outer.server.server import Server
from geotrain.outer.server.validations import Validations
from geotrain.parameters.parameter_map import ParameterMap

LOST_LEASES = 1 << 20  # more than are granted between the copy of a snapshot and the loss of the disk
MOST_SHOWN = 64  # ranges that are set aside, in the status
STEERED = "paused", "stopping", "closed"  # attributes that a snapshot keeps as they are


class GlobalServer(Server):
    """Applies its members' updates, answers them with the newest weights, and hands out data.

    regions: region → its workers. The members are the regions or, in a flat run (`outer.levels` = 1), the workers.
    train_samples, samples_per_step: of the run, and of one inner step. validate_every_samples: committed samples
    between two validations; None: there are none. sample_tokens: tokens in one sample, for the event log, which
    counts tokens. ramp: of the batch.
    """

    def __init__(
        self, identity: Identity, parameter_map: ParameterMap, config: OuterConfig, regions: dict[str, tuple[str,
        ...]],
        train_samples: int, samples_per_step: int, validate_every_samples: int | None = None,
        sample_tokens: int = 1, part: ServerPart = WHOLE, ramp: Ramp | None = None,
    ) -> None:  # fmt: skip
        workers = {w: (w,) for names in regions.values() for w in names}
        self._workers_of = workers if config.flat else regions  # member → workers that it speaks for
        self.members_of = regions if config.flat else {name: (name,) for name in regions}  # region → its members here
        self._member_of = {worker: member for member, names in self._workers_of.items() for worker in names}
        members = tuple(self._workers_of)
        rule = global_rule(config.rule, members)
        role: Literal["worker", "region"] = "worker" if config.flat else "region"
        super().__init__(
            GLOBAL, role, identity, parameter_map, rule, members, self, config.up, config.down, config.limits, part,
            bf16_state=config.server_state == "bf16",
        )  # fmt: skip
        self.sample_tokens = sample_tokens
        jobs = train_samples / samples_per_step / config.local_steps / max(1, len(workers))  # of each
        rounds = tuple(workers) if config.rule.synchronous else None
        self.lease_table = LeaseTable(
            train_samples, samples_per_step, config.local_steps, config.scale_local_steps, rounds, ramp,
            len(parameter_map.fragments), bool(part.dealt),
            config.answers(jobs) == "wait" and config.overlap.late == "continue",  # else answers keep all in step
        )  # fmt: skip
        self.validations = Validations(validate_every_samples)
        self.losses = LossWatch()
        self.paused = self.stopping = self.closed = False  # closed: its process ends, and nobody new may join
        self.draining: set[str] = set()  # members that shall leave, or have left because they were drained

    def _route(self, message: Message) -> Any:
        match message:
            case LeaseRequest():
                return self._on_lease_request(message)
            case Release(leases, failed):
                return self._note_aside(self.lease_table.fail(leases)) if failed else self.lease_table.release(leases)
            case SkipSamples(firsts, lasts):
                return self.lease_table.skip_samples([*zip(firsts, lasts, strict=True)])
            case TakeBack():
                return self._on_take_back(message)
            case Trained(member, fragment, leases):
                self.membership.present(member)
                version = self._version(fragment)
                self._report(Fact("contained", member, fragment=fragment, contains=leases, version=version))
                return None
            case OperatorCommand() if message.what != "expel":
                return self._on_operator_command(message)
            case RunComplete():
                if not self.finished:
                    raise Refused("members are at work: the run has not ended")
                self.closed = True
                return None
            case Validated():
                self.copy_weights(None)
                if self.validations.on_validated(message, self.lease_table):
                    tokens = self.lease_table.committed_samples * self.sample_tokens
                    self._events.append(ValidationDone(**asdict(message), tokens=tokens))
                return None
            case Leave() if (self.stopping or not self.lease_table.left) and message.member not in self.draining:
                # Before the goodbye itself: who is done stays so, and keeps its share for the last deltas of others.
                self.membership.member(message.member).transition(MemberEvent.ENDS)
        return super()._route(message)

    def _on_operator_command(self, command: OperatorCommand) -> str:
        """Returns the run's phase. Raises Refused."""
        match command.what:
            case "pause" | "resume":
                self.paused = command.what == "pause"
            case "stop":
                self.stopping = True
            case "drain":
                if command.region not in self.members_of:
                    raise Refused(f"no region is called {command.region!r} here; known: {', '.join(self.members_of)}")
                if self.lease_table.rounds is not None:
                    raise Refused("each round of a synchronous run needs every worker: stop the run instead")
                self.draining.update(self.members_of[command.region])
            case setting if setting.startswith("set "):
                self._set(*setting.removeprefix("set ").partition("=")[::2])
            case _:
                known = "pause, resume, drain, expel, stop, set"
                raise Refused(f"{command.what[:40]!r} means nothing to a run; known: {known}")
        self._events.append(Steered(command.what, command.region))
        return self.phase

    def _set(self, key: str, value: str) -> None:
        """Change H for the leases to come; each lease says its own length. Raises Refused."""
        now = self.lease_table.local_steps
        if key != "outer.local_steps":
            raise Refused(
                f"{key!r} cannot be set while a run is on, only outer.local_steps and, where regions send by count, "
                "outer.rule.updates_per_send: all agreed on the rest"
            )
        if self.lease_table.rounds is not None:
            raise Refused("outer.local_steps cannot be set: all rounds of a synchronous run are of one length")
        self.lease_table.local_steps = changed_number(key, value, now)

    def _on_lease_request(self, request: LeaseRequest) -> Lease | Finished | None:
        """Grant a lease; None while the run is paused. Raises Refused when the worker is not one of this run's."""
        if request.worker not in self._member_of:
            raise Refused(f"no worker of this run is called {request.worker!r}")
        check_numbers(request)
        if self.member_role == "worker":
            self.membership.check_request_of(request)  # otherwise its region has done so
        self.membership.present(self._member_of[request.worker])
        # Who trains what others have by now must begin anew before it gets more.
        self.check_own(self._member_of[request.worker], ())
        leaves = self.leaves(request.worker)
        task = self.validations.task_for(request.worker, self.lease_table)
        granted = self.lease_table.grant(request, not (self.paused or leaves), task)
        # The lease may be one granted before, which is given again as it was and does not carry the new task.
        if task and isinstance(granted, Lease) and granted.validate == task:
            self.validations.handed_out(self.lease_table.committed_samples)
        # A worker that is to leave still gets the leases it held already, and is answered Finished after them.
        return self.lease_table.dismiss(request) if granted is None and leaves else granted

    def _answer_now(self, names: tuple[str, ...], fragment: int) -> None:
        for name in names:
            del self.fragments[fragment].waiting[name]
        self.answers.answer(names, fragment)

    @property
    def final_validation(self) -> int:
        """Number of the validation that the run's final weights still need; 0: none."""
        return self.validations.final_task(self.lease_table) if self.finished else 0

    def versions_to_validate(self) -> list[int]:
        return self.versions

    def leaves(self, worker: str) -> bool:
        """Whether the worker gets no new lease and leaves after those it holds: the run stops, or it is drained."""
        return self.stopping or any(worker in self._workers_of[name] for name in self.draining)

    @property
    def ending(self) -> bool:
        return self.closed

    def said_step_s(self) -> Iterable[float]:
        return self.lease_table.step_s.values()

    def recalls(self, member: str) -> bool:
        return self.paused or self.stopping or member in self.draining

    def lease_is_due(self, worker: str) -> bool:
        table = self.lease_table
        return self.leaves(worker) or (not self.paused and (table.left or table.finished))

    def most_weight(self, member: str) -> int:
        if self.member_role == "worker":
            return 1
        return len(self._workers_of[member]) if self.rule.in_rounds else MOST_WEIGHT

    def max_credible_weight(self, member: str) -> int:
        workers = self._workers_of[member]  # each may send one more, at the end
        return len(workers) + len(self.holds(member))

    def workers_of(self, member: str) -> tuple[str, ...]:
        return self._workers_of[member]

    def _on_join(self, join: Join) -> Welcome:
        """Let a rank join, and end the draining of a member that had left and comes back in a new incarnation."""
        before = self.membership.member(join.member)
        new = before.incarnation != join.incarnation
        back, lives = new and before.left, new or before.silent
        welcome = super()._on_join(join)
        self.lease_table.pass_numbers(join.leases)
        named = self._answered_for(join.member, join.leases)
        if lives:  # not when a join is said twice: it may have given some of them back since
            self.lease_table.take_back(named)
        welcome = replace(welcome, gone=self.lease_table.gone(named))
        if back and join.member in self.draining:
            self.draining.remove(join.member)
            for worker in self._workers_of[join.member]:
                self.lease_table.dismissed.pop(worker, None)
        return welcome

    def comes_from_copy(self, drawn: int) -> None:
        # Regions, and facts of shards, may name leases that were granted since the copy was made, perhaps by another
        # life that had begun with it.
        self.lease_table.next_lease += LOST_LEASES * (1 + drawn)

    def holds(self, name: str) -> dict[int, Lease]:
        return self.lease_table.held_by(self._workers_of[name])

    def release_leases(self, name: str) -> None:
        self.lease_table.release(self.holds(name))

    def facts_lost(self) -> None:
        # Others get what is out, whoever trains it on: how much of it is trained is not known.
        self.lease_table.release(tuple(self.lease_table.open))
        self.lease_table.forget_returned(self._member_of)
        self.comes_from_copy(0)  # or from a backup, of which nothing else tells

    def give_up(self, name: str, leases: Collection[int]) -> None:
        self._note_aside(self.lease_table.fail(leases))

    def _note_aside(self, ranges: Iterable[Range]) -> None:
        self._events += [SetAside(start, start + samples - 1) for start, samples in ranges]

    def begin_incarnation(self, name: str, named: tuple[int, ...]) -> None:
        # A restarted worker has lost the training of its leases. A restarted region server has journaled the updates
        # that contain it, and still answers for the leases that it names.
        self.lease_table.release(self.holds(name).keys() - set(named))
        if self.member_role == "worker":
            self.lease_table.forget_returned(self._workers_of[name])

    def _answered_for(self, member: str, leases: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of the leases that went to the member. Workers name none when they join: all that came back
        from one, in its present incarnation, it may have trained."""
        named = leases if self.member_role == "region" else (*self.lease_table.returned, *leases)
        return self._given_to(member, named)

    def check_own(self, name: str, leases: tuple[int, ...]) -> None:
        # It has to be answered first whether others have them.
        if self.members[name].silent and self.member_role == "region":
            raise NotJoined(f"{name}: it was silent for too long: join first", JOIN_RETRY_S)
        # A region got word of its own when it joined again, and may name one that it gave back itself: part of
        # that was trained.
        named = () if self.member_role == "region" else leases
        if gone := self.lease_table.gone(self._answered_for(name, named)):
            raise DataGone(
                f"{name}: the data of its leases {list(gone)} went to others while it counted as dead; what "
                "it trained would count twice. Start it anew"
            )

    def _on_take_back(self, asked: TakeBack) -> TakenBack:
        """Give a region leases again whose worker lives after all, or say that others have them."""
        if asked.worker not in self._member_of:
            raise Refused(f"no worker of this run is called {asked.worker!r}")
        self.membership.present(self._member_of[asked.worker])
        table = self.lease_table
        mine = [number for number in dict.fromkeys(asked.leases) if table.given_to(number) == asked.worker]
        table.take_back(mine)
        open_now = tuple(number for number in mine if number in table.open)
        return TakenBack(asked.worker, open_now, tuple(n for n in asked.leases if n not in open_now))

    def _given_to(self, member: str, leases: Iterable[int]) -> tuple[int, ...]:
        """Return those of the leases that went to the member, be they open or returned."""
        workers = self._workers_of[member]
        return tuple(n for n in dict.fromkeys(leases) if self.lease_table.given_to(n) in workers)

    def _version(self, fragment: int) -> int:
        return self.fragments[fragment].version if fragment in self.fragments else 0

    def _on_fact(self, fact: Fact) -> None:
        match fact.what:
            case "applied":
                self._on_applied(fact)
            case "contained":
                leases = self._given_to(fact.member, fact.contains)
                self.lease_table.contain(leases, fact.fragment, fact.version)
            case "refused":
                about = fact.member, fact.incarnation, fact.reason, fact.fragment, fact.sequence, fact.job
                self.membership.count_strike(UpdateRejected(*about))

    def _on_facts(self, said: Facts) -> int:
        known = super()._on_facts(said)
        # Behind the facts, by which leases are committed: those that the copy contains need not be remembered.
        self.lease_table.forget_safe(dict(zip(self.part.dealt[said.shard], said.safe, strict=True)))
        return known

    def _on_went_back(self, back: WentBack) -> None:
        """Hand out again what is trained in updates that a shard has no more."""
        super()._on_went_back(back)
        again = self.lease_table.go_back(dict(zip(self.part.dealt[back.shard], back.versions, strict=True)))
        self._events.append(ShardWentBack(back.shard, list(self.versions), again))

    def _stands(self) -> dict[str, Any]:
        last = self.validations.latest
        return {"validated": last["number"] if last else 0}

    def _count_trained(self, applied: Fact) -> tuple[int, int]:
        # A flat run's worker may name a lease of before this server came back from a backup, whose number is now that
        # of a later job.
        later = {n for n, lease in self.holds(applied.member).items() if lease.job > applied.job}
        region = self.member_role == "region"
        own = applied.contains if region else tuple(n for n in applied.contains if n not in later)
        given = self._given_to(applied.member, own)
        samples = self.lease_table.contain(given, applied.fragment, applied.version)
        tokens = self.lease_table.committed_samples * self.sample_tokens
        loss = credible(applied.metrics).get("loss") if self.answers.reports_updates else None
        if loss is not None and (spike := self.losses.note(loss, tokens)):
            self._events.append(spike)
        return samples, tokens

    def begin_again(self) -> None:
        super().begin_again()
        # The resumed run may have more data for those for whom there was none; earlier commands have ended.
        self.lease_table.dismissed.clear()
        self.paused = self.stopping = self.closed = False
        self.draining.clear()

    @property
    def finished(self) -> bool:
        """Whether the run has ended: every member left, or all data is trained and nobody is at work any more. The
        second holds also where a member died at the end and never said goodbye."""
        return self.membership.empty or (self.over and self.membership.idle)

    @property
    def over(self) -> bool:
        """Whether nothing is left to train: all data is committed, or the run is to stop and no lease is out."""
        return self.lease_table.finished or (self.stopping and not self.lease_table.open)

    @property
    def phase(self) -> str:
        if self.finished:
            return "ended"
        return "stopping" if self.stopping else "paused" if self.paused else "running"

    def status(self) -> dict[str, Any]:
        """Return plain data for people and tests. complete: no data is left, and none is out. trained_s:
        seconds of inner steps in what is committed, of a worker, in the mean. returned_samples: of
        those dispatched, what came back and is to be handed out again."""
        return {
            **super().status(),
            "phase": self.phase,
            "local_steps": self.lease_table.local_steps,
            "draining": sorted(
                region
                for region, names in self.members_of.items()
                if any(not self.members[name].left for name in self.draining.intersection(names))
            ),
            "complete": self.lease_table.finished,
            "validation": self.validations.latest,
            "loss_spike": self.losses.spike,
            "train_samples": self.lease_table.train_samples,
            "committed_samples": self.lease_table.committed_samples,
            "trained_s": self.lease_table.trained_s / max(1, len(self.lease_table.step_s)),
            "dispatched_samples": self.lease_table.next_start,
            "returned_samples": sum(samples for _, samples in self.lease_table.pool),
            "open_leases": len(self.lease_table.open),
            "skip": self.lease_table.skip,
            "set_aside_samples": self.lease_table.set_aside_samples,
            "set_aside": [[start, start + samples - 1] for start, samples in self.lease_table.aside[:MOST_SHOWN]],
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = super().state()
        meta["leases"] = self.lease_table.state()
        meta["validations"] = self.validations.state()
        meta["losses"] = [*self.losses.usual]
        meta["steered"] = {**attributes(self, STEERED), "draining": sorted(self.draining)}
        return tensors, meta

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        super().load(tensors, meta)
        self.lease_table.load(meta["leases"])
        # Who is no member any more trains nothing.
        self.lease_table.release(
            [n for n, lease in self.lease_table.open.items() if lease.worker not in self._member_of]
        )
        self.validations.load(meta["validations"])
        self.losses = LossWatch(meta.get("losses", ()))  # older snapshots have none
        steered = meta["steered"]
        set_attributes(self, STEERED, steered)
        self.draining = set(steered["draining"]) & self._workers_of.keys()  # a region that was drained may be gone
