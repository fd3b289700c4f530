"""Links that break, servers that are restarted, peers that do not belong."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
import socket
import threading
from functools import partial

import pytest
import torch

from geotrain.config import Address
from geotrain.net.server import region_client
from geotrain.net.storage.recovery import begin_snapshot, finish_snapshot, recover
from geotrain.net.storage.snapshots import META
from geotrain.net.transport import grpc_client, wire
from geotrain.net.transport.grpc_client import GrpcClient, Unreachable
from geotrain.net.transport.rpc import ListenError
from geotrain.net.transport.worker_client import ServerForgot, WorkerClient
from geotrain.outer.messages import Join, Leave, Refused, UpdatePart
from tests.support.net_worlds import BUSY_S, halves, outer, side_by_side, status_of, wait_for, whole
from tests.support.outer_world import weights_of


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
def test_restarts_of_both_servers_lose_nothing_and_do_nothing_twice(make, rule):
    """Recovered from their folders, when a worker has trained so many jobs: workers rejoin in the same incarnation.
    A synchronous run, where the order of updates does not depend on time, ends with the bits of one without restarts.
    """
    ends = []
    for restarts in (3, 0) if rule == "sync" else (3,):
        cluster = make(outer(rule), {"eu": {"a": halves}, "us": {"b": whole}}, train_samples=80)
        workers = [cluster.worker("a"), cluster.worker("b")]
        with side_by_side(workers):
            for turn in range(restarts):
                wait_for(lambda turn=turn, workers=workers: any(len(w.trained) > 2 * turn for w in workers))
                cluster.restart_top() if turn % 2 else cluster.restart("eu")
        assert sorted(lease.start for w in workers for lease in w.trained) == list(range(0, 80, 4))
        wait_for(lambda cluster=cluster: cluster.top.server.finished)
        assert cluster.top.server.lease_table.committed_samples == 80
        for worker, region in zip(workers, ("eu", "us"), strict=True):
            updates = cluster.regions[region].server.members[worker.name].updates
            assert updates == len(worker.trained) * len(cluster.parameter_map.fragments)
        ends.append(weights_of(cluster.top.server))
    assert all(torch.equal(one, other) for one, other in zip(ends[0], ends[-1], strict=True))


async def make_link(address: str) -> GrpcClient:
    return GrpcClient(address, "a", "life-1")


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


def test_a_region_whose_goodbye_nobody_hears_ends(make, monkeypatch):
    """The global server may have taken it, and ended before its answer came through."""
    monkeypatch.setattr(region_client, "GOODBYE_S", 0.5)
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = cluster.joined("a")
    cluster.top.kill()
    worker.leave()
    wait_for(lambda: cluster.regions["eu"].server.done)


def test_a_taken_port_is_named(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    port = cluster.top.port
    with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{port}: Address already in use; stop what uses the port"):
        cluster.loop.do(cluster.top.service.start(Address(port=port)))


def test_a_server_restored_from_an_older_state_is_noticed(make):
    """What it had acknowledged is gone: the worker must not go on as if nothing had happened."""
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = cluster.joined("a")
    worker.train(worker.lease())
    copy = cluster.folder / "copy"
    shutil.copytree(cluster.regions["eu"].folder, copy)
    worker.train(worker.lease())
    region = cluster.regions["eu"]
    region.kill()
    cluster.regions["eu"] = cluster.new_region("eu", copy, region.port)
    with pytest.raises(ServerForgot, match="start this worker again"):
        worker.exchange(worker.parts(worker.trained[-1], (0,)), (0,))


def test_a_stream_that_stops_halfway_is_forgotten_and_sent_again(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = cluster.joined("a")
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


def test_refusals_are_counted_with_their_sender(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = cluster.joined("a")
    part = worker.parts(worker.lease(), (0,))[0]
    nan = dataclasses.replace(part.deltas[0], payload=b"\xff" * len(part.deltas[0].payload))
    pushed = worker.clients[0].push(dataclasses.replace(part, deltas=(nan,)))
    with pytest.raises(Refused, match="not finite"):
        pushed.result(BUSY_S)
    assert status_of(worker.clients[0].address)["refused"] == {"a": 1}


def test_a_status_is_answered_while_tensors_are_worked_on(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = cluster.joined("a")
    server_thread = cluster.regions["eu"].server_thread
    answered = threading.Event()
    slow = asyncio.run_coroutine_threadsafe(server_thread.read(lambda: answered.wait(BUSY_S)), cluster.loop.loop)
    assert status_of(worker.clients[0].address)["region"] == "eu"
    assert not slow.done()
    answered.set()
    assert slow.result(BUSY_S) is True


def test_what_a_former_life_of_the_server_acknowledged_is_sent_again(make):
    """The acknowledgement of a part is late: it arrives when the server, which died with the part before the other
    came, was joined again already. Without the part the update would never be whole, nor any after it be taken."""
    cluster = make(outer(), {"eu": {"a": halves}})
    worker = cluster.joined("a")
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


def test_the_next_update_does_not_keep_the_one_before_from_being_sent_again(make):
    """A rank's part was acknowledged, and its next update is on the way, refused until the other rank's part has
    come. Then the server dies: the part is wanted once more, before the update that is on the way."""
    cluster = make(outer(), {"eu": {"a": halves}})
    worker = cluster.joined("a")
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
