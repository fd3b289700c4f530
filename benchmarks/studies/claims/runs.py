"""Runs of the study. Each becomes a row of JSON; a pool of processes runs them, and none is done twice."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import hardware
from benchmarks.studies.claims.exchange import EXCHANGE, Exchange, devices_of_a_worker, wide_bytes, world_for
from benchmarks.studies.claims.kept import EVERY_S, Kept
from benchmarks.studies.claims.methods import METHODS, Settings, whole_steps
from benchmarks.studies.environments import HALOS, Environment, load_environment
from benchmarks.studies.learner.text import carried_text
from benchmarks.studies.learner.training import Curve, Point, Study, training_task
from geotrain.common.files import whole_file
from geotrain.config import OuterConfig
from geotrain.outer.codec import NonFiniteError
from geotrain.outer.messages import Refused
from geotrain.simulate.spec import WorldSpec
from geotrain.simulate.world import VirtualWorld

VERSION = 4  # of what the simulator computes; raised by hand when its results change, so that no older row is used
# Fields of worlds and studies that came later, and as what they are left out of keys.
LATER = {
    "settle_s": 0.0, "refresh_s": 0.0, "refreshes_all": False, "shards": 1, "encrypted": False,
    "normalize_rows": False, "share": 1.0,
}  # fmt: skip
OF_LINKS = {"jitter_s": 0.0, "loss": 0.0, "streams": 8}  # fields that are gone
NOT_WITHOUT_RESULT = (
    "test", "final", "selection", "final_selection", "utilization", "wide_bytes", "committed_steps",
)  # fmt: skip
NO_ROUND, DIVERGED = "no round fits", "diverged"


def _as_kept(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    kept = {key: value for key, value in pairs if LATER.get(key, pairs) != value}
    return {**kept, **OF_LINKS} if "gbps" in kept else kept


@dataclass(frozen=True)
class Job:
    """steps: inner steps of all workers together. size: of the small model, as `Study` names it. until: the run ends
    at the first point of its curve with this test loss. warmup_share: of the run, where it is not the usual one."""

    method: str
    settings: Settings
    seed: int
    steps: int
    size: dict[str, Any] = field(default_factory=dict)
    points: int = 24
    until: float | None = None
    warmup_share: float | None = None

    @cached_property
    def resolved(self) -> Resolved:
        return Resolved.of(self)

    @cached_property
    def key(self) -> str:
        """A digest of everything that the result follows from, so that a changed job does not find an old row. What
        is as its default says is left out: a new option of the outer loop leaves the keys as they are."""
        r = self.resolved
        outer = r.outer.model_dump(by_alias=True, mode="json", exclude_defaults=True)
        # Jobs named a world, worlds had a ring, a trunk and a seed, links jitter: kept rows' keys have these.
        world, study = (asdict(each, dict_factory=_as_kept) for each in (r.world, r.study))
        job, world = {"world": "published", **asdict(self)}, {"ring": None, "trunk": None, "seed": 0, **world}
        parts = (VERSION, job, outer, world, {"quarter_of": {}, **study}, carried_text().digest)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Resolved:
    """A job with everything that its names stand for. devices: how many of them one worker of the world stands
    for."""

    environment: Environment
    exchange: Exchange
    world: WorldSpec
    outer: OuterConfig
    study: Study
    devices: int
    momentum_decay: float | None

    @staticmethod
    def of(job: Job) -> Resolved:
        environment = load_environment(HALOS)
        method = METHODS[job.method]
        outer = method.outer(job.settings, environment, job.steps)
        exchange = EXCHANGE.get(method.run_file, "servers")
        inner = method.optimizer(job.settings["lr"])
        if job.warmup_share is not None:
            inner = replace(inner, warmup_share=job.warmup_share)
        study = Study(steps=whole_steps(outer, environment, job.steps), seed=job.seed, inner=inner, **job.size)
        world = world_for(method.run_file, outer, environment)
        devices = devices_of_a_worker(exchange, environment)
        decay = method.momentum_decay(outer, environment, job.steps)
        return Resolved(environment, exchange, world, outer, study, devices, decay)


class LossReached(Exception):
    """The run need not go on."""


def run(
    job: Job, tell: Callable[[Point], None] | None = None, states: Path | None = None, every_s: float = EVERY_S,
    device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """Train it in virtual time. curve: [virtual seconds, committed share, test loss] points; tell: of each.

    states: a folder in which the run's state is kept every so many seconds; a run that finds its own there goes on
    with it, and tells its points once more. The row is the same, but for the times that it took. device: where
    workers compute; on a GPU, whose row is another, servers take all of the processor's cores.

    final, final_selection: the losses at the end, on more windows than the curve's points. A run without a result
    says why in `failed`, and its losses and measures are None. One that ends at `job.until` has no final loss, and
    none on the selection slice.
    """
    if device == "cpu":
        torch.set_num_threads(1)
    r = job.resolved

    def told(point: Point) -> None:
        if tell:
            tell(point)
        if job.until is not None and point.test <= job.until:
            raise LossReached

    kept = None if states is None else Kept(states, job.key, every_s)
    if found := kept and kept.load():
        world, curve, cpu_s, wall_s = found
        print(f"{job.method}: goes on at {100 * curve.share(world):.1f} % of the tokens", flush=True)
        world.wake()
        curve.tell = told
        for point in curve.points:
            told(point)
    else:
        task = training_task(r.study, r.outer, r.environment.numel, r.devices, device)
        curve, cpu_s, wall_s = Curve(r.study, job.points, tell=told, device=device), 0.0, 0.0
        world = VirtualWorld(r.world, replace(task, momentum_decay=r.momentum_decay), curve.watch)
    began_cpu_s, began_s = time.process_time() - cpu_s, time.perf_counter() - wall_s

    def spent_s() -> tuple[float, float]:
        """Seconds of the processor and of the wall, over all the run's sittings."""
        return time.process_time() - began_cpu_s, time.perf_counter() - began_s

    def look() -> None:
        if kept and world.at_rest:
            kept.save_if_due(lambda: (world, curve, *spent_s()))

    measured = _measured(job, world, curve, look if kept else None) if r.study.steps else {"failed": NO_ROUND}
    cpu_s, wall_s = spent_s()
    return {
        "key": job.key,
        **asdict(job),
        **dict.fromkeys(NOT_WITHOUT_RESULT),
        "curve": [],
        "seconds": world.clock.now,
        **measured,
        "numel": world.task.parameter_map.numel,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "hardware": hardware(),
        "text": carried_text().digest,
    }


