"""Inventories and tasks that the planner's tests share."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from geotrain.commands.plan import default_run
from geotrain.config import ClusterConfig, RunConfig, load_cluster, parse
from geotrain.launch.check import check_together
from geotrain.plan.inventory import Pins, PlanTask, Wish, task_of
from geotrain.plan.placement.cost import Problem, problem_from_links
from geotrain.plan.planner import Plan, plan

CONFIGS = Path(__file__).parent.parent.parent / "configs"
WORLD = CONFIGS / "clusters/world-inventory.json"
DEVICE = {"memory_gb": 40.0, "tflops": 100.0, "efficiency": 0.5, "host_gbps": 400.0, "usd_per_hour": 1.0}
MODEL = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 2048,
}  # fmt: skip


def world() -> ClusterConfig:
    return load_cluster(WORLD)


def run_of(name: str) -> RunConfig:
    model = json.loads((CONFIGS / f"models/{name}.json").read_text())
    return parse(RunConfig, default_run(name, model, None), name)


def small_run(**keys: Any) -> RunConfig:
    """A 1B model in batches of 64; keys: laid over the file."""
    raw = default_run("small", MODEL, 1e9)
    raw["deepspeed"]["train_batch_size"] = 64
    raw["data"]["train_samples"] = 64_000
    raw["deepspeed"]["scheduler"]["params"]["total_num_steps"] = 1000
    return parse(RunConfig, {**raw, **keys}, "small")


def inventory(
    regions: dict[str, list[tuple[int, str]]], gbps: float = 1.0, **devices: dict[str, Any]
) -> ClusterConfig:
    """regions: name → (slots, kind) of each host. devices: what differs from DEVICE; `d` is DEVICE itself."""
    raw: dict[str, Any] = {
        "name": "inventory",
        "regions": [
            {
                "name": name, "ssh": f"{name}-0", "server": {"host": f"{name}-0", "port": 7077},
                "hosts": [{"host": f"{name}-{i}", "slots": s, "device": kind} for i, (s, kind) in enumerate(hosts)],
            }
            for name, hosts in regions.items()
        ],
        "links": [
            {"regions": [a, b], "gbps": gbps if a != b else 100.0, "rtt_ms": 80.0 if a != b else 0.1}
            for i, a in enumerate(regions)
            for b in list(regions)[i:]
        ],
        "devices": {"d": DEVICE, **{name: {**DEVICE, **changed} for name, changed in devices.items()}},
    }  # fmt: skip
    return parse(ClusterConfig, raw, "inventory")


def changed(cluster: ClusterConfig, change: Any) -> ClusterConfig:
    """change: called with the file's JSON, which it may write to."""
    raw = copy.deepcopy(cluster.model_dump(by_alias=True, mode="json"))
    change(raw)
    return parse(ClusterConfig, raw, "changed")


def task(run: RunConfig, cluster: ClusterConfig, pins: Pins | None = None) -> PlanTask:
    return task_of(run, pins or Pins(), cluster)


def planned(run: RunConfig, cluster: ClusterConfig, pins: Pins | None = None, **wish: Any) -> Plan:
    return plan(task(run, cluster, pins), Wish(**{"tokens": 1e10, **wish}))


def holds(plan: Plan) -> None:
    """What must be true of every plan."""
    check_together(plan.run, plan.cluster)
    hosts = [h.host for r in plan.cluster.regions for w in r.workers for h in w.hosts]
    assert len(hosts) == len(set(hosts)), "a host belongs to one worker"
    for w in plan.prediction.workers.values():
        assert w.memory_bytes <= w.memory_limit_bytes, w.name
    used = sum(w.ranks for w in plan.prediction.workers.values())
    everything = sum(s.slots for hosts in plan.task.hosts.values() for s in hosts)
    assert used + sum(count for _, count, _ in plan.idle) == everything
    assert (
        plan.prediction.tokens_per_s <= plan.prediction.bound_tokens_per_s <= plan.inventory_tokens_per_s * 1.000001
    )
    assert plan.prediction.workers.keys() == plan.workers.keys()


def random_problem(rng: np.random.Generator, stages: int, replicas: int, idle: int = 0) -> Problem:
    n = stages * replicas + idle
    return problem_from_links(
        rng.random((n, n)) * 0.2,
        np.exp(rng.standard_normal((n, n))),
        stages=stages,
        replicas=replicas,
        gradient_gigabytes=0.65,
        activation_gigabytes=0.47,
        compute_s=rng.random(n),
    )
