"""`geotrain simulate run.json cluster.json`: a user's own run in a user's own world, before anything is rented."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geotrain.canonical import architecture_from_hf, canonical_parameters
from geotrain.config import (
    ClusterConfig,
    CodecConfig,
    ConfigError,
    OuterConfig,
    RunConfig,
    load_cluster,
    load_run,
    parse,
)
from geotrain.outer.layout import Layout
from geotrain.simulate.learner import Curve, Study, training_task
from geotrain.simulate.spec import WorldSpec, world_of_cluster
from geotrain.simulate.world import World, timing_task

MAX_JOBS = 200_000  # simulated before the rest of a long run is taken to go on alike
LOSS_STEPS = 4096  # inner steps of the small model that stands in for the user's, when a loss curve is asked for


@dataclass(frozen=True)
class WhatIf:
    """Changes to try. codec: of both directions between regions. without: a region that is left out."""

    local_steps: int | None = None
    updates_per_send: int | None = None
    codec: str | None = None
    without: str | None = None

    def apply(self, outer: OuterConfig) -> OuterConfig:
        """Raises ConfigError as the run file would."""
        block = outer.model_dump(by_alias=True, mode="json")
        for key in ("local_steps", "updates_per_send"):
            if getattr(self, key) is not None:
                block[key] = getattr(self, key)
        if self.codec is not None:
            coded = CodecConfig().model_dump(mode="json") | {"name": self.codec}
            block["up"] = block["down"] = coded
        return parse(OuterConfig, block, "what if")


def step_seconds(run: RunConfig, cluster: ClusterConfig, tflops: float) -> dict[str, float]:
    """Seconds of an inner step of each worker: 6 · parameters · tokens over its ranks' useful speed.

    tflops: what one rank really reaches (its peak times the utilization that your model gets there).
    """
    parameters = architecture_from_hf(_architecture(run)).parameter_count
    tokens = run.samples_per_step * run.data.sequence_length
    return {w.name: 6 * parameters * tokens / (w.ranks * tflops * 1e12) for r in cluster.regions for w in r.workers}


def simulate(
    run_path: str | Path,
    cluster_path: str | Path,
    *,
    step_s: float | dict[str, float] | None = None,
    tflops: float | None = None,
    what_if: WhatIf | None = None,
    loss_curve: bool = False,
    picture: Path | None = None,
) -> dict[str, Any]:
    """Hours, utilization and bytes for each link, as plain JSON data; see `told` for people.

    step_s: measured seconds of an inner step, of all workers or by name; or tflops: see `step_seconds`.
    loss_curve: also train a small byte model in this world, with these rules; its losses tell rules and settings
    apart, not your model's loss. picture: where to draw it (.png, .svg or .pdf).
    Raises ConfigError, UnsupportedModelError.
    """
    run, cluster = load_run(run_path), load_cluster(cluster_path)
    if (step_s is None) == (tflops is None):
        raise ConfigError("say how fast the workers are: either step_s (measured) or tflops of a rank, not both")
    seconds = step_seconds(run, cluster, tflops) if tflops is not None else _by_worker(cluster, step_s)
    spec = world_of_cluster(cluster, seconds, run.seed)
    change = what_if or WhatIf()
    if change.without is not None:
        try:
            spec = spec.without(change.without)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    outer = change.apply(run.outer)
    report = _timing(run, outer, spec)
    if loss_curve:
        report["loss_curve"] = _loss_curve(run, outer, spec)
    if picture is not None:
        from geotrain.simulate.picture import draw

        draw(report, picture)
    return report


def told(report: dict[str, Any]) -> str:
    """The report in words."""
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
    return "\n".join(lines)


def _timing(run: RunConfig, outer: OuterConfig, spec: WorldSpec) -> dict[str, Any]:
    steps = run.data.train_samples // run.samples_per_step
    share = min(1.0, MAX_JOBS * outer.local_steps / steps)
    world = World(spec, timing_task(outer, _layout(run, outer), round(steps * share), run.samples_per_step))
    found = world.run()
    trained = found["committed_steps"]
    if not trained:
        raise _nothing_committed(run, round(steps * share), spec, outer)
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
        "links": {
            name: {
                "gigabytes": usage["sent_bytes"] * scale / 1e9,
                "messages": round(usage["messages"] * scale),
                "busy": min(1.0, usage["busy_s"] / found["seconds"]),
            }
            for name, usage in found["links"].items()
        },
    }


def _steps_per_s(world: World) -> float:
    """Of all workers, once the run has settled: without what is paid once, the first weights and the last flush."""
    total = 0.0
    for worker in world.workers.values():
        starts = worker.job_starts_s
        first = len(starts) // 4
        if len(starts) - 1 > first:
            steps_a_job = worker.trained_steps / len(starts)
            total += steps_a_job * (len(starts) - 1 - first) / (starts[-1] - starts[first])
    return total or world.report()["committed_steps"] / world.clock.now


def _nothing_committed(run: RunConfig, steps: int, spec: WorldSpec, outer: OuterConfig) -> ConfigError:
    return ConfigError(
        f"{run.name}: no update was ever committed: {steps} steps are fewer than one round of "
        f"{len(spec.workers)} workers with local_steps = {outer.local_steps}"
    )


def _loss_curve(run: RunConfig, outer: OuterConfig, spec: WorldSpec) -> list[dict[str, float]]:
    study = Study(steps=LOSS_STEPS, length=32)
    curve = Curve(study, points=16)
    world = World(spec, training_task(study, outer, _layout(run, outer).numel), curve.watch)
    trained = world.run()["committed_steps"]
    if not trained:
        raise _nothing_committed(run, LOSS_STEPS, spec, outer)
    curve.add(world, trained / LOSS_STEPS)
    return [{"seconds": p.time_s, "share": p.committed_share, "loss": p.test} for p in curve.points]


def _layout(run: RunConfig, outer: OuterConfig) -> Layout:
    parameters = canonical_parameters(architecture_from_hf(_architecture(run)))
    return Layout(parameters, outer.fragments.layers_per_fragment)


def _architecture(run: RunConfig) -> dict[str, Any]:
    assert isinstance(run.model.config, dict)  # load_run puts it inline
    return run.model.config


def _by_worker(cluster: ClusterConfig, step_s: float | dict[str, float] | None) -> dict[str, float]:
    names = [w.name for r in cluster.regions for w in r.workers]
    given = step_s if isinstance(step_s, dict) else {name: step_s or 0.0 for name in names}
    for name in names:
        if not given.get(name, 0.0) > 0:
            raise ConfigError(f"step_s: worker {name!r} needs the seconds of an inner step, a number above 0")
    return given
