"""Measures the link between two places over the kind of channel that the outer loop uses: gRPC, with TLS if the run
uses it.

method   request                          answer
echo     at most ECHO_BYTES               the same
sink     frames, streamed                 JSON: what arrived
source   JSON: Limits                     frames, streamed

The receiving side computes the rate from the times at which frames arrived. It leaves out the first part of the time,
in which TCP finds the link's speed. The sender chooses the size of its frames so that each occupies the link for some
milliseconds; so when the time is up, little is still under way.
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

from geotrain.config import Address, host_port
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.certs import Credentials, Trust, add_port, open_channel
from geotrain.net.transport.rpc import ListenError

SERVICE = "geotrain.Probe"
ECHOES, ECHO_S = 12, 0.5  # at least so many round trips over so long, or a busy moment would pass for a long way
ECHO_BYTES = 64
FIRST_FRAME_BYTES, MAX_FRAME_BYTES = 16 << 10, wire.DATA_FRAME_BYTES
FRAME_S = (0.005, 0.05)  # a frame that takes less is followed by a larger one, one that takes more by a smaller
RAMP = 0.4  # the share of the time, at its beginning, that does not count for the rate
MAX_S, MAX_BYTES = 60.0, 16 << 30  # a server does not do more than this, each way, whatever it is asked for
REACH_S, CLOSE_S = 15.0, 5.0  # until a probe server has answered first; for calls under way at its end
DRAIN_S = 30.0  # frames that are under way when the time is up may take so much longer
CONCURRENT = 4  # calls at the same time


class ProbeError(ConnectionError):
    """Raised when a link cannot be measured. Says which, why and what to do."""


@dataclass(frozen=True)
class Limits:
    """Limits the measurement of one direction: to so many seconds or bytes, whichever come first."""

    seconds: float
    count_bytes: int


@dataclass(frozen=True)
class Way:
    """Holds what was measured of one link.

    rtt_ms: the shortest of several round trips. up_gbps: the rate from the caller to the server; down_gbps: back.
    """

    rtt_ms: float
    up_gbps: float
    down_gbps: float


def received_gbps(frames: Iterable[bytes], limits: Limits) -> float:
    """Receive frames until they end, and return the rate at which they came, in Gbit/s.

    A sender that goes far beyond the limits is cut off. Raises ProbeError if too little came to compute a rate.
    """
    begin = time.monotonic()
    total_bytes = 0
    seen: list[tuple[float, int]] = []  # time, bytes until then
    for frame in frames:
        now = time.monotonic()
        total_bytes += len(frame)
        seen.append((now, total_bytes))
        if now - begin > limits.seconds + DRAIN_S or total_bytes > limits.count_bytes + MAX_FRAME_BYTES:
            break
    if len(seen) < 3 or seen[-1][0] <= seen[0][0]:
        raise ProbeError(f"only {total_bytes} bytes came: too few to compute a rate; allow more seconds or bytes")
    first, last = seen[0][0], seen[-1][0]
    # The rate is that from the first frame after the ramp to the last frame.
    after_ramp = (s for s in seen if s[0] >= first + RAMP * (last - first) and s[0] < last)
    start, before_bytes = next(after_ramp, seen[0])
    return 8e-9 * (total_bytes - before_bytes) / (last - start)


def frames(limits: Limits) -> Iterator[bytes]:
    """Yield frames until the limits are reached, of random bytes, which nothing on the way can compress."""
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
        options = (*rpc.OPTIONS, ("grpc.so_reuseport", 0))
        self._grpc = grpc.server(self._executor, options=options, maximum_concurrent_rpcs=CONCURRENT)
        methods = {
            "echo": grpc.unary_unary_rpc_method_handler(_echo),
            "sink": grpc.stream_unary_rpc_method_handler(_sink),
            "source": grpc.unary_stream_rpc_method_handler(_source),
        }
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        try:
            self.port = add_port(self._grpc, address, credentials)
        except RuntimeError:
            raise ListenError(
                f"cannot listen on {host_port(*address.listening)}; is a server of a run there? Stop it while "
                "probing, or set another port or `bind` in the cluster file"
            ) from None
        self._grpc.start()

    def close(self) -> None:
        self._grpc.stop(None).wait(CLOSE_S)
        self._executor.shutdown(wait=False, cancel_futures=True)


def measure(address: str, limits: Limits, trust: Trust | None = None, within_s: float = REACH_S) -> Way:
    """Measure the link to the probe server at host:port. within_s: the time until it must have answered.

    Raises ProbeError.
    """
    timeout_s = limits.seconds + 2 * DRAIN_S
    with open_channel(grpc, address, trust, rpc.OPTIONS) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=within_s)
            echo = channel.unary_unary(f"/{SERVICE}/echo")
            trips: list[float] = []
            until_s = time.perf_counter() + ECHO_S
            while len(trips) < ECHOES or time.perf_counter() < until_s:
                begin = time.perf_counter()
                echo(b"?" * ECHO_BYTES, timeout=DRAIN_S)
                trips.append(time.perf_counter() - begin)
            said = json.loads(channel.stream_unary(f"/{SERVICE}/sink")(frames(limits), timeout=timeout_s))
            if "error" in said:
                raise ProbeError(said["error"])
            request = json.dumps(asdict(limits)).encode()
            source = channel.unary_stream(f"/{SERVICE}/source")(request, timeout=timeout_s)
            return Way(1e3 * min(trips), float(said["gbps"]), received_gbps(source, limits))
        except grpc.FutureTimeoutError:
            raise ProbeError(
                f"no answer from {address} within {within_s:g} s; check the address in the cluster file, that no "
                "firewall is between, and both ends' certificates"
            ) from None
        except grpc.RpcError as error:
            raise ProbeError(f"{address}: the measurement broke off: {error.details()}") from None


def _echo(request: bytes, context: Any) -> bytes:
    if len(request) > ECHO_BYTES:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"an echo has at most {ECHO_BYTES} bytes")
    return request


def _sink(requests: Iterator[bytes], context: Any) -> bytes:
    try:
        return json.dumps({"gbps": received_gbps(requests, Limits(MAX_S, MAX_BYTES))}).encode()
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
