"""Lower bounds on a placement's cost against enumeration of all placements."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.plan.placement.cost import Problem, problem_from_links, quick_bound, quick_bound_of_hidden
from tests.support.placement_reference import optimum, stage_cost
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


@settings(derandomize=True)
@given(st.sampled_from(SHAPES), st.integers(2, 5), st.integers(0, 10**6), st.booleans())
def test_no_placement_is_cheaper_than_the_bound(shape, classes, seed, noisy):
    rng = np.random.default_rng(seed)
    problem = class_problem(rng, shape, classes)
    if noisy:
        unlike = np.triu(1 + 0.2 * rng.random(problem.activation_s.shape), 1)
        activation_s = problem.activation_s * (unlike + unlike.T)
        problem = replace(problem, activation_s=activation_s, compute_s=rng.random(problem.devices))
    assert quick_bound(problem) <= optimum(problem) * (1 + 1e-12)


def test_quick_bound_counts_stages_of_poorly_connected_devices():
    """Four devices with good links and four without any: the latter fill two stages, which two edges touch."""
    good = np.arange(8) < 4
    gbps = np.where(good[:, None] & good, 10.0, 1.0)
    problem = problem_from_links(
        np.zeros((8, 8)), gbps, stages=4, replicas=2, gradient_gigabytes=0.1, activation_gigabytes=1.0
    )
    assert quick_bound(problem) == pytest.approx(2 * 8 * 0.1 / 2 + 2 * (8 + 8 + 0.8))
    assert optimum(problem) == pytest.approx(quick_bound(problem))
