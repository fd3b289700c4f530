"""Members that break the rules, over real sockets: what they say is refused in words, and the others train on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
import torch

from geotrain.config import shards_of
from geotrain.net.transport.grpc_client import GrpcClient
from geotrain.outer.messages import Refused, UpdatePart
from tests.support.net_worlds import BUSY_S
from tests.support.server_processes import Site


@pytest.mark.parametrize("value", [nan, 1e6], ids=str)
def test_an_update_that_is_judged_is_what_is_applied(tmp_path: Path, value: float) -> None:
    """Part 0 of a worker is judged while its server waits for part 1; then it pushes other values to the shard, under
    the same number."""
    site = Site(tmp_path, "halos", 24, shards=1)
    servers = {name: site.serve(name) for name in site.processes}
    worker = site.worker("a")
    worker.join()
    lease = worker.lease()
    assert lease is not None
    first, second = worker.parts(lease, (0,))
    worker.clients[0].push(first).result(BUSY_S)  # the coordinator has taken it

    def lie(part: UpdatePart) -> None:
        async def push() -> None:
            link = GrpcClient(str(shards_of(site.cluster, "eu")[0]), "a", "life-1")
            try:
                await link.persist(lambda: link.push(part), BUSY_S)
            finally:
                await link.close()

        asyncio.run(push())

    wild = [
        torch.full((len(d.payload) // 4,), value).numpy().tobytes() for d in worker.parts(lease, (0, 1))[0].deltas
    ]
    both = [replace(d, payload=p) for d, p in zip(worker.parts(lease, (0, 1))[0].deltas, wild, strict=True)]
    lie(replace(first, deltas=(replace(first.deltas[0], payload=wild[0]),)))  # of the same chunks: it is here already
    with pytest.raises(Refused, match="a: update a/1 of part 0 came with other chunks"):
        lie(replace(first, deltas=tuple(both)))
    answers = [client.pull(1, (0,)) for client in worker.clients]
    worker.clients[1].push(second).result(BUSY_S)
    worker.sequence += 1
    worker.adopt(answers, (0,))
    worker.exchange(worker.parts(lease, (1,)), (1,))
    assert all(bool((x.abs() < 10).all()) for x in worker.anchor)
    assert site.status("eu")["shards"][0]["up"]
    for server in servers.values():
        server.process.kill()
