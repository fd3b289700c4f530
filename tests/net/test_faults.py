"""Links that break, servers that are restarted, peers that do not belong."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
import socket
import threading

import pytest

from geotrain.config import Address
from geotrain.net.server import region_client
from geotrain.net.transport import grpc_client, wire, worker_client
from geotrain.net.transport.grpc_client import GrpcClient, Unreachable
from geotrain.net.transport.rpc import ListenError
from geotrain.net.transport.worker_client import ServerForgot, WorkerClient
from geotrain.outer.messages import Join, Refused, UpdatePart
from tests.support.net_worlds import BUSY_S, halves, outer, status_of, wait_for, whole


async def make_link(address: str) -> GrpcClient:
    return GrpcClient(address, "a", "life-1")


def test_an_unreachable_server_is_named_within_the_deadline(monkeypatch, caplog):
    monkeypatch.setattr(grpc_client, "TELL_S", 0.0)
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


def test_a_worker_whose_goodbye_nobody_hears_ends(make, monkeypatch):
    """Its region may have taken it, and ended; all that the worker has sent is durable there."""
    monkeypatch.setattr(worker_client, "GOODBYE_S", 0.5)
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = cluster.joined("a")
    worker.train(worker.lease())
    cluster.regions["eu"].kill()
    worker.leave()


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
    client.push(part).result(BUSY_S)
    link, real, refused = client._link, client._link.push, threading.Event()

    async def watched(part: UpdatePart) -> int:
        try:
            return await real(part)
        except Refused:
            refused.set()
            raise

    link.push = watched
    client.push(dataclasses.replace(part, sequence=part.sequence + 1, leases=()))
    assert refused.wait(BUSY_S)
    cluster.restart("eu")
    worker.clients[1].push(other).result(BUSY_S)
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
