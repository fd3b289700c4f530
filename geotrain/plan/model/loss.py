"""The loss that the outer loop costs, and what that is worth in tokens: the one place of the curve that plans use.

All of it is of docs/evidence.md, with Muon. LOSS: final loss above data parallelism's of equal tokens, by number of
workers, each of which took STEPS inner steps ("Figures"). It falls as a power of these steps ("More text narrows it":
11.9 % at 240, 1.4 % at 3,840); beyond LEAST and MOST steps the curve is not followed. An update is as stale as those
of so many equal workers as update while it is made: what one worker does in its time counts as theirs. Data
parallelism's loss falls with its tokens to the power of −ELASTICITY: 0.046 to 0.085 in the same table, 0.058 by
Hoffmann's law for 20 tokens a parameter of a billion (arXiv 2203.15556). So a loss higher by a share g is that of
(1 + g)^(−1 / ELASTICITY) of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import numpy as np

LOSS = {1: 0.0, 4: 0.020, 16: 0.026}
STEPS, LEAST, MOST = 960, 240, 10_000
FALL = 0.8
ELASTICITY = 0.06
DOUBLED = (LOSS[16] - LOSS[4]) / 2  # of loss, for twice as many workers


def loss_gap(step_s: Sequence[float], tokens: float, tokens_per_step: float, equal_jobs: bool = False) -> float:
    """Estimate the final loss over data parallelism's of as many tokens, less 1.

    step_s: seconds of each worker's step. equal_jobs: slower workers take fewer steps a job, so that all updates are
    as stale; else one of a slow worker is by as much staler. More workers than LOSS has go on as the last ones do.
    """
    workers, rate = len(step_s), sum(1 / s for s in step_s)
    steps = min(max(tokens / tokens_per_step / workers, LEAST), MOST)
    others = [workers if equal_jobs else max(workers, s * rate) for s in step_s]  # equal workers, as stale as these
    by_worker = [_loss(n) / s / rate for n, s in zip(others, step_s, strict=True)]
    return sum(by_worker) * (STEPS / steps) ** FALL


def worth(gap: float) -> float:
    """Return the share of the tokens with which data parallelism reaches a loss that is higher by the share `gap`."""
    return float((1 + gap) ** (-1 / ELASTICITY))


def _loss(workers: float) -> float:
    known = np.interp(log2(workers), [log2(count) for count in LOSS], list(LOSS.values()))
    return float(known) + DOUBLED * max(0.0, log2(workers / max(LOSS)))
