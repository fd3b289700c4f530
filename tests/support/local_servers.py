"""A region server and a global server in this process: the trainer's world without sockets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from geotrain.config import RunConfig
from geotrain.outer.identity import identity_of
from geotrain.outer.messages import (
    Answer,
    AnswerWanted,
    Join,
    LeaseRequest,
    Leave,
    UpdatePart,
    UpdateRejected,
    Validated,
    Welcome,
)
from geotrain.outer.rules import region_rule
from geotrain.outer.rules.region_momentum import updates_in_run
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import ParameterMap, parameter_map_of
from tests.support.outer_world import InProcess


def first_weights(parameter_map: ParameterMap, seed: int = 1) -> list[torch.Tensor]:
    return [
        torch.cat([initial_tensor(p, seed).reshape(-1).float() for p in fragment.parameters])
        for fragment in parameter_map.fragments
    ]


class LocalServers(InProcess):
    """One region, and a global server above it; every message is delivered at once."""

    def __init__(self, run: RunConfig, workers: tuple[str, ...] = ("w",)) -> None:
        self.parameter_map = parameter_map_of(run)
        self.identity = identity_of(run, self.parameter_map)
        sizes, every = (run.data.train_samples, run.samples_per_step), run.monitor.validate_every_samples
        ramp, regions = run.data.rampup_batch_size, {"eu": workers}
        top = GlobalServer(self.identity, self.parameter_map, run.outer, regions, *sizes, every, ramp=ramp)
        top.set_weights(first_weights(self.parameter_map, run.seed))
        updates = updates_in_run(run.inner_steps, run.outer.local_steps, len(workers), len(workers))
        rule = region_rule(run.outer, workers, updates)
        self.region = RegionServer(
            "eu", self.identity, self.parameter_map, run.outer, rule, workers, every is not None
        )
        self.region.incarnation = "life-1"
        super().__init__(top, {"eu": self.region})

    def say(self, message: Any) -> Any:
        """The region's reply, once nothing is under way any more."""
        reply = self.tell("eu", message)
        while self.up["eu"]:
            sent = self.deliver("eu")
            if isinstance(sent, UpdatePart | AnswerWanted):
                self.answer("eu", sent.fragment, sent.sequence)
        return reply


class LocalClient:
    """The trainer's client, for a worker of one rank."""

    def __init__(self, servers: LocalServers, name: str = "w") -> None:
        self.servers, self.name, self.incarnation = servers, name, ""
        self.on_acknowledged: Callable[[int, int], None] = lambda fragment, sequence: None

    def join(self, join: Join) -> Welcome:
        self.incarnation = join.incarnation
        return self.servers.say(join)

    def push(self, part: UpdatePart) -> Future[None]:
        self.servers.say(part)
        return done(None)

    def pull(self, fragment: int, sequence: int) -> Future[Answer]:
        self.servers.say(AnswerWanted(self.name, self.incarnation, fragment, sequence))
        answer = self.servers.region.answer(self.name, self.incarnation, 0, fragment, sequence)
        assert answer is not None, "a single worker is never kept waiting"
        return done(answer)

    def lease(self, request: LeaseRequest) -> Future[Any]:
        return done(self.servers.say(request) or self.servers.down[request.worker])

    def global_weights(self, number: int) -> Future[Answer]:
        return done(self.servers.region.weights_to_validate(self.name, self.incarnation, 0, number))

    def validated(self, result: Validated) -> None:
        self.servers.say(result)

    def report_nonfinite_delta(self, lease: int) -> None:
        self.servers.say(
            UpdateRejected(
                self.name,
                self.incarnation,
                "not finite",
                job=self.servers.region.membership.leases.holds(self.name)[lease].job,
            )
        )

    def leave(self) -> None:
        self.servers.say(Leave(self.name))


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
