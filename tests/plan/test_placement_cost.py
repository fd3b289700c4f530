"""The plain cost against its definition on numbers by hand, and the vectorized one against the plain one."""

import numpy as np
import pytest

from geotrain.plan.placement.cost import (
    Problem,
    arrange,
    placement,
    problem_from_links,
    stage_costs,
    table_costs,
)
from tests.support.placement_reference import partition_cost, stage_cost
from tests.support.plan_cases import random_problem


def four_devices(**changes) -> Problem:
    """Two pairs: 10 Gbit/s and 1 ms within a pair, 1 Gbit/s and 50 ms between."""
    pair = np.array([0, 0, 1, 1])
    near = pair[:, None] == pair
    links = {
        "delay_s": np.where(near, 0.001, 0.05),
        "bandwidth_gbps": np.where(near, 10.0, 1.0),
        "stages": 2,
        "replicas": 2,
        "gradient_gigabytes": 0.5,
        "activation_gigabytes": 0.25,
    }
    return problem_from_links(**{**links, **changes})


def test_cost_by_hand():
    problem = four_devices()
    # Stages are the pairs: gradients near, 2·(0.001 + 8·0.5/(2·10)); activations far, 0.05 + 8·0.25/1.
    assert partition_cost(problem, [[0, 1], [2, 3]]) == pytest.approx(2 * 0.201 + 2 * 2.05)
    # Stages hold one of each pair: gradients far, 2·(0.05 + 8·0.5/2); activations near, 0.001 + 8·0.25/10.
    assert partition_cost(problem, [[0, 2], [3, 1]]) == pytest.approx(2 * 2.05 + 2 * 0.201)


def test_slowest_placed_device_adds_its_compute_time():
    problem = four_devices(compute_s=[1.0, 2.0, 5.0, 3.0])
    assert partition_cost(problem, [[0, 1], [2, 3]]) == pytest.approx(2 * 0.201 + 2 * 2.05 + 5.0)
    assert placement(problem, np.array([[0, 1], [2, 3]])).compute_s == 5.0


def test_unequal_directions_count_both_ways():
    there, back = np.array([[0.0, 0.1], [0.3, 0.0]]), np.array([[1.0, 2.0], [4.0, 1.0]])
    sizes = {"gradient_gigabytes": 0.5, "activation_gigabytes": 1.0}
    stage = problem_from_links(there, back, stages=1, replicas=2, **sizes)
    assert stage_cost(stage, [0, 1]) == pytest.approx(0.1 + 0.3 + 8 * 0.5 / 2 / 2.0 + 8 * 0.5 / 2 / 4.0)
    pipeline = problem_from_links(there, back, stages=2, replicas=1, **sizes)
    assert partition_cost(pipeline, [[0], [1]]) == pytest.approx(0.1 + 0.3 + 8 / 2.0 + 8 / 4.0)


@pytest.mark.parametrize("shape", [(1, 4), (2, 3), (4, 2), (5, 3), (3, 6), (6, 1)])
def test_vectorized_equals_plain(shape):
    rng = np.random.default_rng(shape)
    for _ in range(5):
        problem = random_problem(rng, *shape, idle=2)
        groups = rng.permutation(problem.devices)[: problem.placed].reshape(shape)
        plain = partition_cost(problem, groups.tolist())
        table = arrange(problem, groups)
        assert sorted(map(sorted, table.tolist())) == sorted(map(sorted, groups.tolist()))
        assert table_costs(problem, table) == pytest.approx(plain)
        assert placement(problem, table).total_s == pytest.approx(plain)
        assert table_costs(problem, groups) >= plain - 1e-9  # any other order of rows and columns costs at least that
        np.testing.assert_allclose(stage_costs(problem, groups), [stage_cost(problem, g) for g in groups.tolist()])


def with_entry(value: float, fill: float = 1.0) -> np.ndarray:
    matrix = np.full((4, 4), fill)
    matrix[1, 2] = value
    return matrix


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"delay_s": with_entry(-1.0)}, r"delay_s\[1, 2\] = -1.0: must be finite and at least 0"),
        ({"delay_s": with_entry(np.nan)}, r"delay_s\[1, 2\] = nan"),
        ({"delay_s": with_entry(np.inf)}, r"delay_s\[1, 2\] = inf"),
        ({"bandwidth_gbps": with_entry(-2.0)}, r"bandwidth_gbps\[1, 2\] = -2.0: must be a number above 0"),
        ({"bandwidth_gbps": with_entry(0.0)}, r"bandwidth_gbps\[1, 2\] = 0.0"),
        ({"bandwidth_gbps": with_entry(np.nan)}, r"bandwidth_gbps\[1, 2\] = nan"),
        ({"delay_s": np.ones((4, 3))}, r"delay_s has shape \(4, 3\): must be square"),
        ({"delay_s": [[0.0, 1.0], [1.0]]}, "delay_s: not a matrix of numbers"),
        ({"bandwidth_gbps": np.ones((5, 5))}, "delay_s is 4 × 4 but bandwidth_gbps is 5 × 5"),
        ({"stages": 3}, "3 stages × 2 replicas need 6 devices, the links describe 4: lower replicas or stages"),
        ({"replicas": 0}, "replicas = 0: must be at least 1"),
        ({"gradient_gigabytes": -1.0}, "gradient_gigabytes = -1.0"),
        ({"compute_s": [1.0, 1.0]}, r"compute_s has shape \(2,\), the links describe 4 devices"),
        ({"compute_s": [1.0, -1.0, 1.0, 1.0]}, r"compute_s\[1\] = -1.0"),
    ],
)
def test_bad_input_says_what_and_where(changes, told):
    with pytest.raises(ValueError, match=told):
        four_devices(**changes)


def test_diagonals_are_not_read():
    delay, bandwidth = np.full((4, 4), 0.01), np.ones((4, 4))
    clean = four_devices(delay_s=delay, bandwidth_gbps=bandwidth)
    np.fill_diagonal(delay, np.nan)
    np.fill_diagonal(bandwidth, 0.0)
    dirty = four_devices(delay_s=delay, bandwidth_gbps=bandwidth)
    np.testing.assert_array_equal(dirty.gradient_s, clean.gradient_s)
    np.testing.assert_array_equal(dirty.activation_s, clean.activation_s)


@pytest.mark.parametrize("table", [[[0, 1], [1, 2]], [[0, 1], [2, 4]], [[0, 1]], [[0, 1], [2, -1]]])
def test_a_table_must_place_different_known_devices(table):
    with pytest.raises(ValueError, match="table"):
        placement(four_devices(), np.array(table))
