"""Plain simulated annealing in numpy, to compare with: two devices exchange places, the cost itself is annealed."""

from __future__ import annotations

import time

import numpy as np

from geotrain.plan.placement.cost import Problem, table_costs

CHAINS, STEPS_A_LOOK = 64, 32  # chains side by side, as numpy is fastest; steps between two looks at the clock
HOT, COLD = 0.05, 0.0015  # shares of a good cost


def anneal_for(problem: Problem, seconds: float, about_s: float, seed: int) -> tuple[float, float]:
    """The cheapest cost met from random tables within at least that processor time, and the time it took.

    about_s: about what a good placement costs; temperatures are shares of it, and fall with the time that has passed.
    """
    rng, began, took = np.random.default_rng(seed), time.process_time(), 0.0
    every, shape = np.arange(CHAINS), (CHAINS, problem.stages, problem.replicas)
    orders = np.array([rng.permutation(problem.devices) for _ in every])
    costs = table_costs(problem, orders[:, : problem.placed].reshape(shape))
    best = costs.min()
    while took < seconds:
        heat = about_s * HOT * (COLD / HOT) ** (took / seconds)
        for _ in range(STEPS_A_LOOK):
            one, two = rng.integers(problem.placed, size=CHAINS), rng.integers(problem.devices, size=CHAINS)
            then = orders.copy()
            then[every, one], then[every, two] = orders[every, two], orders[every, one]
            cost = table_costs(problem, then[:, : problem.placed].reshape(shape))
            accepted = cost <= costs + heat * rng.exponential(size=CHAINS)
            orders[accepted], costs[accepted] = then[accepted], cost[accepted]
            best = min(best, costs.min())
        took = time.process_time() - began
    return float(best), took
