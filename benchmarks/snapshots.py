"""Measure what a snapshot costs a server that goes on meanwhile: memory, and how long updates wait.

    python -m benchmarks.snapshots [--layers 16] [--numel 4194304] [--snapshots 5] [--folder DIR] [--record]

A global server with its journal on a disk is told updates of one fragment after another by one region, as fast as it
takes them, in bf16 up and int8 changes down. Between snapshots the usual updates are timed, during snapshots those
that meet them. The last line printed is one JSON object:

stall_share           the longest update during a snapshot over the median update without one; the worst of all
stall_of_state_share  that longest update over the time in which the whole state is written
memory_share          growth of the process's private memory during a snapshot, over the state's size; the worst
copied_share          what was copied for updates that came, over the state's size; the worst
state_mib, update_s, write_s
                      size of the state; median update without a snapshot; median time of a snapshot's writing
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import command_line, report, units_by_ending
from benchmarks.processes import PeakMemory, resident_bytes
from geotrain.config import HalosConfig, OuterConfig, codec_config
from geotrain.net.server.server_thread import ServerThread
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.recovery import Recovered, begin_snapshot, finish_snapshot, recover
from geotrain.outer.codec import make_codec
from geotrain.outer.messages import AnswerWanted, ChunkDelta, Identity, Join, UpdatePart
from geotrain.outer.server.global_server import GlobalServer
from geotrain.parameters.parameter_map import Parameter, ParameterMap
from geotrain.staging.interface import to_bytes

REGION, INCARNATION = "eu", "1"
CALM_UPDATES = 40  # timed before each snapshot


class Run:
    """A server on its thread, and the region that sends it updates."""

    def __init__(self, folder: Path, layers: int, numel: int) -> None:
        blocks = [Parameter(f"layer.{i}", (numel,), i, "ones") for i in range(layers)]
        ends = [Parameter(name, (1024,), None, "ones") for name in ("embed", "norm")]
        self.parameter_map = ParameterMap([ends[0], *blocks, ends[1]], 1)
        self.config = OuterConfig(
            rule=HalosConfig(name="halos"), up=codec_config("bf16"), down=codec_config("int8"),
        )  # fmt: skip
        self.identity = Identity("snapshots", "config", self.parameter_map.digest, "toy")
        self.recovered: Recovered = recover(self._build, self._begin, folder, keep=2)
        codec = make_codec(self.config.up)
        self.payloads = [
            to_bytes(codec.encode(1e-3 * torch.randn(f.numel)).payload) for f in self.parameter_map.fragments
        ]
        self.made = 0  # updates

    def _build(self) -> GlobalServer:
        return GlobalServer(self.identity, self.parameter_map, self.config, {REGION: ("w",)}, 1 << 30, 1)

    def _begin(self, server: Any) -> None:
        server.set_weights([torch.ones(f.numel) for f in self.parameter_map.fragments])

    def next_update(self) -> UpdatePart:
        sequence, fragment = divmod(self.made, len(self.payloads))
        self.made += 1
        version = self.recovered.server.versions[fragment]
        return UpdatePart(
            REGION, INCARNATION, fragment, sequence + 1, 0, (ChunkDelta(fragment, version, self.payloads[fragment]),)
        )

    def join(self) -> Join:
        whole = tuple(self.parameter_map.whole(f.index) for f in self.parameter_map.fragments)
        i = self.identity
        return Join(i.run, i.config_digest, i.parameter_map_digest, i.model, REGION, INCARNATION, 0, 1, whole, whole)


async def measured(run: Run, snapshots: int) -> dict[str, float]:
    server, store, journal = run.recovered.server, run.recovered.store, run.recovered.journal
    thread = ServerThread(server, journal)
    disk = ThreadPoolExecutor(1)
    await thread.say(run.join())
    for fragment in range(len(run.payloads)):
        await thread.say(AnswerWanted(REGION, INCARNATION, fragment, 0))

    async def update() -> float:
        began_s = time.perf_counter()
        await thread.say(run.next_update())
        return time.perf_counter() - began_s

    def begin() -> tuple[Any, FrozenState]:
        frozen, meta = begin_snapshot(server, store, journal, ended=False)
        return disk.submit(finish_snapshot, store, journal, frozen, meta), frozen

    for _ in range(2 * len(run.payloads)):
        await update()
    usual: list[float] = []
    stalls, growths, copied, writes, state_bytes = [], [], [], [], 1
    for _ in range(snapshots):
        usual += [await update() for _ in range(CALM_UPDATES)]
        before_bytes, memory = resident_bytes(), PeakMemory({"own": resident_bytes})
        try:
            began_s = time.perf_counter()
            beginning = asyncio.ensure_future(thread.alone(begin))
            await asyncio.sleep(0)
            during = [await update()]  # it waits behind the beginning
            writing, frozen = await beginning
            while not writing.done():
                during.append(await update())
            writing.result()
            writes.append(time.perf_counter() - began_s)
        finally:
            peak_bytes = memory.close()["own"]
        state_bytes = frozen.state_bytes
        stalls.append(max(during))
        growths.append(peak_bytes - before_bytes)
        copied.append(frozen.most_copied_bytes)
    await asyncio.to_thread(thread.close)
    disk.shutdown()
    journal.close()
    return {
        "stall_share": max(stalls) / median(usual),
        "stall_of_state_share": max(stalls) / median(writes),
        "memory_share": max(growths) / state_bytes,
        "copied_share": max(copied) / state_bytes,
        "state_mib": state_bytes / 2**20,
        "update_s": median(usual),
        "write_s": median(writes),
    }


def main() -> None:
    parser = command_line(__doc__, quick={"layers": 4, "numel": 1 << 20, "snapshots": 2})
    parser.add_argument("--layers", type=int, default=16, help="each is a fragment")
    parser.add_argument("--numel", type=int, default=1 << 22, help="elements of a layer")
    parser.add_argument("--snapshots", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be used; default: the temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = asyncio.run(measured(Run(Path(folder), options.layers, options.numel), options.snapshots))
    note = f"{options.layers} fragments of {options.numel} elements"
    report("snapshots", results, options, units_by_ending({"_s": "s", "_mib": "MiB"}), note)


if __name__ == "__main__":
    main()
