"""Mirrors of what a member holds outlive kills of both servers: the next weights go as changes, as ever."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from geotrain.common.names import GLOBAL
from geotrain.config import codec_config
from geotrain.outer.downlink import FINGERPRINT_BYTES, fingerprint
from geotrain.outer.messages import ChunkWeights
from tests.support.net_worlds import outer
from tests.support.net_worlds import whole as in_one_part

INT4 = codec_config("int4")


def test_a_mark_tells_histories_apart():
    weights = ChunkWeights(0, 7, bytes(range(256)) * 40, increment=True)
    changed = bytearray(weights.payload)
    changed[77] ^= 1
    others = [
        fingerprint(weights, 2),
        fingerprint(dataclasses.replace(weights, version=8), 1),
        fingerprint(dataclasses.replace(weights, payload=bytes(changed)), 1),
    ]
    assert len({fingerprint(weights, 1), *others}) == 4 and fingerprint(weights, 1) == fingerprint(weights, 1)
    large = bytes(10 * FINGERPRINT_BYTES)
    assert fingerprint(ChunkWeights(0, 1, large), 0) != fingerprint(ChunkWeights(0, 1, b"\1" * len(large)), 0)
    assert 0 < fingerprint(ChunkWeights(0, 1 << 40, b""), 0) < 1 << 63


@pytest.mark.parametrize("killed", ["eu", GLOBAL])
def test_over_sockets_no_weights_go_whole_after_a_kill(make, killed):
    """On both links: from the global server to the region, and from the region's server to its worker."""
    cluster = make(outer("halos", updates_per_send=1, down=INT4, local=INT4), {"eu": {"a": in_one_part}})
    worker = cluster.worker("a")
    fragments = len(cluster.parameter_map.fragments)
    worker.clients[0].mirrors = lambda: worker.receivers[0].fingerprints_of(fragments)
    told: list[tuple[int, bool]] = []
    receivers = [worker.receivers[0]]

    def listen() -> None:
        receivers[1:] = [cluster.regions["eu"].server.store.downlink]
        for number, receiver in enumerate(receivers):
            real = type(receiver).decode

            def decode(weights: ChunkWeights, *more: Any, number: int = number, r: Any = receiver, real=real) -> Any:
                told.append((number, weights.increment))
                return real(r, weights, *more)

            receiver.decode = decode

    worker.join()
    worker.train(worker.lease())
    (cluster.restart_top if killed == GLOBAL else lambda: cluster.restart("eu"))()
    listen()
    for _ in range(2):
        worker.train(worker.lease())
    assert {number for number, _ in told} == {0, 1} and all(increment for _, increment in told), told
