"""The state machine's thread: what shares a flush, and what may not."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from geotrain.net.recovery import begin_snapshot, finish_snapshot, recover
from geotrain.outer.messages import Lease, LeaseRequest
from tests.net.net_worlds import Cluster, clusters, outer, wait_for, whole


@pytest.fixture
def make(tmp_path) -> Iterator[Callable[..., Cluster]]:
    with clusters(tmp_path) as maker:
        yield maker


def test_messages_that_wait_behind_a_snapshot_are_in_the_journal_after_it(make, tmp_path):
    """A group of messages is written before the first of them is applied: a snapshot taken in between would cut off
    journal records that it does not hold."""
    top = make(outer(), {"eu": {"a": whole}}).top
    wait_for(lambda: top.machine.status["members"]["eu"]["joined"])  # a join takes a member's leases back

    async def together() -> tuple[Any, Lease]:
        gate = threading.Event()
        waiting: list[asyncio.Task[Any]] = []
        for work in (
            top.machine.read(gate.wait),
            top.machine.say(LeaseRequest("a", 1)),
            top.machine.alone(lambda: begin_snapshot(top.server, top.recovered.journal, ended=False)),
            top.machine.say(LeaseRequest("a", 2)),
        ):
            waiting.append(asyncio.create_task(work))
            await asyncio.sleep(0.01)
        gate.set()
        _, _, copy, lease = await asyncio.gather(*waiting)
        return copy, lease

    copy, lease = top.loop.do(together())
    finish_snapshot(top.recovered.store, top.recovered.journal, *copy)
    shutil.copytree(top.folder, tmp_path / "copy")
    again = recover(top.build, top.begin, tmp_path / "copy", keep=2)
    assert sorted(again.server.book.open) == [1, lease.lease] == [1, 2]
    again.journal.close()
