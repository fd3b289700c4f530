"""Whole runs over emulated links, for the planner: probed, predicted, placed, launched and measured by the product.

Four regions of one rank each stand in network namespaces; links within a continent are fast, between continents slow.
The regions are listed as users often list them, continent by turns: ranks in that order are the naive placement.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.small_runs import deepspeed_block, llama, prepare_text
from geotrain.config import ClusterConfig, RunConfig, load_cluster, load_run, parse
from geotrain.parameters.parameter_map import parameter_count
from geotrain.plan.placement.cost import problem_from_links
from geotrain.plan.placement.search import search
from geotrain.plan.predict import RunPrediction, predict

REGIONS = ("eu-1", "us-1", "eu-2", "us-2")
NEAR, FAR = {"gbps": 0.2, "rtt_ms": 4.0}, {"gbps": 0.02, "rtt_ms": 20.0}
TO_GLOBAL = {"eu-1": 0.02, "us-1": 0.025, "eu-2": 0.005, "us-2": 0.004}
BATCH, MICRO_BATCH, SEQUENCE = 8, 2, 64
DEADLINE_S = 200
MODEL = llama(128, 4, 4, 256, 264, SEQUENCE, tie_word_embeddings=False)


@dataclass(frozen=True)
class Setting:
    """A run. ranks: the regions of its one worker's ranks, in order; of settings with an outer loop, of its workers.
    what: is compared, the time of a step or of a round."""

    name: str
    ranks: tuple[str, ...]
    what: str = "step"
    pipeline: int = 1
    local_steps: int = 3
    jobs: int = 4
    outer: dict[str, Any] = field(default_factory=dict)


SYNC = {"rule": {"name": "sync"}, "up": {"name": "fp32"}, "down": {"name": "fp32"}}
INT4 = {**SYNC, "up": {"name": "int4"}, "down": {"name": "int4"}, "overlap": {"steps": 2, "adopt": "mix"}}
SETTINGS = (
    Setting("dp_over_a_link", ("eu-1", "us-1")),
    Setting("pp_over_a_link", ("eu-1", "us-1"), pipeline=2, local_steps=8),
    Setting("two_regions_fp32", ("eu-1", "us-1"), "round", local_steps=4, jobs=6, outer=SYNC),
    Setting("two_regions_int4_overlap", ("eu-2", "us-2"), "round", local_steps=6, jobs=6, outer=INT4),
)


def measure(quick: bool = False) -> dict[str, Any]:
    """prediction_error, placement_speedup, and `runs`: seconds predicted and measured of each run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_text(folder, 8)
        probed = probe(folder)
        planned = plan(folder, probed)
        settings = [
            *SETTINGS,
            Setting("naive_placement", REGIONS, pipeline=2),
            Setting("planned_placement", planned, pipeline=2),
        ]
        runs: dict[str, dict[str, float]] = {}
        for setting in settings[1:2] if quick else settings:
            runs[setting.name] = compare(folder, setting, probed)
            print(setting.name, json.dumps(runs[setting.name]), flush=True)
    result: dict[str, Any] = {
        "prediction_error": statistics.median(run["error"] for run in runs.values()),
        "runs": runs,
        "planned_order": list(planned),
    }
    if not quick:
        result["placement_speedup"] = runs["naive_placement"]["measured_s"] / runs["planned_placement"]["measured_s"]
    return result


def compare(folder: Path, setting: Setting, probed: ClusterConfig) -> dict[str, float]:
    """Seconds of a step, or of a round: predicted from the probed figures, measured on the links as emulated."""
    run, cluster = files(folder, setting)
    with_probed_links = parse(ClusterConfig, cluster_of(setting, probed), "probed")
    predicted = statistics.mean(_of_worker(predict(load_run(run), with_probed_links), setting.what))
    geotrain("launch", run, cluster)
    measured = measured_s(load_run(run), setting.what)
    return {"predicted_s": predicted, "measured_s": measured, "error": abs(predicted - measured) / measured}


def _of_worker(found: RunPrediction, what: str) -> list[float]:
    return [w.step_s if what == "step" else w.job_s for w in found.workers.values()]


def measured_s(run: RunConfig, what: str) -> float:
    """Median over the jobs but the first and the last, slowest worker: of a step without exchanges; of a round, from
    one job's end to the next one's."""
    slowest = 0.0
    for path in (run.run_folder / "events").glob("*.jsonl"):
        events = [
            event for line in path.read_text().splitlines() if (event := json.loads(line))["event"] == "JobTrained"
        ]
        if what == "step":
            times = [(e["tokens"] / e["tokens_per_s"] - e["waited_s"]) / e["steps"] for e in events[1:]]
        else:
            ends = [e["time_s"] for e in events]
            times = [after - before for before, after in pairwise(ends)][:-1]
        if times:
            slowest = max(slowest, statistics.median(times))
    return slowest


# ------------------------------------------------------------------------------------------------------- plan


