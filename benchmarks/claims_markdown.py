"""The study's report as the tables of docs/evidence.md."""

from __future__ import annotations

from typing import Any

from claims_report import table

# What the speed-ups and the other figures should reach, and what was published.
GOALS = {
    "ours_over_diloco": (10.0, "7.5"),
    "ours_over_async_local_sgd": (2.1, "2.1"),
    "ours_over_halos": (1.5, "–"),
    "ours_over_fair_diloco": (1.3, "–"),
}
GAP_GOAL, GOODPUT_GOAL = 0.01, 0.95
NONE = "–"


def markdown(report: dict[str, Any], titles: dict[str, str]) -> str:
    parts = [_setting(report), _goals(report), _methods(report, titles)]
    if "harsh" in report:
        parts.append(_harsh(report))
    return "\n\n".join([*parts, _goodput(report), _settings(report, titles)]) + "\n"


def _setting(report: dict[str, Any]) -> str:
    s = report["setting"]
    seeds = f"seeds 0 to {s['seeds'] - 1}" if s["seeds"] > 1 else "one seed, so without confidence intervals"
    return (
        f"Model of {s['parameters']:,} parameters, bytes of Python's standard library (digest {s['text']}); "
        f"{s['steps']} inner steps of all 16 workers together, {seeds}. "
        f"Target: {report['target_loss']:.4f} nats a byte (mean), for each seed DiLoCo's final test loss. "
        "± and brackets: 95 % confidence (Student's t over seeds)."
    )


def _goals(report: dict[str, Any]) -> str:
    rows = []
    for name, found in report["speedup"].items():
        goal, published = GOALS[name]
        value = _times(found["mean"])
        if found["reached"] > 1:
            value += f" [{found['low']:.2f}, {found['high']:.2f}]"
        met = NONE if found["mean"] is None else _met(found["mean"] >= goal)
        rows.append((f"`{name}`", value, f"≥ {goal:g}", published, met, str(found["reached"])))
    gap = report["loss_gap_to_synchronous"]
    if gap is not None:
        rows.append(("`loss_gap_to_synchronous`", f"{gap:+.4f}", f"≤ {GAP_GOAL}", NONE, _met(gap <= GAP_GOAL), NONE))
    kept = report["goodput"]["ours"]
    rows.append(("`goodput`", f"{kept:.3f}", f"≥ {GOODPUT_GOAL}", NONE, _met(kept >= GOODPUT_GOAL), NONE))
    return table(rows, ("figure", "found", "goal", "published", "goal met", "seeds that reached the target"))


def _methods(report: dict[str, Any], titles: dict[str, str]) -> str:
    rows = []
    for m, title in titles.items():
        s, loss = report["methods"][m], report["loss_at_equal_tokens"][m]
        rows.append(
            (
                title,
                _number(report["time_to_target_s"][m], 0),
                f"{loss['mean']:.4f}" + (f" ± {loss['half_width']:.4f}" if loss["n"] > 1 else ""),
                _number(report["loss_at_our_time"][m], 4),
                f"{s['end_s']:.0f}",
                f"{100 * s['utilization']:.0f} %",
                f"{s['wide_gigabytes']:.1f}",
            )
        )
    header = ("method", "s to target", "test loss, equal tokens", "at our time", "end, s", "utilization", "GB far")
    longer = report["with_a_schedule_twice_as_long"]
    more = [f"{titles[m]} {loss['mean']:.4f}" for m, loss in longer.items()]
    told = "Rivals that did not reach the target were given a schedule twice as long, for times to it; they end at"
    note = f"\n\n{told}: {'; '.join(more)}." if more else ""
    return table(rows, header) + note


def _harsh(report: dict[str, Any]) -> str:
    names = list(report["speedup"])
    rows = [
        (
            world,
            *(_times(found["speedup"].get(name)) for name in names),
            *(_number(loss, 3) for loss in found["loss_at_equal_tokens"].values()),
        )
        for world, found in report["harsh"].items()
    ]
    first = next(iter(report["harsh"].values()))
    header = ("world", *(f"`{n}`" for n in names), *(f"loss {m}" for m in first["loss_at_equal_tokens"]))
    s = report["setting"]
    return (
        f"Harsher worlds, {s['harsh_steps']} inner steps, seeds: {s['harsh_seeds']}; times to DiLoCo's final loss in "
        f"that world (–: the rival ends above it):\n\n{table(rows, header)}"
    )


def _goodput(report: dict[str, Any]) -> str:
    g = report["goodput"]
    rows = [
        ("ours, simulated", f"{g['ours']:.3f}", f"{g['ours_deaths']:.0f} deaths, {g['ours_lost_share']:.4f} lost"),
        ("quorum syncer, model", f"{g['quorum_syncer']:.3f}", f"published: {g['quorum_syncer_published']}"),
        ("elastic data parallel, model", f"{g['elastic_data_parallel']:.3f}", f"a pause of {g['pause_s']:.1f} s"),
    ]
    return table(rows, ("goodput, 2.4 million devices", "found", ""))


def _settings(report: dict[str, Any], titles: dict[str, str]) -> str:
    rows = [(title, f"`{report['setting']['settings'][m]}`") for m, title in titles.items()]
    return table(rows, ("method", "settings found (the rest: its run file)"))


def _times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}×"


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _met(met: bool) -> str:
    return "yes" if met else "**no**"
