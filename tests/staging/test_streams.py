"""The exchange's copies under emulated CUDA: nothing is used before what it waits for, and every omission is seen."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from geotrain.config import OuterConfig, OverlapConfig, codec_config
from geotrain.outer.codec import make_codec
from geotrain.outer.messages import ChunkWeights
from geotrain.outer.worker import OwnedSlices, WorkerRank
from geotrain.parameters.parameter_map import StridedSlice
from geotrain.staging.cuda import CudaStaging, HostStaging
from geotrain.staging.interface import Ready, to_bytes
from tests.support.cuda_emulator import Cuda
from tests.support.outer_world import parameter_map

CPU = torch.device("cpu")


READ_ON_A_CPU = "Codec.encode"  # whether all was finite; on a GPU that flag travels with the payload


def exchange(
    cuda: Cuda, codec: str, adopt: Any = "rebase", omitted: Any = None, host: bool = False, waits: bool = True
) -> None:
    """Three exchanges and evaluations beside training. omitted: (owner, name, what takes its place). host: the state
    lies there. waits: for a delta before its answer is adopted, as the exchange does."""
    config = OuterConfig(local=codec_config(codec), overlap=OverlapConfig(steps=int(adopt != "replace"), adopt=adopt))
    plain = make_codec(codec_config("bf16" if codec == "bf16" else "fp32"))
    sent = [
        ChunkWeights(0, n, to_bytes(plain.encode(torch.full((16,), float(n))).payload)) for n in range(4)
    ]  # as a server sends them
    swapped = ChunkWeights(0, 9, to_bytes(make_codec(codec_config("bf16")).encode(torch.full((16,), 9.0)).payload))
    matrix = torch.zeros(16)
    chunks = [OwnedSlices((StridedSlice(0, 16, parameter="layer.0"),), matrix, True)]
    if host:
        worker = WorkerRank(parameter_map(), config, chunks, HostStaging(CPU, cuda, chunk=6))
        for shard in worker.shards:
            cuda.on_host(shard.anchor, shard.scratch)
    with cuda.emulated(), mock.patch.object(*omitted) if omitted else nullcontext():
        if not host:
            worker = WorkerRank(parameter_map(), config, chunks, CudaStaging(CPU, cuda))
        worker.on_weights(sent[0], start=True)
        for turn in range(1, 4):
            matrix.add_(0.5)
            delta = worker.make_delta(0, seed=turn)
            made = worker.when_made(lambda delta=delta: Ready(delta.result().payload))
            matrix.add_(0.25)
            with worker.swapped_in([swapped]):
                matrix.mul(2.0)
            if waits:
                made.result()
            worker.on_weights(sent[turn])
        matrix.add_(0.5)


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_every_use_waits_for_what_it_needs(codec: str) -> None:
    for adopt in ("replace", "mix", "rebase"):
        cuda = Cuda(READ_ON_A_CPU)
        exchange(cuda, codec, adopt)
        assert not cuda.faults and len(cuda.current_stream().clock) > 2, adopt  # type: ignore[attr-defined]


@pytest.mark.parametrize("waits", [True, False], ids=["answered", "not answered"])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_with_the_state_on_the_host_every_use_waits(codec: str, waits: bool) -> None:
    for adopt in ("replace", "mix", "rebase"):
        cuda = Cuda(READ_ON_A_CPU)
        exchange(cuda, codec, adopt, host=True, waits=waits)
        assert not cuda.faults, adopt
