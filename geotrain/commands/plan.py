"""`geotrain plan`: reads the files, plans, prints the plan, and writes what `geotrain launch` takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from geotrain.commands.operate import LiveRun, RunState
from geotrain.commands.output import duration
from geotrain.common.files import write_whole
from geotrain.common.names import GLOBAL
from geotrain.config import (
    ClusterConfig,
    OuterConfig,
    RunConfig,
    architecture_from_hf,
    load_cluster,
    load_run,
    parse,
    read_json,
)
from geotrain.launch.check import check_together, open_links
from geotrain.launch.launchers.base import WorkerPlace, hostfile_path
from geotrain.launch.launchers.registry import worker_commands
from geotrain.launch.run_rules import answers
from geotrain.launch.terminal import new_console, size, table_of
from geotrain.parameters.parameter_map import parameter_count
from geotrain.plan.catalogue import with_catalogue
from geotrain.plan.choice import NO_WORSE
from geotrain.plan.explain import alternatives, doubts, outer_text, reasons
from geotrain.plan.inventory import MOST_WORKERS, Objective, Pins, PlanError, PlanTask, Wish, pins_of, task_of
from geotrain.plan.live import Change, as_measured, changes
from geotrain.plan.model.loss import worth
from geotrain.plan.model.server_hosts import host_bytes
from geotrain.plan.picture import draw
from geotrain.plan.planner import Plan
from geotrain.plan.planner import plan as make_plan
from geotrain.simulate.forecast import forecast_run

TOKENS_PER_PARAMETER = 20  # Hoffmann et al., arXiv 2203.15556: the training-compute optimum
SEQUENCE, BATCH_TOKENS = 4096, 2**20
WARMUP_SHARE = 0.02


def plan(
    run_path: Path,
    cluster_path: Path,
    out: Path | None,
    explain: bool = False,
    tokens: float | None = None,
    objective: Objective = "speed",
    within_days: float | None = None,
    utilization: float = 0.95,
    usd: float | None = None,
    tokens_per_s: float | None = None,
    most_workers: int | None = None,
    *,
    pin_global: str | None = None,
    imbalance: float = 1.0,
    live: bool = False,
    catalogue: Path | None = None,
) -> tuple[Plan, list[Change]]:
    """Plan a run and print the plan with its forecast; returns also what it changes in a live run. Raises ConfigError
    (PlanError) and UnsupportedModelError with one message; then nothing is written.

    run_path: a run file, whose parallel, outer and model.recompute keys are kept; or a model's config.json. live: it
    is the folder of a run that is on, for the rest of whose tokens is planned, with speeds as measured there.
    catalogue: gives prices, see `geotrain.plan.catalogue`.
    out: a folder for run.json, cluster.json, hosts/ and placement.svg. tokens: to train; default: as the run file
    says, for a bare model 20 a parameter. imbalance: of tokens sent to experts, the fullest rank's over the mean.
    """
    console, cluster = new_console(), load_cluster(cluster_path)
    cluster = with_catalogue(cluster, catalogue) if catalogue else cluster
    running = LiveRun(run_path) if live else None
    raw = read_json(run_path / "run.json" if live else run_path)
    if running is not None:
        run, pins, cluster, left = _of_live(running, cluster, pin_global)
        tokens = tokens or left
    elif isinstance(raw, dict) and "model_type" in raw and "deepspeed" not in raw:  # a bare model: nothing is pinned
        run = parse(RunConfig, default_run(run_path.stem, raw, tokens), str(run_path))
        pins = pins_of({}, pin_global)
    else:
        run, pins = load_run(run_path), pins_of(raw, pin_global)
    wanted = tokens or run.data.train_samples * run.data.sequence_length
    wish = Wish(float(wanted), objective, within_days, utilization, usd, tokens_per_s, most_workers)
    found, forecast = played(task_of(run, pins, cluster, imbalance), wish)
    days, per_s = forecast["hours"] / 24 / found.available, forecast["tokens_per_s"] * found.available
    if within_days is not None and days > within_days and objective != "tokens":
        raise PlanError(
            f"{wanted:.3g} tokens within {within_days:g} days cannot be had: this plan needs {days:.3g} days, "
            f"{forecast['utilization']:.0%} of them at work; allow more days, train fewer tokens, or add accelerators"
        )
    if tokens_per_s is not None and per_s < tokens_per_s:
        raise PlanError(
            f"--tokens-per-s {tokens_per_s:,.0f} cannot be had: this plan trains {per_s:,.0f} tokens/s, with "
            f"{forecast['utilization']:.0%} of the time at work; ask for less, or add accelerators"
        )
    show_plan(found, forecast, console)
    changed = [] if running is None else list(changes(running.cluster, found))
    for change in changed:
        console.print(f"{change.what} {change.region}: {change.why}", highlight=False)
    if explain:
        show_reasons(found, forecast, console)
    if out is not None:
        write(found, out)
        console.print(f"\nwritten to {out}: run.json, cluster.json, hosts/, placement.svg; start it with\n")
        started = (
            f"{run_path} {out / 'cluster.json'} --apply" if live else f"{out / 'run.json'} {out / 'cluster.json'}"
        )
        console.print(f"  geotrain launch {started}", highlight=False)
    return found, changed


def played(task: PlanTask, wish: Wish) -> tuple[Plan, dict[str, Any]]:
    """Make the plan and play it; where the plan chooses `acco.balance`, both ways, of which the better one counts.
    Raises PlanError where neither can be had."""
    found, refused = list[tuple[Plan, dict[str, Any]]](), list[PlanError]()
    for each in map(task.with_balance, (False, True)) if task.may_balance else (task,):
        try:
            one = make_plan(each, wish)
        except PlanError as error:
            refused.append(error)
            continue
        check_together(one.run, one.cluster)
        found.append((one, forecast_run(one.run, one.cluster, one.prediction)))
    if not found:
        raise refused[0]

    def tokens(entry: tuple[Plan, dict[str, Any]]) -> float:
        """Tokens a second, or, where price decides, a dollar."""
        one, forecast = entry
        usd = one.prediction.usd_per_hour if wish.objective == "cost" else None
        return forecast["tokens_per_s"] * worth(one.expected_gap) * one.available / (usd or 1.0)

    return found[-1] if tokens(found[-1]) > NO_WORSE * tokens(found[0]) else found[0]


def _of_live(
    running: LiveRun, inventory: ClusterConfig, pin_global: str | None
) -> tuple[RunConfig, Pins, ClusterConfig, float]:
    """Return what is planned for a run that is on: its settings, what of them is kept, the inventory as measured,
    and the tokens that are left. What all members agreed on cannot change: the outer loop, and its server's place."""
    run, now = running.config, running.cluster
    seen = running.see()
    if seen.state is not RunState.RUNNING or not (top := seen.statuses.get(GLOBAL)):
        raise PlanError(f"{running.folder}: the run is not on: {seen.headline}; plan it from its run file")
    members = {name: m for status in seen.statuses.values() for name, m in status.get("members", {}).items()}
    step_s = {
        worker.name: m["compute_s"] / m["steps"]
        for _, worker in now.workers
        if (m := members.get(worker.name, {})).get("steps") and m.get("compute_s")
    }
    carried = {name: status.get("links", {}) for name, status in seen.statuses.items() if name != GLOBAL}
    peaks = {name: links.get("peak_up_bytes_per_s", 0) for name, links in carried.items()}
    there = next((r.name for r in now.regions if now.global_ssh is not None and r.ssh == now.global_ssh), None)
    agreed = frozenset({*OuterConfig.model_fields, "rule.updates_per_send", "rule.answers"})
    balance = run.acco.balance if run.acco else None
    pins = Pins(recompute=run.model.recompute, balance=balance, outer=agreed, global_region=pin_global or there)
    left = (run.data.train_samples - top["committed_samples"]) * run.data.sequence_length
    return run, pins, as_measured(run, now, inventory, step_s, peaks, there), float(max(left, 1))


