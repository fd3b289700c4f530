"""Takes the places of the machine's clock, threads, network and disk while a simulated world is played."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import random
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest import mock

from geotrain.net.server import (
    failure_detector,
    grpc_service,
    listener,
    process_host,
    server_host,
    server_thread,
    shard_link,
)
from geotrain.net.server.rate_limits import RateLimits
from geotrain.net.server.resumable_uploads import ResumableUploads
from geotrain.net.storage import frozen_state, remote_snapshots
from geotrain.net.transport import certs, grpc_client, rpc, wire, worker_client
from geotrain.net.transport.tcp_counters import Traffic
from geotrain.outer.server import lease_requests
from tests.simulation.disk import Disk
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import CREDENTIALS, Network

FRAME_BYTES = 512  # so that transfers have several frames, and can break between them
REGION_SILENT_S, WORKER_SILENT_S = 60.0, 25.0  # shorter than in the product: while all wait, nothing can break
PATIENCE_S = 90.0  # with who hangs
BEAT_S = 8.0


class Machine:
    """The clock, threads, network and disk of all processes of one world."""

    now: Machine  # that of the world that is being played

    def __init__(self, drawn: random.Random, owners: dict[str, str]) -> None:
        """owners: address → the process that listens there."""
        Machine.now = self
        self.random, self.loop = drawn, VirtualLoop()
        self.network, self.disk = Network(self.loop, drawn, owners), Disk(drawn)
        self.pools: list[_Writes] = []
        self.wall_s = 1e9  # what the wall clock is ahead of the loop's

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let virtual time, this network and this disk take the places of the machine's."""
        transport, loop = self.network.transport(), self.loop
        threads = SimpleNamespace(Thread=_NoThread, Event=None)
        put: list[tuple[Any, str, Any]] = [
            (server_thread, "threading", SimpleNamespace(Thread=_InboxThread, Lock=Lock)),
            (server_thread, "queue", SimpleNamespace(SimpleQueue=_Inbox)),
            (server_thread, "ThreadPoolExecutor", _AtOnce),
            (process_host, "ThreadPoolExecutor", lambda *_, **__: _Writes(self)),
            (process_host, "wait", _wait),
            (process_host, "ConnectionGuard", _NoThread),
            (process_host, "raise_file_limit", lambda: None),
            (remote_snapshots, "threading", SimpleNamespace(Thread=_DoneThread, Lock=Lock)),
            (frozen_state, "threading", SimpleNamespace(Condition=_Condition)),
            (server_host, "TcpCounters", _Counters),
            (server_host, "TRAFFIC_EVENT_S", 60.0),
            (server_host, "REGION_SILENT_S", REGION_SILENT_S),
            (server_host, "WORKER_SILENT_S", WORKER_SILENT_S),
            (listener, "aio", transport),
            (certs, "grpc", CREDENTIALS),
            (rpc, "check_free", lambda address: None),
            (grpc_service, "RateLimits", functools.partial(RateLimits, clock=loop.time)),
            (grpc_service, "ResumableUploads", functools.partial(ResumableUploads, clock=loop.time)),
            (grpc_client, "aio", transport),
            (shard_link, "aio", transport),
            (worker_client, "threading", threads),
            (wire, "DATA_FRAME_BYTES", FRAME_BYTES),
            (failure_detector, "LEAST_PATIENCE_S", PATIENCE_S),
            (failure_detector.FailureDetector, "clock", staticmethod(loop.time)),
            (lease_requests, "LEAST_PATIENCE_S", PATIENCE_S),
            (grpc_client, "LAST_PAUSE_S", 3.0),
            (rpc, "BEAT_S", BEAT_S),
            (rpc, "REGION_BEAT_S", BEAT_S),
        ]
        with ExitStack() as stack:
            for module, attribute, value in put:
                stack.enter_context(mock.patch.object(module, attribute, value))
            for target, clock in (("time.monotonic", loop.time), ("time.perf_counter", loop.time)):
                stack.enter_context(mock.patch(target, clock))
            stack.enter_context(mock.patch("time.sleep", _sleep))
            stack.enter_context(mock.patch("time.time", lambda: self.wall_s + loop.time()))
            stack.enter_context(mock.patch("os.fsync", self.disk.fsync))
            stack.enter_context(mock.patch("os.fdatasync", self.disk.fsync))
            stack.enter_context(mock.patch("os.pwrite", self.disk.pwrite))
            stack.enter_context(mock.patch("asyncio.new_event_loop", lambda: loop))
            stack.enter_context(mock.patch("uuid.uuid4", lambda: uuid.UUID(int=self.random.getrandbits(128))))
            stack.enter_context(mock.patch("random.uniform", self.random.uniform))
            asyncio.set_event_loop(loop)
            disabled = logging.root.manager.disable
            logging.disable(logging.CRITICAL)
            gc.freeze()  # else the collector looks at all of torch again and again
            try:
                yield
            finally:
                gc.unfreeze()
                logging.disable(disabled)  # not by assignment: loggers remember what was disabled
                asyncio.set_event_loop(None)


