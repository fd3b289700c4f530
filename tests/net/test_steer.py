"""An operator's word to servers on real sockets: pause, resume, drain, stop; who may say it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from geotrain.net.server.peers import is_this_machine
from geotrain.net.transport import rpc
from geotrain.net.transport.operator_client import ask_status, command
from geotrain.outer.messages import Lease, LeaseRequest
from tests.support.net_worlds import BUSY_S, Cluster, halves, outer, wait_for, whole

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
    worker.clients[0].deadline_s = 10.0  # many calls' time on a machine with other work
    waiting: Future[object] = worker.clients[0].lease(LeaseRequest("b", 2))
    until_s = time.monotonic() + 10.5
    wait_for(lambda: time.monotonic() > until_s)
    asked_again(cluster, 1)  # each of them holds a call for as long as it may
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
