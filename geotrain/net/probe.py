"""Measures the way between two places, over the same channel as the outer loop: gRPC, with TLS where the run has it.

method   request                          answer
echo     at most ECHO_BYTES               the same
sink     frames, streamed                 JSON: what arrived
source   JSON: Limits                     frames, streamed

The side that receives tells the rate, from when frames arrived; the first part of the time is left out, in which
connections find their speed. Frames are sized so that each occupies the link for some milliseconds: then little is
under way when the time is up.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from geotrain.config import Address
from geotrain.net import calls, wire
from geotrain.net.certs import Credentials, Trust
from geotrain.net.service import ListenError

SERVICE = "geotrain.Probe"
ECHOES, ECHO_S = 12, 0.5  # at least so many, for at least so long: a busy moment must not pass for a long way
ECHO_BYTES = 64
FIRST_FRAME_BYTES, MAX_FRAME_BYTES = 16 << 10, wire.CHUNK_BYTES
FRAME_S = (0.005, 0.05)  # a frame that takes less is followed by a larger one, that takes more by a smaller
RAMP = 0.4  # share of the time in which the rate is not counted yet
MAX_S, MAX_BYTES = 60.0, 16 << 30  # that a server lets itself be asked for, each way
DRAIN_S = 30.0  # what is under way when the time is up may take so long
CONCURRENT = 4


class ProbeError(ConnectionError):
    """A way cannot be measured. Says which, why and what to do."""


@dataclass(frozen=True)
class Limits:
    """Of one direction of one way: it ends at whichever comes first."""

    seconds: float
    count_bytes: int


@dataclass(frozen=True)
class Way:
    """rtt_ms: the shortest of some round trips. up_gbps: from who asks to the server; down_gbps: back."""

    rtt_ms: float
    up_gbps: float
    down_gbps: float


class Arrivals:
    """Frames as they came."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._seen: list[tuple[float, int]] = []

    def take(self, frames: Iterable[bytes], limits: Limits) -> None:
        """Until they end, or the limits are reached by far: then the sender does not keep to them."""
        begin = time.monotonic()
        for frame in frames:
            now = time.monotonic()
            self.total_bytes += len(frame)
            self._seen.append((now, self.total_bytes))
            if now - begin > limits.seconds + DRAIN_S or self.total_bytes > limits.count_bytes + MAX_FRAME_BYTES:
                break

    def gbps(self) -> float:
        """Raises ProbeError when too little came to say."""
        if len(self._seen) < 3 or self._seen[-1][0] <= self._seen[0][0]:
            raise ProbeError(
                f"only {self.total_bytes} bytes came: too few to tell a rate; allow more seconds or bytes"
            )
        (first, _), (last, total) = self._seen[0], self._seen[-1]
        begin, before = next(
            (seen for seen in self._seen if seen[0] >= first + RAMP * (last - first) and seen[0] < last),
            self._seen[0],
        )
        return 8e-9 * (total - before) / (last - begin)


def frames(limits: Limits) -> Iterator[bytes]:
    """Random bytes, so that nothing on the way can shrink them."""
    noise = os.urandom(MAX_FRAME_BYTES)
    begin = before = time.monotonic()
    size, sent = FIRST_FRAME_BYTES, 0
    while time.monotonic() - begin < limits.seconds and sent < limits.count_bytes:
        frame = noise[: min(size, limits.count_bytes - sent)]
        yield frame
        sent += len(frame)
        now = time.monotonic()
        if now - before < FRAME_S[0]:
            size = min(2 * size, MAX_FRAME_BYTES)
        elif now - before > FRAME_S[1]:
            size = max(size // 2, FIRST_FRAME_BYTES)
        before = now


class ProbeServer:
    """Listens until `close`. credentials: None means plaintext. Raises ListenError."""

    def __init__(self, address: Address, credentials: Credentials | None = None) -> None:
        self._executor = ThreadPoolExecutor(CONCURRENT, thread_name_prefix="probe")
        options = (*calls.OPTIONS, ("grpc.so_reuseport", 0))
        self._grpc = grpc.server(self._executor, options=options, maximum_concurrent_rpcs=CONCURRENT)
        methods = {
            "echo": grpc.unary_unary_rpc_method_handler(_echo),
            "sink": grpc.stream_unary_rpc_method_handler(_sink),
            "source": grpc.unary_stream_rpc_method_handler(_source),
        }
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        try:
            if credentials is None:
                self.port = int(self._grpc.add_insecure_port(str(address)))
            else:
                self.port = int(self._grpc.add_secure_port(str(address), credentials.server()))
        except RuntimeError:
            raise ListenError(
                f"cannot listen on {address}; is a server of a run there? Stop it while probing, or set another "
                "host or port in the cluster file"
            ) from None
        self._grpc.start()

    def close(self) -> None:
        self._grpc.stop(None).wait(5.0)
        self._executor.shutdown(wait=False, cancel_futures=True)


def measure(address: str, limits: Limits, trust: Trust | None = None, within_s: float = 15.0) -> Way:
    """The way to the probe server at host:port. within_s: until it must have answered. Raises ProbeError."""
    if trust is None:
        channel = grpc.insecure_channel(address, options=calls.OPTIONS)
    else:
        options = (*calls.OPTIONS, ("grpc.ssl_target_name_override", trust.server))
        channel = grpc.secure_channel(address, trust.credentials.channel(), options=options)
    with channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=within_s)
            return _measured(channel, limits)
        except grpc.FutureTimeoutError:
            raise ProbeError(
                f"no answer from {address} within {within_s:g} s; check the address in the cluster file, that no "
                "firewall is between, and both ends' certificates"
            ) from None
        except grpc.RpcError as error:
            raise ProbeError(f"{address}: the measurement broke off: {error.details()}") from None


def _measured(channel: grpc.Channel, limits: Limits) -> Way:
    echo = channel.unary_unary(f"/{SERVICE}/echo")
    trips: list[float] = []
    until_s = time.perf_counter() + ECHO_S
    while len(trips) < ECHOES or time.perf_counter() < until_s:
        begin = time.perf_counter()
        echo(b"?" * ECHO_BYTES, timeout=DRAIN_S)
        trips.append(time.perf_counter() - begin)
    timeout_s = limits.seconds + 2 * DRAIN_S
    sink = channel.stream_unary(f"/{SERVICE}/sink")
    told = json.loads(sink(frames(limits), timeout=timeout_s))
    if "error" in told:
        raise ProbeError(told["error"])
    request = json.dumps(asdict(limits)).encode()
    arrivals = Arrivals()
    arrivals.take(channel.unary_stream(f"/{SERVICE}/source")(request, timeout=timeout_s), limits)
    return Way(1e3 * min(trips), float(told["gbps"]), arrivals.gbps())


def _echo(request: bytes, context: Any) -> bytes:
    if len(request) > ECHO_BYTES:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"an echo has at most {ECHO_BYTES} bytes")
    return request


def _sink(requests: Iterator[bytes], context: Any) -> bytes:
    arrivals = Arrivals()
    arrivals.take(requests, Limits(MAX_S, MAX_BYTES))
    try:
        return json.dumps({"gbps": arrivals.gbps()}).encode()
    except ProbeError as error:
        return json.dumps({"error": str(error)}).encode()


def _source(request: bytes, context: Any) -> Iterator[bytes]:
    try:
        limits = Limits(**json.loads(request))
        bounded = Limits(min(float(limits.seconds), MAX_S), min(int(limits.count_bytes), MAX_BYTES))
    except (ValueError, TypeError):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "limits expected: seconds, count_bytes")
        return
    yield from frames(bounded)
