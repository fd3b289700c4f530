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
from geotrain.outer.messages import Join, PieceDelta, UpdatePart
from geotrain.outer.server.server import identity_of
from geotrain.parameters.layout import layout_of
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
    block["outer"]["fragments"]["layers_per_fragment"] *= 5  # as pieces of large models, none is kept by malloc
    run_path.write_text(json.dumps(block))
    server = ServerProcess(run_path, "global")
    members: list[Member] = []
    try:
        server.start()
        bare_bytes = server.resident_bytes(), server.resident_bytes(mapped=True)  # with the weights, and no mirror
        memory, all_of_it = PeakMemory([server]), PeakMemory([server], mapped=True)
        members += [Member(run_path, name, server.address) for name in MEMBERS]
        numel, every = members[0].numel, range(len(members[0].pieces_of))
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
        layout, self.name, self.life = layout_of(run), name, uuid.uuid4().hex
        self.client, i, every = WorkerClient(address), identity_of(run, layout), range(len(layout.fragments))
        slices = tuple(layout.whole(piece.index) for piece in layout.pieces)
        names = i.run, i.config_digest, i.layout_digest, i.model, name, self.life
        self.sequence = self.client.join(Join(*names, 0, 1, slices, slices)).sequence
        weights = self.client.pull(0, tuple(every)).result(WAIT_S).weights
        self.versions = {w.piece: w.version for w in weights}
        self.pieces_of = [[piece.index for piece in pieces] for pieces in layout.pieces_of]
        self.sizes, self.numel = [fragment.numel for fragment in layout.fragments], layout.numel
        codec, seeded = make_codec(run.outer.up), torch.Generator().manual_seed(1)
        noise = {n: torch.empty(n).normal_(std=1e-4, generator=seeded) for n in {p.numel for p in layout.pieces}}
        coded = {n: to_bytes(codec.encode(values).payload) for n, values in noise.items()}
        self.noise = {piece.index: coded[piece.numel] for piece in layout.pieces}

    def update(self, fragment: int) -> None:
        deltas = tuple(PieceDelta(p, self.versions[p], self.noise[p]) for p in self.pieces_of[fragment])
        part = UpdatePart(self.name, self.life, self.sequence, 0, deltas, adopted=self.sequence - 1)
        pushed, answer = self.client.push(part), self.client.pull(self.sequence, (fragment,))
        pushed.result(WAIT_S)
        self.versions |= {w.piece: w.version for w in answer.result(WAIT_S).weights}
        self.sequence += 1
