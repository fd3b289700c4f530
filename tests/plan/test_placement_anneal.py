"""What the annealer proposes, and what it expects of an exchange, against the cost itself."""

import numpy as np
import pytest

from geotrain.plan.placement import anneal
from geotrain.plan.placement.anneal import Annealer
from geotrain.plan.placement.cost import Problem, alike, stage_costs, table_costs
from tests.support.plan_cases import random_problem

SHAPES = [(5, 4, 3), (2, 3, 0), (1, 4, 2), (6, 1, 0), (1, 3, 0), (4, 9, 0), (7, 2, 9)]  # stages, replicas, idle


def annealer(shape: tuple[int, int, int]) -> tuple[Problem, Annealer]:
    rng = np.random.default_rng(shape)
    problem = random_problem(rng, *shape)
    return problem, Annealer(problem, np.array([rng.permutation(problem.devices) for _ in range(6)]), rng)


@pytest.mark.parametrize("shape", SHAPES)
def test_proposals_are_permutations_whose_costs_are_kept_up_to_date(shape):
    problem, chains = annealer(shape)
    for kind in (anneal.EXCHANGE, anneal.RUNS, anneal.REVERSE) * 10:
        if problem.stages > 1 or kind == anneal.EXCHANGE:
            proposed = chains._proposed(kind, kind % problem.stages)
            assert (np.sort(proposed.orders, axis=1) == np.arange(problem.devices)).all()
            table = chains._grid(proposed.orders)
            np.testing.assert_allclose(chains._costs(proposed)[0], table_costs(problem, table), rtol=1e-12)
            np.testing.assert_allclose(proposed.rows, stage_costs(problem, table), rtol=1e-12)
            chains._decide(proposed, heat=1e9)
    found = chains.run(50, 0.0)
    costs = table_costs(problem, chains._grid(found))
    assert (np.diff(costs) >= 0).all()
    assert costs[0] <= chains.best_cost.min() * (1 + 1e-12)


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


def test_devices_with_equal_links_to_all_others_are_alike():
    region = np.array([0, 1, 0, 2, 1, 2, 2])
    times = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]])[np.ix_(region, region)]
    np.fill_diagonal(times, 0.0)
    assert (alike(Problem(2, 3, times, 2 * times, np.zeros(7))) == (region[:, None] == region)).all()
