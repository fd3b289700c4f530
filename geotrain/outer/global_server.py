"""The global server's state machine: the run's weights, and the ledger of its data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from geotrain.config import OuterConfig
from geotrain.outer.layout import Layout
from geotrain.outer.leases import LeaseBook
from geotrain.outer.messages import Finished, Join, Lease, LeaseRequest, Refused, Release, UpdatePart
from geotrain.outer.rules import global_rule
from geotrain.outer.server import Identity, Server


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
    ) -> None:
        workers = {w: (w,) for names in regions.values() for w in names}
        self.workers_of = workers if config.levels == 1 else regions
        self._member_of = {worker: member for member, names in self.workers_of.items() for worker in names}
        members = tuple(self.workers_of)
        rule = global_rule(config, members)
        super().__init__(identity, layout, rule, members, config.up, config.down, config.limits)
        rounds = tuple(workers) if config.rule == "sync" else None
        self.book = LeaseBook(train_samples, samples_per_step, config.local_steps, config.scale_local_steps, rounds)

    def on_lease_request(self, request: LeaseRequest) -> Lease | Finished:
        """Raises Refused when the worker is none of this run's."""
        if request.worker not in self._member_of:
            raise Refused(f"no worker of this run is called {request.worker!r}")
        self.members[self._member_of[request.worker]].silent = False
        return self.book.grant(request)

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

    @property
    def finished(self) -> bool:
        """The run is over: every member left, or all data is trained and nobody else is at work."""
        return self.empty or (self.book.finished and self.idle)

    def status(self) -> dict[str, Any]:
        return {
            **super().status(),
            "train_samples": self.book.train_samples,
            "committed_samples": self.book.committed_samples,
            "dispatched_samples": self.book.next_start,
            "open_leases": len(self.book.open),
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = super().state()
        meta["leases"] = self.book.state()
        return tensors, meta

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        super().load(tensors, meta)
        self.book.load(meta["leases"])
