"""The annealer in C against its reference in numpy, and both against the cost."""

import numpy as np
import pytest

from geotrain.kernels import Annealing, anneal, cpu
from geotrain.plan.placement.cost import Problem, problem_from_links, table_costs
from tests.support.plan_cases import random_problem

SHAPES = [(5, 4, 3), (2, 3, 0), (1, 4, 2), (6, 1, 0), (1, 3, 0), (4, 9, 0), (7, 2, 9)]  # stages, replicas, idle


def alike_problem(rng: np.random.Generator, stages: int, replicas: int, idle: int) -> Problem:
    """Devices of three classes, and few different links: many tables cost the same."""
    region = rng.integers(0, 3, size=stages * replicas + idle)
    gbps = rng.choice([0.5, 1.0, 4.0], (3, 3))[np.ix_(region, region)]
    return problem_from_links(
        np.zeros_like(gbps),
        np.minimum(gbps, gbps.T),
        stages=stages,
        replicas=replicas,
        gradient_gigabytes=0.65,
        activation_gigabytes=0.47,
        compute_s=rng.choice([1.0, 2.0], len(region)),
    )


def start(problem: Problem, rng: np.random.Generator):
    order = rng.permutation(problem.devices).astype(np.int32)
    return problem.gradient_s, problem.activation_s, problem.compute_s, order


def how(problem: Problem, steps: int, seed: int = 7) -> Annealing:
    shape = problem.stages, problem.replicas
    return Annealing(*shape, steps, heat=5.0, cold=0.01, seed=seed, dear_s=50.0, shift=2)


def cost(problem: Problem, order: np.ndarray) -> float:
    table = order[: problem.placed].reshape(problem.stages, problem.replicas).astype(np.int64)
    return float(table_costs(problem, table))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [random_problem, alike_problem])
def test_c_finds_the_table_of_the_reference(shape, kind, monkeypatch):
    """By every kind of turn, at high and low temperatures: if one is decided otherwise, so are all that follow."""
    assert cpu.library() is not None
    rng = np.random.default_rng(shape)
    problem = kind(rng, *shape)
    given = start(problem, rng)
    kept = given[3].copy()
    found = [anneal(*given, how(problem, 150, seed)) for seed in range(2)]
    monkeypatch.setattr(cpu, "library", lambda: None)
    for seed, order in enumerate(found):
        assert order.tolist() == anneal(*given, how(problem, 150, seed)).tolist()
        assert sorted(order) == list(range(problem.devices))
        assert cost(problem, order) < cost(problem, kept) or problem.stages == 1
    assert (given[3] == kept).all()


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
