"""The search of placements against its bounds: DT-FM's published scenarios, and synthesized clusters."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks import DATA, ROOT
from benchmarks.planner.random_matrices import on_a_globe
from geotrain.commands.plan import default_run
from geotrain.common.files import whole_file
from geotrain.config import ClusterConfig, RunConfig, parse
from geotrain.plan.inventory import Pins, Wish, task_of
from geotrain.plan.placement.cost import Placement, Problem, problem_from_links, quick_bound, table_costs
from geotrain.plan.placement.search import search
from geotrain.plan.planner import plan

T = TypeVar("T")
SCENARIOS = DATA / "dtfm_scenarios.json"
OUT = ROOT / "benchmarks" / "out"
SEEDS = 10
PLANNED_MODELS = ("llama-8b", "llama-70b")
SCALES = {256: 16, 1024: 32}  # devices: stages


def load_scenarios(path: Path = SCENARIOS) -> dict[str, Problem]:
    """DT-FM's scenarios as placement problems."""
    data = json.loads(path.read_text())
    task = data["task"]
    return {
        name: problem_from_links(
            np.array(scenario["delay_ms"]) / 1e3,
            scenario["bandwidth_gbps"],
            stages=task["pipeline_stages"],
            replicas=task["data_parallel"],
            gradient_gigabytes=task["gradient_gigabytes"],
            activation_gigabytes=task["activation_gigabytes"],
        )
        for name, scenario in data["scenarios"].items()
    }


def write_assignment(folder: Path, name: str, found: Placement) -> Path:
    """Write the placement for anyone to recompute."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"placement_{name}.json"
    text = {"stages": found.stages, "pipelines": list(zip(*found.stages, strict=True))}
    with whole_file(path) as file:
        json.dump(text, file)
    return path


def timed(call: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """What the call returns, and its seconds by the clock and of the processor."""
    began, began_cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - began_cpu}


def measure_scenario(name: str, problem: Problem, seeds: int = SEEDS, folder: Path = OUT) -> dict[str, float]:
    runs = [timed(lambda seed=seed: search(problem, seed)) for seed in range(seeds)]
    found = [placement for placement, _ in runs]
    costs = [p.total_s for p in found]
    write_assignment(folder, name, found[int(np.argmin(costs))])
    return {
        "cost": max(costs),
        "cost_best": min(costs),
        **{key: max(took[key] for _, took in runs) for key in ("seconds", "cpu_seconds")},
    }


def synthesize(devices: int, stages: int, seed: int) -> Problem:
    """Regions of unequal size strewn over a globe, hosts of eight devices; links get slower with distance."""
    rng = np.random.default_rng(seed)
    regions = devices // 32
    region = np.sort(rng.choice(regions, size=devices, p=rng.dirichlet(np.full(regions, 3.0))))
    within = np.arange(devices) - np.searchsorted(region, region)
    host = region * devices + within // 8
    delay, gbps = on_a_globe(rng, regions)
    gbps *= np.exp(0.1 * rng.standard_normal(gbps.shape))  # either direction its own
    same_host, same_region = host[:, None] == host, region[:, None] == region
    across = np.ix_(region, region)
    return problem_from_links(
        np.where(same_host, 1e-5, np.where(same_region, 2e-4, delay[across])),
        np.where(same_host, 200.0, np.where(same_region, 25.0, gbps[across])),
        stages=stages,
        replicas=devices // stages,
        gradient_gigabytes=0.65,
        activation_gigabytes=0.47,
    )


def measure_scale(devices: int, stages: int) -> dict[str, float]:
    problem = synthesize(devices, stages, seed=0)
    rng = np.random.default_rng(0)
    tables = np.array([rng.permutation(devices).reshape(stages, -1) for _ in range(8)])
    found, took = timed(lambda: search(problem, 0))
    return {
        **took,
        "cost": found.total_s,
        "random_cost": float(table_costs(problem, tables).mean()),
        "quick_bound": quick_bound(problem),
    }


def many_regions(regions: int = 8, hosts: int = 16) -> ClusterConfig:
    """Regions of hosts of eight accelerators, a third of them slower, joined by links of 1 to 1.4 Gbit/s."""
    names = [f"r{i}" for i in range(regions)]
    pairs = [(i, j) for i in range(regions) for j in range(i, regions)]
    raw = {
        "name": "many",
        "regions": [
            {
                "name": name,
                "ssh": f"{name}-n0",
                "server": {"host": name, "port": 7077},
                "hosts": [
                    {"host": f"{name}-n{j}", "slots": 8, "device": "slow" if i % 3 == 0 else "fast"}
                    for j in range(hosts)
                ],
            }
            for i, name in enumerate(names)
        ],
        "links": [
            {"regions": [names[i], names[j]], "gbps": 1.0 + 0.1 * ((i + j) % 5), "rtt_ms": 80.0}
            if i != j
            else {"regions": [names[i], names[i]], "gbps": 400.0, "rtt_ms": 0.05}
            for i, j in pairs
        ],
        "devices": {
            "fast": {"memory_gb": 76.0, "tflops": 989.0, "host_gbps": 3600.0},
            "slow": {"memory_gb": 76.0, "tflops": 312.0, "host_gbps": 2400.0},
        },
    }
    return parse(ClusterConfig, raw, "many regions")


def measure_plan(model: str) -> dict[str, float]:
    config = json.loads((ROOT / f"configs/models/{model}.json").read_text())
    task = task_of(parse(RunConfig, default_run(model, config, 1e12), model), Pins(), many_regions())
    found, took = timed(lambda: plan(task, Wish(1e12)))
    return {**took, "of_bound": found.prediction.tokens_per_s / found.inventory_tokens_per_s}


def measure(quick: bool) -> dict[str, Any]:
    """The figures of all scenarios and sizes, by the names that the benchmark's help explains."""
    found: dict[str, Any] = {}
    for name, problem in load_scenarios().items():
        found[name] = measure_scenario(name, problem, seeds=1 if quick else SEEDS)
        print(name, json.dumps(found[name]), flush=True)
    scales = {devices: stages for devices, stages in SCALES.items() if devices == min(SCALES) or not quick}
    detail = {str(devices): measure_scale(devices, stages) for devices, stages in scales.items()}
    found["scale"] = {devices: figures["seconds"] for devices, figures in detail.items()}
    found["scale_detail"] = detail
    found["plan"] = {model: measure_plan(model) for model in PLANNED_MODELS[: 1 if quick else None]}
    return found
