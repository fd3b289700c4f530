"""Joins a region's server as a worker, with that worker's certificate, and sends what is no update. Each line printed
says what was refused; the exit code is BELIEVED if anything was not.

    python -m tests.chaos.faults.liar RUN.json CLUSTER.json REGION WORKER LISTENING.json
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from geotrain.config import load_cluster, load_run
from geotrain.net.transport.certs import Trust, identity, load_credentials
from geotrain.net.transport.fragment_links import shards_above
from geotrain.net.transport.grpc_client import Unreachable
from geotrain.net.transport.worker_client import WorkerClient
from geotrain.outer.codec import make_codec
from geotrain.outer.messages import ChunkDelta, Join, Refused, UpdatePart
from geotrain.outer.server.server import identity_of
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.staging.interface import to_bytes

WAIT_S = 20.0
LIAR = "liar-"  # so begins the name of its incarnation
NOWHERE = 99  # a chunk that no model here has
BELIEVED = 3  # not 1, which an exception gives


def lies(true: UpdatePart) -> Iterator[tuple[str, UpdatePart]]:
    """true: an update of zeros of the first fragment, as a worker that has trained nothing would send it."""
    delta, *others = true.deltas

    def instead(**changes: object) -> UpdatePart:
        return replace(true, deltas=(replace(delta, **changes), *others))  # type: ignore[arg-type]

    yield "not finite", instead(payload=b"\xff" * len(delta.payload))
    yield "too short", instead(payload=delta.payload[:-1])
    yield "of a version that was never given", instead(anchor_version=1 << 40)
    yield "of a chunk that is not there", instead(chunk=NOWHERE)
    yield "for a thousand workers", replace(true, weight=1000)


def main() -> int:
    run, cluster = load_run(Path(sys.argv[1])), load_cluster(Path(sys.argv[2]))
    region, worker, listening = sys.argv[3], sys.argv[4], Path(sys.argv[5])
    parameter_map, incarnation = parameter_map_of(run), f"{LIAR}{uuid.uuid4().hex}"
    assert cluster.security is not None
    trust = Trust(load_credentials(Path(cluster.security.folder), "worker", worker), identity("region", region))
    whole = tuple(parameter_map.whole(chunk.index) for chunk in parameter_map.chunks)
    i = identity_of(run, parameter_map)
    join = Join(i.run, i.config_digest, i.parameter_map_digest, i.model, worker, incarnation, 0, 1, whole, whole)
    up, _ = run.outer.worker_codecs
    codec = make_codec(up)
    try:
        address = json.loads(listening.read_text())["address"]
    except (OSError, ValueError) as error:  # of a server that is just started again, or cannot write
        print(f"the server is not there: {error}")
        return 0
    above = shards_above(cluster, parameter_map, "worker", worker, region)
    with closing(WorkerClient(address, connect_s=WAIT_S, deadline_s=WAIT_S, trust=trust, shards=above)) as client:
        try:
            sequences = client.join(join).sequences
        except (Refused, Unreachable, TimeoutError) as error:
            print(f"the join was refused: {error}")
            return 0
        zeros = (
            ChunkDelta(p.index, 0, to_bytes(codec.encode(torch.zeros(p.numel)).payload))
            for p in parameter_map.chunks_of[0]
        )
        true = UpdatePart(worker, incarnation, 0, sequences[0], 0, tuple(zeros), job=1)
        for what, lie in lies(true):
            try:
                client.push(lie).result(WAIT_S)
            except (Refused, Unreachable, TimeoutError, ConnectionError) as error:
                print(f"{what}: refused: {error}")
            else:
                print(f"{what}: believed")
                return BELIEVED
    return 0


if __name__ == "__main__":
    sys.exit(main())
