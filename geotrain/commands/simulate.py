"""`geotrain simulate run.json cluster.json`: a user's own run in a user's own world, before anything is rented."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geotrain.config import (
    ClusterConfig,
    ConfigError,
    OuterConfig,
    RunConfig,
    load_cluster,
    load_run,
    parse,
)
from geotrain.parameters.parameter_map import ParameterMap, active_parameter_count, canonical_parameters
from geotrain.plan.model.server_rates import MEASURED, ServerRates
from geotrain.plan.predict import predict
from geotrain.simulate.spec import WorldSpec, world_of_cluster
from geotrain.simulate.world import VirtualWorld, timing_task

MAX_JOBS = 200_000  # simulated before the rest of a long run is taken to go on alike


@dataclass(frozen=True)
class WhatIf:
    """Changes to try. codec: of both directions between regions. without: a region that is left out."""

    local_steps: int | None = None
    updates_per_send: int | None = None
    codec: str | None = None
    without: str | None = None

    def apply(self, outer: OuterConfig) -> OuterConfig:
        """Apply the changes. Raises ConfigError as the run file would."""
        block = outer.model_dump(by_alias=True, mode="json")
        if self.local_steps is not None:
            block["local_steps"] = self.local_steps
        if self.updates_per_send is not None:
            block["rule"]["updates_per_send"] = self.updates_per_send
        if self.codec is not None:
            block["up"] = block["down"] = {"name": self.codec}
        return parse(OuterConfig, block, "what if")


def step_seconds(run: RunConfig, cluster: ClusterConfig, tflops: float) -> dict[str, float]:
    """Seconds of an inner step of each worker: 6 · parameters · tokens over its ranks' useful speed. Of experts, only
    the parameters of those that a token is sent to count.

    tflops: what one rank really reaches (its peak times the utilization that your model gets there).
    """
    parameters = active_parameter_count(run.architecture)
    tokens = run.samples_per_step * run.data.sequence_length
    return {w.name: 6 * parameters * tokens / (w.ranks * tflops * 1e12) for _, w in cluster.workers}


def simulate(
    run_path: str | Path,
    cluster_path: str | Path,
    *,
    picture: Path | None = None,
    server_rates: ServerRates | None = MEASURED,
    **asked: Any,
) -> dict[str, Any]:
    """Hours, utilization and bytes for each link, as plain JSON data; `report_text` has them in words.

    asked: further arguments of `question`. server_rates: what a server's work costs; None: nothing.
    picture: where to draw it (.png, .svg or .pdf).
    Raises ConfigError, UnsupportedModelError.
    """
    report = _timing(*question(run_path, cluster_path, **asked), server_rates)
    if picture is not None:
        from geotrain.commands.simulate_picture import draw

        draw(report, picture)
    return report


def question(
    run_path: str | Path,
    cluster_path: str | Path,
    *,
    step_s: float | dict[str, float] | None = None,
    tflops: float | None = None,
    what_if: WhatIf | None = None,
    changes: Sequence[str] = (),
) -> tuple[RunConfig, OuterConfig, WorldSpec]:
    """The run, its outer block and the world to simulate, with the what-if's changes in the latter two.

    step_s: measured seconds of an inner step, of all workers or by name; or tflops: see `step_seconds`; of neither,
    the steps are those that the planner predicts, for which the cluster must say what its hosts' devices are.
    changes: of the run file, see `load_run`.
    Raises ConfigError, UnsupportedModelError.
    """
    run, cluster = load_run(run_path, changes), load_cluster(cluster_path)
    if step_s is not None and tflops is not None:
        raise ConfigError("say how fast the workers are: either step_s (measured) or tflops of a rank, not both")
    if tflops is not None:
        seconds = step_seconds(run, cluster, tflops)
    elif step_s is None:
        seconds = {name: worker.step_s for name, worker in predict(run, cluster).workers.items()}
    else:
        names = [worker.name for _, worker in cluster.workers]
        seconds = step_s if isinstance(step_s, dict) else {name: step_s or 0.0 for name in names}
        for name in names:
            if not seconds.get(name, 0.0) > 0:
                raise ConfigError(f"step_s: worker {name!r} needs the seconds of an inner step, a number above 0")
    spec = world_of_cluster(cluster, seconds, run.seed)
    change = what_if or WhatIf()
    if change.without is not None:
        try:
            spec = spec.without(change.without)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return run, change.apply(run.outer), spec


def report_text(report: dict[str, Any]) -> str:
    """Format a report for people."""
    lines = [
        f"{report['hours']:.2f} h for {report['tokens']:.3g} tokens; the same devices without any waiting: "
        f"{report['compute_bound_hours']:.2f} h",
        f"utilization {100 * report['utilization']:.1f} %, goodput {100 * report['goodput']:.1f} %",
    ]
    for name, link in report["links"].items():
        lines.append(
            f"  {name:24s} {link['gigabytes']:12.1f} GB in {link['messages']} messages, "
            f"busy {100 * link['busy']:5.1f} %"
        )
    busy = ", ".join(f"{name} {100 * server['busy']:.1f} %" for name, server in report["servers"].items())
    return "\n".join([*lines, f"servers' one thread, busy: {busy}"])


def _timing(
    run: RunConfig, outer: OuterConfig, spec: WorldSpec, rates: ServerRates | None = MEASURED
) -> dict[str, Any]:
    steps = run.data.train_samples // run.samples_per_step
    share = min(1.0, MAX_JOBS * outer.local_steps / steps)
    parameter_map = ParameterMap(canonical_parameters(run.architecture), outer.fragments.layers_per_fragment)
    world = VirtualWorld(spec, timing_task(outer, parameter_map, round(steps * share), run.samples_per_step, rates))
    found = world.run()
    trained = found["committed_steps"]
    if not trained:
        raise nothing_committed(run, round(steps * share), spec, outer)
    scale = steps / trained
    rest_s = (steps - trained) / _steps_per_s(world)
    workers = {
        w.spec.name: {"step_s": w.spec.step_s, "utilization": w.trained_s / found["seconds"]}
        for w in world.workers.values()
    }
    return {
        "run": run.name,
        "outer": outer.model_dump(by_alias=True, mode="json"),
        "hours": found["hours"] + rest_s / 3600,
        "compute_bound_hours": found["compute_bound_s"] * scale / 3600,
        "tokens": run.data.train_samples * run.data.sequence_length,
        "simulated_share": trained / steps,
        "utilization": found["utilization"],
        "goodput": found["goodput"],
        "lost_updates": round(found["lost_updates"] * scale),
        "workers": workers,
        "servers": {name: {"busy": busy_s / found["seconds"]} for name, busy_s in found["servers"].items()},
        "links": {
            name: {
                "gigabytes": usage["sent_bytes"] * scale / 1e9,
                "messages": round(usage["messages"] * scale),
                "busy": min(1.0, usage["busy_s"] / found["seconds"]),
            }
            for name, usage in found["links"].items()
        },
    }


def _steps_per_s(world: VirtualWorld) -> float:
    """Inner steps a second of all workers in the settled run: without the first weights and the last flush."""
    total = 0.0
    for worker in world.workers.values():
        starts = worker.job_starts_s
        first = len(starts) // 4
        if len(starts) - 1 > first:
            steps_a_job = worker.trained_steps / len(starts)
            total += steps_a_job * (len(starts) - 1 - first) / (starts[-1] - starts[first])
    return total or world.report()["committed_steps"] / world.clock.now


def nothing_committed(run: RunConfig, steps: int, spec: WorldSpec, outer: OuterConfig) -> ConfigError:
    """The error of a simulation that ended before its first update."""
    return ConfigError(
        f"{run.name}: no update was ever committed: {steps} steps are fewer than one round of "
        f"{len(spec.workers)} workers with local_steps = {outer.local_steps}"
    )
