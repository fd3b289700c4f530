"""What the annealer proposes, and what it expects of an exchange, against the cost itself."""

import numpy as np
import pytest

from geotrain.plan.placement.anneal import Annealer
from geotrain.plan.placement.cost import Problem
from tests.support.plan_cases import random_problem

SHAPES = [(5, 4, 3), (2, 3, 0), (1, 4, 2), (6, 1, 0), (1, 3, 0), (4, 9, 0), (7, 2, 9)]  # stages, replicas, idle


def annealer(shape: tuple[int, int, int]) -> tuple[Problem, Annealer]:
    rng = np.random.default_rng(shape)
    problem = random_problem(rng, *shape)
    return problem, Annealer(problem, np.array([rng.permutation(problem.devices) for _ in range(6)]), rng)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_exchange_is_expected_to_take_the_path_that_it_takes(shape):
    """Exactly, or a little more where one pipeline has the dearest link and the other the next."""
    problem, chains = annealer(shape)
    more = []
    for stage in range(problem.stages):
        pipeline = chains.rng.integers(problem.replicas, size=chains.chains)
        mine = stage * problem.replicas + pipeline
        expected = chains._paths(stage, pipeline, chains.now.orders[chains.every, mine])
        for cell in np.arange(problem.devices):
            orders = chains.now.orders.copy()
            orders[chains.every, mine], orders[:, cell] = orders[:, cell].copy(), orders[chains.every, mine].copy()
            path = chains._links(orders).max(axis=2).sum(axis=1)
            more.append(((expected[:, cell] - path) / np.maximum(path, 1e-30))[cell != mine])
    difference = np.concatenate(more)
    assert difference.min() >= -1e-12
    assert (difference > 1e-12).mean() < 0.15
