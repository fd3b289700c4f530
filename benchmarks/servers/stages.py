"""What an update costs a region's server, stage by stage: the product's own functions, on one thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from geotrain.config import RegionMomentumConfig, codec_config, rule_config
from geotrain.net.storage.disk_shelf import DiskShelf
from geotrain.net.storage.journal import Journal
from geotrain.net.transport import wire
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import WeightsSender
from geotrain.outer.messages import Answer, Join, PieceDelta, UpdatePart
from geotrain.outer.rules import Counts
from geotrain.outer.rules.region_momentum import MomentumRegion
from geotrain.outer.shards.shard import Apply, Decode, Forget, Freeze, Merge, SendUp, Vault
from geotrain.parameters.layout import Layout, Parameter
from geotrain.staging.interface import to_bytes

ROUNDS = 3


def measure(folder: Path, numel: int) -> dict[str, float]:
    """ns a parameter of each stage; bf16 inside the region, int4 beyond it. folder: on the disk of the journal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: 1e9 * median(times) / numel for name, times in _timed(folder, numel).items()}
    finally:
        torch.set_num_threads(threads)


def _timed(folder: Path, numel: int) -> dict[str, list[float]]:
    local, wide = codec_config("bf16"), codec_config("int4")
    config = rule_config("region_momentum")
    assert isinstance(config, RegionMomentumConfig)
    layout = Layout([Parameter("a", (numel,), None, "zeros")])
    whole = (layout.whole(0),)
    rule, counts = MomentumRegion(config, 1, 0.9), Counts()
    vault = Vault("eu", layout, layout.pieces, rule, make_codec(local), local, (wide, wide))
    vault.hear(Join("r", "c", layout.digest, "m", "w", "1", 0, 1, whole, whole))
    above = WeightsSender(wide)

    def heard(version: int, x: Tensor) -> Answer:
        return Answer(version, (above.encode(0, version, x),))

    vault.hear(heard(0, torch.randn(numel)))
    vault.obey(Merge(0, first=True))
    rule.start(counts)
    noise = to_bytes(make_codec(local).encode(1e-4 * torch.randn(numel)).payload)
    journal = Journal(folder / "stages", (UpdatePart,), 8 * numel)
    list(journal.replay(1))
    shelf = DiskShelf(folder, print)
    mirror = shelf.put(torch.zeros(numel))
    shelf.back(mirror)
    times: dict[str, list[float]] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        times.setdefault(name, []).append(time.perf_counter() - begin)

    for number in range(1, ROUNDS + 1):
        part = UpdatePart("w", "1", number, 0, (PieceDelta(0, 0, noise),))
        frames = list(wire.frames(part))
        with stage("frames_in"):
            _read(frames, 8 * numel)
        with stage("journal_write"):
            journal.append(part)
        with stage("journal_flush"):
            journal.flush()
        vault.hear(part)
        with stage("decode_and_norm"):
            vault.obey(Decode("w", number, (0,)))
        with stage("rule"):
            told, _ = rule.on_delta(counts, "w", 1)
            vault.obey(Apply("w", number, 0, counts.version, told))
        with stage("answer"):
            vault.obey(Freeze("w", number, 0, counts.version))
        answer = vault.members["w"].answers[number][0, 0]
        with stage("frames_out"):
            list(wire.frames(Answer(number, (answer,))))
        vault.obey(Forget("w", answers=(number,), updates=(number,)))
        with stage("up_encode"):
            vault.obey(SendUp(0, number, rule.on_send(counts)[0]))
        change = heard(number, vault.vectors[0].x + 1e-5)
        with stage("merge"):
            vault.hear(change)
            vault.obey(Merge(0, first=False))
        rule.on_global_weights(counts)
        shelf.settle()
        with stage("mirror"):  # read from the disk, changed, and written there again
            shelf.fetch(mirror)
            mirror.neg_()
            shelf.back(mirror)
            shelf.settle()
    journal.close()
    return times


def _read(frames: list[bytes], limit_bytes: int) -> object:
    reader = wire.FrameReader(UpdatePart, limit_bytes=limit_bytes)
    for frame in frames:
        reader.feed(frame)
    return reader.message
