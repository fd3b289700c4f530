"""A worker that trains nothing: its ranks push deltas of noise, and take the answers. Run as a process, told over a
pipe."""

from __future__ import annotations

import time
import uuid
import zlib
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.servers.world import RANKS
from geotrain.config import load_cluster, load_run
from geotrain.net.transport.certs import trust_between
from geotrain.net.transport.fragment_links import shards_above
from geotrain.net.transport.worker_client import WorkerClient
from geotrain.outer.codec import make_codec
from geotrain.outer.identity import identity_of
from geotrain.outer.messages import ChunkDelta, Join, UpdatePart
from geotrain.parameters.parameter_map import StridedSlice, parameter_map_of
from geotrain.staging.interface import to_bytes

NOISE = 1e-4


class Worker:
    """Pushes noise, and takes the answers. Ranks divide each chunk into equal parts; one payload serves all of a
    size."""

    def __init__(self, run_path: Path, name: str, address: str, ranks: int = RANKS) -> None:
        run = load_run(run_path)
        parameter_map, self.name, self.incarnation = parameter_map_of(run), name, uuid.uuid4().hex
        self.sizes, self.groups = parameter_map.group_numel, parameter_map.groups
        cuts = [[p.numel * rank // ranks for rank in range(ranks + 1)] for p in parameter_map.chunks]
        self.chunks_of = [[chunk.index for chunk in chunks] for chunks in parameter_map.chunks_of]
        cluster = load_cluster(run_path.parent / "cluster.json")
        region = next(r.name for r in cluster.regions if any(w.name == name for w in r.workers))
        shards = shards_above(cluster, parameter_map, "worker", name, region)
        trust = trust_between(cluster, "worker", name, "region", region)
        self.clients = [WorkerClient(address, trust=trust, shards=shards) for _ in range(ranks)]
        i = identity_of(run, parameter_map)
        welcome = None
        for rank, client in enumerate(self.clients):
            slices = tuple((StridedSlice(cut[rank], cut[rank + 1] - cut[rank]),) for cut in cuts)
            names = i.run, i.config_digest, i.parameter_map_digest, i.model, name, self.incarnation
            welcome = client.join(Join(*names, rank, ranks, slices, slices))
        assert welcome is not None
        self.sequences = list(welcome.sequences)
        every = range(len(parameter_map.fragments))
        answers = [client.pull(fragment, 0).result() for fragment in every for client in self.clients]
        self.versions = {w.chunk: w.version for answer in answers for w in answer.weights}
        codec = make_codec(run.outer.worker_codecs[0])
        sizes = [[end - begin for begin, end in pairwise(cut)] for cut in cuts]
        seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # the same in every process
        noise = torch.empty(max(map(max, sizes))).normal_(std=NOISE, generator=seeded)
        coded = {n: to_bytes(codec.encode(noise[:n]).payload) for each in sizes for n in set(each)}
        self.noise = [[coded[n] for n in each] for each in sizes]  # by chunk and rank

    def timed(self, group: int) -> tuple[float, float]:
        """Seconds from the first byte of a group's fragments that is pushed until the server has all on its disk, and
        to the last byte of the answers."""
        fragments = [fragment for fragment, its in enumerate(self.groups) if its == group]
        adopted = tuple(sequence - 1 for sequence in self.sequences)
        parts = [
            UpdatePart(
                self.name, self.incarnation, fragment, self.sequences[fragment], rank,
                tuple(self._delta(chunk, rank) for chunk in self.chunks_of[fragment]), adopted=adopted,
            )
            for fragment in fragments
            for rank in range(len(self.clients))
        ]  # fmt: skip
        begin = time.perf_counter()
        pushed = [self.clients[part.part].push(part) for part in parts]
        answers = [self.clients[part.part].pull(part.fragment, part.sequence) for part in parts]
        for done in pushed:
            done.result(600)
        pushed_s = time.perf_counter() - begin
        found = [answer.result(600) for answer in answers]
        took_s = time.perf_counter() - begin
        self.versions |= {w.chunk: w.version for answer in found for w in answer.weights}
        for fragment in fragments:
            self.sequences[fragment] += 1
        return pushed_s, took_s

    def _delta(self, chunk: int, rank: int) -> ChunkDelta:
        return ChunkDelta(chunk, self.versions[chunk], self.noise[chunk][rank])

    def close(self) -> None:
        for client in self.clients:
            client.close()


def main(pipe: Connection, run_path: Path, name: str, address: str) -> None:
    """Does what comes through the pipe: a group of fragments to update, or None to end. Says "ready", then what
    `timed` gives."""
    torch.set_num_threads(1)
    worker = Worker(run_path, name, address)
    pipe.send("ready")
    while (group := pipe.recv()) is not None:
        pipe.send(worker.timed(group))
    worker.close()
