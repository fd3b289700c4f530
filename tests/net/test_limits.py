"""A service under strain: a full disk, payloads of many data frames, garbage, and what a reply that comes early
saves."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import random

import grpc
import pytest
import torch
from grpc import aio

from geotrain.net.storage import journal as journal_module
from geotrain.net.storage.journal import JournalFull
from geotrain.net.transport import rpc
from geotrain.net.transport.grpc_client import GrpcClient
from geotrain.outer.messages import LeaseRequest, Refused, UpdateRejected
from tests.support.broken_frames import mutations
from tests.support.net_worlds import BUSY_S, outer, wait_for, whole


def test_a_full_disk_refuses_updates_for_now_and_serves_reads(make, monkeypatch):
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = cluster.joined("a")
    lease = worker.lease()
    before = cluster.regions["eu"].server.members["a"].updates
    monkeypatch.setattr("geotrain.net.server.server_thread.FULL_RETRY_S", 0.2)
    real, full = os.pwrite, True

    def pwrite(descriptor: int, content: bytes, position: int) -> int:
        if full and len(content) > 200:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content, position)

    monkeypatch.setattr(journal_module.os, "pwrite", pwrite)
    part = worker.parts(lease, 0)[0]
    pushed = worker.clients[0].push(part)
    assert len(worker.clients[0].pull(0, 0).result(BUSY_S).weights) == 1
    wait_for(lambda: cluster.regions["eu"].server_thread.full)
    assert not pushed.done() and cluster.regions["eu"].server.members["a"].updates == before
    full = False
    pushed.result(BUSY_S)
    assert cluster.regions["eu"].server.members["a"].updates == before + 1


def test_a_refusal_is_final_once_there_is_room_for_the_strike(make, monkeypatch):
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = cluster.joined("a")
    monkeypatch.setattr("geotrain.net.server.server_thread.FULL_RETRY_S", 0.2)
    journal, tried = cluster.regions["eu"].recovered.journal, []
    real = journal.append

    def append(*messages):
        if any(isinstance(message, UpdateRejected) for message in messages):
            tried.append(messages)
            if len(tried) < 3:
                raise JournalFull(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*messages)

    monkeypatch.setattr(journal, "append", append)
    with pytest.raises(Refused, match="no worker comes to job -1"):
        worker.clients[0].lease(LeaseRequest("a", -1)).result(BUSY_S)
    assert len(tried) == 3 and cluster.regions["eu"].server.members["a"].refused == 1


def test_what_the_server_has_or_refuses_is_not_sent(large):
    worker = large.joined("a")
    lease = worker.lease()
    part = worker.parts(lease, 0)[0]
    worker.exchange([part])
    service = large.regions["eu"].service
    frames = []
    real = service._take_update

    async def counting(context):
        read = context.read

        class Counted:
            def __getattr__(self, name):
                return getattr(context, name)

            async def read(self):
                frame = await read()
                frames.append(frame)
                return frame

        return await real(Counted())

    service._take_update = counting

    async def again() -> tuple[int, str]:
        link = GrpcClient(worker.clients[0].address, "a", "life-1")
        applied = await link.push(part)
        with pytest.raises(Refused, match=r"update \w+/0.9 came, but 2 is next") as refused:
            await link.push(dataclasses.replace(part, sequence=9))
        await link.close()
        return applied, refused.value.reason

    assert large.loop.do(again())[0] == 1
    assert len(frames) == 2  # the headers


def test_garbage_changes_nothing(make):
    """Every call with bytes that are no message, or not the right one: an error at once, and the state as it was."""
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = cluster.joined("a")
    lease = worker.lease()
    region = cluster.regions["eu"]
    tensors, meta = region.server.state()
    before = {name: t.clone() for name, t in tensors.items()}
    rng = random.Random(1)

    async def attack() -> set[grpc.StatusCode]:
        channel = aio.insecure_channel(region.address)
        codes = set()
        inputs = [frames[0] for frames in mutations(7, 300)]
        for frame in inputs:
            method = rng.choice(["join", "lease", "release", "leave", "beat", "control"])
            try:
                await channel.unary_unary(f"/{rpc.SERVICE}/{method}")(frame, timeout=BUSY_S)
            except aio.AioRpcError as error:
                codes.add(error.code())
        for frames in mutations(8, 60):
            call = channel.stream_stream(f"/{rpc.SERVICE}/push")()
            try:
                for frame in frames:
                    await call.write(frame)
                await call.done_writing()
                await call.read()
            except aio.AioRpcError as error:
                codes.add(error.code())
            except asyncio.InvalidStateError:
                pass  # the server has ended the call already
            call.cancel()
            try:
                await channel.unary_stream(f"/{rpc.SERVICE}/pull")(frames[0], timeout=BUSY_S).read()
            except aio.AioRpcError as error:
                codes.add(error.code())
        await channel.close()
        return codes

    codes = cluster.loop.do(attack())
    assert grpc.StatusCode.UNKNOWN not in codes  # a handler that crashed
    assert codes >= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS}
    assert not region.server_thread.failure.done()
    after, meta_after = region.server.state()
    assert meta == meta_after and all(torch.equal(before[name], t) for name, t in after.items())
    worker.train(lease)


def test_a_header_that_promises_too_much_is_refused_before_the_payload(make):
    cluster = make(outer(), {"eu": {"a": whole}})
    worker = cluster.joined("a")
    part = worker.parts(worker.lease(), 0)[0]
    huge = dataclasses.replace(part, deltas=(dataclasses.replace(part.deltas[0], payload=bytes(3_000_000)),))
    pushed = worker.clients[0].push(huge)
    with pytest.raises(Refused, match=r"payloads of more than \d+ bytes are refused here"):
        pushed.result(BUSY_S)
