"""Runs of the study: one is a row of JSON; many go over a pool of processes, and none is done twice."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from claims_methods import METHODS, ROOT, Settings
from claims_worlds import WORLDS

if TYPE_CHECKING:
    from geotrain.simulate.learner import Point

DATA = ROOT / "benchmarks/data/halos_environment.json"


@dataclass(frozen=True)
class Job:
    """steps: inner steps of all workers together. size: of the small model, as `Study` names it."""

    method: str
    settings: Settings
    world: str
    seed: int
    steps: int
    size: dict[str, Any] = field(default_factory=dict)
    points: int = 24

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def run(job: Job, tell: Callable[[Point], None] | None = None) -> dict[str, Any]:
    """Train it in virtual time. curve: [virtual seconds, committed share, test loss] points; tell: of each."""
    import torch

    torch.set_num_threads(1)
    from geotrain.outer.codec import NonFiniteError
    from geotrain.outer.messages import Refused
    from geotrain.simulate.learner import Curve, Study, training_task
    from geotrain.simulate.lm import InnerSettings
    from geotrain.simulate.published import world_for
    from geotrain.simulate.spec import load_environment
    from geotrain.simulate.text import standard_library
    from geotrain.simulate.world import World

    begin, begin_wall = time.process_time(), time.perf_counter()
    environment = load_environment(DATA)
    bound_s = job.steps / sum(1 / w.step_s for w in environment.world.workers)
    setting = WORLDS[job.world](environment, bound_s)
    method = METHODS[job.method]
    outer = method.outer(job.settings, environment, job.steps)
    if setting.changes and outer.levels == 2 and outer.rule != "sync":
        outer = outer.model_copy(update=setting.changes)
    devices = len(environment.world.workers) if job.method == "data-parallel" else 1
    inner = InnerSettings(lr=job.settings["lr"])
    study = Study(steps=job.steps, seed=job.seed, inner=inner, quarter_of=setting.quarter_of, **job.size)
    curve = Curve(study, job.points, tell=tell)
    task = training_task(study, outer, environment.numel, devices)
    world = World(world_for(job.method, outer, setting.environment), task, curve.watch)
    try:
        report = world.run()
    except (NonFiniteError, Refused) as error:  # the delta of a diverged worker is not encoded, or not taken
        return {"key": job.key, **asdict(job), "diverged": str(error), "selection": 1e9, "test": 1e9, "curve": [],
                "seconds": world.clock.now, "cpu_s": time.process_time() - begin}  # fmt: skip
    selection = curve.last(world, report["committed_steps"] * devices / job.steps)
    return {
        "key": job.key,
        **asdict(job),
        "curve": [[p.time_s, p.committed_share, p.test] for p in curve.points],
        "selection": selection,
        "test": curve.points[-1].test,
        "seconds": report["seconds"],
        "bound_s": bound_s,
        "utilization": report["utilization"],
        "lost_updates": report["lost_updates"],
        "global_version": report["global_versions"][0],
        "wide_bytes": sum(u["sent_bytes"] for name, u in report["links"].items() if "local" not in name),
        "numel": task.layout.numel,
        "cpu_s": time.process_time() - begin,
        "wall_s": time.perf_counter() - begin_wall,
        "text": standard_library().digest,
    }


class Results:
    """Rows of a JSON-lines file, by key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
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
                    told = f"{row['method']:22s} {row['world']:15s} seed {row['seed']} test {row['test']:.4f}"
                    print(
                        f"[{done}/{len(missing)}] {told} at {row['seconds']:.0f} virtual s "
                        f"({row['cpu_s']:.0f} s CPU; {time.monotonic() - begin:.0f} s so far)",
                        flush=True,
                    )
        return [self.rows[job.key] for job in jobs]
