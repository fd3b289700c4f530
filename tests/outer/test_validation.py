"""Who validates the global weights and when; that all its ranks see the same; what is lost with a worker."""

from __future__ import annotations

import math

import pytest
import torch

from geotrain.common.names import GLOBAL
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import VALIDATION_CODEC
from geotrain.outer.messages import Identity, Lease, LeaseRequest, Refused, Send, Validated
from geotrain.outer.rules import region_rule
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.leases import LeaseTable
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.server.validations import Validations
from geotrain.parameters.parameter_map import numel, scatter
from geotrain.staging.interface import from_bytes
from tests.support.outer_world import UPDATES, FakeWorker, config, halves, parameter_map, weights_of

EVERY = 16


def coordinator(committed: int, **step_s: float) -> LeaseTable:
    made = LeaseTable(1000, 1, 4)
    made.committed_samples, made.step_s = committed, step_s
    return made


def test_the_fastest_worker_is_asked_and_others_only_when_it_stays_away() -> None:
    tasks = Validations(EVERY)
    assert tasks.task_for("fast", coordinator(EVERY - 1, fast=1.0, slow=2.0)) == 0
    due = coordinator(EVERY, fast=1.0, slow=2.0)
    assert (tasks.task_for("slow", due), tasks.task_for("fast", due)) == (0, 1)
    assert tasks.task_for("slow", coordinator(EVERY + EVERY // 2, fast=1.0, slow=2.0)) == 1
    tasks.handed_out(EVERY + 3)
    assert tasks.task_for("fast", due) == 0 and tasks.due_samples == 2 * EVERY
    assert tasks.task_for("fast", coordinator(2 * EVERY, fast=1.0)) == 2
    assert Validations(None).task_for("fast", due) == 0


def test_only_what_was_asked_for_counts_and_the_newest_stays() -> None:
    tasks = Validations(EVERY)
    tasks.handed_out(EVERY)
    tasks.handed_out(2 * EVERY)
    assert tasks.on_validated(Validated("a", 2, 9, 3.5, 1.0), coordinator(40))
    assert not tasks.on_validated(Validated("b", 1, 8, 4.0, 1.0), coordinator(44))  # late
    assert tasks.latest is not None and (tasks.latest["loss"], tasks.latest["samples"]) == (3.5, 40)
    for number, loss in ((3, 1.0), (0, 1.0), (2, math.nan)):
        with pytest.raises(Refused, match="was not asked for"):
            tasks.on_validated(Validated("a", number, 1, loss, 1.0), coordinator(44))


def test_the_final_weights_are_due_once_all_is_committed_and_by_nobody_else() -> None:
    tasks = Validations(EVERY)
    tasks.handed_out(EVERY)

    def coordinator(committed: int, samples: int = 1000) -> LeaseTable:
        made = LeaseTable(samples, 1, 4)
        made.committed_samples = made.next_start = committed
        return made

    assert tasks.final_task(coordinator(999)) == Validations(None).final_task(coordinator(1000)) == 0
    assert tasks.final_task(coordinator(1000)) == 2
    for early in (Validated(GLOBAL, 2, 9, 3.0, 1.0), Validated("a", 2, 9, 3.0, 1.0)):
        with pytest.raises(Refused, match="was not asked for"):
            tasks.on_validated(early, coordinator(999))
    assert tasks.on_validated(Validated(GLOBAL, 2, 9, 3.0, 1.0), coordinator(1000))
    assert tasks.final_task(coordinator(1000)) == 0
    assert tasks.final_task(coordinator(2000, 2000)) == 3  # the run was given more data


def test_a_lease_keeps_its_task_through_a_restart_and_for_every_rank() -> None:
    lay = parameter_map()
    identity = Identity("t", "c", lay.digest, "toy")

    def server() -> GlobalServer:
        return GlobalServer(identity, lay, config(), {"eu": ("a",)}, 400, 1, EVERY)

    top = server()
    before = top.handle(LeaseRequest("a", 1)).reply
    top.lease_table.committed_samples = EVERY
    assert top.handle(LeaseRequest("a", 1)).reply == before  # another rank, after it came due
    with_task = top.handle(LeaseRequest("a", 2)).reply
    assert isinstance(with_task, Lease) and with_task.validate == 1
    new = server()
    new.load(*top.state())
    assert new.handle(LeaseRequest("a", 2)).reply == with_task
    following = new.handle(LeaseRequest("a", 3)).reply
    assert isinstance(following, Lease) and following.validate == 0
    new.handle(Validated("a", 1, 5, 2.5, 0.1))
    again = server()
    again.load(*new.state())
    assert again.status()["validation"]["loss"] == 2.5


def test_all_parts_see_the_weights_of_one_moment() -> None:
    """Those of the global server, as the region last got them: not the region's own."""
    lay = parameter_map(1)
    identity = Identity("t", "c", lay.digest, "toy")
    cfg = config()
    top = GlobalServer(identity, lay, cfg, {"eu": ("a",)}, 400, 1, EVERY)
    top.set_weights([torch.linspace(-1, 1, f.numel) for f in lay.fragments])
    region = RegionServer("eu", identity, lay, cfg, region_rule(cfg, ("a",), UPDATES), ("a",), validates=True)
    region.incarnation = "life-1"
    worker = FakeWorker("a", lay, halves(lay))
    for join in worker.joins(identity):
        region.handle(join)
    assert region.weights_to_validate("a", "life-1", 0, 1).weights == ()  # nothing is here yet
    top.handle(region.join_message())
    for fragment in range(len(lay.fragments)):
        answer = top.answer("eu", "life-1", 0, fragment, 0)
        assert answer is not None
        region.handle(answer)
    for x in weights_of(region):
        x.add_(1.0)  # a worker's delta came
    seen = [torch.full((f.numel,), torch.nan) for f in lay.fragments]
    for part in (0, 1):
        told = region.weights_to_validate("a", "life-1", part, 1)
        assert told.incarnation == "life-1" and len(told.weights) == len(lay.fragments)
        for w in told.weights:
            cut = worker.slicings[part][w.chunk]
            values = make_codec(VALIDATION_CODEC).decode(from_bytes(w.payload), numel(cut))
            scatter(values, cut, seen[w.chunk])
        shard = region.store
        assert shard.newest is not None
        for x in weights_of(region):
            x.add_(1.0)  # training goes on between the two
        shard.newest.update({i: x + 1.0 for i, x in shard.newest.items()})
    for f, values in enumerate(seen):
        assert torch.equal(values, top.weights(f).bfloat16().float())
    assert region.weights_to_validate("a", "life-1", 0, 2).weights != told.weights
    assert region.weights_to_validate("a", "life-1", 0, 1).weights == ()  # gone: a later one has begun
    result = Validated("a", 2, 1, 3.0, 0.1)
    assert region.handle(result).sends == (Send("global", result),) and region.frozen is None and not shard.copy


def test_a_region_that_does_not_validate_keeps_no_copy() -> None:
    lay = parameter_map()
    rule = region_rule(config(), ("a",), UPDATES)
    region = RegionServer("eu", Identity("t", "c", lay.digest, "toy"), lay, config(), rule, ("a",))
    assert region.store.newest is None and region.versions_to_validate() == []