def plan(folder: Path, probed: ClusterConfig) -> tuple[str, ...]:
    """The regions in the order of ranks that the product's search finds on the probed links: row = stage."""
    pairs = {frozenset(link.regions): link for link in probed.links}

    def matrix(value: Callable[[Any], float]) -> np.ndarray:
        return np.array([[value(pairs.get(frozenset((a, b)))) if a != b else 0.0 for b in REGIONS] for a in REGIONS])

    run = load_run(files(folder, Setting("placement", REGIONS, pipeline=2))[0])
    problem = problem_from_links(
        matrix(lambda link: link.rtt_ms / 2e3),
        matrix(lambda link: link.gbps),
        stages=2,
        replicas=2,
        gradient_gigabytes=4e-9 * parameter_count(run.architecture) / 2,
        activation_gigabytes=4e-9 * BATCH / 2 * SEQUENCE * MODEL["hidden_size"],
    )
    return tuple(REGIONS[device] for stage in search(problem, 0).stages for device in stage)


# ------------------------------------------------------------------------------------------------------ files


def geotrain(*arguments: object) -> None:
    """Ends this benchmark with what the command said if it fails."""
    command = [sys.executable, "-m", "geotrain", *map(str, arguments)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE_S)
    if done.returncode:
        sys.exit(done.stdout)


def probe(folder: Path) -> ClusterConfig:
    """All four regions, with links as `geotrain probe` finds them."""
    run, cluster = files(folder, Setting("probe", ("eu-1",)), REGIONS)
    geotrain("probe", cluster, "--run", run, "--seconds", "1.5")
    found = load_cluster(cluster)
    print(
        "probed", json.dumps({"–".join(link.regions): [link.gbps, link.rtt_ms] for link in found.links}), flush=True
    )
    print("efficiency", found.devices["cpu"].efficiency, flush=True)
    return found


def files(folder: Path, setting: Setting, regions: Sequence[str] = ()) -> tuple[Path, Path]:
    """Run and cluster file, with links as they are to be emulated. regions: more than the setting uses."""
    samples = setting.jobs * setting.local_steps * BATCH * (len(setting.ranks) if setting.outer else 1)
    run = {
        "name": "planner", "folder": str(folder / setting.name), "model": {"config": MODEL},
        "data": {"train": str(folder / "data/train"), "sequence_length": SEQUENCE, "train_samples": samples},
        "parallel": {"pipeline": setting.pipeline},
        "deepspeed": deepspeed_block(BATCH, MICRO_BATCH, 1e-3),
        "outer": {"local_steps": setting.local_steps, **(setting.outer or SYNC)},
        "checkpoint": {"every_jobs": 1000, "every_minutes": 1e6},
    }  # fmt: skip
    paths = folder / f"{setting.name}.json", folder / f"{setting.name}-cluster.json"
    paths[0].write_text(json.dumps(run))
    paths[1].write_text(json.dumps(cluster_of(setting, None, regions)))
    return paths


def cluster_of(setting: Setting, probed: ClusterConfig | None, regions: Sequence[str] = ()) -> dict[str, Any]:
    """The regions that the setting uses, each with one rank. probed: its figures stand in for the emulated ones."""

    def host(region: str) -> dict[str, Any]:
        return {"host": f"host-{region}", "slots": 1, "device": "cpu", "region": region}

    env = {"OMP_NUM_THREADS": "1"}
    home, used = setting.ranks[0], regions or setting.ranks
    workers: dict[str, list[dict[str, Any]]] = {}
    if setting.outer:
        for region in setting.ranks:
            workers[region] = [{"name": f"{region}-w", "hosts": [host(region)], "env": env}]
    else:
        workers[home] = [{"name": f"{home}-w", "hosts": [host(r) for r in setting.ranks], "env": env}]
    device: dict[str, Any] = {"memory_gb": 4.0, "tflops": 0.1, "host_gbps": 8.0}
    if probed is not None:
        device["efficiency"] = probed.devices["cpu"].efficiency
    return {
        "name": "planner",
        "regions": [{"name": r, "workers": workers.get(r, []), "hosts": [host(r)]} for r in used],
        "devices": {"cpu": device},
        "links": links_of(used, probed),
        "emulate_links": True,
    }


def links_of(used: Sequence[str], probed: ClusterConfig | None) -> list[dict[str, Any]]:
    if probed is not None:
        return [
            {"regions": list(link.regions), "gbps": link.gbps, "rtt_ms": link.rtt_ms}
            for link in probed.links
            if set(link.regions) <= {*used, "global"}
        ]
    pairs = [(a, b, NEAR if a[:2] == b[:2] else FAR) for a, b in combinations(used, 2)]
    links = [{"regions": [a, b], **figures} for a, b, figures in pairs]
    return links + [{"regions": [r, "global"], "gbps": TO_GLOBAL[r], "rtt_ms": 20.0} for r in used]
