"""Opens a gRPC server at an address: its limits, and who is let in before anything but a call's metadata is read."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
from grpc import aio

from geotrain.config import Address, host_port
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.certs import Credentials, add_port, password_of
from geotrain.net.transport.rpc import ListenError

MAX_CALLS = 8192  # at the same time
HANDSHAKE_S = 15.0  # who connects must have said who they are within this time
IDLE_S = 600.0  # a connection without calls is closed after this time; who has more to say connects again
SERVER_OPTIONS = (
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
)
ENROLL = "enroll"
STREAMS = {
    "pull": grpc.unary_stream_rpc_method_handler, "weights": grpc.unary_stream_rpc_method_handler,
    "push": grpc.stream_stream_rpc_method_handler, "shard": grpc.stream_stream_rpc_method_handler,
    ENROLL: grpc.stream_unary_rpc_method_handler,
}  # fmt: skip
NO_PASSWORD = "the token's password is not this server's; copy the token anew"
Handler = Callable[[Any, Any], Awaitable[Any]]


async def open_server(
    address: Address, own: Credentials | None, handlers: Mapping[str, Handler]
) -> tuple[aio.Server, int]:
    """Answer calls at an address by these handlers; returns the server and its port. Raises ListenError."""
    kinds = {name: STREAMS.get(name, grpc.unary_unary_rpc_method_handler) for name in handlers}
    methods = {name: kinds[name](handler) for name, handler in handlers.items()}
    # Without so_reuseport=0, two servers could listen on one port and share its connections.
    options = (*rpc.OPTIONS, *SERVER_OPTIONS, ("grpc.so_reuseport", 0))
    doors = [Door(own)] if own and own.secret else []
    server = aio.server(interceptors=doors, options=options, maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, methods),))
    rpc.check_free(address)
    try:
        port = add_port(server, address, own)
    except RuntimeError as error:
        raise ListenError(f"cannot listen on {host_port(*address.listening)}: {error}") from None
    await server.start()
    return server, port


def proven(own: Credentials, context: Any) -> list[str]:
    """List the identities that whoever makes a call to this server has proven. context: the call's."""
    if own.secret:
        return by_password(own, context.invocation_metadata())
    return [name.decode() for name in context.auth_context().get("x509_subject_alternative_name", [])]


def by_password(own: Credentials, metadata: Iterable[tuple[str, Any]] | None) -> list[str]:
    """List the identity that the password in a call's metadata proves, or nothing."""
    claimed, _, password = dict(metadata or ()).get("authorization", "").removeprefix("Bearer ").rpartition(":")
    right = password_of(claimed.removesuffix(".geotrain").rpartition(".")[2], own.secret)
    return [claimed] if hmac.compare_digest(password.encode(), right.encode()) else []


class Door(aio.ServerInterceptor):
    """Refuses calls without a password before anything but their metadata is read: what strangers hold open, gRPC
    would wait for."""

    def __init__(self, own: Credentials) -> None:
        self.own = own

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        known = by_password(self.own, details.invocation_metadata)
        return await continuation(details) if known else grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_: Any, context: Any) -> None:
    context.set_trailing_metadata(((rpc.REFUSAL_KEY, wire.pack(rpc.Refusal(NO_PASSWORD, None, False))),))
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, NO_PASSWORD)
