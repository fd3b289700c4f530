"""Links that break, servers that are restarted, peers that do not belong."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import weakref

import pytest

from geotrain.net.server import region_client
from geotrain.net.transport import grpc_client, worker_client
from geotrain.net.transport.grpc_client import Unreachable
from geotrain.net.transport.worker_client import WorkerClient
from geotrain.outer.messages import Join, Refused, UpdatePart
from tests.support.net_worlds import BUSY_S, halves, outer, status_of, wait_for, whole


def test_an_unreachable_server_is_named_within_the_deadline(monkeypatch, caplog):
    monkeypatch.setattr(grpc_client, "REPORT_S", 0.0)
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


def test_ranks_do_not_join_over_and_over_while_a_peer_is_missing(make):
    """The region's server restarts; one of two ranks comes back, with calls of every kind under way."""
    cluster = make(outer(updates_per_send=1), {"eu": {"a": halves}}, train_samples=24)
    worker = cluster.joined("a")
    lease = worker.lease()
    worker.clients[1].close()  # the second rank stands still: it neither beats nor calls
    cluster.restart("eu")
    joins, refused, running = [], [], cluster.regions["eu"]
    take, current = running.server.take, running.server.membership.current

    def joining(message):
        joins.extend([message] if isinstance(message, Join) else [])
        return take(message)

    def asking(*rank):
        try:
            return current(*rank)
        except Refused as error:
            refused.append(error)
            raise

    running.server.take, running.server.membership.current = joining, asking
    first = worker.clients[0]
    calls = [first.push(worker.parts(lease, 0)[0]), first.pull(0, worker.sequences[0])]
    wait_for(lambda: len(refused) >= 6)
    assert 1 <= len(joins) <= 3, len(joins)
    for call in calls:
        call.cancel()


def test_an_update_made_while_a_session_begins_is_sent(make):
    """It is made after the region was asked what to send again, and delivered before the answer to that is there."""
    cluster = make(outer(updates_per_send=1), {"eu": {"a": whole}}, train_samples=24)
    running, worker = cluster.regions["eu"], cluster.worker("a")
    worker.join()
    lease = worker.lease()
    read, asked = running.server_thread.read, []

    async def slow_read(what):
        found = await read(what)
        if what == running.server.resend and not asked:
            asked.append(len(found))
            await asyncio.to_thread(worker.train, lease)
            while not any(running.server.uplink.sequences):
                await asyncio.sleep(0.01)
        return found

    running.server_thread.read = slow_read
    cluster.restart_top()
    wait_for(lambda: asked and cluster.top.server.members["eu"].updates >= 1)
    assert asked == [0]
    while (lease := worker.lease()) is not None:
        worker.train(lease)
    worker.leave()
    wait_for(lambda: cluster.top.server.finished)
    assert cluster.top.server.lease_table.committed_samples == 24


def test_payloads_that_were_delivered_do_not_stay_in_memory(make):
    cluster = make(outer(updates_per_send=1), {"eu": {"a": whole}})
    running, worker, sent = cluster.regions["eu"], cluster.joined("a"), []
    deliver = running.region_client.deliver

    def watched(send):
        if isinstance(send.message, UpdatePart):
            sent.append(weakref.ref(send.message))
        deliver(send)

    running.region_client.deliver = watched
    worker.train(worker.lease())
    wait_for(lambda: len(sent) == len(cluster.parameter_map.fragments) and not running.server.uplink.in_flight)
    wait_for(lambda: not any(update() for update in sent), 20.0)
