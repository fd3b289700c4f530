"""How long a job is to be, so that jobs of several workers end together: answers that wait then wait for little."""

from __future__ import annotations

from collections.abc import Sequence

FAR = 4.0  # usual jobs: who is to end so long before or after is at another place, or its clock was set


def ending_together(
    usual: int, own: tuple[float, float], others: Sequence[tuple[float, float]], left: int, steers: bool,
    with_s: float | None,
) -> int:  # fmt: skip
    """Return the steps of a worker's next job, within half of the usual ones.

    It ends when one of the fastest worker does, and the last jobs of all end together: for a short last one all
    others would wait. A clock that was set makes one job longer or shorter.

    usual: steps. own: when the job begins, and seconds of a step. others: of each other worker, when its newest job
    ends, and seconds of a step. left: steps that are not handed out. steers: whether it is nearly as fast as the
    fastest; else only its last job is unusual. with_s: when the newest job of the fastest worker ends, unless this is
    it, or nothing is known.
    """
    begins_s, own_s = own
    others = [each for each in others if abs(each[0] - begins_s) < FAR * usual * own_s]
    speed = 1 / own_s + sum(1 / step_s for _, step_s in others)
    all_s = (
        left + begins_s / own_s + sum(end_s / step_s for end_s, step_s in others)
    ) / speed  # nothing is left then
    jobs = max(1, round((all_s - begins_s) / (usual * own_s)))
    steps = min(1.5 * usual, max(0.5 * usual, (all_s - begins_s) / jobs / own_s))
    period_s = steps * own_s
    if jobs > 1 and not steers:
        steps = usual
    elif jobs > 1 and with_s is not None:
        steps -= ((begins_s + period_s - with_s + period_s / 2) % period_s - period_s / 2) / own_s
    elif jobs == 1 and all(end_s > all_s - period_s / 2 for end_s, _ in others):  # nobody gets another one
        steps = min(1.5 * usual, left)
    return max(1, round(steps))
