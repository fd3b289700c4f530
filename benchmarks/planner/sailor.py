"""Sailor's scenarios (SOSP 2025): what the planner's workers reach by Sailor's own measured profiles and simulator.

benchmarks/data/sailor.json holds, from its artifact: seconds and bytes of each layer of two models on three kinds of
accelerators, by micro-batch and tensor parallelism; rates within and between zones; prices; availabilities. Its
simulator's formulas (`iteration`) are stated again here: time of a 1F1B pipeline by its slowest stage, an all-reduce
in buckets, 24 bytes a parameter and all activations in flight.

The planner forms workers of like hosts, and of unlike ones of a zone, with these figures in place of its own cost
model, chooses among them by price, and takes the outer settings that the links between zones bear; of the result
counts what they leave (`Setting.utilization`). All workers together train at most Sailor's batch a step: of 1 to 16
workers, each with its part, the best number counts. Their updates are of different versions, which one synchronous
job's are not; what that costs in loss no figure here shows (docs/evidence.md).

`bound_it_s`: no plan does more in this simulator: a linear program that gives each layer to the kinds that compute it
best, without bubbles and communication. `bound_usd_it`: none costs less, likewise. `job_it_s`, `job_usd_it`: of a
single synchronous job that fulfils the wish, which Sailor's plans are: more than they reach where they are of the
forms of `jobs`; `usd_it_as_fast_as_job`: of the cheapest plan that is no slower. `sailor`: the plan of Sailor's own
planner, by its own simulator (docs/planner.md), and the processor seconds of its search, which in one case did not
end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise, permutations, product
from math import ceil
from typing import Any

import numpy as np
from scipy.optimize import linprog

from benchmarks import DATA
from geotrain.commands.plan import default_run
from geotrain.config import ClusterConfig, ParallelConfig, RunConfig, parse
from geotrain.plan.choice import usd_per_hour
from geotrain.plan.grouping import Workers, speed
from geotrain.plan.inventory import Host, Pins, PlanError, PlanTask, Wish, task_of
from geotrain.plan.layouts import ParallelLayout, Refusals
from geotrain.plan.model.division import Layers, divide_within
from geotrain.plan.model.step import StepTime
from geotrain.plan.planner import decide

SLOTS = 4  # accelerators of a virtual machine
BUCKET = 500_000_000
BYTES_A_PARAMETER = 24
ITERATIONS = 160_000  # of a run: as many steps of each of 16 workers as evidence of their loss has
FASTEST_LINKS = ("GH-96", "A100-40", "V100-16")


@dataclass(frozen=True)
class Profile:
    """Layers of a model on one kind of accelerator: running sums over layers, in the order of the model. compute_s:
    of a micro-batch forward and backward, by (micro-batch, tensor ranks). update_s: of a layer, likewise."""

    compute_s: dict[tuple[int, int], list[float]]
    update_s: dict[tuple[int, int], float]


class Sailor:
    """One model in Sailor's simulator."""

    def __init__(self, model: str) -> None:
        self.data = json.loads((DATA / "sailor.json").read_text())
        self.model = self.data["models"][model]
        self.layers = self.model["layers"]
        per_layer = {int(tp): _unpacked(runs) for tp, runs in self.model["bytes"].items()}
        self.parameters = {tp: _sums(row[0] for row in rows) for tp, rows in per_layer.items()}
        self.activations = {tp: _sums(row[2] for row in rows) for tp, rows in per_layer.items()}
        self.outputs = [row[1] for row in per_layer[1]]
        self.total = len(self.outputs)
        self.profiles = {kind: self._profile(kind) for kind in self.model["seconds"]}

    def _profile(self, kind: str) -> Profile:
        compute, update = {}, {}
        for micro, by_tp in self.model["seconds"][kind].items():
            for tp, runs in by_tp.items():
                rows = _unpacked(runs)
                compute[int(micro), int(tp)] = _sums(row[0] + row[1] for row in rows)
                update[int(micro), int(tp)] = max(row[2] for row in rows)
        return Profile(compute, update)

    def stages(self, pipeline: int) -> list[tuple[int, int]]:
        """Layers of each stage, [begin, end): equally many of the model's, as the product launches them; the first
        has the embedding besides, the last the head."""
        each = self.layers // pipeline
        bounds = [0, *(1 + each * s for s in range(1, pipeline)), self.total]
        return list(pairwise(bounds))

    def stages_of(self, layers: Layers) -> list[tuple[int, int]]:
        """The same of stages that hold these numbers of the model's layers."""
        inner = [1 + end for end in accumulate(layers[:-1])]
        return list(pairwise([0, *inner, self.total]))

    def fits(self, kind: str, pipeline: int, tp: int, micro: int) -> bool:
        return self.fullest(pipeline, tp, micro) <= self.data["memory_gib"][kind] * 2**30

    def fullest(self, pipeline: int, tp: int, micro: int) -> float:
        stages = self.stages(pipeline)
        return max(self.stage_bytes(stages, s, tp, micro) for s in range(pipeline))

    def stage_bytes(self, stages: list[tuple[int, int]], stage: int, tp: int, micro: int) -> float:
        begin, end = stages[stage]
        held = BYTES_A_PARAMETER * (self.parameters[tp][end] - self.parameters[tp][begin])
        kept = 4 * micro * (self.activations[tp][end] - self.activations[tp][begin]) * (len(stages) - stage)
        return held + kept + (2e9 if tp == 1 else 3e9)

    def iteration(self, zone: str, kind: str, pipeline: int, tp: int, replicas: int, micro: int, batch: int) -> float:
        """Seconds of an iteration of one job on like accelerators of a zone."""
        compute, stages = self.profiles[kind].compute_s[micro, tp], self.stages(pipeline)
        took = [compute[end] - compute[begin] for begin, end in stages]
        moved = self.transfers(f"{zone} {kind} {tp}", stages, micro)
        micro_batches = ceil(batch / (micro * replicas))
        slowest = max(a + b for a, b in zip(took, moved, strict=True))
        pipe_s = (micro_batches - 1) * slowest + sum(took) + sum(moved) + self.profiles[kind].update_s[micro, tp]
        if replicas == 1:
            return pipe_s
        alone = self.data["gbytes_per_s"][f"{zone} {kind} 1"]
        sizes = [4 * (self.parameters[1][end] - self.parameters[1][begin]) / tp for begin, end in stages]
        return pipe_s + max(self.reduction(size, replicas, alone) for size in sizes)

    def transfers(self, link: str, stages: list[tuple[int, int]], micro: int) -> list[float]:
        """Seconds of a stage's transfers for a micro-batch. link: a key of the messages' rates."""
        rate = self.data["gbytes_per_s"][link]
        if len(stages) == 1:
            return [0.0]
        out = [_seconds(4 * self.outputs[end - 1] * micro, rate) for _, end in stages]
        back = [_seconds(4 * self.outputs[begin] * micro, rate) for begin, _ in stages]
        first = out[0] if len(stages) <= 3 else 2 * out[0]
        return [first, *(out[s] + back[s] for s in range(1, len(stages) - 1)), 2 * back[-1]]

    def reduction(self, size: float, replicas: int, coefficients: list[float]) -> float:
        whole, rest = divmod(size, BUCKET)
        buckets = [BUCKET] * int(whole) + [rest] * (rest > 0)
        return sum(2 * (replicas - 1) * _seconds(bucket / replicas, coefficients) for bucket in buckets)

    def layouts(self, task: PlanTask, hosts: Sequence[Host], refused: Refusals, kept: int) -> list[ParallelLayout]:
        """Find the fastest layouts of one worker on these hosts, complete search; in place of the cost model's."""
        zone, kind, ranks = hosts[0].region, hosts[0].kind, SLOTS * len(hosts)
        unlike = len({(host.region, host.kind) for host in hosts}) > 1
        found = self.mixed(task, hosts) if unlike else []
        for micro, tp in self.profiles[kind].compute_s if not unlike else ():
            for pipeline in range(1, self.layers + 1):
                replicas, rest = divmod(ranks, pipeline * tp)
                if rest or not replicas or self.layers % pipeline or task.batch % (replicas * micro):
                    continue
                if self.fits(kind, pipeline, tp, micro):
                    step_s = self.iteration(zone, kind, pipeline, tp, replicas, micro, task.batch)
                    parallel = ParallelConfig(tensor=tp, pipeline=pipeline)
                    need = int(self.fullest(pipeline, tp, micro))
                    found.append(ParallelLayout(tuple(hosts), SLOTS, parallel, micro, _step(step_s), need))
        return sorted(found, key=lambda layout: layout.order)[:kept]

    def mixed(self, task: PlanTask, hosts: Sequence[Host]) -> list[ParallelLayout]:
        """Find the layouts of one worker of stages on unlike kinds of a zone, with one tensor parallelism, as the
        product launches them. Links between kinds are those of the slower one."""
        zone, found = hosts[0].region, list[ParallelLayout]()
        of = {kind: [host for host in hosts if host.kind == kind] for kind in dict.fromkeys(h.kind for h in hosts)}
        shared = set.intersection(*(set(self.profiles[kind].compute_s) for kind in of))
        for (micro, tp), width in product(sorted(shared), (1, 2, *range(SLOTS, SLOTS * len(hosts), SLOTS))):
            counts = {kind: SLOTS * len(mine) // width for kind, mine in of.items()}
            kinds, replicas = [kind for kind, count in counts.items() for _ in range(count)], width // tp
            links = [f"{zone} {kind} {tp}" for kind in of]
            if width % tp or task.batch % (replicas * micro) or not all(counts.values()) or len(kinds) > self.layers:
                continue
            if any(host.region != zone for host in hosts) or not self.data["gbytes_per_s"].keys() >= set(links):
                continue
            at = [0, *range(2, self.layers + 1), self.total]
            sums = {kind: np.array(self.profiles[kind].compute_s[micro, tp])[at] for kind in of}

            def needs(layers: Layers, micro: int = micro, tp: int = tp, kinds: list[str] = kinds) -> Any:
                stages = self.stages_of(layers)
                rooms = [self.data["memory_gib"][kind] * 2**30 for kind in kinds]
                return [(self.stage_bytes(stages, s, tp, micro), room) for s, room in enumerate(rooms)]

            layers = divide_within([sums[kind] for kind in kinds], needs)
            if layers is None:
                continue
            stages = self.stages_of(layers)
            moved = np.max([self.transfers(link, stages, micro) for link in links], axis=0)
            each = [self.profiles[kind].compute_s[micro, tp] for kind in kinds]
            took = [sums[end] - sums[begin] for sums, (begin, end) in zip(each, stages, strict=True)] + moved
            step_s = (ceil(task.batch / (micro * replicas)) - 1) * max(took) + sum(took)
            step_s += max(self.profiles[kind].update_s[micro, tp] for kind in of)
            if replicas > 1:
                step_s += max(
                    self.reduction(4 * (self.parameters[1][end] - self.parameters[1][begin]) / tp, replicas,
                                   self.data["gbytes_per_s"][f"{zone} {kind} 1"])
                    for kind, (begin, end) in zip(kinds, stages, strict=True)
                )  # fmt: skip
            unlike = layers if len(set(layers)) > 1 else None
            parallel = ParallelConfig(tensor=tp, pipeline=len(kinds), stage_layers=unlike)
            used = [host for kind, mine in of.items() for host in mine[: ceil(counts[kind] * width / SLOTS)]]
            need = int(max(need for need, _ in needs(layers)))
            found.append(ParallelLayout(tuple(used), SLOTS, parallel, micro, _step(float(step_s)), need))
        return found

    def out_of_memory(self, layout: ParallelLayout) -> bool:
        """Whether a stage does not fit its own accelerators."""
        p = layout.parallel
        stages = self.stages(p.pipeline) if p.stage_layers is None else self.stages_of(p.stage_layers)
        width = layout.ranks // p.pipeline
        on = [layout.hosts[s * width // SLOTS].kind for s in range(p.pipeline)]
        return any(
            self.stage_bytes(stages, s, p.tensor, layout.micro_batch) > self.data["memory_gib"][kind] * 2**30
            for s, kind in enumerate(on)
        )

    def bounds(self, available: dict[str, int]) -> tuple[float, float]:
        """(most iterations a second, least dollars an iteration) of any plan: accelerator-seconds of each layer of a
        sample, at the best micro-batch and tensor parallelism, and nothing else."""
        kinds = sorted({key.split()[1] for key in available})
        seconds = np.array([
            np.min([np.diff(sums) * tp / micro for (micro, tp), sums in self.profiles[k].compute_s.items()], axis=0)
            for k in kinds
        ])  # fmt: skip
        count = [sum(number for key, number in available.items() if key.split()[1] == k) for k in kinds]
        n, layers = seconds.shape
        # Samples a second that kind k computes of layer l; then those of all.
        limits = np.zeros((n, n * layers + 1))
        for k in range(n):
            limits[k, k * layers : (k + 1) * layers] = seconds[k]
        equal = np.hstack([np.tile(np.eye(layers), n), -np.ones((layers, 1))])
        goal = np.zeros(n * layers + 1)
        goal[-1] = -1
        most = -linprog(goal, limits, count, equal, np.zeros(layers)).fun
        prices = np.array([self.data["usd_per_hour"][k] / 3600 for k in kinds])
        least = float((seconds * prices[:, None]).min(axis=0).sum())
        return most / self.model["batch"], least * self.model["batch"]


def inventory(sailor: Sailor, available: dict[str, int], quotas: bool = False) -> ClusterConfig:
    """A cluster file of the accelerators that are available: "zone kind" → how many."""
    zones = list(dict.fromkeys(key.split()[0] for key in available))
    data, regions = sailor.data, []
    for zone in zones:
        mine = {key.split()[1]: number for key, number in available.items() if key.split()[0] == zone}
        hosts = [
            {"host": f"{zone}-{kind.lower()}-[0-{number // SLOTS - 1}]", "slots": SLOTS, "device": kind}
            for kind, number in mine.items()
        ]
        offers = {kind: {"quota": data["quotas"][kind][zone]} for kind in mine} if quotas else {}
        server = {"host": f"{zone}.example.org", "port": 7077}
        regions.append({"name": zone, "ssh": zone, "server": server, "hosts": hosts, "offers": offers})
    links: list[dict[str, Any]] = []
    for i, zone in enumerate(zones):
        # Of unlike rates each its own: layouts are not shared between zones.
        links.append({"regions": [zone, zone], "gbps": 20.0 + i, "rtt_ms": 0.1})
        for other in zones[i + 1 :]:
            pair = " ".join(sorted((zone, other)))
            gbps, price = data["gbps_across"][pair], data["usd_per_gb"][pair]
            links.append({"regions": [zone, other], "gbps": gbps, "rtt_ms": 30.0, "usd_per_gb": price})
    devices = {
        kind: {"memory_gb": data["memory_gib"][kind], "tflops": 100.0, "usd_per_hour": data["usd_per_hour"][kind]}
        for kind in sailor.profiles
    }
    raw = {"name": "sailor", "regions": regions, "links": links, "devices": devices}
    return parse(ClusterConfig, raw, "sailor")


def run_of(sailor: Sailor, batch: int) -> RunConfig:
    """A run of a model with as many parameters: what the outer loop sends."""
    m = sailor.model
    h = m["hidden"]
    raw = default_run("sailor", {
        "model_type": "llama", "vocab_size": m["vocabulary"], "hidden_size": h, "num_hidden_layers": m["layers"],
        "intermediate_size": 8 * h // 3 // 8 * 8, "num_attention_heads": 16, "num_key_value_heads": 16,
        "max_position_embeddings": m["sequence"],
    }, None)  # fmt: skip
    raw["deepspeed"]["train_batch_size"] = batch
    raw["data"] |= {"sequence_length": m["sequence"], "train_samples": 1000 * batch}
    return parse(RunConfig, raw, "sailor")


@dataclass(frozen=True)
class Planned:
    """A plan: iterations a second, and dollars of each, traffic included."""

    workers: Workers
    it_s: float
    usd_it: float
    utilization: float


def planned(sailor: Sailor, cluster: ClusterConfig, **wish: Any) -> Planned | None:
    """Plan, as `geotrain plan` does, with the simulator's figures. Wishes are in iterations, converted here. Returns
    None where no plan fulfils them."""
    batch = sailor.model["batch"]
    a_step = sailor.model["sequence"] * batch  # tokens of an iteration
    per = {"tokens_per_s": a_step, "usd": ITERATIONS}
    asked = Wish(ITERATIONS * a_step, **{k: per[k] * v if k in per else v for k, v in wish.items()})
    found: list[Planned] = []
    for parts in (1, 2, 4, 8, 16):
        task = task_of(run_of(sailor, batch // parts), Pins(recompute="none"), cluster)
        try:
            decided = decide(task, replace(asked, most_workers=parts), sailor.layouts)
        except PlanError:
            continue  # so few reach too little, or parts of the batch are too small
        workers, setting = decided.workers, decided.settings[0]
        alone = len(workers) == 1  # synchronous; nothing is exchanged
        it_s = speed(workers) * (1.0 if alone else setting.utilization) / parts
        traffic = 0.0 if alone else setting.traffic_usd_per_hour
        usd_it = (usd_per_hour(workers) + traffic) / it_s / 3600
        kept = usd_it <= wish.get("usd", usd_it)
        if it_s >= wish.get("tokens_per_s", 0.0) and kept:
            found.append(Planned(workers, it_s, usd_it, setting.utilization))
    return min(found, key=lambda plan: plan.usd_it if asked.objective == "cost" else -plan.it_s, default=None)


def jobs(sailor: Sailor, pool: dict[str, int]) -> list[tuple[float, float]]:
    """(iterations a second, dollars each) of single synchronous jobs that mix kinds, on the assumption that all zones
    are one, and links between unlike kinds those of the faster: more than any such job reaches. Either each stage has
    replicas of several kinds, each with its own tensor parallelism; or the first stages are of one kind, the others
    of another, with layers of any number."""
    batch, kinds = sailor.model["batch"], list(dict.fromkeys(key.split()[1] for key in pool))
    count = {kind: sum(n for key, n in pool.items() if key.split()[1] == kind) for kind in kinds}
    price = {kind: sailor.data["usd_per_hour"][kind] / 3600 for kind in kinds}
    zone, found = next(iter(pool)).split()[0], list[tuple[float, float]]()

    def add(
        micro: int, most: int, tps: dict[str, int], used: dict[str, int], stages: list[tuple[int, int]],
        computed: list[float], on: list[list[str]],
    ) -> None:  # fmt: skip
        """Add jobs of up to `most` replicas. used: accelerators of each kind, of all of these. computed: seconds of
        each stage. on: kinds of which a stage has several replicas."""
        if not most:
            return
        tp, fast = min(tps.values()), next(kind for kind in FASTEST_LINKS if kind in used)
        took = [
            a + b for a, b in zip(computed, sailor.transfers(f"{zone} {fast} {max(tps.values())}", stages, micro),
                                  strict=True)
        ]  # fmt: skip
        sync = [4 * (sailor.parameters[1][end] - sailor.parameters[1][begin]) / tp for begin, end in stages]
        for micro_batches in {ceil(batch / (micro * replicas)) for replicas in range(1, most + 1)}:
            replicas = ceil(batch / (micro * micro_batches))
            rings = [(size, kind) for size, of in zip(sync, on, strict=True) for kind in of if replicas > 1]
            alone = {kind: sailor.data["gbytes_per_s"][f"{zone} {kind} 1"] for kind in used}
            reduced = max((sailor.reduction(size, replicas, alone[kind]) for size, kind in rings), default=0.0)
            step_s = (micro_batches - 1) * max(took) + sum(took) + reduced
            usd_s = sum(price[kind] * number for kind, number in used.items()) * replicas / most
            found.append((1 / step_s, usd_s * step_s))

    for micro in {micro for profile in sailor.profiles.values() for micro, _ in profile.compute_s}:
        known = {
            kind: [tp for m, tp in sailor.profiles[kind].compute_s if m == micro and f"{zone} {kind} 1" in
                   sailor.data["gbytes_per_s"]]
            for kind in kinds
        }  # fmt: skip
        for pipeline in (p for p in range(1, 9) if sailor.layers % p == 0):
            stages = sailor.stages(pipeline)
            for tps in product(*([0, *known[kind]] for kind in kinds)):
                mixed = {k: tp for k, tp in zip(kinds, tps, strict=True) if tp}
                if not mixed or not all(sailor.fits(k, pipeline, tp, micro) for k, tp in mixed.items()):
                    continue
                each = {k: count[k] // (pipeline * tp) for k, tp in mixed.items()}
                sums = [sailor.profiles[k].compute_s[micro, tp] for k, tp in mixed.items()]
                took = [max(c[end] - c[begin] for c in sums) for begin, end in stages]
                used = {k: each[k] * pipeline * tp for k, tp in mixed.items()}
                several = [k for k in mixed if each[k] > 1]
                add(micro, sum(each.values()), mixed, used, stages, took, [several] * pipeline)
        for first, other in permutations(kinds, 2):
            for n, m, tp, tq in product(range(1, 5), range(1, 5), known[first], known[other]):
                for layers in range(n, sailor.layers - m + 1, n):
                    if (sailor.layers - layers) % m:
                        continue
                    bounds = [0, *(1 + layers // n * s for s in range(1, n + 1))]
                    bounds += [1 + layers + (sailor.layers - layers) // m * s for s in range(1, m)]
                    stages = list(pairwise([*bounds, sailor.total]))
                    places = [(first, tp)] * n + [(other, tq)] * m
                    if all(
                        sailor.stage_bytes(stages, s, t, micro) <= sailor.data["memory_gib"][k] * 2**30
                        for s, (k, t) in enumerate(places)
                    ):
                        took = [
                            sailor.profiles[k].compute_s[micro, t][end]
                            - sailor.profiles[k].compute_s[micro, t][begin]
                            for (k, t), (begin, end) in zip(places, stages, strict=True)
                        ]
                        most = min(count[first] // (n * tp), count[other] // (m * tq))
                        used = {first: most * n * tp, other: most * m * tq}
                        add(micro, most, {first: tp, other: tq}, used, stages, took, [[k] for k, _ in places])
    return found


def measure(quick: bool) -> dict[str, Any]:
    """The figures of all scenarios, by the names that the module explains."""
    found: dict[str, Any] = {}
    for model in ("OPT-350", "GPT-Neo-2.7")[: 1 if quick else None]:
        sailor = Sailor(model)
        data = sailor.data
        three = {f"us-central1-a {kind}": 256 for kind in sailor.profiles}
        pools = {name: {key: rows[-1] for key, rows in of.items()} for name, of in data["availability"].items()}
        cases: list[tuple[str, dict[str, int], dict[str, Any], bool]] = [
            *((name, pool, {}, False) for name, pool in pools.items()),
            ("three_kinds_of_256", three, {}, False),
            ("quotas", pools["geo"], {}, True),
            ("floor", pools["two_zones_two_kinds"],
             {"objective": "cost", "tokens_per_s": data["least_iterations_per_s"]}, False),
            ("budget", pools["two_zones_two_kinds"], {"usd": data["most_usd_per_iteration"]}, False),
        ]  # fmt: skip
        for name, available, wish, quotas in cases[: -2 if model != "OPT-350" else None]:
            pool, cluster = available, inventory(sailor, available, quotas)
            began = time.process_time()
            plan = planned(sailor, cluster, **wish)
            took_s = time.process_time() - began
            assert plan is not None, name
            failed = sum(sailor.out_of_memory(w.layout) for w in plan.workers)
            mixed = sum(len({host.kind for host in w.layout.hosts}) > 1 for w in plan.workers)
            if quotas:
                pool = {key: min(n, data["quotas"][key.split()[1]][key.split()[0]]) for key, n in pool.items()}
            every = jobs(sailor, pool)
            most, least = sailor.bounds(pool)
            job = max(every)
            if "usd" in wish:
                job = max(one for one in every if one[1] <= wish["usd"])
            if "tokens_per_s" in wish:
                job = min((one for one in every if one[0] >= wish["tokens_per_s"]), key=lambda one: one[1])
            as_fast = planned(sailor, cluster, objective="cost", tokens_per_s=job[0])
            figures = {
                "it_s": plan.it_s, "usd_it": plan.usd_it, "sailor": data["planner"].get(f"{model} {name}"),
                "plan_seconds": took_s, "workers": len(plan.workers), "mixed": mixed, "out_of_memory": failed,
                "bound_it_s": most, "bound_usd_it": least, "job_it_s": job[0], "job_usd_it": job[1],
                "usd_it_as_fast_as_job": None if as_fast is None else as_fast.usd_it, "available": sum(pool.values()),
                "accelerators": sum(w.layout.ranks for w in plan.workers), "utilization": plan.utilization,
            }  # fmt: skip
            found[f"{model} {name}"] = figures
            print(f"{model} {name}", json.dumps(figures), flush=True)
    return found


def _step(step_s: float) -> StepTime:
    return StepTime(step_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, {}, 0.0, 0.0, {}, False)


def _unpacked(runs: list[list[Any]]) -> list[list[float]]:
    return [row for count, row in runs for _ in range(count)]


def _sums(values: Any) -> list[float]:
    return [0.0, *accumulate(values)]


@cache
def _rate(size: float, coefficients: tuple[float, ...]) -> float:
    """Gigabytes a second of messages of that size: a polynomial of the logarithm of the megabytes."""
    return float(np.polyval(coefficients, np.log2(size / 1e6)))


def _seconds(size: float, coefficients: list[float]) -> float:
    return size / 1e9 / _rate(size, tuple(coefficients))
