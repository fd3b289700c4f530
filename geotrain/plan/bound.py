"""How cheap any placement can be at best: proven lower bounds on the cost of `geotrain.plan.cost`.

`quick_bound` looks at each device's cheapest links. `lower_bound` raises it by the complete search of
`geotrain.plan.exact` over classes of devices: if nothing lies below a threshold, the threshold is a bound, and if
something does, the cheapest is. The first threshold tried is the cost of the placement that was found, so the search
ends with a proof that it is optimal, or with the optimum over classes; where that takes too much work, lower ones
are tried.
"""

from __future__ import annotations

import numpy as np

from geotrain.plan.classes import joined_classes, like_classes, off_diagonal
from geotrain.plan.cost import Problem
from geotrain.plan.exact import TooMuchWorkError, cheapest_below

RUNGS = (1.0, 0.85, 0.65, 0.4, 0.2)  # thresholds tried, between the quick bound and the known cost
ROUNDING = 1e-9  # thresholds lie this share below the known cost, so that the cost itself is not "below"


def quick_bound(problem: Problem) -> float:
    """From each device's cheapest links alone (s).

    A stage's device pays at least its D−1 cheapest gradient links, and with n devices left idle at least the n+1-th
    dearest such sum is paid. If more than e·D + n devices have no activation link below t, then more than e stages
    hold one of them, so at least e + 1 (at most S−1) edges of the path cost t or more.
    """
    return _quick_gradients(problem) + _quick_activations(problem) + compute_bound(problem)


def quick_bound_of_hidden(problem: Problem, shared: bool) -> float:
    """The same where gradients travel while devices compute (s): with ACCO. shared: replicas take of a step's work as
    they get to it (`acco.balance`), at best with the S·D fastest devices' rates together, over the cheapest links."""
    if not shared:
        return max(_quick_gradients(problem), _quick_activations(problem) + compute_bound(problem))
    computed = problem.placed / float((1 / np.sort(problem.compute_s)[: problem.placed]).sum())
    edges = 2 * (problem.stages - 1)
    passed_on = edges * float(off_diagonal(problem.activation_s).min()) if edges else 0.0
    return max(_quick_gradients(problem), passed_on + computed)


def compute_bound(problem: Problem) -> float:
    """The S·D-th fastest device computes, at best, the longest."""
    return float(np.sort(problem.compute_s)[problem.placed - 1])


def _quick_gradients(problem: Problem) -> float:
    sums = np.sort(off_diagonal(problem.gradient_s), axis=1)[:, : problem.replicas - 1].sum(axis=1)
    return float(np.sort(sums)[problem.placed - 1])


def _quick_activations(problem: Problem) -> float:
    if problem.stages == 1:
        return 0.0
    dearest_first = np.sort(off_diagonal(problem.activation_s).min(axis=1))[::-1]
    return 2 * float(dearest_first[problem.idle :: problem.replicas][: problem.stages - 1].sum())


def lower_bound(problem: Problem, known_s: float, max_work: int = 30_000_000) -> float:
    """A proven lower bound (s) on the cost of every placement, at most `known_s`, the cost of one that was found.

    Equal to known_s · (1 − 1e-9) when that placement is proven optimal. max_work: see `cheapest_below`; the default
    is some ten seconds a threshold.
    """
    proven, compute = _quick_gradients(problem) + _quick_activations(problem), compute_bound(problem)
    target = (known_s - compute) * (1 - ROUNDING)
    if proven >= target:
        return min(proven + compute, known_s)
    classes = like_classes(problem) or joined_classes(problem)
    for rung in RUNGS:
        threshold = proven + rung * (target - proven)
        try:
            optimum = cheapest_below(classes, problem.stages, threshold, max_work)
        except TooMuchWorkError:
            continue
        return compute + max(proven, optimum.total_s if optimum else threshold)
    return proven + compute
