"""Where a rank's share is cut, and that a rank which is cut trains as one which is not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.config import OuterConfig, OverlapConfig, codec_config
from geotrain.outer.codec import make_codec
from geotrain.outer.messages import ChunkWeights
from geotrain.outer.worker import OwnedSlices, WorkerRank
from geotrain.parameters.chunks import cut, deal
from geotrain.parameters.parameter_map import Fragment, StridedSlice, gather, numel, scatter
from geotrain.staging.interface import from_bytes, to_bytes
from tests.support.outer_world import parameter_map

FP32 = codec_config("fp32")
# Runs of the embedding, 24 elements, as ranks have them: rows, and columns of rows; in any order.
runs = st.lists(
    st.sampled_from(
        [
            StridedSlice(0, 24, parameter="embed"),
            StridedSlice(5, 9, parameter="embed"),
            StridedSlice(1, 2, 4, 6, parameter="embed"),
            StridedSlice(0, 3, 4, 5, parameter="embed"),
            StridedSlice(23, 1, parameter="embed"),
            StridedSlice(2, 5, parameter="norm"),
        ]
    ),
    min_size=1,
    max_size=5,
)


@given(runs, st.integers(1, 40))
def test_cuts_name_the_same_elements_in_the_same_order(local: list[StridedSlice], chunk_elements: int) -> None:
    lay = parameter_map(None, chunk_elements)
    vector = torch.arange(64.0)
    wanted = gather(vector, lay.slices(local, 0)).clone()
    found, position = torch.full_like(wanted, -1), 0
    for each in cut(lay, local):
        chunk = lay.chunks[each.chunk]
        lay.check_slices(each.chunk, each.slices[:1])
        assert each.begin == position and each.end - each.begin == numel(each.slices) > 0
        found[each.begin : each.end] = gather(vector[chunk.start : chunk.start + chunk.numel], each.slices)
        position = each.end
    assert torch.equal(found, wanted) and position == len(wanted)


def test_chunks_are_counted_through_all_fragments() -> None:
    lay = parameter_map(1, 10)
    assert [[p.index for p in of] for of in lay.chunks_of] == lay.chunk_numbers == [[0, 1], [2, 3], [4, 5, 6], [7]]
    assert [p.numel for p in lay.chunks] == [10, 6, 10, 6, 10, 10, 4, 8]
    assert lay.called(5) == "fragment 2, chunk 2 of 3" and lay.called(7) == "fragment 3"


@given(st.lists(st.integers(1, 1 << 27), max_size=40), st.integers(1, 8), st.integers(1, 8))
def test_shards_get_about_as_much_each(sizes: list[int], shards: int, pieces: int) -> None:
    fragments = [Fragment(number, number // pieces, "", (), (), size) for number, size in enumerate(sizes)]
    dealt = deal(fragments, shards)
    assert sorted(number for own in dealt for number in own) == [*range(len(sizes))] and len(dealt) == shards
    loads = [sum(sizes[number] for number in own) for own in dealt]
    assert max(loads) - min(loads) <= (1.5 if pieces > 1 else 1) * max(sizes, default=0)


def test_each_shard_gets_a_piece_of_every_group() -> None:
    """Also where norms make one piece of a group a little larger."""
    fragments = [Fragment(n, n // 4, "", (), (), 1000 + 3 * (n % 4 == 0)) for n in range(40)]
    assert all({number // 4 for number in own} == set(range(10)) for own in deal(fragments, 4))


@pytest.mark.parametrize("adopt", ["replace", "mix", "rebase"])
@pytest.mark.parametrize("chunk_elements", [7, 24, 40])
def test_a_rank_that_is_cut_sends_and_adopts_what_one_that_is_not_does(adopt: str, chunk_elements: int) -> None:
    """It owns columns of the embedding, and holds copies of the norm and of a layer."""
    overlap = OverlapConfig(steps=int(adopt != "replace"), adopt=adopt)  # type: ignore[arg-type]
    server, ranks = torch.linspace(-1, 1, 64), []
    for elements in (1 << 27, chunk_elements):
        lay = parameter_map(None, elements)
        masters = torch.zeros(12), torch.zeros(8), torch.zeros(16)
        owned = [
            OwnedSlices((StridedSlice(0, 8, parameter="norm"),), masters[1], False),
            OwnedSlices((StridedSlice(2, 2, 4, 6, parameter="embed"),), masters[0], True),
            OwnedSlices((StridedSlice(0, 16, parameter="layer.1"),), masters[2], False),
        ]
        ranks.append((lay, masters, WorkerRank(lay, OuterConfig(local=FP32, overlap=overlap), owned)))
    generator, sent = torch.Generator().manual_seed(3), []
    for turn in range(4):
        sent.clear()
        steps = [torch.randn(n, generator=generator) for n in (12, 8, 16)]
        for lay, masters, worker in ranks:
            told = torch.full((64,), 99.0)
            for chunk in lay.chunks if turn else ():
                delta = worker.make_delta(chunk.index, seed=1).result()
                values = make_codec(FP32).decode(from_bytes(delta.payload), numel(worker.pushes[chunk.index]))
                scatter(values, worker.pushes[chunk.index], told[chunk.start : chunk.start + chunk.numel])
            sent.append(told)
            for chunk in lay.chunks:
                held = gather(server[chunk.start : chunk.start + chunk.numel], worker.holds[chunk.index])
                payload = to_bytes(make_codec(FP32).encode(held.contiguous()).payload)
                worker.on_weights(ChunkWeights(chunk.index, turn, payload), start=not turn)
            for master, step in zip(masters, steps, strict=True):
                master.add_(step)
        assert torch.equal(*sent)
        assert all(torch.equal(one, two) for one, two in zip(ranks[0][1], ranks[1][1], strict=True))
        server = server + 0.5
    assert not sent[0].eq(99.0).all()
