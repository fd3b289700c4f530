"""A visitor's question to a server: how does it go? Blocking, so that a launcher needs no event loop for it."""

from __future__ import annotations

import json
from typing import Any

import grpc

from geotrain.net import calls
from geotrain.net.certs import Trust


def ask_status(address: str, within_s: float, trust: Trust | None = None) -> dict[str, Any] | None:
    """What the server at host:port says of itself (`Service.status`); None when it does not answer in time.

    trust: None means plaintext.
    """
    if trust is None:
        channel = grpc.insecure_channel(address, options=calls.OPTIONS)
    else:
        options = (*calls.OPTIONS, ("grpc.ssl_target_name_override", trust.server))
        channel = grpc.secure_channel(address, trust.credentials.channel(), options=options)
    with channel:
        try:
            answer: bytes = channel.unary_unary(f"/{calls.SERVICE}/status")(b"", timeout=within_s)
        except grpc.RpcError:
            return None
    said: dict[str, Any] = json.loads(answer)
    return said