def default_run(name: str, model: dict[str, Any], tokens: float | None) -> dict[str, Any]:
    """A run file for a bare model: bf16 with gradients summed in fp32, ZeRO 1, Muon with a warmed-up cosine, batches
    of about a million tokens."""
    architecture = architecture_from_hf(model)
    sequence = min(SEQUENCE, architecture.max_positions)
    batch = max(1, BATCH_TOKENS // sequence)
    wanted = tokens or TOKENS_PER_PARAMETER * parameter_count(architecture)
    steps = max(1, round(wanted / (sequence * batch)))
    slug = "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")[:31] or "planned"
    return {
        "name": slug,
        "model": {"config": model},
        "data": {"train": "data/train", "sequence_length": sequence, "train_samples": steps * batch},
        "deepspeed": {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "Muon", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": steps,
                    "warmup_num_steps": max(1, round(WARMUP_SHARE * steps)),
                    "warmup_min_ratio": 0.0,
                    "cos_min_ratio": 0.1,
                },
            },
        },
    }


def as_json(found: Plan, changed: Sequence[Change] = ()) -> dict[str, Any]:
    """Return a plan as plain data: both files, what is predicted of them, and what changes in a live run."""
    p, tokens = found.prediction, found.wish.tokens
    configs = {"run": found.run, "cluster": found.cluster}
    files = {k: v.model_dump(by_alias=True, mode="json", exclude_defaults=True) for k, v in configs.items()}
    figures: dict[str, float | None] = {
        "tokens_per_s": p.tokens_per_s,
        "utilization": p.utilization,
        "seconds": p.seconds(tokens),
    }
    workers = {name: asdict(worker) for name, worker in p.workers.items()}
    gap = found.expected_gap
    figures |= {"available": found.available, "expected_gap": gap, "worth": worth(gap)}
    return {
        **files,
        **figures,
        "usd": p.usd(tokens),
        "workers": workers,
        "notes": list(found.notes),
        "changes": list(map(asdict, changed)),
    }


