"""The study's report as the tables of docs/evidence.md."""

from __future__ import annotations

from typing import Any

from benchmarks.goals import PARTS, Goal
from benchmarks.studies.claims.baseline import best_test
from benchmarks.studies.claims.report import table
from benchmarks.studies.claims.study import FULL

# Goal of each speed-up and gap, and what was published.
GOALS = {
    goal.metric.removesuffix(".mean").rpartition(".")[2]: goal
    for part in PARTS
    if part.module == "claims"
    for goal in part.goals
}
PUBLISHED = {"ours_over_diloco": "7.5", "ours_over_async_local_sgd": "2.1"}
NONE = "–"


def markdown(report: dict[str, Any], titles: dict[str, str]) -> str:
    parts = [_setting(report, titles), _goals(report), _gaps(report, titles), _methods(report, titles)]
    return "\n\n".join(parts) + "\n"


def _setting(report: dict[str, Any], titles: dict[str, str]) -> str:
    s = report["setting"]
    seeds = f"seeds 0 to {s['seeds'] - 1}" if s["seeds"] > 1 else "one seed, so without confidence intervals"
    return (
        f"Model of {s['parameters']:,} parameters, bytes of Python's standard library (digest {s['text']}); "
        f"{s['steps']} inner steps of all 16 workers together, {seeds}. "
        f"Target: {number(report['target_loss'], 4)} nats a byte (mean), for each seed the final test loss of "
        f"{titles[s['target']]}. Rivals in the optimizer with which they end lower: "
        f"{', '.join(f'`{m}`' for m in s['rivals'].values())}. "
        "± and brackets: 95 % confidence (Student's t over seeds)."
    )


def _goals(report: dict[str, Any]) -> str:
    rows = []
    for name, found in report["speedup"].items():
        goal = GOALS.get(name, Goal(name))
        met = _met(goal, found["mean"], found["low"])
        rows.append((f"`{name}`", _speedup(found), str(goal), PUBLISHED.get(name, NONE), met, str(found["reached"])))
    for name, goal in GOALS.items():
        if (gap := report.get(name)) is not None:
            high = None if gap["half_width"] is None else gap["mean"] + gap["half_width"]
            rows.append((f"`{name}`", share(gap), str(goal), NONE, _met(goal, gap["mean"], high), NONE))
    return table(rows, ("figure", "found", "goal", "published", "goal met", "seeds that reached the target"))


def share(gap: dict[str, Any] | None) -> str:
    """A gap with its interval."""
    if gap is None or gap["mean"] is None:
        return NONE
    half = "" if gap["half_width"] is None else f" ± {gap['half_width']:.4f}"
    return f"{number(gap['mean'], 4, '+')}{half}"


def _gaps(report: dict[str, Any], titles: dict[str, str]) -> str:
    """Ours in both forms and with both optimizers, held against data parallelism with both, and against the best one
    found, of means over the seeds."""
    found, s = report["gaps"], report["setting"]
    references = list(next(iter(found.values())))
    best = best_test(range(s["seeds"])) if (s["steps"], s["size"]) == (FULL.steps, FULL.size) else None

    def to_best(method: str) -> str:
        loss = report["loss_at_equal_tokens"][method]["mean"]
        return NONE if loss is None or best is None else number(loss / best - 1, 4, "+")

    rows = [(titles[m], *(share(gap) for gap in of.values()), to_best(m)) for m, of in found.items()]
    header = *(f"above {titles.get(m, m)}" for m in references), "above the best data parallelism found"
    return table(rows, ("loss at equal tokens", *header))


def _methods(report: dict[str, Any], titles: dict[str, str]) -> str:
    rows = []
    for m, title in titles.items():
        s = report["methods"][m]
        used = s["utilization"]
        rows.append(
            (
                title,
                number(report["time_to_target_s"][m], 0),
                _loss(s),
                number(report["loss_at_our_time"].get(m), 4),
                number(s["steps"], 0),
                number(s["end_s"], 0),
                NONE if used is None else f"{100 * used:.0f} %",
                number(s["wide_gigabytes"], 1),
            )
        )
    header = (
        "method", "s to target", "test loss, equal tokens", "ending at our time (one seed, better optimizer)",
        "steps", "end, s", "utilization", "GB between regions",
    )  # fmt: skip
    more = _longer(report["with_a_schedule_twice_as_long"], titles)
    told = "Rivals that did not reach the target were given a schedule twice as long, and trained until they did"
    note = f"\n\n{told}: {more}." if more else ""
    return table(rows, header) + note


def _loss(s: dict[str, Any]) -> str:
    loss, failed = s["loss"], s["failed"]
    if loss["mean"] is None:
        return ", ".join(dict.fromkeys(failed)) or NONE
    half = "" if loss["half_width"] is None else f" ± {loss['half_width']:.4f}"
    note = f" ({len(failed)} seeds {failed[0]})" if failed else ""
    return f"{loss['mean']:.4f}{half}{note}"


def _longer(found: dict[str, dict[str, int]], titles: dict[str, str]) -> str:
    return "; ".join(f"{titles[m]} ({of['reached']} of {of['runs']} seeds)" for m, of in found.items())


def _speedup(found: dict[str, Any]) -> str:
    if found["mean"] is None:
        return NONE
    interval = "" if found["low"] is None else f" [{found['low']:.2f}, {found['high']:.2f}]"
    return f"{found['mean']:.2f}×{interval}"


def number(value: float | None, digits: int, sign: str = "") -> str:
    return NONE if value is None else f"{value:{sign}.{digits}f}"


def _met(goal: Goal, mean: float | None, edge: float | None) -> str:
    """edge: the worse end of the interval; None: there is no interval."""
    if mean is None or str(goal) == NONE:
        return NONE
    if not goal.met(mean):
        return "**no**"
    return "yes" if edge is not None and goal.met(edge) else "mean only"
