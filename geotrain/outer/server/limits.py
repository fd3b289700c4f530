"""Recognizes updates whose norm is far above the usual one.

For each fragment the server keeps the logarithms of the norms of the last updates it applied. What is usual is their
median and their median absolute deviation; unlike mean and variance, these hardly move for one wild update.

A healthy region's updates differ among themselves: delayed Nesterov moves its weights by the momentum of many updates
at every N-th, so some are ten times their neighbours. So an update also passes when it is at most twice the largest
remembered norm. One history serves all members of a server, since they are of one kind (workers, or regions).

A replay must accept and refuse as the server did. So nothing but journaled state decides, with the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from math import exp, fsum, inf, log, sqrt
from statistics import median
from typing import Any

from geotrain.config import LimitsConfig
from geotrain.outer.messages import BadDelta, Refused

# Norms remembered for each fragment: so many times the number of members, up to a number beyond which they cost time.
MEMORY, MOST_MEMORY = 64, 512
FAR = 4.0  # beyond so many times what would be usual by the others' updates, no history of a member's own helps it
LEAST_OF_OTHERS = 4  # updates of others, by which one is measured
PEAK = 2.0  # a norm up to this many times the largest remembered one passes
LEAST_DEVIATION = 0.25  # of the logarithm, so that norms that hardly varied so far do not make a small change suspect
NORMAL = 1.4826  # standard deviation over median absolute deviation of a normal distribution
Noted = tuple[str, float, float]
MOST_CHANGE = 4  # of H or K at once: norm limits let so much through
FP32_MAX = (2 - 2**-23) * 2.0**127


def changed_number(key: str, value: str, now: int) -> int:
    """Read what an operator sets this key to in a live run. now: its value. Raises Refused."""
    if not value.isdecimal() or not now <= int(value) * MOST_CHANGE <= now * MOST_CHANGE**2:
        raise Refused(
            f"{key} = {value}: must be from {-(-now // MOST_CHANGE)} to {now * MOST_CHANGE}: it is {now} now, and "
            f"the norms of updates (outer.limits) may change by {MOST_CHANGE} times at once"
        )
    return int(value)


def norm(sums_of_squares: Sequence[float]) -> float:
    """Euclidean norm of a delta, from its parts' sums of squares; infinite when the total exceeds fp32's range.

    The bits are the same on replay: each part's sum has a fixed order (`Codec.decode_measured`), and `fsum` rounds
    once, whatever the order of the parts.
    """
    total = fsum(sums_of_squares)
    return sqrt(total) if total <= FP32_MAX else inf


def usual_limit(logs: Sequence[float], deviations: float) -> float:
    """The largest number that still passes after those with these logarithms: the larger of `deviations` deviations
    above their median, and PEAK times the largest. Logarithms, because norms differ by factors: half and double are
    equally far from the usual. Needs at least one."""
    centre = median(logs)
    deviation = NORMAL * median(abs(value - centre) for value in logs)
    exponent = max(centre + deviations * max(deviation, LEAST_DEVIATION), max(logs) + log(PEAK))
    return exp(exponent) if exponent < 700 else inf  # `exp` raises OverflowError from about 709.8 on


class NormLimits:
    """Refuses updates with an unusual norm, for each fragment by its own history.

    A region's update stands for `weight` workers' updates: more of them after a partition, fewer at the run's end. So
    two histories are kept, of norms and of norms divided by weight, and an update is refused only when it is unusual
    in both: a region that was cut off sends a large sum of ordinary updates.

    One member alone could make ever larger norms usual, a little at a time, and drive the weights of the others where
    it likes. So an update is refused, too, when it is FAR beyond what would be usual by the others' updates alone.
    """

    def __init__(self, config: LimitsConfig, fragments: int, members: int) -> None:
        self.deviations = config.norm_deviations
        # At least as many are remembered as are let through at first, or the check would never begin.
        self.free = min(config.norm_free_updates * members, max(MOST_MEMORY, config.norm_free_updates))
        self._memory = max(min(MEMORY * members, MOST_MEMORY), self.free)
        # For each fragment: (member, log of the norm, log of the norm over weight) of the last updates, oldest first.
        self._noted: list[deque[Noted]] = [deque(maxlen=self._memory) for _ in range(fragments)]

    def check(self, member: str, fragment: int, size: float, weight: int, others: Container[str] = ()) -> None:
        """Raise BadDelta if an update is out of the ordinary. size: its norm. others: members that are at work, by
        whose updates it is measured. Remembers nothing (see `note`)."""
        if self.deviations is None:
            return
        if size == inf:  # a norm beyond fp32 is never ordinary
            raise _unusual(member, fragment, size, "")
        noted = self._noted[fragment]
        theirs = [each for each in noted if each[0] != member and each[0] in others]
        # Any other passes until enough updates have shown what is usual.
        for known, needed, factor, whose in (
            (noted, self.free, 1.0, "is usual here"),
            (theirs, LEAST_OF_OTHERS, FAR, "is to be expected by what the others send"),
        ):
            if len(known) < needed:
                continue
            histories = [each[1] for each in known], [each[2] for each in known]
            limits = [factor * usual_limit(logs, self.deviations) for logs in histories]
            if size > limits[0] and size / weight > limits[1]:
                raise _unusual(member, fragment, size, f"; up to {limits[0]:.3g} {whose}")

    def senders(self, fragment: int) -> set[str]:
        """Return the members whose norms of this fragment are remembered."""
        return {noted[0] for noted in self._noted[fragment]}

    def note(self, member: str, fragment: int, size: float, weight: int) -> None:
        """Remember the norm of an update that was accepted. What was refused is never remembered: a member that keeps
        sending wild updates cannot make them usual."""
        if size > 0:  # zero has no logarithm
            self._noted[fragment].append((member, log(size), log(size / weight)))

    def state(self) -> list[Any]:
        """Return plain JSON data, from which `load` restores the histories."""
        return [[list(column) for column in zip(*noted, strict=True)] for noted in self._noted]

    def load(self, state: list[Any]) -> None:
        """Load what `state` returned."""
        self._noted = [deque(zip(*columns, strict=True), maxlen=self._memory) for columns in state]


def _unusual(member: str, fragment: int, size: float, usually: str) -> BadDelta:
    return BadDelta(
        f"{member}: fragment {fragment}: the update's norm of {size:.3g} is far out of the ordinary{usually}. "
        "Look for a diverged loss; to allow it, raise outer.limits.norm_deviations or set it to null"
    )
