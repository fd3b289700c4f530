"""The complete search's kernels in C against their reference, and that against plain enumeration."""

import itertools

import numpy as np
import pytest

from geotrain.kernels import Beginnings, Endings, StageVectors, cpu, extend, possible, reference_transport, transport
from geotrain.kernels.reference_transport import hall_sets


def case(rng: np.random.Generator, classes: int, levels: int):
    """Vectors of up to three devices a class, links of few ranks, of which the last cannot be used."""
    sizes = rng.integers(1, 5, size=classes)
    vectors = rng.integers(0, sizes + 1, size=(40, classes))
    vectors = vectors[vectors.sum(axis=1) == np.median(vectors.sum(axis=1)).astype(int)]
    rank = rng.integers(0, levels + 1, size=(classes, classes))
    rank = np.minimum(rank, rank.T)
    most = rng.integers(-1, levels, size=len(vectors))
    return *(np.ascontiguousarray(each, dtype=np.int32) for each in (vectors, sizes, rank, most)), levels


@pytest.mark.parametrize("classes", [1, 2, 4, 7])
def test_transports_are_those_of_the_reference(classes):
    rng = np.random.default_rng(classes)
    below = 0
    for _ in range(25):
        given = case(rng, classes, int(rng.integers(1, 6)))
        found = cpu.transport(*given)
        assert (found == reference_transport.transport(*given)).all()
        below += int((found < given[-1]).sum())
    assert below


def test_transports_are_the_bottlenecks_of_every_matching():
    rng = np.random.default_rng(0)
    for _ in range(20):
        vectors, sizes, rank, _, never = case(rng, 3, 4)
        few = vectors[:6][vectors[:6].sum(axis=1) <= 5]
        most = np.full(len(few), never - 1, dtype=np.int32)
        found = transport(np.ascontiguousarray(few), sizes, rank, most, never)
        for (x, v), (y, w) in itertools.product(enumerate(few), repeat=2):
            one, two = ([k for k, count in enumerate(each) for _ in range(count)] for each in (v, w))
            ways = itertools.permutations(two)
            best = min(max([rank[a, b] for a, b in zip(one, way, strict=True)], default=0) for way in ways)
            assert found[x, y] == (best if (v + w <= sizes).all() and best < never else never)


def test_hall_sets_are_enough():
    """The sets left out never decide whether a transport exists."""
    rng = np.random.default_rng(4)
    for _ in range(30):
        k = int(rng.integers(2, 6))
        linked = rng.random((k, k)) < rng.choice([0.2, 0.5])
        linked |= linked.T
        sets, reached = hall_sets(linked)
        for v, w in rng.integers(0, 3, size=(30, 2, k)):
            every = itertools.product((0, 1), repeat=k)
            plain = all(np.array(t) @ v <= linked[np.array(t, dtype=bool)].any(axis=0) @ w for t in every)
            assert (sets @ v <= reached @ w).all() == plain


def beginnings(rng: np.random.Generator) -> tuple[StageVectors, Beginnings]:
    vectors, sizes, *_ = case(rng, 4, 3)
    count = len(vectors)
    edges = rng.choice([0.5, 1.0, 2.0, np.inf], size=(count, count))
    last = rng.integers(0, count, size=200).astype(np.int32)
    used = vectors[last] + rng.integers(0, 2, size=(200, 4)).astype(np.int32)
    return StageVectors(vectors, sizes * 2, edges, rng.random(count)), Beginnings(
        used, last, rng.random(200), rng.random(200)
    )


def test_what_may_follow_is_the_same_in_parts(monkeypatch):
    rng = np.random.default_rng(5)
    for limit in (0.0, 4.0, 6.0, 100.0):
        stages, labels = beginnings(rng)
        expected = [
            np.concatenate(each) for each in zip(*reference_transport.extend(stages, labels, limit), strict=True)
        ]
        for room in (1, 1 << 20):
            monkeypatch.setattr(cpu, "EXTEND_ROOM", room)
            found = [np.concatenate(each) for each in zip(*extend(stages, labels, limit), strict=True)]
            assert [each.tolist() for each in found] == [each.tolist() for each in expected]
        plain = [
            (i, v)
            for i, v in itertools.product(range(200), range(len(stages.vectors)))
            if max(labels.label_stage[i], stages.stage[v])
            + 4 * (labels.label_path[i] + stages.edges[labels.last[i], v])
            < limit
            and (labels.used[i] + stages.vectors[v] <= stages.sizes).all()
        ]
        assert list(zip(*(each.tolist() for each in expected), strict=True)) == plain


@pytest.mark.parametrize("uses_all", [False, True])
def test_what_may_end_is_that_of_the_reference(uses_all):
    rng = np.random.default_rng(8)
    alive = 0
    for _ in range(40):
        stages, labels = beginnings(rng)
        over = np.sort(rng.random(3))[::-1].copy()
        part = np.array([[0, 0, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]], dtype=np.int32)
        what = Endings(part, over, int(rng.integers(0, 4)), int(stages.vectors[0].sum()), uses_all)
        given = stages.vectors, stages.sizes, labels.used, labels.last, 2 * rng.random(200) - 0.2
        found = possible(*given, what)
        assert (found == reference_transport.possible(*given, what)).all()
        alive += int(found.sum())
    assert 0 < alive < 40 * 200


def test_without_the_compiled_kernels_the_reference_works(monkeypatch):
    rng = np.random.default_rng(6)
    given, (stages, labels) = case(rng, 4, 3), beginnings(rng)
    compiled, after = transport(*given), list(extend(stages, labels, 5.0))
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert (transport(*given) == compiled).all()
    for (one, two), (i, v) in zip(extend(stages, labels, 5.0), after, strict=True):
        assert one.tolist() == i.tolist() and two.tolist() == v.tolist()


def test_wrong_arrays_are_refused():
    vectors, sizes, rank, most, never = case(np.random.default_rng(7), 3, 3)
    with pytest.raises(ValueError, match="rank must be int32 of shape"):
        transport(vectors, sizes, rank[:2], most, never)
    with pytest.raises(ValueError, match="17 classes; at most 16"):
        wide = np.zeros((1, 17), dtype=np.int32)
        transport(wide, wide[0], np.zeros((17, 17), dtype=np.int32), np.zeros(1, dtype=np.int32), 1)
