"""Transfers over a link that breaks go on from their last data frame; and what bounds what is kept for that."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import grpc
import pytest
import torch

from geotrain.config import FragmentConfig
from geotrain.net.server import grpc_service, rate_limits
from geotrain.net.server.rate_limits import RateLimits
from geotrain.net.server.resumable_uploads import ResumableUploads
from geotrain.net.transport import deadlines, grpc_client, rpc, wire
from geotrain.net.transport.deadlines import FrameDeadline
from geotrain.net.transport.grpc_client import ConnectionLost, GrpcClient
from geotrain.outer.messages import Answer, Refused, UpdatePart
from geotrain.parameters.parameter_map import Parameter, ParameterMap
from tests.support import net_worlds
from tests.support.breaking_link import BreakingLink
from tests.support.net_worlds import BUSY_S, FakeWorker, outer, whole

MB = 1 << 20
UPDATE_BYTES = 6_000_000 * 4


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_transfer_that_breaks_goes_on_from_its_last_chunk(large, way):
    """Twice in 24 MB; what goes over the wire is the update once, and what was under way when the link broke."""
    link = BreakingLink(large.regions["eu"].port, way, 11 * MB, times=2)
    port = large.loop.do(link.start())
    worker = FakeWorker(
        "a",
        "life-1",
        f"127.0.0.1:{port}",
        large.parameter_map,
        large.config,
        whole(large.parameter_map),
        large.identity,
    )
    worker.join()
    if way == "up":
        worker.train(worker.lease())
    assert torch.equal(worker.anchor[0], large.regions["eu"].server.weights(0))
    assert link.broken == 2
    metered = link.tcp_counters.traffic()[f"127.0.0.1:{port}"]
    # A busy receiver leaves up to 6 MB in its socket, which are lost each time; from the start it would be 46 MB.
    most = UPDATE_BYTES + link.broken * 8 * MB
    assert UPDATE_BYTES < link.moved[way] < most
    wire_bytes = metered.sent_bytes if way == "up" else metered.received_bytes
    # What stands in a socket's buffer when a link breaks may still arrive after the last sample of that connection.
    assert UPDATE_BYTES - link.broken * MB < wire_bytes < most
    assert large.regions["eu"].server.members["a"].updates == (1 if way == "up" else 0)
    assert not large.regions["eu"].service.uploads._kept


@pytest.mark.parametrize("wait_s", [rpc.MAX_WAIT_S, 0.05])
def test_few_get_first_weights_at_a_time(make, monkeypatch, wait_s):
    """All get them, in turn, also where their turn comes later than a call may wait."""
    parameters = [Parameter("big", (3000, 1000), None, "ones")]
    monkeypatch.setattr(net_worlds, "tiny_layout", lambda config: ParameterMap(parameters))
    monkeypatch.setattr(grpc_service, "FIRSTS_AT_ONCE", 1)
    monkeypatch.setattr(rpc, "MAX_WAIT_S", wait_s)
    frames, live, most = wire.frames, set[int](), [0]

    def watched(message: object, first: int = 0) -> Iterator[bytes]:
        for number, frame in enumerate(frames(message, first)):
            if number == 1 and isinstance(message, Answer):
                live.add(id(message))
                most.append(len(live))
            yield frame
        live.discard(id(message))

    cluster = make(outer(fragments=FragmentConfig(), updates_per_send=50), {"eu": dict.fromkeys("abcd", whole)})
    monkeypatch.setattr(wire, "frames", watched)
    with ThreadPoolExecutor(4) as joining:
        workers = list(joining.map(cluster.joined, "abcd"))
    assert all(torch.equal(worker.anchor[0], torch.ones(3_000_000)) for worker in workers)
    assert max(most) == 1 and len(most) > 4


@pytest.fixture
def came(monkeypatch) -> list[int]:
    """The sizes of the data frames that were taken."""
    sizes, take = list[int](), wire.FrameReader._take
    monkeypatch.setattr(wire.FrameReader, "_take", lambda own, body: sizes.append(len(body)) or take(own, body))
    return sizes


def test_what_is_kept_of_one_update_is_not_taken_for_another(large, came):
    """Its sender comes back with another update of the same number: it is taken from the start."""
    worker = large.joined("a")
    part = worker.parts(worker.lease(), 0)[0]
    changed = dataclasses.replace(part, metrics={"loss": 2.0})
    uploads = large.regions["eu"].service.uploads
    came.clear()  # the first weights

    async def work() -> tuple[int, int, int]:
        link = GrpcClient(worker.clients[0].address, "a", "life-1")
        call = link._channel.stream_stream("/geotrain.Outer/push")()
        header, *some = islice(wire.frames(part), 8)
        for frame in (header, *some):
            await call.write(frame)
        while len(came) < len(some):  # `do` has a deadline
            await asyncio.sleep(0.01)
        call.cancel()
        while not (kept := uploads.data_frames(("a", 0), wire.crc_of(header))):
            await asyncio.sleep(0.01)
        other = wire.crc_of(next(wire.frames(changed)))
        nothing = uploads.data_frames(("a", 0), other)
        link._broken[0] = other  # it asks where to go on
        applied = await link.push(changed)
        await link.close()
        return kept, nothing, applied

    assert large.loop.do(work()) == (7, 0, 1)
    assert large.regions["eu"].server.members["a"].metrics["loss"] == 2.0


@pytest.mark.parametrize("first", ["ends", "goes on"])
def test_an_update_whose_stream_another_replaces_is_told_so(large, came, first):
    """A stream that the rank has given up may be read after the one that followed, and end that: its sender is told,
    and does not wait until its deadline for an acknowledgement. first: what becomes of the other stream."""
    worker = large.joined("a")
    part = worker.parts(worker.lease(), 0)[0]
    header, *some = islice(wire.frames(part), 4)
    came.clear()  # the first weights

    async def work() -> tuple[Any, str]:
        links = [GrpcClient(worker.clients[0].address, "a", "life-1") for _ in range(2)]
        calls = [link._channel.stream_stream("/geotrain.Outer/push")() for link in links]
        for number, call in enumerate(calls, 1):
            for frame in (header, *some):
                await call.write(frame)
            while len(came) < number * len(some):
                await asyncio.sleep(0.01)
        if first == "ends":
            calls[1].cancel()
        code, said = await calls[0].code(), await calls[0].details()
        for link in links:
            await link.close()
        return code, said

    assert large.loop.do(work()) == (grpc.StatusCode.ABORTED, "another stream of this rank took its place")


def half(size: int, sequence: int = 1) -> tuple[bytes, wire.FrameReader]:
    """A header, and a reader that has taken it and one data frame of `size` bytes."""
    payload = bytes([sequence]) * size + bytes(MB)
    frames = wire.frames(UpdatePart("a", "1", 0, sequence, 0, (net_worlds.ChunkDelta(0, 0, payload),)))
    header = next(frames)
    reader = wire.FrameReader(UpdatePart, limit_bytes=8 * MB)
    reader.feed(header)
    reader.feed(next(frames))
    return header, reader


def test_what_is_kept_is_bounded_in_bytes_and_time():
    now = [0.0]
    uploads = ResumableUploads(limit_bytes=int(2.5 * MB), keep_s=100, clock=lambda: now[0])
    crcs = {}
    for number in range(3):
        header, reader = half(MB, number)
        crcs[number] = wire.crc_of(header)
        uploads.keep(("a", number), reader)
        now[0] += 1
    assert [uploads.data_frames(("a", n), crcs[n]) for n in range(3)] == [0, 1, 1]  # the oldest is given up
    now[0] = 101.5
    uploads.trim()
    assert [uploads.data_frames(("a", n), crcs[n]) for n in range(3)] == [0, 0, 1]
    uploads.keep(("a", 2), reader)  # begins its time anew
    now[0] = 200
    uploads.trim()
    assert uploads.data_frames(("a", 2), crcs[2]) == 1 and uploads.take(("a", 2), reader) is reader
    assert not uploads.data_frames(("a", 2), crcs[2])


def test_a_pace_follows_the_link():
    pace = FrameDeadline()
    assert pace.allowed_s == 60
    for _ in range(100):
        pace.note(0.01)
    assert pace.allowed_s == deadlines.LEAST_S
    pace.note(3.0)  # a slow link: at once
    assert pace.allowed_s == pytest.approx(90)
    for _ in range(40):
        pace.note(1e6)
    assert pace.allowed_s == deadlines.MOST_S

    async def stall() -> None:
        slow = FrameDeadline()
        slow._frame_s = 0.1
        deadline_s = slow.allowed_s
        with pytest.raises(TimeoutError):
            await slow.frame(asyncio.sleep(60))
        assert slow.allowed_s == pytest.approx(2 * deadline_s)

    real = deadlines.LEAST_S
    deadlines.LEAST_S = 0.05
    try:
        deadlines.MARGIN, margin = 1.0, deadlines.MARGIN
        asyncio.run(stall())
    finally:
        deadlines.LEAST_S, deadlines.MARGIN = real, margin


def test_calls_are_limited_for_each_connection(make, monkeypatch):
    now = [0.0]
    rates = RateLimits(per_s=10, burst=3, clock=lambda: now[0])
    assert [rates.wait_s("x") for _ in range(4)] == [None, None, None, pytest.approx(0.1)]
    assert rates.wait_s("y") is None
    now[0] += 0.1
    assert rates.wait_s("x") is None and rates.wait_s("x") == pytest.approx(0.1)
    monkeypatch.setattr(rate_limits, "MAX_PEERS", 2)
    assert [rates.wait_s("z") is None for _ in range(4)] == [True, True, True, False], "another's bucket was dropped"

    cluster = make(outer(), {"eu": {"a": whole}})
    worker = cluster.joined("a")
    cluster.regions["eu"].service.rates = RateLimits(per_s=1, burst=5, clock=lambda: now[0])

    async def hurry() -> tuple[int, int]:
        link = GrpcClient(worker.clients[0].address, "a", "life-1")
        taken = refused = 0
        for _ in range(30):
            try:
                await link.beat(0)
                taken += 1
            except Refused as error:
                assert error.retry_s and "too many calls" in error.reason
                refused += 1
        now[0] += 1
        assert await link.persist(lambda: link.beat(0), BUSY_S)  # whoever waits gets through
        await link.close()
        return taken, refused

    assert cluster.loop.do(hurry()) == (5, 25)
    assert rpc.BEAT_S > 1 / 20


def test_a_call_goes_on_after_a_pause_of_its_process(monkeypatch):
    """Its deadline passed while it could not call: SIGSTOP, a paused machine."""
    monkeypatch.setattr(grpc_client, "REPLY_S", 0.1)
    calls = 0

    async def call() -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            time.sleep(0.6)  # the whole process, with its event loop
            raise ConnectionLost("gone meanwhile")
        return "answered"

    async def pause() -> str:
        link = GrpcClient("127.0.0.1:1", "a", "life-1")
        try:
            return await link.persist(call, deadline_s=0.3)
        finally:
            await link.close()

    assert asyncio.run(pause()) == "answered" and calls == 2
