"""Members that strike, die for good, or train on other data: over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator

import pytest

from geotrain.config import LimitsConfig
from geotrain.monitor.events import EventLog
from geotrain.net.transport import rpc
from geotrain.net.transport.grpc_client import GrpcClient
from geotrain.net.transport.operator_client import command
from geotrain.outer.messages import Refused
from tests.support.net_worlds import Cluster, FakeWorker, clusters, outer, status_of, wait_for, whole

SILENT_S = 1.6


@pytest.fixture
def make(tmp_path, monkeypatch) -> Iterator[Callable[..., Cluster]]:
    monkeypatch.setattr(rpc, "BEAT_S", SILENT_S / 10)
    monkeypatch.setattr(rpc, "REGION_BEAT_S", SILENT_S / 10)
    with clusters(tmp_path) as maker:
        yield maker


def joined(cluster: Cluster, name: str, incarnation: str = "life-1") -> FakeWorker:
    worker = cluster.worker(name, incarnation)
    worker.join()
    return worker


def strike(worker: FakeWorker, times: int) -> None:
    """Updates that hold no numbers."""
    lease = worker.lease()
    assert lease is not None
    part = worker.parts(lease, (0,))[0]
    nan = dataclasses.replace(part.deltas[0], payload=b"\xff" * len(part.deltas[0].payload))
    for _ in range(times):
        with pytest.raises(Refused, match="not finite"):
            worker.clients[0].push(dataclasses.replace(part, deltas=(nan,))).result(10)


async def control(address: str, what: str, member: str) -> None:
    await asyncio.to_thread(command, address, rpc.Control(what, member), 10)


@pytest.mark.parametrize("how", ["by time", "by the operator"])
def test_who_offends_is_quarantined_until_unbanned(make, tmp_path, how):
    """Counted and shown with its sender; its lease goes to another; after its time, or at the operator's word, a new
    incarnation of it may join, the old one may not."""
    quarantine_s = 1.0 if how == "by time" else 1e6
    limits = LimitsConfig(strikes=3, quarantine_s=quarantine_s)
    cluster = make(outer(limits=limits), {"eu": {"a": whole, "b": whole}}, train_samples=12, silent_s=SILENT_S)
    wild, good = joined(cluster, "a"), joined(cluster, "b")
    region = cluster.regions["eu"]
    with EventLog(tmp_path / "events.jsonl") as events:
        region.server_thread.write_event = events.write
        strike(wild, 2)
        status = status_of(good.clients[0].address)
        assert status["refused"] == {"a": 2} and not status["members"]["a"]["quarantined"]
        strike(wild, 1)
        region.server_thread.write_event = lambda event: None
    said = (tmp_path / "events.jsonl").read_text()
    assert said.count('"event": "UpdateRefused", "member": "a"') == 3
    assert said.count('"event": "Quarantined", "member": "a"') == 1
    wait_for(lambda: cluster.top.server.lease_table.pool)
    assert status_of(good.clients[0].address)["members"]["a"]["fault"].endswith("not finite; refused")
    if how == "by the operator":
        with pytest.raises(Refused, match="a is quarantined after 3 refused updates"):
            joined(cluster, "a", "life-2")
        cluster.loop.do(control(region.address, "unban", "a"))
    wait_for(lambda: not region.server.members["a"].quarantined)
    with pytest.raises(Refused, match="this incarnation of it was quarantined; start it anew"):
        joined(cluster, "a")
    new = joined(cluster, "a", "life-3")
    starts = []
    for worker in (good, new, good):
        lease = worker.lease()
        assert lease is not None
        worker.train(lease)
        starts.append(lease.start)
    assert sorted(starts) == [0, 4, 8]
    for worker in (wild, good, new):
        worker.close()


def test_a_unban_for_nobody_is_refused(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    with pytest.raises(Refused, match="no member is called 'x' here; known: a"):
        cluster.loop.do(control(cluster.regions["eu"].address, "unban", "x"))


def test_a_wrong_header_is_held_against_its_sender(make):
    """Refused before its payload was taken, and counted all the same; what may be tried again is not."""
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = joined(cluster, "a")
    part = worker.parts(worker.lease(), (0,))[0]
    future = dataclasses.replace(part.deltas[0], anchor_version=99)

    async def push(wrong) -> None:
        link = GrpcClient(worker.clients[0].address, "a", "life-1")
        try:
            await link.push(wrong)
        finally:
            await link.close()

    with pytest.raises(Refused, match="starts from version 99, which this server never gave"):
        cluster.loop.do(push(dataclasses.replace(part, deltas=(future,))))
    with pytest.raises(Refused, match=r"update \w+/5 came, but 1 is next"):
        cluster.loop.do(push(dataclasses.replace(part, sequence=5)))
    assert status_of(worker.clients[0].address)["refused"] == {"a": 1}
    worker.close()


def test_a_worker_that_is_dead_for_good_does_not_keep_the_run_from_ending(make):
    """It dies with a lease, and with updates of it pending; another never came. Its data is trained by the other,
    what is pending goes up without a full K, and region and run end."""
    cluster = make(
        outer(updates_per_send=50), {"eu": {"a": whole, "b": whole, "c": whole}}, train_samples=12, silent_s=SILENT_S
    )
    dead, living = joined(cluster, "a"), joined(cluster, "b")
    dead.train(dead.lease())
    lost = dead.lease()
    dead.clients[0].close()
    region, top = cluster.regions["eu"], cluster.top.server
    wait_for(lambda: (lost.start, lost.samples) in top.lease_table.pool, 10 * SILENT_S)
    assert top.lease_table.committed_samples == 0
    while (lease := living.lease()) is not None:
        living.train(lease)
    assert not region.server.gone
    living.leave()
    wait_for(lambda: top.finished, 10 * SILENT_S)
    wait_for(lambda: region.server.done)
    assert top.lease_table.committed_samples == 12
    assert not any(region.server.rule.pending(state) for state in region.server.fragments)
    for worker in (dead, living):
        worker.close()


def test_a_worker_that_died_while_its_server_was_away_is_noticed(make):
    cluster = make(outer(), {"eu": {"a": whole}}, train_samples=12, silent_s=SILENT_S)
    worker = joined(cluster, "a")
    lost = worker.lease()
    cluster.regions["eu"].kill()
    worker.clients[0].close()
    cluster.regions["eu"] = cluster.regions["eu"].again()
    wait_for(lambda: (lost.start, lost.samples) in cluster.top.server.lease_table.pool, 10 * SILENT_S)


def test_a_region_with_other_data_is_refused(make):
    """It learns from its worker what it trains on; the global server compares; its server ends with the reason."""
    cluster = make(outer(), {"eu": {"a": whole}, "us": {"b": whole}})
    for name, data in (("a", "aa" * 32), ("b", "bb" * 32)):
        worker = cluster.worker(name)
        real = worker.clients[0].join
        worker.clients[0].join = lambda join, real=real, data=data: real(dataclasses.replace(join, data=data))
        worker.join()
        if name == "a":
            wait_for(lambda: cluster.top.server.data == "aa" * 32)
            assert worker.lease() is not None
        else:
            task = cluster.regions["us"].region_client_task
            wait_for(task.done)
            with pytest.raises(Refused, match=r"data differs: us trains on data of sha256 b+…, this run on a+…"):
                task.result()
        worker.close()
    assert not cluster.regions["eu"].region_client_task.done()
