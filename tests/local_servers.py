"""A region server and a global server in this process: the trainer's world without sockets."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch

from geotrain.config import RunConfig
from geotrain.initial import initial_tensor
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.layout import Layout, layout_of
from geotrain.outer.messages import (
    Answer,
    Finished,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    Release,
    UpdatePart,
    Validated,
    Welcome,
)
from geotrain.outer.region_server import RegionServer
from geotrain.outer.server import identity_of


def first_weights(layout: Layout, seed: int) -> list[torch.Tensor]:
    return [
        torch.cat([initial_tensor(p, seed).reshape(-1).float() for p in fragment.parameters])
        for fragment in layout.fragments
    ]


class LocalServers:
    def __init__(self, run: RunConfig, workers: tuple[str, ...] = ("w",)) -> None:
        self.layout = layout_of(run)
        self.identity = identity_of(run, self.layout)
        samples, batch = run.data.train_samples, run.samples_per_step
        every = run.monitor.validate_every_samples
        self.top = GlobalServer(self.identity, self.layout, run.outer, {"eu": workers}, samples, batch, every)
        self.top.set_weights(first_weights(self.layout, run.seed))
        self.region = RegionServer("eu", self.identity, self.layout, run.outer, workers, every is not None)
        self.region.incarnation = "life-1"
        self.top.on_join(self.region.join_message())
        self._answer_region(0, tuple(range(len(self.layout.fragments))))

    def pump(self) -> dict[str, Lease | Finished]:
        """Deliver everything until nothing is said any more. Returns leases by worker."""
        leases: dict[str, Lease | Finished] = {}
        while out := self.region.outgoing():
            for send in out:
                match send.message:
                    case UpdatePart() as update:
                        self.top.on_part(update)
                        self._answer_region(update.sequence, tuple(d.fragment for d in update.deltas))
                    case LeaseRequest() as request:
                        self.region.on_lease(granted(self.top.on_lease_request(request)))
                    case Lease() | Finished() as lease:
                        leases[send.to] = lease
                    case Release() as release:
                        self.top.on_release(release)
                    case Validated() as result:
                        self.top.on_validated(result)
                    case Leave() as leave:
                        self.top.on_leave(leave.member)
        return leases

    def _answer_region(self, sequence: int, fragments: tuple[int, ...]) -> None:
        answer = self.top.answer("eu", "life-1", 0, sequence, fragments)
        if answer:
            self.region.on_global_weights(answer)


class LocalClient:
    """The trainer's client, for a worker of one rank."""

    def __init__(self, servers: LocalServers, name: str = "w") -> None:
        self.servers, self.name, self.incarnation = servers, name, ""

    def join(self, join: Join) -> Welcome:
        self.incarnation = join.incarnation
        return self.servers.region.on_join(join)

    def push(self, part: UpdatePart) -> Future[None]:
        self.servers.region.on_part(part)
        self.servers.pump()
        return done(None)

    def pull(self, sequence: int, fragments: tuple[int, ...]) -> Future[Answer]:
        answer = self.servers.region.answer(self.name, self.incarnation, 0, sequence, fragments)
        assert answer is not None, "a single worker is never kept waiting"
        return done(answer)

    def lease(self, request: LeaseRequest) -> Future[Any]:
        lease = self.servers.region.on_lease_request(request)
        return done(lease or self.servers.pump()[request.worker])

    def global_weights(self, number: int) -> Future[Answer]:
        return done(self.servers.region.weights_to_validate(self.name, self.incarnation, 0, number))

    def validated(self, result: Validated) -> None:
        self.servers.region.on_validated(result)
        self.servers.pump()

    def leave(self) -> None:
        self.servers.region.on_leave(self.name)
        self.servers.pump()


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def granted(lease: Lease | Finished | None) -> Lease | Finished:
    assert lease is not None, "nobody pauses this run"
    return lease
