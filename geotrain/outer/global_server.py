"""The global server's state machine: the run's weights, and the ledger of its data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from geotrain.config import OuterConfig
from geotrain.outer.layout import Layout
from geotrain.outer.leases import LeaseBook
from geotrain.outer.messages import (
    Finished,
    Join,
    Lease,
    LeaseRequest,
    Refused,
    Release,
    Steer,
    UpdatePart,
    Validated,
    Welcome,
)
from geotrain.outer.rules import global_rule
from geotrain.outer.server import Identity, Server
from geotrain.outer.validation import Validations


class GlobalServer(Server):
    """Applies its members' updates, answers them with the newest weights, hands out data.

    regions: region → its workers. In a flat run (`outer.levels` = 1) the members are the workers themselves.
    """

    def __init__(
        self,
        identity: Identity,
        layout: Layout,
        config: OuterConfig,
        regions: dict[str, tuple[str, ...]],
        train_samples: int,
        samples_per_step: int,
        validate_every_samples: int | None = None,
    ) -> None:
        workers = {w: (w,) for names in regions.values() for w in names}
        self.workers_of = workers if config.levels == 1 else regions
        self.members_of = regions if config.levels == 1 else {name: (name,) for name in regions}
        self._member_of = {worker: member for member, names in self.workers_of.items() for worker in names}
        members = tuple(self.workers_of)
        rule = global_rule(config, members)
        super().__init__(identity, layout, rule, members, config.up, config.down, config.limits)
        rounds = tuple(workers) if config.rule == "sync" else None
        self.book = LeaseBook(train_samples, samples_per_step, config.local_steps, config.scale_local_steps, rounds)
        self.validations = Validations(validate_every_samples)
        self.paused = self.stopping = False
        self.draining: set[str] = set()  # members that are to leave, or have left for that reason

    def on_steer(self, steer: Steer) -> None:
        """Raises Refused."""
        match steer.what:
            case "pause" | "resume":
                self.paused = steer.what == "pause"
            case "stop":
                self.stopping = True
            case "drain":
                if steer.region not in self.members_of:
                    raise Refused(f"no region is called {steer.region!r} here; known: {', '.join(self.members_of)}")
                if self.book.rounds is not None:
                    raise Refused("each round of a synchronous run needs every worker: stop the run instead")
                self.draining.update(self.members_of[steer.region])
            case _:
                raise Refused(f"{steer.what[:40]!r} means nothing to a run; known: pause, resume, drain, stop")

    def on_lease_request(self, request: LeaseRequest) -> Lease | Finished | None:
        """None: the run is paused, ask again. Raises Refused when the worker is none of this run's."""
        if request.worker not in self._member_of:
            raise Refused(f"no worker of this run is called {request.worker!r}")
        self.members[self._member_of[request.worker]].silent = False
        leaves = self.leaves(request.worker)
        task = self.validations.task_for(request.worker, self.book)
        granted = self.book.grant(request, not (self.paused or leaves), task)
        if task and isinstance(granted, Lease) and granted.validate == task:
            self.validations.handed_out(self.book.committed_samples)
        return self.book.dismiss(request) if granted is None and leaves else granted

    def on_validated(self, result: Validated) -> bool:
        """Whether it is news. Raises Refused."""
        self.frozen = None
        return self.validations.on_validated(result, self.book.committed_samples)

    def validation_weights(self) -> list[Tensor]:
        return [state.x for state in self.fragments]

    def global_version_of(self, fragment: int) -> int:
        return self.fragments[fragment].version

    def leaves(self, worker: str) -> bool:
        """Whether the worker is to finish what it has, and leave."""
        return self.stopping or any(worker in self.workers_of[name] for name in self.draining)

    def on_join(self, join: Join) -> Welcome:
        """A member that was drained, and comes back, takes part again."""
        before = self.members.get(join.member)
        back = before is not None and before.left and before.incarnation != join.incarnation
        welcome = super().on_join(join)
        if back and join.member in self.draining:
            self.draining.remove(join.member)
            for worker in self.workers_of[join.member]:
                self.book.dismissed.pop(worker, None)
        return welcome

    def on_release(self, release: Release) -> None:
        self.book.release(release.leases)

    def holds(self, name: str) -> set[int]:
        """Leases that are out with this member's workers."""
        return set(self.book.held_by(set(self.workers_of[name])))

    def release_leases(self, name: str) -> None:
        self.book.release(tuple(self.holds(name)))

    def on_new_life(self, name: str, join: Join) -> None:
        self.book.release(tuple(self.holds(name) - set(join.leases)))

    def on_applied(self, part: UpdatePart) -> None:
        """A member commits only what it holds: another's leases, and its own that were given away, are not."""
        self.book.commit(tuple(self.holds(part.member) & set(part.leases)))

    def begin_again(self) -> None:
        super().begin_again()
        self.book.dismissed.clear()
        self.paused = self.stopping = False
        self.draining.clear()

    @property
    def finished(self) -> bool:
        """The run is over: every member left, or all data is trained and nobody else is at work."""
        return self.empty or (self.over and self.idle)

    @property
    def over(self) -> bool:
        """Nothing is left to do for anybody: all data is trained; or the run is to stop, and no lease is out."""
        return self.book.finished or (self.stopping and not self.book.open)

    @property
    def phase(self) -> str:
        if self.finished:
            return "ended"
        return "stopping" if self.stopping else "paused" if self.paused else "running"

    def status(self) -> dict[str, Any]:
        """complete: no data is left, and none is out."""
        return {
            **super().status(),
            "phase": self.phase,
            "draining": sorted(region for region, names in self.members_of.items() if self.draining & set(names)),
            "complete": self.book.finished,
            "validation": self.validations.latest,
            "train_samples": self.book.train_samples,
            "committed_samples": self.book.committed_samples,
            "dispatched_samples": self.book.next_start,
            "open_leases": len(self.book.open),
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = super().state()
        meta["leases"] = self.book.state()
        meta["validations"] = self.validations.state()
        meta["steered"] = {"paused": self.paused, "stopping": self.stopping, "draining": sorted(self.draining)}
        return tensors, meta

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        super().load(tensors, meta)
        self.book.load(meta["leases"])
        if "validations" in meta:
            self.validations.load(meta["validations"])
        steered = meta.get("steered", {})  # older snapshots have none
        self.paused, self.stopping = steered.get("paused", False), steered.get("stopping", False)
        self.draining = set(steered.get("draining", ()))
