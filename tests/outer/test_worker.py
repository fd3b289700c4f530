"""A rank's anchors and what it does with answers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.config import CodecConfig, OuterConfig, OverlapConfig, codec_config
from geotrain.outer.codec import make_codec
from geotrain.outer.messages import ChunkWeights
from geotrain.outer.worker import OwnedSlices, WorkerRank
from geotrain.parameters.parameter_map import StridedSlice, gather, joined, scatter
from geotrain.staging.interface import from_bytes, to_bytes
from tests.support.outer_world import parameter_map

FP32 = codec_config("fp32")


def rank(adopt: str, codec: CodecConfig = FP32) -> tuple[WorkerRank, torch.Tensor, torch.Tensor]:
    """Owns layer.0, and holds a copy of the norm that another rank speaks for."""
    matrix, norm = torch.zeros(16), torch.zeros(8)
    config = OuterConfig(
        local=codec,
        overlap=OverlapConfig(
            steps=0 if adopt == "replace" else 2, adopt=adopt, **({"mix": 0.25} if adopt == "mix" else {})
        ),
    )
    chunks = [
        OwnedSlices((StridedSlice(0, 8, parameter="norm"),), norm, False),
        OwnedSlices((StridedSlice(0, 16, parameter="layer.0"),), matrix, True),
    ]
    return WorkerRank(parameter_map(), config, chunks), matrix, norm


def weights(value: float, version: int = 1) -> ChunkWeights:
    payload = make_codec(FP32).encode(torch.full((24,), value)).payload
    return ChunkWeights(0, version, to_bytes(payload))


@pytest.mark.parametrize(
    ("adopt", "expected"), [("replace", 5.0), ("mix", 0.25 * 3 + 0.75 * 5), ("rebase", 5 + 3 - 2)]
)
def test_adopting(adopt, expected):
    worker, matrix, norm = rank(adopt)
    worker.on_weights(weights(1.0), start=True)
    assert matrix.eq(1).all() and norm.eq(1).all()
    matrix.fill_(2.0)
    norm.fill_(2.0)
    delta = worker.make_delta(0, seed=1).result()
    sent = make_codec(FP32).decode(from_bytes(delta.payload), 16)
    assert sent.eq(-1).all() and delta.anchor_version == 1  # anchor 1 − masters 2, of what it speaks for only
    matrix.fill_(3.0)  # training went on while the answer travelled
    norm.fill_(3.0)
    worker.on_weights(weights(5.0, version=4))
    assert matrix.eq(expected).all() and norm.eq(expected).all()
    later = worker.make_delta(0, seed=2).result()
    assert later.anchor_version == 4
    torch.testing.assert_close(
        make_codec(FP32).decode(from_bytes(later.payload), 16), torch.full((16,), 5.0 - expected)
    )


chunks_of_a_vector = st.lists(
    st.builds(
        lambda start, length, count, gap: StridedSlice(start, length, length + gap if count > 1 else 0, count),
        st.integers(0, 30), st.integers(1, 8), st.integers(1, 3), st.integers(0, 3),
    ),
    max_size=8,
)  # fmt: skip


@given(chunks_of_a_vector)
def test_joined_slices_name_the_same_elements(slices):
    vector = torch.arange(64.0)
    fewer = joined(slices)
    assert len(fewer) <= len(slices)
    assert torch.equal(gather(vector, fewer), gather(vector, slices))
    here, there = torch.zeros(64), torch.zeros(64)
    scatter(gather(vector, slices), fewer, here)
    scatter(gather(vector, slices), slices, there)
    assert torch.equal(here, there)


def test_neighbours_are_one_slice():
    assert joined([StridedSlice(0, 4), StridedSlice(4, 2), StridedSlice(8, 1), StridedSlice(6, 2)]) == (
        StridedSlice(0, 6),
        StridedSlice(8, 1),
        StridedSlice(6, 2),
    )
    assert joined([StridedSlice(0, 2, 4, 2), StridedSlice(6, 2)]) == (StridedSlice(0, 2, 4, 2), StridedSlice(6, 2))
    both = [
        OwnedSlices((StridedSlice(0, 16, parameter=name),), torch.zeros(16), name == "layer.0")
        for name in ("layer.0", "layer.1")
    ]
    worker = WorkerRank(parameter_map(), OuterConfig(), both)
    assert worker.pushes == ((StridedSlice(24, 16),),) and worker.holds == ((StridedSlice(24, 32),),)


def test_rebase_forgets_nothing():
    """Over many exchanges with a server that adds up deltas, the sum of the worker's own progress arrives whole."""
    worker, matrix, norm = rank("rebase")
    server = torch.zeros(24)
    worker.on_weights(weights(0.0), start=True)
    progress, gen = torch.zeros(16), torch.Generator().manual_seed(0)

    def train() -> None:
        step = torch.randn(16, generator=gen)
        matrix.add_(step)
        progress.add_(step)

    for i in range(10):
        train()
        delta = worker.make_delta(0, seed=i).result()
        server[:16] -= make_codec(FP32).decode(from_bytes(delta.payload), 16)
        train()
        payload = make_codec(FP32).encode(torch.cat([server[:16], norm])).payload
        worker.on_weights(ChunkWeights(0, i, to_bytes(payload)))
        torch.testing.assert_close(matrix, progress, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(server[:16] + (matrix - server[:16]), progress, rtol=1e-5, atol=1e-5)


def test_error_feedback_sends_later_what_rounding_left_out():
    worker, matrix, _ = rank("replace", codec_config("bf16"))
    zeros = make_codec(codec_config("bf16")).encode(torch.zeros(24)).payload
    worker.on_weights(ChunkWeights(0, 1, to_bytes(zeros)), start=True)
    meant, sent = torch.zeros(16), torch.zeros(16)
    gen = torch.Generator().manual_seed(0)
    for i in range(50):
        before = matrix.clone()
        matrix.add_(torch.rand(16, generator=gen) / 3)
        meant += before - matrix
        delta = worker.make_delta(0, seed=i).result()
        sent += make_codec(codec_config("bf16")).decode(from_bytes(delta.payload), 16)
    assert float((meant - sent).abs().max()) < 2e-3  # one rounding, not fifty
