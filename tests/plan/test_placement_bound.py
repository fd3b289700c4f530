"""The complete search and the bounds against enumeration of all placements."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner import random_matrices
from benchmarks.planner.lower_bound import joined_classes, lower_bound
from benchmarks.planner.plain_annealing import anneal_for
from benchmarks.planner.random_matrices import regions
from geotrain.plan.placement.classes import bottlenecks, hall_sets, like_classes, stage_vectors, vector_costs
from geotrain.plan.placement.cost import Problem, problem_from_links, quick_bound, quick_bound_of_hidden
from geotrain.plan.placement.exact import cheapest_below
from tests.support.placement_reference import matching_cost, optimum, stage_cost
from tests.support.plan_cases import random_problem

SHAPES = [(1, 3, 1), (2, 2, 0), (2, 3, 1), (3, 2, 0), (4, 2, 0), (2, 4, 0), (3, 3, 0), (5, 2, 0), (3, 2, 2)]


def class_problem(rng: np.random.Generator, shape: tuple[int, int, int], classes: int) -> Problem:
    """Devices of a few classes; links from few values, so that many levels tie."""
    stages, replicas, idle = shape
    label = np.sort(rng.integers(0, classes, size=stages * replicas + idle))
    delay = rng.choice([0.0, 0.05, 0.2], size=(classes, classes))
    gbps = rng.choice([0.3, 0.5, 1.0, 2.0, 10.0], size=(classes, classes))
    if rng.random() < 0.7:  # mostly, links within a class are the best
        np.fill_diagonal(gbps, 20.0)
        np.fill_diagonal(delay, 0.0)
    sizes = {"gradient_gigabytes": float(rng.choice([0.1, 0.65, 3.0])), "activation_gigabytes": 0.47}
    return problem_from_links(
        np.maximum(delay, delay.T)[np.ix_(label, label)],
        np.minimum(gbps, gbps.T)[np.ix_(label, label)],
        stages=stages,
        replicas=replicas,
        **sizes,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_complete_search_finds_the_optimum_and_proves_it(shape):
    rng = np.random.default_rng(shape)
    for count in (2, 2, 3, 4):
        problem = class_problem(rng, shape, count)
        best = optimum(problem)
        classes = like_classes(problem)
        assert classes is not None
        for over in (1 + 1e-6, 1.3, 3.0):
            found, complete = cheapest_below(classes, problem.stages, best * over, 10**9)
            assert found is not None and complete
            assert found.total_s == pytest.approx(best, rel=1e-9)
            assert found.vectors.sum(axis=1).tolist() == [problem.replicas] * problem.stages
            assert (found.vectors.sum(axis=0) <= classes.sizes).all()
        assert cheapest_below(classes, problem.stages, best * (1 - 1e-9), 10**9) == (None, True)
        assert lower_bound(problem, best) == pytest.approx(best, rel=2e-9)
        assert lower_bound(problem, best * 1.2) == pytest.approx(best, rel=2e-9)
        assert quick_bound(problem) <= best * (1 + 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_bound_holds_where_no_devices_are_alike(shape, monkeypatch):
    stages, replicas, idle = shape
    rng = np.random.default_rng(shape)
    n = stages * replicas + idle
    problem = problem_from_links(
        rng.random((n, n)) * 0.2,
        np.exp(rng.standard_normal((n, n))),
        stages=stages,
        replicas=replicas,
        gradient_gigabytes=0.65,
        activation_gigabytes=0.47,
        compute_s=rng.random(n),
    )
    best = optimum(problem)
    assert quick_bound(problem) <= best
    assert lower_bound(problem, best * 1.1) <= best
    for module in ("geotrain.plan.placement.classes", "benchmarks.planner.lower_bound"):
        monkeypatch.setattr(f"{module}.MAX_CLASSES", 3)  # forces unlike devices into one class
    assert like_classes(problem) is None
    assert len(joined_classes(problem).sizes) == min(3, n)
    assert quick_bound(problem) <= lower_bound(problem, best * 1.1) <= best


@pytest.mark.parametrize("shape", SHAPES)
def test_bounds_hold_where_gradients_are_hidden(shape):
    """Against random tables of stages × pipelines: a pipeline takes its slowest device and twice its links."""
    stages, replicas, idle = shape
    rng = np.random.default_rng(shape)
    problem = random_problem(rng, stages, replicas, idle)
    for _ in range(300):
        table = rng.permutation(problem.devices)[: problem.placed].reshape(stages, replicas)
        gradients = max(stage_cost(problem, stage) for stage in table)
        links = [sum(problem.activation_s[i, j] for i, j in itertools.pairwise(pipe)) for pipe in table.T]
        pipes = [max(problem.compute_s[pipe]) + 2 * link for pipe, link in zip(table.T, links, strict=True)]
        alike = max(problem.compute_s[table].max() + 2 * max(links), gradients)
        assert quick_bound_of_hidden(problem, shared=False) <= alike * (1 + 1e-12)
        shared = max(replicas / sum(1 / seconds for seconds in pipes), gradients)
        assert quick_bound_of_hidden(problem, shared=True) <= shared * (1 + 1e-12)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (2, 4)])
def test_bounds_of_random_kinds_hold(shape):
    """The benchmark's ways to draw matrices, with few regions, against every placement, wherever the work ends."""
    draws = [
        regions(3),
        regions(5),
        regions(4, random_matrices.on_a_globe),
        regions(3, spare=0.25),
        regions(3, speeds=(1.0, 3.0)),
        regions(2, hosts_of=2),
        regions(2, noise=0.2),
        random_matrices.without_structure,
    ]
    for draw in draws:
        problem = draw(np.random.default_rng(shape), *shape)
        best = optimum(problem)
        for known in (best, best * 1.15):
            bounds = [lower_bound(problem, known, work) for work in (0, 3_000, 30_000, 10**8)]
            assert quick_bound(problem) * (1 - 1e-12) <= min(bounds)
            assert max(bounds) <= best * (1 + 1e-12)


