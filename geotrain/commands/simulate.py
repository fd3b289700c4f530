"""`geotrain simulate run.json cluster.json`: a user's own run in a user's own world, before anything is rented."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geotrain.config import ClusterConfig, ConfigError, OuterConfig, RunConfig, load_cluster, load_run, parse
from geotrain.parameters.parameter_map import active_parameter_count
from geotrain.plan.model.server_rates import MEASURED, ServerRates
from geotrain.plan.predict import predict
from geotrain.simulate.forecast import forecast
from geotrain.simulate.spec import WorldSpec, world_of_cluster


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
    report = forecast(*question(run_path, cluster_path, **asked), server_rates)
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
    change, predicted = what_if or WhatIf(), None
    outer = change.apply(run.outer)
    if tflops is not None:
        seconds = step_seconds(run, cluster, tflops)
    elif step_s is None:
        predicted = predict(run.model_copy(update={"outer": outer}), cluster)
        seconds = {name: worker.step_s for name, worker in predicted.workers.items()}
    else:
        names = [worker.name for _, worker in cluster.workers]
        seconds = step_s if isinstance(step_s, dict) else {name: step_s or 0.0 for name in names}
        for name in names:
            if not seconds.get(name, 0.0) > 0:
                raise ConfigError(f"step_s: worker {name!r} needs the seconds of an inner step, a number above 0")
    spec = world_of_cluster(run, cluster, seconds, predicted)
    if change.without is not None:
        try:
            spec = spec.without(change.without)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return run, outer, spec


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
    return "\n".join([*lines, f"servers busy: {busy}"])
