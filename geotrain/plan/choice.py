"""Chooses among the workers that could be formed, by their price: on how many of a region's hosts, bought or at the
spot price; and leaves out those that the others do better without.

Every group of hosts has alternatives: workers on all of its hosts, on some, on spot hosts. Of each group one is
taken, or none. Their sums of (dollars an hour, steps a second) have a frontier, beyond which nothing is both as cheap
and as fast; it is found group by group, and is exact but for EQUAL. What the user wishes is a point of it.

A spot host that is taken back stops its worker until another has joined; nothing that was acknowledged is lost. So a
worker trains for 1 / (1 + Σ preemptions an hour · hours until replaced) of the time, and is paid for all of it.

Tokens of more workers, and of slower ones, are worth less (`geotrain.plan.model.loss`). Wishes are in tokens; what is
compared is what they are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from geotrain.plan.grouping import Groups, Workers, speed
from geotrain.plan.inventory import DAY_S, PlanError, PlanTask, Wish
from geotrain.plan.model.loss import loss_gap, worth

NO_WORSE = 1.001  # prices a token within this factor are equal
EQUAL = 1e-3  # a dearer sum must be faster by this share to stay on the frontier


@dataclass(frozen=True)
class Choice:
    """Workers, their steps a second together, preemptions counted, and their price."""

    workers: Workers
    steps_per_s: float
    usd_per_hour: float

    @property
    def usd_per_step(self) -> float:
        return self.usd_per_hour / self.steps_per_s / 3600


def choose(task: PlanTask, wish: Wish, divisions: Sequence[Groups]) -> Workers:
    """Choose the workers that fulfil the wish, and of those as cheap a token the ones whose tokens are worth most.
    divisions: of the hosts into groups, of which one is taken. Raises PlanError, which says what could be had."""
    if not wish.priced:
        return helpful(task, wish, [tuple(w for group in groups for w in group[0]) for groups in divisions])
    found = [workers for groups in divisions for group in groups for workers in group]
    unpriced = {host.kind for workers in found for w in workers for host in w.layout.hosts if host.unpriced}
    if unpriced:
        raise PlanError(
            f"--objective cost, --usd, --tokens-per-s: devices.{min(unpriced)} has no usd_per_hour; add it, or plan "
            "for speed"
        )
    priced = [[[*group, *(w for w in map(on_spot, group) if w)] for group in groups] for groups in divisions]
    every = [choice for groups in priced for choice in frontier(groups)]

    def tokens_per_s(choice: Choice) -> float:
        return choice.steps_per_s * task.tokens_per_step * wish.utilization

    def usd(choice: Choice) -> float:
        """Dollars for the tokens, or, where these are what is asked for, of all days."""
        if wish.objective == "tokens":
            return choice.usd_per_hour * 24 * (wish.within_days or 0.0)
        trained = choice.usd_per_step * wish.tokens / (task.tokens_per_step * wish.utilization)
        return trained + choice.usd_per_hour * wish.idle_s / 3600

    fast = [c for c in every if tokens_per_s(c) >= wish.least_tokens_per_s]
    if not fast:
        most = max(map(tokens_per_s, every))
        days = wish.tokens / most / DAY_S
        wanted = f"{wish.tokens:.3g} tokens within {wish.within_days:g} days" if wish.within_days else "that"
        if wish.tokens_per_s is not None:
            wanted = f"{wish.tokens_per_s:,.0f} tokens/s"
        raise PlanError(
            f"{wanted} cannot be had: all workers together need {days:.1f} days at a utilization of "
            f"{wish.utilization:.0%}, {most:,.0f} tokens/s"
        )
    paid = [c for c in fast if wish.usd is None or usd(c) <= wish.usd]
    if not paid:
        raise PlanError(
            f"--usd {wish.usd:,.0f} is too little: the cheapest plan costs {min(map(usd, fast)):,.0f} USD at a "
            f"utilization of {wish.utilization:.0%}; allow more, train fewer tokens, or lower what must be reached"
        )
    least = min(c.usd_per_step for c in paid)
    good = [c for c in paid if wish.objective != "cost" or c.usd_per_step <= NO_WORSE * least]
    return max(good, key=lambda c: (effective(task, wish, c.workers), -c.usd_per_hour)).workers


def effective(task: PlanTask, wish: Wish, workers: Workers) -> float:
    """Return the steps a second of data parallelism that these workers' are worth."""
    return speed(workers) * worth(expected_gap(task, wish, workers))


def expected_gap(task: PlanTask, wish: Wish, workers: Workers) -> float:
    """Estimate the final loss over data parallelism's of as many tokens, less 1."""
    step_s, tokens = [w.layout.step.step_s for w in workers], tokens_of(task, wish, workers)
    return loss_gap(step_s, tokens, task.tokens_per_step, task.run.outer.scale_local_steps)


def tokens_of(task: PlanTask, wish: Wish, workers: Workers) -> float:
    """Count the tokens that these workers are to train."""
    if wish.objective != "tokens":
        return wish.tokens
    return speed(workers) * task.tokens_per_step * wish.utilization * wish.seconds


def helpful(task: PlanTask, wish: Wish, divisions: Sequence[Workers]) -> Workers:
    """Keep so many of the fastest workers of one division that all of their steps are worth most, with at least the
    wished speed."""
    every = list[Workers]()
    for workers in divisions:
        slowest_last = sorted(workers, key=lambda worker: -speed((worker,)))
        for count in range(min(len(workers), wish.most_workers or len(workers)), 0, -1):
            every.append(tuple(worker for worker in workers if worker in slowest_last[:count]))
    a_step = task.tokens_per_step * wish.utilization
    fast = [kept for kept in every if speed(kept) * a_step >= wish.least_tokens_per_s]
    return max(fast or every[:1], key=lambda kept: effective(task, wish, kept))


def frontier(groups: Sequence[Sequence[Workers]]) -> list[Choice]:
    """Find all sums that nothing as cheap outruns, the cheapest first."""
    found = [Choice((), 0.0, 0.0)]
    for group in groups:
        each = [Choice(workers, speed(workers), usd_per_hour(workers)) for workers in group]
        both = [(a.usd_per_hour + b.usd_per_hour, -a.steps_per_s - b.steps_per_s, a, b) for a in found for b in each]
        both += [(a.usd_per_hour, -a.steps_per_s, a, found[0]) for a in found]
        both.sort(key=lambda entry: entry[:2])
        fastest = min(both, key=lambda entry: (entry[1], entry[0]))
        kept = both[:1]
        for entry in both:
            if -entry[1] > -kept[-1][1] * (1 + EQUAL) or (entry is fastest and entry[1] < kept[-1][1]):
                kept.append(entry)
        found = [Choice((*a.workers, *b.workers), -minus, usd) for usd, minus, a, b in kept]
    return [choice for choice in found if choice.workers]


def usd_per_hour(workers: Workers) -> float:
    return sum(w.layout.usd_per_hour or 0.0 for w in workers)


def on_spot(workers: Workers) -> Workers:
    """The same workers on spot hosts; none where a host has no spot price."""
    if any(host.offer.spot_usd_per_hour is None for w in workers for host in w.layout.hosts):
        return ()
    return tuple(w.on(tuple(host.on_spot() for host in w.layout.hosts)) for w in workers)
