"""An operator's word to servers on real sockets: pause, resume, drain, stop; who may say it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch

from geotrain.net.server.peers import is_this_machine
from geotrain.net.transport import rpc
from geotrain.net.transport.operator_client import ask_status, command
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import VALIDATION_CODEC
from geotrain.outer.messages import Lease, LeaseRequest, Validated
from geotrain.outer.server.validations import Validations
from geotrain.parameters.parameter_map import numel, scatter
from geotrain.staging.interface import from_bytes
from tests.support.net_worlds import BUSY_S, Cluster, halves, outer, wait_for, whole
from tests.support.outer_world import weights_of

PLAN = {"eu": {"a": whole, "b": halves}, "us": {"c": whole}}


def tell(cluster: Cluster, what: str, region: str = "") -> str:
    return command(cluster.top.address, rpc.Control(what, region), BUSY_S)


def asked_again(cluster: Cluster, times: int) -> None:
    """Wait until the global server was asked so many times more for leases."""
    server, handled = cluster.top.server, list[LeaseRequest]()
    take = type(server).take

    def counting(message: object) -> object:
        handled.extend([message] if isinstance(message, LeaseRequest) else [])
        return take(server, message)

    server.take = counting
    wait_for(lambda: len(handled) >= times)


def test_workers_wait_while_the_run_is_paused_and_go_on_at_once(make: Callable[..., Cluster], monkeypatch) -> None:
    """A pause is in the journal, and may last longer than any deadline."""
    monkeypatch.setattr(rpc, "MAX_WAIT_S", 0.2)
    cluster = make(outer(), PLAN)
    worker = cluster.joined("b")
    held = worker.lease()
    assert held is not None
    assert tell(cluster, "pause") == "paused"
    cluster.restart_top()
    worker.train(held)
    worker.clients[0].deadline_s = 0.5
    waiting: Future[object] = worker.clients[0].lease(LeaseRequest("b", 2))
    asked_again(cluster, 6)  # each of them holds a call for as long as it may
    assert not waiting.done()
    status = ask_status(cluster.top.address, BUSY_S)
    assert status is not None and (status["phase"], status["open_leases"]) == ("paused", 1)
    monkeypatch.setattr(rpc, "MAX_WAIT_S", BUSY_S)  # it does not end by itself
    asked_again(cluster, 1)
    assert tell(cluster, "resume") == "running"
    assert isinstance(waiting.result(BUSY_S / 2), Lease)


def test_without_tls_only_this_machine_steers() -> None:
    assert is_this_machine("127.0.0.1:5") and is_this_machine("::1:5")
    assert is_this_machine("198.18.0.1:5")  # emulated links
    assert not is_this_machine("203.0.113.7:5") and not is_this_machine("2001:db8::7:5")


def test_a_validation_goes_out_with_a_lease_and_its_loss_comes_up(make: Callable[..., Cluster]) -> None:
    cluster = make(outer(), PLAN, train_samples=64)
    top, region = cluster.top.server, cluster.regions["eu"].server
    top.validations = Validations(4)
    worker = cluster.joined("b")
    first = worker.lease()
    assert first is not None and first.validate == 0
    top.lease_table.committed_samples, top.lease_table.step_s = 4, {"b": 1.0}
    worker.job += 1
    task = worker.lease()
    assert task is not None and task.validate == 1
    assert worker.clients[0].global_weights(1).result(BUSY_S).weights == ()  # it keeps none
    region.newest = set(range(len(top.fragments)))
    [shard] = region.shards.all
    shard.newest = {i: x + 1 for i, x in enumerate(weights_of(top))}
    seen = [torch.zeros(f.numel) for f in cluster.parameter_map.fragments]
    for part, client in enumerate(worker.clients):
        for told in client.global_weights(2).result(BUSY_S).weights:
            cut = worker.slicing[part][told.chunk]
            scatter(make_codec(VALIDATION_CODEC).decode(from_bytes(told.payload), numel(cut)), cut, seen[told.chunk])
        for x in shard.newest.values():
            x.zero_()  # newer ones change nothing
    for x, vector in zip(weights_of(top), seen, strict=True):
        assert torch.equal(vector, (x + 1).bfloat16().float())
    worker.clients[0].validated(Validated("b", 1, 0, 3.25, 0.5))
    wait_for(lambda: top.validations.latest)
    status = ask_status(cluster.top.address, BUSY_S)
    assert status is not None and status["validation"]["loss"] == 3.25
