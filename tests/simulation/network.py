"""Carries gRPC calls in memory, in place of `grpc.aio`: latency, order within a stream, connections that break unseen
for a while, processes that are gone. Only what `geotrain.net` uses of it."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import grpc
from cryptography import x509
from grpc import aio

PROCESS: contextvars.ContextVar[str] = contextvars.ContextVar("process")  # whose code is running
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
NOTICE_S = 20.0  # a broken connection is noticed within this time, as keepalive does
CONNECT_S, REFUSED_S = 20.0, 2.0  # no connection over a cut link, or to a process that is down, after this time


def site(process: str) -> str:
    """Where it runs: shards beside their server."""
    return process.partition(".")[0]


def rpc_error(code: grpc.StatusCode, details: str, trailing: Any = ()) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailing), details)


@cache
def names_of(certificate: bytes) -> list[str]:
    """Those that a certificate, a PEM text, was made for."""
    extensions = x509.load_pem_x509_certificate(certificate).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)


# Takes the place of the name `grpc` where credentials are made of (authority, certificate).
CREDENTIALS = SimpleNamespace(
    ssl_channel_credentials=lambda authority, key, certificate: (authority, certificate),
    ssl_server_credentials=lambda pairs, authority, required: (authority, pairs[0][1]),
)


class _Aborted(Exception):
    """Raised in a handler by `context.abort`."""


class _Pipe:
    """One direction of a call: what is sent arrives later, in order. `end` closes it with an error for the reader."""

    def __init__(self, network: Network) -> None:
        self.network, self.due_s = network, 0.0
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()
        self.open = True

    def send(self, item: Any, then: Callable[[Any], None] | None = None) -> None:
        loop = self.network.loop
        # later than the one before: timers of one moment come in any order
        self.due_s = max(self.due_s + 1e-6, loop.time() + self.network.latency_s())
        arrive = self._arrive, item, then or self.arrived.put_nowait
        loop.call_at(self.due_s, *arrive, context=self.network.context)  # type: ignore[call-arg]

    def _arrive(self, item: Any, then: Callable[[Any], None]) -> None:
        if self.open:
            self.network.count()
            then(item)


class Call:
    """One call: the client's end, which has the methods of `grpc.aio`'s call objects, and the server's task."""

    def __init__(self, channel: Channel, method: str, request: Any = None, timeout: float | None = None) -> None:
        self.channel, self.method, self.timeout = channel, method, timeout
        self.network, self.client, self.address = channel.network, channel.process, channel.address
        self.up, self.down = _Pipe(self.network), _Pipe(self.network)
        self.status: aio.AioRpcError | None = None  # how the call ended, once the client knows
        self.ended = False  # whether the client knows the end
        self.task: asyncio.Task[None] | None = None
        self.server: Server | None = None
        self.trailing: Any = ()
        self.network.calls.append(self)
        if self.network.is_cut(self.client, self.network.owner(self.address)):
            self.network.loop.call_later(self.network.random.uniform(0.0, CONNECT_S), self.lose)
        else:
            self.up.send(request, self._reach)
            if self.network.flakiness and self.network.random.random() < self.network.flakiness:
                self.network.loop.call_later(self.network.random.uniform(0.0, 0.3), self.break_off, 1.0)

    # -- the client's end

    def __await__(self) -> Any:
        return self._unary().__await__()

    async def _unary(self) -> Any:
        try:
            async with asyncio.timeout(self.timeout):
                reply = await self.read()
                if reply is aio.EOF:
                    raise rpc_error(grpc.StatusCode.INTERNAL, "no reply")
                return reply
        except TimeoutError:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        finally:
            self.cancel()

    async def read(self) -> Any:
        if self.ended and self.down.arrived.empty():
            return self._end()
        item = await self.down.arrived.get()
        if item is not _END:
            return item
        return self._end()

    def _end(self) -> Any:
        self.ended = True
        self.network.forget(self)
        if self.status is not None:
            raise self.status
        return aio.EOF

    async def write(self, frame: bytes) -> None:
        if self.ended or self.status is not None:
            raise asyncio.InvalidStateError("the call has ended")
        await asyncio.sleep(len(frame) / self.network.bytes_per_s)
        self.up.send(bytes(frame))

    async def done_writing(self) -> None:
        self.up.send(aio.EOF)

    def done(self) -> bool:
        return self.ended

    async def code(self) -> grpc.StatusCode:
        return self.status.code() if self.status else grpc.StatusCode.OK

    def cancel(self) -> None:
        """Give the call up; the server learns it later."""
        if not self.ended:
            self.ended = True
            self.down.open = False
            self.up.send(None, lambda _: self._end_task())
        self.network.forget(self)

    def lose(self) -> None:
        """Let the client learn that the connection is gone."""
        if not self.ended and self.down.open:
            self.down.open = False
            self.status = rpc_error(UNAVAILABLE, "the connection was lost")
            self.down.arrived.put_nowait(_END)

    # -- the server's end

    def _reach(self, request: Any) -> None:
        server = self.network.servers.get(self.address)
        handler = server.handler(self.method) if server is not None else None
        if server is None or handler is None or not self.channel.trusts(server):
            self.network.loop.call_later(self.network.random.uniform(0.0, REFUSED_S), self.lose)
            return
        self.server = server
        self.task = self.network.loop.create_task(self._handle(handler, request), context=server.context.copy())
        server.tasks.add(self.task)
        self.task.add_done_callback(server.tasks.discard)

    async def _handle(self, handler: Any, request: Any) -> None:
        context = Context(self)
        try:
            if handler.response_streaming:
                stream = handler.stream_stream if handler.request_streaming else handler.unary_stream
                await stream(request, context)
            else:
                self.down.send(await handler.unary_unary(request, context))
        except _Aborted:
            pass
        except Exception as error:  # what gRPC tells as UNKNOWN, a person has to see
            self.network.errors.append(f"{self.method} from {self.client}: {error!r}")
            context.code, context.details = grpc.StatusCode.UNKNOWN, repr(error)
        status = rpc_error(context.code, context.details, self.trailing) if context.code else None
        self.down.send(status, self._finish)

    def _finish(self, status: aio.AioRpcError | None) -> None:
        self.status = status
        self.down.arrived.put_nowait(_END)

    def _end_task(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def break_off(self, notice_s: float = NOTICE_S) -> None:
        """Break the connection: what is under way is lost, and each end notices for itself."""
        self.up.open = False
        uniform, later = self.network.random.uniform, self.network.loop.call_later
        waiting, self.down.open = self.down.open, False
        if waiting and not self.ended:
            later(uniform(0.0, notice_s), self._notice)
        later(uniform(0.0, notice_s), self._end_task)

    def _notice(self) -> None:
        self.down.open = True
        self.lose()


_END = object()


class Context:
    """What a handler gets as its context."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.code: grpc.StatusCode | None = None
        self.details = ""

    def peer(self) -> str:
        return f"ipv4:127.0.0.1:{self._call.channel.port}"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_subject_alternative_name": [name.encode() for name in names_of(self._call.channel.own[1])]}

    async def read(self) -> Any:
        return await self._call.up.arrived.get()

    async def write(self, frame: bytes) -> None:
        await asyncio.sleep(len(frame) / self._call.network.bytes_per_s)
        self._call.down.send(bytes(frame))

    def set_trailing_metadata(self, trailing: Any) -> None:
        self._call.trailing = trailing

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        raise _Aborted


class Channel:
    """What `grpc.aio.insecure_channel` gives, and with credentials `secure_channel`."""

    def __init__(
        self, network: Network, address: str, own: Any = None, options: Sequence[tuple[str, Any]] = ()
    ) -> None:
        self.network, self.address, self.process = network, address, PROCESS.get()
        self.own, self.options = own, options
        network.ports += 1
        self.port = network.ports  # of this end, by which a server knows the connection

    def unary_unary(self, method: str) -> Callable[..., Call]:
        return lambda request=None, timeout=None: Call(self, method, request, timeout)

    unary_stream = stream_stream = unary_unary

    def trusts(self, server: Server) -> bool:
        """Whether a handshake with it succeeds, as far as this end decides: it has the name that is meant."""
        if self.own is None or server.own is None:
            return self.own is server.own
        named = dict(self.options)["grpc.ssl_target_name_override"]
        return bool(self.own[0] == server.own[0] and named in names_of(server.own[1]))

    async def close(self) -> None:
        for call in [c for c in self.network.calls if c.channel is self]:
            call.cancel()


class Server:
    """What `grpc.aio.server` gives."""

    def __init__(self, network: Network) -> None:
        self.network, self.process, self.context = network, PROCESS.get(), contextvars.copy_context()
        self.tasks: set[asyncio.Task[None]] = set()

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        [self.handlers] = handlers

    def add_insecure_port(self, address: str, own: Any = None) -> int:
        self.address, self.own = address, own
        return int(address.rpartition(":")[2])

    add_secure_port = add_insecure_port

    def handler(self, method: str) -> Any:
        return self.handlers.service(SimpleNamespace(method=method, invocation_metadata=()))

    async def start(self) -> None:
        self.network.servers[self.address] = self

    async def stop(self, grace_s: float | None) -> None:
        if self.network.servers.get(self.address) is self:
            del self.network.servers[self.address]
        if grace_s and self.tasks:
            await asyncio.wait(set(self.tasks), timeout=grace_s)
        for task in set(self.tasks):
            task.cancel()
        for call in [call for call in self.network.calls if call.server is self and call.down.open]:
            if call.task is not None and not call.task.done():  # else its reply is on its way
                call.up.open = call.down.open = False
                self.network.loop.call_later(self.network.random.uniform(0.0, 0.1), call._notice)


class Network:
    """All connections of one simulated world.

    latency_s: of one message, drawn anew for each; `slowness` multiplies it. flakiness: the share of calls that
    break, mostly when the server has heard them. errors: exceptions that handlers raised.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, drawn: random.Random, owners: dict[str, str]) -> None:
        self.loop, self.random, self.owners = loop, drawn, owners
        self.servers: dict[str, Server] = {}
        self.calls: list[Call] = []
        self.cuts: dict[frozenset[str], float] = {}  # two processes or sites → until when nothing passes
        self.errors: list[str] = []
        self.arrived, self.waiting = 0, list[tuple[int, asyncio.Future[None]]]()
        self.slowness, self.bytes_per_s, self.ports = 1.0, 1e7, 20_000
        self.flakiness = 0.0
        self.context = contextvars.Context()  # of what arrives: it is in no process yet

    def latency_s(self) -> float:
        return self.slowness * self.random.uniform(0.001, 0.1)

    def owner(self, address: str) -> str:
        return self.owners[address]

    def count(self) -> None:
        """Count a message that arrives, and wake those who wait for it."""
        self.arrived += 1
        for number, future in [(n, f) for n, f in self.waiting if n <= self.arrived]:
            self.waiting.remove((number, future))
            if not future.done():
                future.set_result(None)

    async def messages(self, count: int) -> None:
        """Wait until so many messages have arrived anywhere, from now on. More happens in a crowded second so."""
        future = self.loop.create_future()
        self.waiting.append((self.arrived + count, future))
        await asyncio.wait({future}, timeout=60.0)

    def is_cut(self, one: str, other: str) -> bool:
        pairs = frozenset((site(one), site(other))), frozenset((one, other))
        return self.loop.time() < max(self.cuts.get(pair, 0.0) for pair in pairs)

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Let nothing pass between two processes, or all of two sites, for so long, and break what is open."""
        self.cuts[frozenset((one, other))] = self.loop.time() + seconds
        for call in list(self.calls):
            ends = call.client, self.owner(call.address)
            if {one, other} in ({*ends}, {*map(site, ends)}):
                call.break_off()

    def lose_process(self, name: str) -> None:
        """Break all calls of a process that is gone; the other ends notice soon."""
        for call in list(self.calls):
            if self.owner(call.address) == name:
                call.up.open = call.down.open = False
                self.loop.call_later(self.random.uniform(0.0, 2.0), call._notice)
            elif call.client == name:
                call.up.open = call.down.open = False
                self.loop.call_later(self.random.uniform(0.0, 2.0), call._end_task)
                self.forget(call)

    def forget(self, call: Call) -> None:
        if call in self.calls:
            self.calls.remove(call)

    def transport(self) -> SimpleNamespace:
        """What takes the place of the name `aio` in modules that open channels or serve."""
        return SimpleNamespace(
            server=lambda **_: Server(self),
            insecure_channel=lambda address, options: Channel(self, address),
            secure_channel=lambda address, own, options: Channel(self, address, own, options),
            AioRpcError=aio.AioRpcError,
            EOF=aio.EOF,
        )