class _Idle(BaseException):
    """Raised where a thread would wait for work: its run goes on when there is some."""


class _Inbox:
    """A queue whose reader, the target of a thread, runs in the event loop whenever something was put in."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self.reader: Callable[[], None] = lambda: None

    def put(self, item: Any) -> None:
        self._items.append(item)
        # Not at once: what comes meanwhile shares a flush of the journal.
        Machine.now.loop.call_later(Machine.now.random.uniform(0.0, 0.02), self.run)

    def get(self) -> Any:
        if not self._items:
            raise _Idle
        return self._items.pop(0)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    def run(self) -> None:
        try:
            if self._items:
                self.reader()
        except _Idle:
            pass


class _InboxThread:
    """The thread of a `ServerThread`: it runs where its inbox runs it."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._inbox = target.__self__._queue  # type: ignore[attr-defined]
        self._inbox.reader = target

    def start(self) -> None:
        pass

    def join(self) -> None:
        self._inbox.run()


class _NoThread:
    """A thread whose work the event loop of the simulation does, or nobody."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    start = stop = join = __init__

    def traffic(self) -> dict[str, Traffic]:
        return {}


class _DoneThread:
    """A thread whose work is done when it has started."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self.start = target


class _AtOnce(_NoThread):
    """A pool of one thread whose work is done when it was submitted."""

    shutdown = _NoThread.stop

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function())
        return future


class _Counters(_NoThread):
    """`TcpCounters` where there are no sockets."""

    total, open = Traffic(), None

    def take_recent(self) -> Traffic:
        return Traffic()


class _Later(BaseException):
    """Raised where a thread would sleep: what it was about is begun again after that time."""


def _sleep(seconds: float) -> None:
    raise _Later(seconds)


class _Writes:
    """A pool of one thread that writes snapshots: a while later, or when somebody waits for it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._waiting: dict[Future[Any], Callable[[], Any]] = {}
        machine.pools.append(self)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting[future] = functools.partial(function, *args)
        self._machine.loop.call_later(self._machine.random.uniform(0.0, 3.0), self.write, future)
        return future

    def write(self, future: Future[Any]) -> None:
        if (work := self._waiting.pop(future, None)) is not None:
            try:
                future.set_result(work())
            except _Later as later:
                self._waiting[future] = work
                self._machine.loop.call_later(later.args[0], self.write, future)
            except OSError as error:
                future.set_exception(error)

    def shutdown(self) -> None:
        for future in list(self._waiting):
            self.write(future)


def _wait(futures: list[Future[Any]], timeout: float) -> Any:
    """`concurrent.futures.wait` for what `_Writes` were given."""
    for future in futures:
        for pool in Machine.now.pools:
            pool.write(future)
    return SimpleNamespace(not_done={future for future in futures if not future.done()})


class _Condition:
    """The condition on which a `FrozenState` waits for its writer, which then writes to its end."""

    __enter__ = __exit__ = notify_all = lambda *_: None

    def wait(self, timeout: float | None = None) -> bool:
        for pool in Machine.now.pools:
            pool.shutdown()
        return True
