"""Measure what an update costs a region's server, stage by stage: the product's own functions, on one thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.servers.world import OUTER
from geotrain.config import OuterConfig, parse
from geotrain.net.storage.disk_mirror_store import DiskMirrorStore
from geotrain.net.storage.journal import Journal
from geotrain.net.transport import wire
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import WeightsSender
from geotrain.outer.messages import Answer, ChunkDelta, Join, UpdatePart
from geotrain.outer.rules import Counts, region_rule
from geotrain.outer.server.store import Store
from geotrain.parameters.parameter_map import Parameter, ParameterMap
from geotrain.staging.interface import to_bytes

ROUNDS = 3


def measure(folder: Path, numel: int) -> dict[str, float]:
    """ns a parameter of each stage, with the settings of `world.OUTER`. folder: on the disk of the journal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: 1e9 * median(times) / numel for name, times in _timed(folder, numel).items()}
    finally:
        torch.set_num_threads(threads)


def _timed(folder: Path, numel: int) -> dict[str, list[float]]:
    outer = parse(OuterConfig, OUTER, "outer")
    local, wide = outer.local, outer.up
    parameter_map = ParameterMap([Parameter("a", (numel,), None, "zeros")])
    whole = (parameter_map.whole(0),)
    rule, counts = region_rule(outer, ("w",), 1e3), Counts()
    store = Store(
        "eu", parameter_map, (0,), rule, make_codec(local), local, (wide, outer.down), False,
        outer.server_state == "bf16",
    )  # fmt: skip
    store.receive_join(Join("r", "c", parameter_map.digest, "m", "w", "1", 0, 1, whole, whole))
    above = WeightsSender(outer.down)

    def heard(version: int, x: Tensor) -> Answer:
        return Answer(0, version, (above.encode(0, version, x),))

    store.receive_weights(heard(0, torch.randn(numel)))
    store.merge(0, True, {})
    rule.start(counts)
    noise = to_bytes(make_codec(local).encode(1e-4 * torch.randn(numel)).payload)
    journal = Journal(folder / "stages", (UpdatePart,), 8 * numel)
    list(journal.replay(1))
    mirror_store = DiskMirrorStore(folder, print)
    mirror = mirror_store.put(torch.zeros(numel))
    times: dict[str, list[float]] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        times.setdefault(name, []).append(time.perf_counter() - begin)

    for number in range(1, ROUNDS + 1):
        part = UpdatePart("w", "1", 0, number, 0, (ChunkDelta(0, 0, noise),))
        frames = list(wire.frames(part))
        with stage("frames_in"):
            _read(frames, 8 * numel)
        with stage("journal_write"):
            journal.append(part)
        with stage("journal_flush"):
            journal.flush()
        store.receive_part(part)
        with stage("decode_and_norm"):
            store.decode("w", 0, number)
        with stage("rule"):
            inputs, _ = rule.on_delta(counts, "w", 1, 1)
            store.apply("w", 0, number, counts.version, inputs)
        with stage("answer"):
            store.freeze("w", 0, number, counts.version)
        [answer] = store.answer("w", 0, 0)
        with stage("frames_out"):
            list(wire.frames(Answer(0, number, (answer,))))
        store.forget("w", answers=(0,), updates=((0, number),))
        with stage("up_encode"):
            store.send_up(0, number, rule.on_send(counts)[0])
        change = heard(number, store.vectors[0].x + 1e-5)
        with stage("merge"):
            store.receive_weights(change)
            store.merge(0, False, rule.on_global_weights(counts)[0])
        mirror_store.settle()
        with stage("mirror"):  # read from the disk, changed, and written there again
            mirror_store.page_in(mirror).neg_()
            mirror_store.page_out(mirror)
            mirror_store.settle()
    journal.close()
    return times


def _read(frames: list[bytes], limit_bytes: int) -> object:
    reader = wire.FrameReader(UpdatePart, limit_bytes=limit_bytes)
    for frame in frames:
        reader.feed(frame)
    return reader.message