def _measured(job: Job, world: VirtualWorld, curve: Curve, look: Callable[[], None] | None) -> dict[str, Any]:
    r = job.resolved
    selection: float | None = None
    final: tuple[float | None, float | None] = None, None
    try:
        report = world.run(after_event=look)
        selection = curve.last(world, report["committed_steps"] * r.devices / r.study.steps)
        final = curve.final_losses(world)
    except LossReached:
        report = world.report()
    except (NonFiniteError, Refused) as error:  # the delta of a diverged worker is not encoded, or not taken
        return {"failed": DIVERGED, "error": str(error), "seconds": world.clock.now}
    committed_steps = report["committed_steps"] * r.devices
    test = curve.points[-1].test
    if not all(math.isfinite(loss) for loss in (test, selection) if loss is not None):
        return {"failed": DIVERGED, "seconds": report["seconds"]}
    return {
        "curve": [[p.time_s, p.committed_share, p.test] for p in curve.points],
        "selection": selection,
        "test": test,
        "final": final[0],
        "final_selection": final[1],
        "seconds": report["seconds"],
        "committed_steps": committed_steps,
        "utilization": r.environment.bound_s(committed_steps) / report["seconds"],
        "lost_updates": report["lost_updates"],
        "global_version": report["global_versions"][0],
        "wide_bytes": wide_bytes(r.exchange, report, r.outer, r.environment),
    }


class Results:
    """Rows of a JSON-lines file, by key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            if lines and not lines[-1].endswith("\n"):  # whoever wrote it was killed
                lines.pop()
                with whole_file(path) as file:
                    file.writelines(lines)
            for line in lines:
                row = json.loads(line)
                self.rows[row["key"]] = row

    def complete(
        self, jobs: Iterable[Job], processes: int, work: Callable[[Job], dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """The jobs' rows, in their order; what is missing is run, and written as soon as it is there. work: `run`, or
        what stands for it."""
        jobs = list(jobs)
        missing = {job.key: job for job in jobs if job.key not in self.rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if missing:
            os.environ["OMP_NUM_THREADS"] = "1"
            begin = time.monotonic()
            context = multiprocessing.get_context("spawn")
            with context.Pool(min(processes, len(missing))) as pool, self.path.open("a") as file:
                for done, row in enumerate(pool.imap_unordered(work or run, missing.values()), 1):
                    self.rows[row["key"]] = row
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    result = row.get("failed") or f"test {row['test']:.4f}"
                    told = f"{row['method']:22s} seed {row['seed']} {result}"
                    print(
                        f"[{done}/{len(missing)}] {told} at {row['seconds']:.0f} virtual s "
                        f"({row['cpu_s']:.0f} s CPU; {time.monotonic() - begin:.0f} s so far)",
                        flush=True,
                    )
        return [self.rows[job.key] for job in jobs]
