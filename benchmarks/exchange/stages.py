"""A worker's side of an exchange, stage by stage, with the product's own functions on one thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from benchmarks.servers.worker import Worker
from benchmarks.servers.world import REGION, ServerProcess, write_files
from benchmarks.studies.environments import one_block
from geotrain.config import OuterConfig, codec_config
from geotrain.net.transport import wire
from geotrain.outer.messages import ChunkDelta, UpdatePart
from geotrain.outer.worker import OwnedSlices, WorkerRank
from geotrain.parameters.parameter_map import StridedSlice

STAGES = ("read", "code", "copy", "frame")
WORKER_BYTES = 18  # masters, anchor, scratch, residual, and what is in work, a parameter
SERVER_BYTES = 45  # both servers, their page cache aside, and the pushing worker


def of_a_worker(numel: int, codec: str, rounds: int) -> dict[str, float]:
    """ns a parameter of each of STAGES, of one rank that holds `numel` parameters.

    read: the masters are copied; code: the delta is coded, with what earlier ones left; copy: the payload to bytes,
    and the masters that were sent into the anchor; frame: checksums and headers of what goes over the wire."""
    parameter_map = one_block(numel)
    masters = torch.zeros(numel)
    outer = OuterConfig(levels=1, up=codec_config(codec))
    rank = WorkerRank(
        parameter_map, outer, [OwnedSlices((StridedSlice(0, numel, parameter="model"),), masters, True)]
    )
    spent: list[dict[str, float]] = []

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        spent[-1][name] += time.perf_counter() - begin

    for number in range(rounds + 1):
        spent.append(dict.fromkeys(STAGES, 0.0))
        for chunk, shard in enumerate(rank.shards):
            for master in shard.masters:  # as after a job: each weight has moved a little
                master.add_(1e-3)
            if rank.codec.error_feedback and shard.residual is None:
                shard.residual = torch.zeros_like(shard.anchor)
            with stage("read"):
                now = shard.read()
            with stage("code"):
                payload = rank.codec.encode(now, anchor=shard.anchor, residual=shard.residual, seed=number).payload
            with stage("copy"):
                shard.anchor.copy_(now)
                data = payload.cpu().numpy().tobytes()
            part = UpdatePart("w", "1", 0, number, 0, (ChunkDelta(chunk, 0, data),))
            with stage("frame"):
                for _ in wire.frames(part):
                    pass
    return {name: 1e9 * median(each[name] for each in spent[1:]) / numel for name in STAGES}


def sent(folder: Path, numel: int, rounds: int) -> dict[str, float]:
    """ns a parameter until a real region's server has an update on its disk, and until its answer is there.

    From the first byte that is pushed, framing included, over loopback; of two ranks that push at once."""
    folder.mkdir(parents=True)
    run_path = write_files(folder, numel, {REGION: ("w0",)})
    servers = [ServerProcess(run_path, "global"), ServerProcess(run_path, REGION)]
    try:
        for server in servers:
            server.start()
        worker = Worker(run_path, "w0", servers[1].address)
        total = sum(worker.sizes)
        times = [[worker.timed(f) for f in range(len(worker.sizes))] for _ in range(rounds + 1)][1:]
        worker.close()
    finally:
        for server in servers:
            server.kill()
    return {
        "send": 1e9 * median(sum(pushed for pushed, _ in each) for each in times) / total,
        "answer": 1e9 * median(sum(took - pushed for pushed, took in each) for each in times) / total,
    }


def available_bytes() -> int:
    """Memory that programs can still have."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