def write(found: Plan, out: Path) -> None:
    """run.json, cluster.json, hosts/<worker>, placement.svg. Raises OutputError."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "hosts").mkdir(exist_ok=True)
    for region, worker in found.cluster.workers:
        hostfile = hostfile_path(worker.name)
        made = worker_commands(WorkerPlace(out.absolute(), 0), region, worker)
        write_whole(out / hostfile, made.files[hostfile])
    picture = out / "placement.partial.svg"
    draw(found, picture)
    picture.replace(out / "placement.svg")
    for name, config in (("cluster", found.cluster), ("run", found.run)):
        raw = config.model_dump(by_alias=True, mode="json", exclude_defaults=True)
        write_whole(out / f"{name}.json", json.dumps(raw, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------- for people


def show_plan(found: Plan, forecast: dict[str, Any], console: Console) -> None:
    p, wish, days = found.prediction, found.wish, forecast["hours"] / 24
    workers = []
    for name, w in p.workers.items():
        tokens_per_s = forecast["workers"][name]["tokens_per_s"]
        kinds = found.workers[name].layout.kinds
        workers.append(
            {
                "worker": name,
                "where": "+".join(w.regions),
                "accelerators": f"{w.ranks} × {kinds}",
                "parallel layout": w.parallel.text(w.ranks),
                "micro": str(w.micro_batch),
                "step": f"{w.step_s:.3g} s",
                "tokens/s": f"{tokens_per_s:,.0f}",
                "busy": f"{w.utilization * tokens_per_s / w.tokens_per_s:.0%}",
                "memory a rank": f"{size(w.memory_bytes)} of {size(w.memory_limit_bytes)}",
                "limited by": w.limit,
                "USD/h": "–" if w.usd_per_hour is None else f"{w.usd_per_hour:,.2f}",
            }
        )
    console.print(table_of(workers, left=("worker", "where", "accelerators", "parallel layout", "limited by")))
    links = []
    for link in p.links:
        ends = [found.place.region if end == GLOBAL else end for end in (link.sender, link.receiver)]
        region, way = (link.sender, "up") if link.receiver == GLOBAL else (link.receiver, "down")
        cells = {"link": f"{ends[0]} → {ends[1]}", "carries": link.what}
        a_day, busy, round_s, stale = link.bytes_per_day, link.busy, "", ""
        if link.what == "outer loop":
            unused = {"gigabytes": 0.0, "busy": 0.0}  # so short a run ends before this region has sent anything
            carried, exchanges = forecast["links"].get(f"{region} {way}", unused), forecast["exchanges"][region]
            a_day, busy = 1e9 * carried["gigabytes"] / days, carried["busy"]
            round_s = f"{forecast['hours'] * 3600 / exchanges:.3g} s" if exchanges else "none"
            stale = f"{p.regions[region].staleness:.2g}"
        cells |= {"bytes a day": size(a_day), "busy": f"{busy:.1%}", "round": round_s, "staleness": stale}
        links.append(cells | {"USD/h": f"{link.usd_per_hour:,.2f}"})
    console.print("\n", table_of(links), sep="")
    decided = f"{outer_text(found.setting)}; recompute {found.run.model.recompute}"
    console.print(f"\nglobal server: {found.place.region}; {decided}")
    busy_share, busiest = max((server["busy"], name) for name, server in forecast["servers"].items())
    shards = len(found.cluster.global_shards)
    where = f"{shards} shards each" if shards else "vectors in their own processes"
    needed, room = host_bytes(found.run, found.cluster), found.cluster.server_memory
    fullest = max(needed, key=lambda host: sum(needed[host].values()))
    of = f" of {size(room[fullest])}" if fullest in room else ""
    console.print(
        f"servers: {where}, on {len(needed)} hosts, of which {fullest} needs most memory: "
        f"{size(sum(needed[fullest].values()))}{of}; the busiest, {busiest}, works {busy_share:.1%} of the time"
    )
    tokens_per_s = forecast["tokens_per_s"]
    share, of_these = tokens_per_s / found.inventory_tokens_per_s, tokens_per_s / p.bound_tokens_per_s
    console.print(
        f"{tokens_per_s:,.0f} tokens/s: {of_these:.0%} of what these accelerators could reach without any "
        f"waiting, {share:.0%} of what the whole inventory could; no plan does more than 100 % of that"
    )
    usd = None if p.usd_per_hour is None else p.usd_per_hour * forecast["hours"] / found.available
    cost = "no price: `usd_per_hour` of a device is missing" if usd is None else f"{usd:,.0f} USD"
    seconds = 3600 * forecast["hours"] / found.available
    console.print(f"{wish.tokens:.3g} tokens: {duration(seconds)}, {cost}")
    gap, number = found.expected_gap, len(found.workers)
    beyond = f"; no study had more than {MOST_WORKERS} workers" * (number > MOST_WORKERS)
    console.print(
        f"final loss, {number} workers: {gap:.1%} above data parallelism's of as many tokens, as of "
        f"{worth(gap):.0%} of them (docs/evidence.md{beyond})"
    )
    if found.available < 1:
        spot = sum(host.spot * w.layout.slots for w in found.workers.values() for host in w.layout.hosts)
        console.print(
            f"{spot} accelerators at spot prices: {1 - found.available:.1%} of the time goes until hosts that were "
            "taken back are replaced, and is in the time and the price; the rest of this page leaves it out"
        )
    for note in (*found.notes, *doubts(found, forecast["exchanges"]), *answers(found.run, found.cluster)):
        console.print(f"note: {note}", style="yellow")
    for warning in open_links(found.cluster):
        console.print(f"warning: {warning}", style="yellow")
    idle = sum(count for _, count, _ in found.idle)
    if idle:
        console.print(f"left idle on purpose: {idle} accelerators (--explain says which and why)")


def show_reasons(found: Plan, forecast: dict[str, Any], console: Console) -> None:
    console.print("\nwhy", style="bold")
    for reason in reasons(found):
        console.print(f"  {reason}", highlight=False)
    others = []
    for other in alternatives(found):
        # All are predicted in closed form; only the plan itself is played.
        against, hourly = other.prediction.tokens_per_s / found.prediction.tokens_per_s, other.prediction.usd_per_hour
        others.append(
            {
                "instead": other.decision,
                "tokens/s": f"{against * forecast['tokens_per_s']:,.0f}",
                "against the plan": f"{against - 1:+.1%}",
                "USD": "–" if hourly is None else f"{hourly * forecast['hours'] / against:,.0f}",
                "what is worse": other.worse,
            }
        )
    console.print("\nthe next best", style="bold")
    console.print(table_of(others))
