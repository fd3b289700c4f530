"""Whether slices cover a vector once: against counting element by element."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.parameters.coverage import check_coverage, not_once
from geotrain.parameters.parameter_map import (
    Parameter,
    ParameterMap,
    ParameterMapError,
    StridedSlice,
    clip_runs,
    numel,
)

runs_strategy = st.lists(
    st.builds(
        lambda start, length, gap, count: StridedSlice(
            start, length, length + gap if count > 1 else 0, count
        ),
        st.integers(0, 50), st.integers(1, 7), st.integers(0, 5), st.integers(1, 6),
    ),
    max_size=5,
)  # fmt: skip


def counted(slices, size):
    """`not_once`, element by element."""
    times = torch.zeros(size, dtype=torch.int32)
    for chunk in slices:
        times.as_strided((chunk.count, chunk.length), (chunk.stride, 1), chunk.start).add_(1)
    wrong = (times != 1).nonzero()
    return int(wrong[0]) if len(wrong) else None


@st.composite
def almost_covers(draw):
    """(slices, size): a vector in blocks, each a matrix whose columns are dealt to ranks, each rank's part cut as
    ZeRO cuts it; sometimes one slice is left out, given twice, moved or made longer."""
    slices, size = [], 0
    for _ in range(draw(st.integers(1, 3))):
        rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 8))
        edges = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=3))})
        for low, high in pairwise(edges):
            mine = [StridedSlice(size + low, high - low, columns if rows > 1 else 0, rows)]
            cuts = sorted({0, numel(mine), *draw(st.lists(st.integers(0, numel(mine)), max_size=2))})
            slices += [chunk for cut in pairwise(cuts) for chunk in clip_runs(mine, *cut)]
        size += rows * columns
    at = draw(st.integers(0, len(slices) - 1))
    change = draw(st.sampled_from(["none", "without", "twice", "moved", "longer"]))
    one = slices.pop(at) if change not in ("none", "twice") else slices[at]
    if change == "twice":
        slices.append(one)
    elif change == "moved":
        start = draw(st.integers(0, size - one.stop + one.start))
        slices.append(StridedSlice(start, one.length, one.stride, one.count))
    elif change == "longer" and one.count > 1 and one.stop < size and one.length < one.stride:
        slices.append(StridedSlice(one.start, one.length + 1, one.stride, one.count))
    return draw(st.permutations(slices)), size


@given(almost_covers())
def test_what_ranks_hold_is_judged_as_element_by_element(found):
    assert not_once(*found) == counted(*found)


@given(runs_strategy, st.integers(1, 100))
def test_any_slices_are_judged_as_element_by_element(runs, size):
    inside = [run for run in runs if run.stop <= size]
    assert not_once(inside, size) == counted(inside, size)


@pytest.mark.parametrize("strides", [(2, 4, 8, 8), (3, 6, 6, 3)])
def test_rows_of_unlike_strides_may_lie_within_each_other(strides):
    starts = {(2, 4, 8, 8): (0, 1, 3, 7), (3, 6, 6, 3): (0, 1, 4, 2)}[strides]
    slices = [StridedSlice(at, 1, step, 96 // step) for at, step in zip(starts, strides, strict=True)]
    assert not_once(slices, 96) is None
    assert not_once(slices[:-1], 96) == counted(slices[:-1], 96) == starts[-1]


def test_what_is_wrong_is_said():
    parameter_map = ParameterMap([Parameter("a", (4, 4), 0, "normal"), Parameter("b", (4,), None, "ones")])
    with pytest.raises(ParameterMapError, match="element 16 of 20 is covered by no rank"):
        check_coverage(parameter_map, 0, [StridedSlice(0, 16)])
    with pytest.raises(ParameterMapError, match="element 6 of 20 is covered 2 times"):
        check_coverage(parameter_map, 0, [StridedSlice(0, 20), StridedSlice(6, 2, 4, 3)])
    with pytest.raises(ParameterMapError, match="does not lie within its 20 elements"):
        check_coverage(parameter_map, 0, [StridedSlice(0, 1, 0, 20)])


def test_ranks_of_a_large_model_are_checked_by_their_slices_and_not_by_its_size():
    """70 B parameters in one fragment: matrices of 65,536 rows, their columns over 8 ranks, each cut by ZeRO in 4."""
    rows, columns, layers = 65536, 8192, 130
    slices = []
    for layer in range(layers):
        for rank in range(8):
            mine = [StridedSlice(layer * rows * columns + rank * 1024, 1024, columns, rows)]
            cuts = [0, 1_000_001, 5_000_000, 9_999_999, rows * 1024]
            slices += [chunk for cut in pairwise(cuts) for chunk in clip_runs(mine, *cut)]
    parameter_map = ParameterMap([Parameter("a", (layers, rows, columns), 0, "normal")], chunk_elements=1 << 40)
    assert parameter_map.numel > 69e9 and len(slices) > 8_000
    tracemalloc.start()
    check_coverage(parameter_map, 0, slices)
    with pytest.raises(ParameterMapError, match=r"element 7995392 of 69793218560 is covered by no rank"):
        check_coverage(parameter_map, 0, [chunk for chunk in slices if chunk is not slices[1]])
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_slices_that_are_entangled_without_end_are_refused():
    """Each takes every second element of those that the ones before left: a period of 2^30."""
    slices = [StridedSlice((1 << i) - 1, 1, 2 << i, 1 << (31 - i)) for i in range(31)]
    with pytest.raises(ParameterMapError, match=r"fragment 'all': slices with .* as those of no ranks do"):
        check_coverage(ParameterMap([Parameter("a", (1 << 32,), 0, "normal")], chunk_elements=1 << 32), 0, slices)
