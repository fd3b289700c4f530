"""An operator's word to servers on real sockets: pause, resume, drain, stop; who may say it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from geotrain.net.server.grpc_service import is_this_machine
from geotrain.net.storage.recovery import begin_snapshot, finish_snapshot
from geotrain.net.transport import rpc
from geotrain.net.transport.operator_client import ask_status, command
from geotrain.net.transport.worker_client import WorkerClient
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import VALIDATION_CODEC
from geotrain.outer.messages import Lease, LeaseRequest, Validated
from geotrain.outer.server.leases import Validations
from geotrain.parameters.parameter_map import numel, scatter
from geotrain.staging.interface import from_bytes
from tests.support.net_worlds import BUSY_S, Cluster, clusters, halves, outer, train_all, wait_for, whole
from tests.support.outer_world import weights_of

PLAN = {"eu": {"a": whole, "b": halves}, "us": {"c": whole}}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    with clusters(tmp_path) as make:
        yield make


def tell(cluster: Cluster, what: str, region: str = "") -> str:
    return command(cluster.top.address, rpc.Control(what, region), BUSY_S)


def test_workers_wait_while_the_run_is_paused_and_go_on_at_once(make: Callable[..., Cluster]) -> None:
    cluster = make(outer(), PLAN)
    worker = cluster.worker("b")
    worker.join()
    held = worker.lease()
    assert held is not None
    assert tell(cluster, "pause") == "paused"
    cluster.restart_top()  # it is in the journal
    worker.train(held)
    waiting: Future[object] = worker.clients[0].lease(LeaseRequest("b", 2))
    time.sleep(0.5)
    assert not waiting.done()
    status = ask_status(cluster.top.address, BUSY_S)
    assert status is not None and (status["phase"], status["open_leases"]) == ("paused", 1)
    began_s = time.monotonic()
    assert tell(cluster, "resume") == "running"
    assert isinstance(waiting.result(BUSY_S), Lease)
    assert time.monotonic() - began_s < rpc.MAX_WAIT_S / 2  # for which a call is held
    worker.close()


def test_a_pause_may_last_longer_than_any_deadline(make: Callable[..., Cluster], monkeypatch) -> None:
    monkeypatch.setattr(rpc, "MAX_WAIT_S", 0.2)
    cluster = make(outer(), PLAN)
    worker = cluster.worker("a")
    worker.join()
    tell(cluster, "pause")
    client: WorkerClient = worker.clients[0]
    client.deadline_s = 2.0
    waiting = client.lease(LeaseRequest("a", 1))
    time.sleep(3.0)
    assert not waiting.done()
    tell(cluster, "resume")
    assert isinstance(waiting.result(BUSY_S), Lease)
    worker.close()


def end_and_resume(cluster: Cluster) -> None:
    """As the server's process does: once it is over, a last snapshot that says so, and a start from it."""
    for region in cluster.regions.values():
        wait_for(lambda server=region.server: server.done)  # its workers are told before its own goodbye is answered
    for name in (*cluster.regions, "top"):
        running = cluster.top if name == "top" else cluster.regions[name]
        r = running.recovered
        copy = cluster.loop.do(
            running.server_thread.read(lambda s=running.server, r=r: begin_snapshot(s, r.store, r.journal, True))
        )
        finish_snapshot(r.store, r.journal, *copy)
        running.kill()
    cluster.top = cluster.top.again()
    cluster.regions = {name: running.again() for name, running in cluster.regions.items()}


def test_stopped_and_resumed_gives_the_bits_of_a_run_that_never_stopped(make: Callable[..., Cluster]) -> None:
    """Synchronous, where the order of updates does not depend on timing."""
    ends = []
    for stopped in (False, True):
        cluster = make(outer("sync"), PLAN, train_samples=60)
        trained: list[Lease] = []
        if stopped:
            stopper = threading.Timer(0.0, lambda cluster=cluster: _stop_after(cluster, 24))
            stopper.start()
            trained += [lease for w in train_all(cluster, "life-1") for lease in w.trained]
            stopper.join()
            assert 24 <= sum(lease.samples for lease in trained) < 60
            assert cluster.top.server.phase == "ended" and not cluster.top.server.status()["complete"]
            end_and_resume(cluster)
            assert cluster.top.server.phase == "running"
        trained += [lease for w in train_all(cluster, "life-2") for lease in w.trained]
        starts = sorted(lease.start for lease in trained)
        assert starts == list(range(0, 60, 4))  # each sample once
        assert cluster.top.server.status()["complete"]
        ends.append([x.clone() for x in weights_of(cluster.top.server)])
    for straight, resumed in zip(*ends, strict=True):
        assert torch.equal(straight, resumed)


def _stop_after(cluster: Cluster, samples: int) -> None:
    wait_for(lambda: cluster.top.server.lease_table.committed_samples >= samples)
    tell(cluster, "stop")


def test_without_tls_only_this_machine_steers() -> None:
    assert is_this_machine("127.0.0.1:5") and is_this_machine("::1:5")
    assert is_this_machine("198.18.0.1:5")  # emulated links
    assert not is_this_machine("203.0.113.7:5") and not is_this_machine("2001:db8::7:5")


def test_a_validation_goes_out_with_a_lease_and_its_loss_comes_up(make: Callable[..., Cluster]) -> None:
    cluster = make(outer(), PLAN, train_samples=64)
    top, region = cluster.top.server, cluster.regions["eu"].server
    top.validations = Validations(4)
    worker = cluster.worker("b")
    worker.join()
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
    worker.close()
