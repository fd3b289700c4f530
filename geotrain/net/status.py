"""A visitor at a server: how does it go? And the operator's word. Blocking, so that no event loop is needed."""

from __future__ import annotations

import json
from typing import Any

import grpc

from geotrain.net import calls, wire
from geotrain.net.certs import Trust
from geotrain.net.link import Unreachable


def ask_status(address: str, within_s: float, trust: Trust | None = None) -> dict[str, Any] | None:
    """What the server at host:port says of itself (`Service.status`); None when it does not answer in time.

    trust: None means plaintext.
    """
    try:
        said: dict[str, Any] = json.loads(_call(address, "status", b"", within_s, trust))
    except grpc.RpcError:
        return None
    return said


def command(address: str, control: calls.Control, within_s: float, trust: Trust | None = None) -> str:
    """Tell a server what the operator wants; what it says to that. trust: the operator's.

    Raises Refused; Unreachable when it does not answer in time.
    """
    try:
        answer = _call(address, "control", wire.pack(control), within_s, trust)
    except grpc.RpcError as error:
        refused = calls.refusal_of(error)
        if refused is not None:
            raise refused from None
        raise Unreachable(
            f"the server at {address} does not answer ({error.code().name.lower()}); check that the run is on, and "
            "that this machine reaches it"
        ) from None
    told: calls.Told = wire.unpack(answer, calls.Told)
    return told.text


def _call(address: str, method: str, request: bytes, within_s: float, trust: Trust | None) -> bytes:
    if trust is None:
        channel = grpc.insecure_channel(address, options=calls.OPTIONS)
    else:
        options = (*calls.OPTIONS, ("grpc.ssl_target_name_override", trust.server))
        channel = grpc.secure_channel(address, trust.credentials.channel(), options=options)
    with channel:
        answer: bytes = channel.unary_unary(f"/{calls.SERVICE}/{method}")(request, timeout=within_s)
    return answer
