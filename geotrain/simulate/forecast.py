"""Forecasts a whole run: hours, utilization, bytes of each link, work of each server. `geotrain plan`, `dry-run` and
`simulate` all print this one.

Steps, sizes of messages and servers' rates are those of `geotrain.plan.model`; the run is then played by the
production's state machines. A long run is played in short: what its middle half did a step is taken to go on.
"""

from __future__ import annotations

from typing import Any

from geotrain.config import ClusterConfig, ConfigError, OuterConfig, RunConfig
from geotrain.parameters.parameter_map import ParameterMap, canonical_parameters
from geotrain.plan.model.answering import settled, updates_per_send
from geotrain.plan.model.server_rates import MEASURED, ServerRates
from geotrain.plan.predict import RunPrediction
from geotrain.simulate.spec import WorldSpec, world_of_cluster
from geotrain.simulate.world import VirtualWorld, timing_task

MAX_UPDATES = 8_000  # of a fragment, by all workers together, that are played of a run of more than twice as many
MIN_JOBS, MIN_ROUNDS = 16, 8  # of each worker, and of each region, all the same


def forecast_run(run: RunConfig, cluster: ClusterConfig, predicted: RunPrediction) -> dict[str, Any]:
    """Forecast a run on the cluster that `predicted` is of. Raises ConfigError."""
    step_s = {name: worker.step_s for name, worker in predicted.workers.items()}
    return forecast(run, run.outer, world_of_cluster(run, cluster, step_s, predicted))


def forecast(
    run: RunConfig, outer: OuterConfig, spec: WorldSpec, rates: ServerRates | None = MEASURED
) -> dict[str, Any]:
    """Forecast a run in a world, as plain JSON data. outer: in place of the run's. rates: of servers; None: they take
    no time. Raises ConfigError when no update would ever be committed."""
    steps, speed = run.total_steps, sum(1 / worker.step_s for worker in spec.workers)
    parameter_map = ParameterMap(canonical_parameters(run.architecture), outer.fragments.layers_per_fragment)
    fragments, count = len(parameter_map.fragments), len(spec.workers)
    # What is played in short answers as the whole run does.
    outer_played = settled(outer, steps / outer.local_steps / count)
    of_rounds = MIN_ROUNDS * (updates_per_send(outer_played) or 1) // min(len(r.workers) for r in spec.regions)
    jobs = max(MIN_JOBS, of_rounds, MAX_UPDATES // fragments // count)
    played = jobs * count * outer.local_steps
    played = steps if steps <= 2 * played else played
    marks: list[dict[str, float]] = []

    def watch(world: VirtualWorld) -> None:
        share = world.top.server.lease_table.committed_samples / (played * run.samples_per_step)
        if len(marks) < 2 and share >= (1 + 2 * len(marks)) / 4:
            marks.append(_counts(world))

    world = VirtualWorld(spec, timing_task(outer_played, parameter_map, played, run.samples_per_step, rates), watch)
    found, end = world.run(), _counts(world)
    if not (trained := found["committed_steps"]):
        raise nothing_committed(run, played, spec, outer)
    begin, until = marks if len(marks) == 2 else (dict.fromkeys(end, 0.0), end)
    more = (steps - trained) / (until["steps"] - begin["steps"])
    total = {key: value + more * (until.get(key, 0.0) - begin.get(key, 0.0)) for key, value in end.items()}
    seconds, tokens = total["seconds"], run.data.train_samples * run.data.sequence_length
    a_step = run.samples_per_step * run.data.sequence_length
    return {
        "run": run.name,
        "outer": outer.model_dump(by_alias=True, mode="json"),
        "hours": seconds / 3600,
        "compute_bound_hours": steps / speed / 3600,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "simulated_share": trained / steps,
        "utilization": sum(total[f"{w.name} trained"] for w in spec.workers) / (seconds * count),
        "goodput": steps / speed / seconds,
        "lost_updates": round(total["lost_updates"]),
        "workers": {
            w.name: {
                "step_s": w.step_s,
                "utilization": total[f"{w.name} trained"] / seconds,
                "tokens_per_s": total[f"{w.name} trained"] / w.step_s * a_step / seconds,
            }
            for w in spec.workers
        },
        "servers": {name: {"busy": total[f"server {name}"] / seconds} for name in found["servers"]},
        "links": {
            name: {
                "gigabytes": total[f"{name} sent_bytes"] / 1e9,
                "messages": round(total[f"{name} messages"]),
                "busy": min(1.0, total[f"{name} busy_s"] / seconds),
            }
            for name in found["links"]
        },
        # Exchanges of the whole model that each region makes in the run.
        "exchanges": {
            r.name: total.get(f"{r.name} up messages", 0.0) / fragments / (len(r.workers) if outer.flat else 1)
            for r in spec.regions
        },
    }


def _counts(world: VirtualWorld) -> dict[str, float]:
    """Count what grows as a world goes on. steps: also those of unfinished jobs."""
    found, workers = world.report(), world.workers
    counts = {key: found[key] for key in ("seconds", "lost_updates")}
    counts |= {f"{name} trained": worker.trained_s for name, worker in workers.items()}
    counts["steps"] = sum(worker.trained_s / worker.spec.step_s for worker in workers.values())
    counts |= {f"server {name}": busy_s for name, busy_s in found["servers"].items()}
    return counts | {f"{name} {key}": n for name, usage in found["links"].items() for key, n in usage.items()}


def nothing_committed(run: RunConfig, steps: int, spec: WorldSpec, outer: OuterConfig) -> ConfigError:
    """The error of a simulation that ended before its first update."""
    return ConfigError(
        f"{run.name}: no update was ever committed: {steps} steps are fewer than one round of "
        f"{len(spec.workers)} workers with local_steps = {outer.local_steps}"
    )
