"""Links that break, servers that are restarted, peers that do not belong."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from geotrain.config import Address
from geotrain.net.storage.recovery import begin_snapshot, finish_snapshot, recover
from geotrain.net.storage.snapshots import META
from geotrain.net.transport import grpc_client, wire
from geotrain.net.transport.grpc_client import GrpcClient, Unreachable
from geotrain.net.transport.rpc import ListenError
from geotrain.net.transport.worker_client import ServerForgot, WorkerClient
from geotrain.outer.messages import Join, Leave, Refused, UpdatePart
from tests.support.net_worlds import BUSY_S, Cluster, FakeWorker, clusters, halves, outer, status_of, wait_for, whole
from tests.support.outer_world import weights_of


@pytest.fixture
def make(tmp_path) -> Iterator[Callable[..., Cluster]]:
    with clusters(tmp_path) as maker:
        yield maker


def in_background(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_what_came_after_a_snapshot_is_replayed_and_also_from_the_one_before(make):
    cluster = make(outer(), {"eu": {"a": halves}})
    worker = cluster.worker("a")
    worker.join()
    for _ in range(2):
        worker.train(worker.lease())
        cluster.regions["eu"].snapshot()
    worker.train(worker.lease())
    worker.close()
    versions = cluster.regions["eu"].server.versions
    cluster.restart("eu")
    region = cluster.regions["eu"]
    assert region.server.versions == versions and region.server.members["a"].sequence == worker.sequence - 1
    store = region.recovered.store
    region.kill()
    (store.path(store.numbers()[-1]) / META).unlink()
    cluster.regions["eu"] = region.again()
    assert cluster.regions["eu"].recovered.faults and cluster.regions["eu"].server.versions == versions


def test_a_run_that_has_ended_goes_on_in_another_launch_only(make):
    top = make(outer(), {"eu": {"a": whole}}).top
    wait_for(lambda: top.server.members["eu"].complete)
    top.loop.do(top.server_thread.say(Leave("eu")))
    r = top.recovered
    begin = partial(begin_snapshot, top.server, r.store, r.journal, ended=True, launch="one")
    finish_snapshot(r.store, r.journal, *top.loop.do(top.server_thread.alone(begin)))
    for launch, ended in (("one", True), ("two", False)):
        copy = top.folder.with_name(launch)
        shutil.copytree(top.folder, copy)
        again = recover(top.build, top.begin, copy, keep=2, launch=launch)
        again.journal.close()
        assert (again.ended, again.server.members["eu"].left) == (ended, ended)


@pytest.mark.parametrize("rule", ["sync", "halos"])
def test_a_run_survives_restarts_of_both_servers(make, rule):
    """Recovered from their folders, at any time: workers rejoin in the same incarnation, nothing is lost or done
    twice."""
    cluster = make(outer(rule), {"eu": {"a": halves}, "us": {"b": whole}}, train_samples=120)
    workers = [cluster.worker("a"), cluster.worker("b")]
    threads = [in_background(w.run) for w in workers]
    for turn in range(3):
        time.sleep(0.15)
        if turn % 2:
            cluster.restart_top()
        else:
            cluster.restart("eu")
    for thread in threads:
        thread.join(BUSY_S)
        assert not thread.is_alive()
    starts = sorted(lease.start for w in workers for lease in w.trained)
    assert starts == list(range(0, 120, 4))
    wait_for(lambda: cluster.top.server.finished)
    assert cluster.top.server.lease_table.committed_samples == 120
    updates = {name: region.server.members for name, region in cluster.regions.items()}
    for worker, region in zip(workers, ("eu", "us"), strict=True):
        assert updates[region][worker.name].updates == len(worker.trained) * len(cluster.parameter_map.fragments)
        worker.close()


def test_sync_restarts_leave_the_same_bits(make):
    """The same run with and without restarts ends in the same state."""
    ends = []
    for restarts in (0, 3):
        cluster = make(outer("sync"), {"eu": {"a": halves}, "us": {"b": whole}}, train_samples=80)
        workers = [cluster.worker("a"), cluster.worker("b")]
        threads = [in_background(w.run) for w in workers]
        for turn in range(restarts):
            time.sleep(0.1)
            if turn % 2:
                cluster.restart_top()
            else:
                cluster.restart("us")
        for thread in threads:
            thread.join(BUSY_S)
            assert not thread.is_alive()
        for worker in workers:
            worker.close()
        ends.append(weights_of(cluster.top.server))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


async def make_link(address: str) -> GrpcClient:
    return GrpcClient(address, "a", "life-1")


def joined(cluster: Cluster, name: str = "a") -> FakeWorker:
    worker = cluster.worker(name)
    worker.join()
    return worker


def test_a_part_sent_twice_is_applied_once(make):
    cluster = make(outer(), {"eu": {"a": halves}})
    worker = joined(cluster)
    lease = worker.lease()
    parts = worker.parts(lease, (0,))
    link = cluster.loop.do(make_link(worker.clients[0].address))
    try:
        region, do = cluster.regions["eu"].server, cluster.loop.do
        for _ in range(3):
            assert do(link.push(parts[0])) == 0
        before = region.weights(0).clone()
        assert do(link.push(parts[1])) == 1
        after = region.weights(0).clone()
        assert not torch.equal(before, after)
        for part in parts * 2:
            assert do(link.push(part)) == 1
        assert torch.equal(region.weights(0), after) and region.members["a"].updates == 1
    finally:
        cluster.loop.do(link.close())
        worker.close()


def test_a_worker_of_another_run_is_told_both_digests(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = cluster.worker("a")
    worker.identity = dataclasses.replace(worker.identity, config_digest="beef", model="something else")
    with pytest.raises(Refused, match=r"a has beef \(something else\), this server has 0123 \(a tiny llama\)"):
        worker.join()
    worker.close()


def test_an_unreachable_server_is_named_within_the_deadline(monkeypatch, caplog):
    monkeypatch.setattr(grpc_client, "TELL_S", 0.1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = WorkerClient(f"127.0.0.1:{port}", connect_s=2.0)
    with pytest.raises(Unreachable, match=rf"127\.0\.0\.1:{port} gave no answer within 2 s .*refused.*firewall"):
        client.join(Join("r", "c", "l", "m", "a", "1", 0, 1, (), ()))
    assert re.search(rf"at 127.0.0.1:{port} has not answered a call: .*refused.*; it is repeated", caplog.text)
    client.close()


def test_a_server_that_hangs_is_noticed():
    """It accepts connections and says nothing."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        client = WorkerClient(f"127.0.0.1:{deaf.getsockname()[1]}", connect_s=0.7)
        with pytest.raises(Unreachable):
            client.join(Join("r", "c", "l", "m", "a", "1", 0, 1, (), ()))
        client.close()


