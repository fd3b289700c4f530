"""Calls a server for the operator: its status, and commands. Blocking, so that no event loop is needed."""

from __future__ import annotations

import json
from typing import Any

import grpc

from geotrain.net.transport import rpc, wire
from geotrain.net.transport.certs import Trust, expiry, open_channel
from geotrain.net.transport.grpc_client import Unreachable


def ask_status(address: str, within_s: float, trust: Trust | None = None) -> dict[str, Any] | None:
    """Ask the server at host:port for its status (`GrpcService.status`); None: it did not answer in time.

    within_s: how long it may take. trust: None means plaintext.
    """
    try:
        return json.loads(_call(address, "status", b"", within_s, trust))
    except grpc.RpcError:
        return None


def command(address: str, control: rpc.Control, within_s: float, trust: Trust | None = None) -> str:
    """Send a server the operator's command; returns what it says to it. trust: with the operator's certificate.

    Raises Refused, and Unreachable if the server does not answer in time.
    """
    try:
        answer = _call(address, "control", wire.pack(control), within_s, trust)
    except grpc.RpcError as error:
        refused = rpc.refusal_of(error)
        if refused is not None:
            raise refused from None
        raise Unreachable(
            f"the server at {address} does not answer ({error.code().name.lower()}{expiry(error, trust)}); check "
            "that the run is on, and that this machine reaches it"
        ) from None
    reply: rpc.ControlReply = wire.unpack(answer, rpc.ControlReply)
    return reply.text


def _call(address: str, method: str, request: bytes, within_s: float, trust: Trust | None) -> bytes:
    with open_channel(grpc, address, trust, rpc.OPTIONS) as channel:
        answer: bytes = channel.unary_unary(f"/{rpc.SERVICE}/{method}")(request, timeout=within_s)
    return answer