@settings(derandomize=True)
@given(st.sampled_from(SHAPES), st.integers(2, 5), st.integers(0, 10**6), st.booleans(), st.integers(0, 6))
def test_bounds_hold_and_searches_end_at_the_optimum(shape, classes, seed, noisy, digits):
    """Whatever the work allowed; where it does, the complete search ends at the optimum of devices that are alike."""
    rng = np.random.default_rng(seed)
    problem = class_problem(rng, shape, classes)
    if noisy:
        unlike = np.triu(1 + 0.2 * rng.random(problem.activation_s.shape), 1)
        activation_s = problem.activation_s * (unlike + unlike.T)
        problem = replace(problem, activation_s=activation_s, compute_s=rng.random(problem.devices))
    best = optimum(problem)
    assert lower_bound(problem, best * 1.1, 10**digits) <= best * (1 + 1e-9)
    if not noisy:
        alike = like_classes(problem)
        assert alike is not None
        found, complete = cheapest_below(alike, problem.stages, best * 1.1, 10 ** (digits + 2))
        assert found is None or found.total_s >= best * (1 - 1e-9)
        assert not complete or (found is not None and found.total_s <= best * (1 + 1e-9))


def test_the_rival_of_the_benchmark_finds_the_optimum_of_a_tiny_matrix():
    problem = regions(3, spare=0.25, speeds=(1.0, 3.0))(np.random.default_rng(1), 3, 2)
    found, _ = anneal_for(problem, 0.0, 20.0, seed=0)
    assert found == pytest.approx(optimum(problem), rel=1e-9)


def test_quick_bound_counts_stages_of_poorly_connected_devices():
    """Four devices with good links and four without any: the latter fill two stages, which two edges touch."""
    good = np.arange(8) < 4
    gbps = np.where(good[:, None] & good, 10.0, 1.0)
    problem = problem_from_links(
        np.zeros((8, 8)), gbps, stages=4, replicas=2, gradient_gigabytes=0.1, activation_gigabytes=1.0
    )
    assert quick_bound(problem) == pytest.approx(2 * 8 * 0.1 / 2 + 2 * (8 + 8 + 0.8))
    assert optimum(problem) == pytest.approx(quick_bound(problem))


def test_bound_is_never_more_than_the_known_cost_and_gives_up_gracefully():
    problem = class_problem(np.random.default_rng(2), (5, 2, 0), 4)
    best = optimum(problem)
    assert lower_bound(problem, best, max_work=0) >= quick_bound(problem)
    assert lower_bound(problem, best, max_work=0) <= best
    assert cheapest_below(like_classes(problem), 5, best * 2, max_work=0) == (None, False)


def test_vectors_costs_and_bottlenecks_equal_those_of_devices():
    rng = np.random.default_rng(8)
    for count in (2, 3, 5):
        problem = class_problem(rng, (4, 4, 0), count)
        classes = like_classes(problem)
        cheap_first = np.argsort(vector_costs(classes), kind="stable")
        vectors = classes.vectors[cheap_first]
        members = [np.flatnonzero(classes.label == k) for k in range(len(classes.sizes))]
        groups = [[i for k, c in enumerate(v) for i in members[k][:c]] for v in vectors]
        np.testing.assert_allclose(
            vector_costs(classes)[cheap_first], [stage_cost(problem, g) for g in groups], rtol=1e-12
        )
        edges = bottlenecks(vectors, classes.sizes, classes.activation_s, np.full(len(vectors), np.inf))
        for (x, v), (y, w) in itertools.product(enumerate(vectors), repeat=2):
            if ((v + w) <= classes.sizes).all():
                right = [i for k, c in enumerate(w) for i in members[k][len(members[k]) - c :]]
                assert edges[x, y] == matching_cost(problem, groups[x], right)


def test_stage_vectors():
    found = stage_vectors(np.array([1, 2, 3]), 3, 100)
    every = [v for v in itertools.product(range(2), range(3), range(4)) if sum(v) == 3]
    assert sorted(map(tuple, found.tolist())) == every
    assert stage_vectors(np.array([1, 2, 3]), 3, len(every) - 1) is None


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