def test_a_taken_port_is_named(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    port = cluster.top.port
    with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{port}: Address already in use; stop what uses the port"):
        cluster.loop.do(cluster.top.service.start(Address(port=port)))


def test_an_older_life_cannot_come_back(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    old = joined(cluster)
    new = cluster.worker("a", "life-2")
    new.join()
    lease = new.lease()
    with pytest.raises(Refused, match="another process has joined under this name"):
        old.exchange(old.parts(lease, (0,)), (0,))
    new.train(lease)
    old.close()
    new.close()


def test_a_server_restored_from_an_older_state_is_noticed(make):
    """What it had acknowledged is gone: the worker must not go on as if nothing had happened."""
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = joined(cluster)
    worker.train(worker.lease())
    copy = cluster.folder / "copy"
    shutil.copytree(cluster.regions["eu"].folder, copy)
    worker.train(worker.lease())
    region = cluster.regions["eu"]
    region.kill()
    cluster.regions["eu"] = cluster.new_region("eu", copy, region.port)
    with pytest.raises(ServerForgot, match="start this worker again"):
        worker.exchange(worker.parts(worker.trained[-1], (0,)), (0,))
    worker.close()


def test_a_region_whose_folder_is_lost_starts_again_from_the_global_weights(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = joined(cluster)
    for _ in range(3):
        worker.train(worker.lease())
    region = cluster.regions["eu"]
    wait_for(lambda: not region.server.in_flight)
    region.kill()
    before = cluster.top.server.members["eu"].sequence
    assert before > 0
    cluster.regions["eu"] = cluster.new_region("eu", cluster.folder / "empty", region.port)
    second = cluster.worker("a", "life-2")
    second.join()
    for _ in range(2):
        second.train(second.lease())
    wait_for(lambda: cluster.top.server.members["eu"].sequence > before)
    worker.close()
    second.close()


def test_a_stream_that_stops_halfway_is_forgotten_and_sent_again(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = joined(cluster)
    part = worker.parts(worker.lease(), (0,))[0]
    service = cluster.regions["eu"].service

    async def half() -> None:
        link = await make_link(worker.clients[0].address)
        call = link._channel.stream_stream("/geotrain.Outer/push")()
        await call.write(next(iter(wire.frames(part))))
        while ("a", 0) not in service._receiving:  # `do` has a deadline
            await asyncio.sleep(0.01)
        call.cancel()
        await link.close()

    cluster.loop.do(half())
    worker.exchange([part], (0,))
    assert cluster.regions["eu"].server.members["a"].updates == 1
    worker.close()


def test_refusals_are_counted_with_their_sender(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = joined(cluster)
    part = worker.parts(worker.lease(), (0,))[0]
    nan = dataclasses.replace(part.deltas[0], payload=b"\xff" * len(part.deltas[0].payload))
    pushed = worker.clients[0].push(dataclasses.replace(part, deltas=(nan,)))
    with pytest.raises(Refused, match="not finite"):
        pushed.result(BUSY_S)
    assert status_of(worker.clients[0].address)["refused"] == {"a": 1}
    worker.close()


def test_a_status_is_answered_while_tensors_are_worked_on(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = joined(cluster)
    server_thread = cluster.regions["eu"].server_thread
    answered = threading.Event()
    slow = asyncio.run_coroutine_threadsafe(server_thread.read(lambda: answered.wait(BUSY_S)), cluster.loop.loop)
    assert status_of(worker.clients[0].address)["region"] == "eu"
    assert not slow.done()
    answered.set()
    assert slow.result(BUSY_S) is True
    worker.close()


def test_what_a_former_life_of_the_server_acknowledged_is_sent_again(make):
    """The acknowledgement of a part is late: it arrives when the server, which died with the part before the other
    came, was joined again already. Without the part the update would never be whole, nor any after it be taken."""
    cluster = make(outer(), {"eu": {"a": halves}})
    worker = cluster.worker("a")
    worker.join()
    lease = worker.lease()
    part, other = worker.parts(lease, (0,))
    client = worker.clients[0]
    link, real, sent = client._link, client._link.push, threading.Event()

    async def late(part: UpdatePart) -> int:
        joins, applied = client._joins, await real(part)
        sent.set()
        while client._joins == joins:
            await asyncio.sleep(0.01)
        link.push = real
        return applied

    link.push = late
    pushed = [client.push(part)]
    assert sent.wait(BUSY_S)
    cluster.restart("eu")
    worker.lease()  # the server does not know it: both ranks join again
    pushed.append(worker.clients[1].push(other))
    for push in pushed:
        push.result(BUSY_S)
    wait_for(lambda: cluster.regions["eu"].server.members["a"].sequence == other.sequence)
    worker.close()


def test_the_next_update_does_not_keep_the_one_before_from_being_sent_again(make):
    """A rank's part was acknowledged, and its next update is on the way, refused until the other rank's part has
    come. Then the server dies: the part is wanted once more, before the update that is on the way."""
    cluster = make(outer(), {"eu": {"a": halves}})
    worker = cluster.worker("a")
    worker.join()
    part, other = worker.parts(worker.lease(), (0,))
    client = worker.clients[0]
    client.push(part).result(30)
    link, real, refused = client._link, client._link.push, threading.Event()

    async def watched(part: UpdatePart) -> int:
        try:
            return await real(part)
        except Refused:
            refused.set()
            raise

    link.push = watched
    client.push(dataclasses.replace(part, sequence=part.sequence + 1, leases=()))
    assert refused.wait(30)
    cluster.restart("eu")
    worker.clients[1].push(other).result(30)
    wait_for(lambda: cluster.regions["eu"].server.members["a"].sequence == other.sequence)
    worker.close()
