"""What an update costs a region's server, stage by stage: the product's own functions, on one thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from geotrain.config import RegionMomentumConfig, codec_config, rule_config
from geotrain.net import wire
from geotrain.net.journal import Journal
from geotrain.outer.codec import make_codec, rounding_seed
from geotrain.outer.downlink import WeightsReceiver, WeightsSender, to_bytes
from geotrain.outer.limits import norm
from geotrain.outer.messages import Answer, FragmentDelta, UpdatePart
from geotrain.outer.rules import FragmentState
from geotrain.outer.rules.region_momentum import MomentumRegion

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
    local, wide = make_codec(codec_config("bf16")), make_codec(codec_config("int4"))
    config = rule_config("region_momentum")
    assert isinstance(config, RegionMomentumConfig)
    rule = MomentumRegion(config, 1, 0.9)
    state = FragmentState(torch.randn(numel))
    rule.start(state)
    delta, residual = torch.empty(numel), torch.zeros(numel)
    part = UpdatePart(
        "w", "life", 1, 0, (FragmentDelta(0, 0, to_bytes(local.encode(1e-4 * torch.randn(numel)).payload)),)
    )
    sender, receiver = WeightsSender(codec_config("bf16")), WeightsReceiver(codec_config("int4"))
    above = WeightsSender(codec_config("int4"))
    receiver.decode(above.encode(0, 0, state.x), numel)
    journal = Journal(folder / "stages", (UpdatePart,), 8 * numel)
    list(journal.replay(1))
    times: dict[str, list[float]] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        times.setdefault(name, []).append(time.perf_counter() - begin)

    for number in range(1, ROUNDS + 1):
        frames, payload = list(wire.frames(part)), from_bytes(part.deltas[0].payload)
        with stage("frames_in"):
            _read(frames, 8 * numel)
        with stage("journal_write"):
            journal.append(part)
        with stage("journal_flush"):
            journal.flush()
        with stage("decode_and_norm"):
            norm([local.decode_measured(payload, delta)])
        with stage("rule"):
            rule.on_delta(state, "w", delta, 1)
        with stage("answer"):
            answer = sender.encode(0, number, state.x)
        with stage("frames_out"):
            list(wire.frames(Answer(1, (answer,))))
        with stage("up_encode"):
            progress, _ = rule.take_progress(state)
            seed = rounding_seed("eu", 0, number, 0)
            to_bytes(wide.encode(progress, residual=residual, seed=seed).payload)
        down = above.encode(0, number, state.x + 1e-5)
        with stage("down_decode"):
            vector = receiver.decode(down, numel)
        with stage("merge"):
            rule.on_global_weights(state, vector)
    journal.close()
    return times


def _read(frames: list[bytes], limit_bytes: int) -> object:
    reader = wire.FrameReader(UpdatePart, limit_bytes=limit_bytes)
    for frame in frames:
        reader.feed(frame)
    return reader.message
