"""A global server that sends changes to several regions, with its mirrors in memory and on the disk."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.servers.world import PeakMemory, ServerProcess, write_files
from geotrain.config import load_run
from geotrain.net.transport import rpc
from geotrain.net.transport.operator_client import command
from geotrain.net.transport.worker_client import WorkerClient
from geotrain.outer.codec import make_codec
from geotrain.outer.messages import ChunkDelta, Join, UpdatePart
from geotrain.outer.server.server import identity_of
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.staging.interface import to_bytes

MEMBERS = tuple(f"r{i}" for i in range(4))  # what the server does for a region, it does for a worker in a flat run
WHERE, WAIT_S = ("memory", "disk"), 300.0


def measure(folder: Path, parameters: float, rounds: int) -> dict[str, Any]:
    """`mirrors`, as `benchmarks.servers` tells them."""
    return {"regions": len(MEMBERS), **{where: _live(folder / where, parameters, rounds, where) for where in WHERE}}


def _live(folder: Path, parameters: float, rounds: int, where: str) -> dict[str, float]:
    folder.mkdir(parents=True)
    run_path = write_files(folder, parameters, workers={"eu": MEMBERS})
    block = json.loads(run_path.read_text())
    for key in ("local", "server_state"):
        del block["outer"][key]
    block["outer"] |= {"levels": 1, "rule": {"name": "region_momentum"}, "mirrors": where}
    block["outer"]["fragments"]["layers_per_fragment"] *= 5  # as chunks of large models, none is kept by malloc
    run_path.write_text(json.dumps(block))
    server = ServerProcess(run_path, "global")
    members: list[Member] = []
    try:
        server.start()
        bare_bytes = server.resident_bytes(), server.resident_bytes(mapped=True)  # with the weights, and no mirror
        memory, all_of_it = PeakMemory([server]), PeakMemory([server], mapped=True)
        members += [Member(run_path, name, server.address) for name in MEMBERS]
        numel, every = members[0].numel, range(len(members[0].chunks_of))
        times = []
        for number in range(rounds + 1):
            for fragment in every:
                begin = time.perf_counter()
                for member in members:
                    member.update(fragment)
                if number:  # the first round copies each mirror away from the payload that it began as
                    times.append((time.perf_counter() - begin) / len(members) / members[0].sizes[fragment])
        command(server.address, rpc.Control("snapshot"), WAIT_S)
        at_rest = server.resident_bytes(mapped=True)
        peak, all_peak = memory.close()["global"], all_of_it.close()["global"]
    finally:
        for member in members:
            member.client.close()
        server.kill()
    return {
        "bytes_per_parameter": (peak - bare_bytes[0]) / numel + 4,
        "with_files_bytes_per_parameter": (all_peak - bare_bytes[1]) / numel + 4,
        "at_rest_bytes_per_parameter": (at_rest - bare_bytes[1]) / numel + 4,
        "update_ns_per_parameter": 1e9 * median(times),
    }


class Member:
    """Pushes noise in one part, and drops the answers."""

    def __init__(self, run_path: Path, name: str, address: str) -> None:
        run = load_run(run_path)
        parameter_map, self.name, self.incarnation = parameter_map_of(run), name, uuid.uuid4().hex
        self.client, i, every = (
            WorkerClient(address),
            identity_of(run, parameter_map),
            range(len(parameter_map.fragments)),
        )
        slices = tuple(parameter_map.whole(chunk.index) for chunk in parameter_map.chunks)
        names = i.run, i.config_digest, i.parameter_map_digest, i.model, name, self.incarnation
        self.sequence = self.client.join(Join(*names, 0, 1, slices, slices)).sequence
        weights = self.client.pull(0, tuple(every)).result(WAIT_S).weights
        self.versions = {w.chunk: w.version for w in weights}
        self.chunks_of = [[chunk.index for chunk in chunks] for chunks in parameter_map.chunks_of]
        self.sizes, self.numel = [fragment.numel for fragment in parameter_map.fragments], parameter_map.numel
        codec, seeded = make_codec(run.outer.up), torch.Generator().manual_seed(1)
        noise = {
            n: torch.empty(n).normal_(std=1e-4, generator=seeded) for n in {p.numel for p in parameter_map.chunks}
        }
        coded = {n: to_bytes(codec.encode(values).payload) for n, values in noise.items()}
        self.noise = {chunk.index: coded[chunk.numel] for chunk in parameter_map.chunks}

    def update(self, fragment: int) -> None:
        deltas = tuple(ChunkDelta(p, self.versions[p], self.noise[p]) for p in self.chunks_of[fragment])
        part = UpdatePart(self.name, self.incarnation, self.sequence, 0, deltas, adopted=self.sequence - 1)
        pushed, answer = self.client.push(part), self.client.pull(self.sequence, (fragment,))
        pushed.result(WAIT_S)
        self.versions |= {w.chunk: w.version for w in answer.result(WAIT_S).weights}
        self.sequence += 1
