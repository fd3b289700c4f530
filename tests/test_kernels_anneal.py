"""The annealer in C against its reference in Python, and both against the cost that they claim."""

import numpy as np
import pytest

from geotrain.kernels import Annealing, anneal, cpu, reference_anneal
from geotrain.plan.placement.cost import Problem, table_costs
from tests.support.plan_cases import random_problem

SHAPES = [(5, 4, 3), (2, 3, 0), (1, 4, 2), (6, 1, 0), (1, 3, 0)]  # stages, replicas, idle


def start(problem: Problem, rng: np.random.Generator):
    order = rng.permutation(problem.devices).astype(np.int32)
    return problem.gradient_s, problem.activation_s, problem.compute_s, order


def how(problem: Problem, steps: int) -> Annealing:
    cool = 0.01 ** (1 / (3 * steps))
    return Annealing(problem.stages, problem.replicas, steps, 5.0, cool, seed=7, first_power=2, last_power=4)


@pytest.mark.parametrize("shape", SHAPES)
def test_c_gives_the_bits_of_the_reference_and_the_cost_of_its_table(shape):
    """5,000 steps a level: more than are between two evaluations from nothing."""
    rng = np.random.default_rng(shape)
    problem = random_problem(rng, *shape)
    given = start(problem, rng)
    kept = given[3].copy()
    cost, order = cpu.anneal(*given, how(problem, 5_000))
    expected, as_expected = reference_anneal.anneal(*given, how(problem, 5_000))
    assert (cost, order.tolist()) == (expected, as_expected.tolist())
    assert sorted(order) == list(range(problem.devices))
    table = order[: problem.placed].reshape(problem.stages, problem.replicas).astype(np.int64)
    assert cost == pytest.approx(table_costs(problem, table), rel=1e-12)
    first = kept[: problem.placed].reshape(problem.stages, problem.replicas).astype(np.int64)
    assert cost < table_costs(problem, first) or problem.stages == 1
    assert (given[3] == kept).all()


def test_without_the_compiled_kernels_the_reference_works(monkeypatch):
    rng = np.random.default_rng(3)
    problem = random_problem(rng, 3, 2, idle=1)
    given = start(problem, rng)
    compiled = anneal(*given, how(problem, 200))
    monkeypatch.setattr(cpu, "library", lambda: None)
    plain = anneal(*given, how(problem, 200))
    assert (compiled[0], compiled[1].tolist()) == (plain[0], plain[1].tolist())


def test_arguments_are_checked():
    rng = np.random.default_rng(4)
    problem = random_problem(rng, 2, 2, idle=0)
    gradient, activation, compute, order = start(problem, rng)
    with pytest.raises(ValueError, match=r"activation must be float64 of shape \(4, 4\)"):
        anneal(gradient, activation[:3], compute, order, how(problem, 10))
    with pytest.raises(ValueError, match="permutation of the devices"):
        anneal(gradient, activation, compute, np.zeros_like(order), how(problem, 10))
    with pytest.raises(ValueError, match="permutation of the devices"):
        anneal(gradient, activation, compute, order, how(random_problem(rng, 3, 2, idle=0), 10))
