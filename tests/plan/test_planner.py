"""What the planner decides, against plainer searches and against what must hold of any plan."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from geotrain.commands import dry_run
from geotrain.config import ClusterConfig, ConfigError, OuterConfig, ParallelConfig
from geotrain.parameters.parameter_map import parameter_count
from geotrain.plan.explain import doubts, reasons, synchronous_text
from geotrain.plan.grouping import SLACK, divisions, fewest_workers
from geotrain.plan.inventory import Pins, PlanError, PlanTask
from geotrain.plan.layouts import FULL_MICRO_TOKENS, Refusals, evaluated, layouts, micro_batches
from geotrain.plan.model.answering import waits
from geotrain.plan.placement.search import search
from geotrain.plan.planner import Plan, resolve
from geotrain.plan.planner import plan as plan_of
from geotrain.plan.predict import predict
from geotrain.plan.settings import BUSY, SERVER_BUSY, TRAFFIC, line_to
from geotrain.plan.spanning import effort, link_tables, placement_problem, shapes, spanning_layouts
from tests.support.plan_cases import MODEL, changed, holds, inventory, planned, run_of, small_run, task, world


@pytest.mark.long("geotrain/plan")
def test_the_world_inventory() -> None:
    plan = planned(run_of("llama-8b"), world(), tokens=1.6e11)
    holds(plan)
    assert {w.region for w in plan.prediction.workers.values()} == {"us-east", "us-west", "europe", "asia"}
    assert plan.prediction.utilization > 0.85
    for worker in plan.workers.values():
        assert len({s.kind for s in worker.layout.hosts}) == 1, "no slow kind in a worker of fast ones"
    large = planned(run_of("llama-70b"), world())
    holds(large)
    assert large.run.model.recompute == "none"
    run = run_of("llama-70b")
    adamw = {**run.deepspeed, "optimizer": {**run.deepspeed["optimizer"], "type": "AdamW"}}
    larger = planned(run.model_copy(update={"deepspeed": adamw}), world())
    assert larger.run.model.recompute == "full", "with a second moment it fits only so"
    assert {host.kind for host, _, _ in large.idle} == {"l40s"}, "left idle on purpose"
    assert sum(line.startswith("idle: ") and " l40s on " in line for line in reasons(large)) == len(large.idle)
    (mixed,) = (w.layout for w in large.workers.values() if len({host.kind for host in w.layout.hosts}) > 1)
    assert {host.kind for host in mixed.hosts} == {"a100", "h200"}, "which cannot hold the model alone"
    assert mixed.parallel.stage_layers is not None and max(mixed.parallel.stage_layers[:2]) < 20


def test_the_layout_is_the_fastest_of_all() -> None:
    """Against every layout, tried without bounds or order."""
    for given, kind in (([(4, "d")] * 2, "d"), ([(8, "d")] * 2, "d"), ([(6, "d")], "d"), ([(4, "s")] * 4, "s")):
        asked = task(small_run(), inventory({"eu": given}, s={"memory_gb": 12.0, "host_gbps": 50.0}))
        hosts = asked.hosts["eu"]
        assert hosts[0].kind == kind
        refused = Refusals()
        best = None
        for slots in range(1, given[0][0] + 1):
            for tp, pp, micro in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4)):
                ranks = slots * len(hosts)
                if slots % tp or ranks % (tp * pp) or 64 % (micro * (ranks // (tp * pp))):
                    continue
                layout = ParallelConfig(tensor=tp, pipeline=pp, sequence=tp > 1)
                found = evaluated(asked, hosts, slots, layout, micro, refused)
                if found is not None:
                    best = min(best or found.step.step_s, found.step.step_s)
        found_s = [layout.step.step_s for layout in layouts(asked, hosts, refused)]
        assert found_s[0] == pytest.approx(best, rel=1e-12)
        assert found_s == sorted(found_s)


DATA = small_run().model_dump(by_alias=True, mode="json")["data"]
EXPERTS = {
    **MODEL, "model_type": "qwen3_moe", "moe_intermediate_size": 1024, "num_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip


def every_layout(asked: PlanTask) -> float:
    """The shortest step of all layouts on the hosts of region eu, tried without bounds or order."""
    hosts, best = asked.hosts["eu"], float("inf")
    sizes, experts = (1, 2, 4, 8), (1, 2, 4, 8) if asked.architecture.experts else (1,)
    pipelines = sizes if asked.pins.pipeline is None else (asked.pins.pipeline,)
    for slots, tp, pp, cp, ep, micro in itertools.product((4, 8), (1, 2, 4), pipelines, sizes, experts, (1, 2, 4)):
        layout = ParallelConfig(tensor=tp, pipeline=pp, sequence=tp > 1, context=cp, expert=ep)
        ranks = slots * len(hosts)
        if slots > hosts[0].slots or slots % (tp * cp) or slots % (tp * ep) or ranks % layout.replica_ranks:
            continue
        if asked.run.data.sequence_length // cp < FULL_MICRO_TOKENS and cp > 1:
            continue
        if asked.batch % (micro * (ranks // layout.replica_ranks)) == 0:
            found = evaluated(asked, hosts, slots, layout, micro, Refusals())
            best = min(best, found.step.step_s) if found else best
    return best


def test_experts_are_divided_where_that_is_the_fastest_that_fits() -> None:
    small = {"memory_gb": 19.4, "host_gbps": 3200.0}
    plan = planned(small_run(model={"config": EXPERTS}), inventory({"eu": [(8, "s")]}, s=small))
    holds(plan)
    (found,) = plan.workers.values()
    assert found.layout.parallel.expert > 1
    assert found.layout.step.step_s == pytest.approx(every_layout(plan.task), rel=1e-12)
    (worker,) = (w for region in plan.cluster.regions for w in region.workers)
    assert worker.parallel == found.layout.parallel == plan.run.parallel, "as it is launched"
    pinned = planned(plan.task.run, plan.task.cluster, Pins(expert=1))
    (whole,) = pinned.workers.values()
    assert whole.layout.parallel.expert == 1
    assert whole.layout.step.step_s > found.layout.step.step_s
    uneven = plan_of(replace(plan.task, imbalance=1.5), plan.wish)
    assert uneven.prediction.tokens_per_s < plan.prediction.tokens_per_s
    needs = dry_run.needs(plan.run, plan.cluster)
    assert [f"EP {worker.parallel.expert}" in needs.workers[0].layout] == [True]


def test_long_sequences_are_shared_where_that_is_the_fastest_that_fits() -> None:
    run = small_run(
        model={"config": {**MODEL, "max_position_embeddings": 65_536}}, data={**DATA, "sequence_length": 65_536}
    )
    plan = planned(run, inventory({"eu": [(8, "d")]}), Pins(pipeline=1))
    holds(plan)
    (found,) = plan.workers.values()
    assert found.layout.parallel.context > 1
    best = min(every_layout(plan.task.with_recompute(again)) for again in ("none", "full"))
    assert found.layout.step.step_s <= best * (1 + 1e-12)
    (worker,) = (w for region in plan.cluster.regions for w in region.workers)
    assert worker.parallel == found.layout.parallel
    short = planned(small_run(), inventory({"eu": [(8, "d")]}))
    assert {w.layout.parallel.context for w in short.workers.values()} == {1}, "parts would be too small"


def test_the_fewest_workers_that_lose_little() -> None:
    rate = {1: 1.0, 2: 1.9, 3: 2.0, 4: 3.0}
    for hosts in range(1, 9):
        divisions = [
            counts
            for workers in range(1, hosts + 1)
            for counts in itertools.combinations_with_replacement(rate, workers)
            if sum(counts) <= hosts
        ]
        best = max(sum(rate[c] for c in counts) for counts in divisions)
        good = [counts for counts in divisions if sum(rate[c] for c in counts) >= (1 - SLACK) * best - 1e-12]
        assert len(fewest_workers(rate, hosts)) == min(map(len, good)), hosts


def test_regions_are_divided_in_the_best_way() -> None:
    asked = task(small_run(), inventory({name: [(1, "d")] for name in "abcd"}))
    worker = planned(asked.run, asked.cluster).workers["a-0"]
    alike = {name: (name, "d", 1, False) for name in "abcd"}
    sets = {frozenset((alike[name],)): [] for name in "abcd"}
    sets |= {frozenset(map(alike.get, "ab")): [(worker,)]}
    sets |= {frozenset(map(alike.get, pair)): [(worker, worker)] for pair in ("bc", "cd")}
    found = divisions(sets, list(alike.values()))[0]
    assert {"".join(sorted(name for name, *_ in chosen)) for chosen in found} == {"ab", "cd"}, "not bc alone"


def test_the_global_server_stands_where_the_slowest_region_waits_least() -> None:
    plan = planned(run_of("llama-8b"), world(), tokens=1.6e11)
    homes = [r.name for r in plan.cluster.regions]
    size = 2 * parameter_count(plan.task.architecture)
    worst = {
        place: max(2 * line_to(plan.task, home, place).seconds(size) for home in homes)
        for place in ("us-east", "us-west", "europe", "asia")
    }
    assert plan.place.region == min(worst, key=lambda place: worst[place])
    assert plan.cluster.global_ssh == "us-west-node0"
    assert plan.cluster.global_server.host == "us-west.example.org"
    pinned = planned(run_of("llama-8b"), world(), Pins(global_region="asia"))
    assert pinned.cluster.global_ssh == "asia-node0"
    to_global = {
        set(link.regions) - {"global"} == {"europe"}: link
        for link in pinned.cluster.links
        if "global" in link.regions
    }
    assert (to_global[True].gbps, to_global[True].rtt_ms) == (0.4, pytest.approx(220.0))


def test_slower_links_bear_less() -> None:
    def steps_at(gbps: float) -> tuple[float, Plan]:
        plan = planned(small_run(), inventory({"a": [(8, "d")], "b": [(8, "d")]}, gbps))
        assert plan.setting.misses == 0
        assert plan.setting.utilization >= 0.95
        assert plan.setting.busy <= BUSY
        return plan.setting.steps, plan

    found = [steps_at(gbps) for gbps in (100.0, 1.0, 0.1)]
    assert found[0][0] <= found[1][0] <= found[2][0]
    assert found[0][0] < found[2][0]
    assert found[0][1].setting.outer.up.name == "bf16", "no reason for less precision"
    assert found[2][1].setting.outer.up.name == "int4"


def test_in_a_short_run_answers_wait_and_have_the_time_to_come() -> None:
    """H and τ follow from how long an update travels; a plan that states K, or is of a long run, waits for nobody."""
    seen = []
    for slots, gbps in ((8, 100.0), (8, 0.5), (8, 0.1), (1, 0.03)):  # the last: H 4 and K 4 exchange as often
        plan = planned(small_run(), inventory({"a": [(slots, "d")], "b": [(slots, "d")]}, gbps), tokens=1.3e8)
        outer, step_s = plan.run.outer, min(w.step_s for w in plan.prediction.workers.values())
        assert waits(outer) and outer.overlap.late == "continue" and plan.setting.misses == 0
        travel_s = max(region.answer_s for region in plan.prediction.regions.values())
        assert 0 < travel_s <= outer.overlap.steps * step_s < outer.local_steps * step_s
        assert plan.setting.steps == pytest.approx(outer.local_steps, rel=0.1)
        assert any(why.startswith("answers wait") and f"{travel_s:.3g} s of the" in why for why in reasons(plan))
        seen.append(outer.local_steps)
    assert seen[0] <= seen[1] < seen[2]
    hosts = inventory({"a": [(8, "d")], "b": [(8, "d")]}, 1.0)
    often = small_run(outer={"rule": {"name": "region_momentum", "updates_per_send": 2}})
    for run, pins, tokens in (
        (small_run(), Pins(), 1e12), (often, Pins(outer=frozenset({"rule.updates_per_send"})), 1.3e8),
    ):  # fmt: skip
        outer = planned(run, hosts, pins, tokens=tokens).run.outer
        assert not waits(outer) and outer.overlap.late == "wait"
    on = small_run(outer={"overlap": {"steps": 4, "late": "continue", "adopt": "rebase"}})
    agreed = Pins(outer=frozenset({*OuterConfig.model_fields, "rule.updates_per_send", "rule.answers"}))
    kept = planned(on, hosts, agreed, tokens=1.3e8).run.outer
    assert (kept.rule, kept.overlap, kept.local_steps) == (on.outer.rule, on.outer.overlap, on.outer.local_steps)


def test_servers_have_as_many_shards_as_their_work_needs() -> None:
    """Quick workers, small H and K: a server of one process would work all the time."""
    often = {"rule": {"name": "region_momentum", "updates_per_send": 2}, "local_steps": 16}
    pins = Pins(outer=frozenset({*often, "rule.updates_per_send"}))
    regions = {"a": [(8, "d")] * 4, "b": [(8, "d")] * 4}
    fast = {"tflops": 170.0, "memory_gb": 80.0}

    def at(**keys: Any) -> Plan:
        plan = planned(small_run(outer=often, **keys), inventory(regions, 100.0, d=fast), pins)
        holds(plan)
        return plan

    plan = at()
    shards = plan.setting.shards
    assert shards > 1 and plan.setting.server_busy <= SERVER_BUSY
    servers = [(r.server, r.shards) for r in plan.cluster.regions]
    servers.append((plan.cluster.global_server, plan.cluster.global_shards))
    assert all(len(mine) == shards for _, mine in servers)
    assert all(shard.host == server.host for server, mine in servers for shard in mine)
    everyone = [each for server, mine in servers for each in (server, *mine)]
    assert len({str(each) for each in everyone}) == len(everyone)
    busy = plan.prediction.server_busy
    assert busy.keys() == {"a", "b", "global"} and max(busy.values()) == pytest.approx(plan.setting.server_busy)
    fewer = resolve(plan.task, plan.workers, plan.place.region, plan.setting.outer, plan.wish.tokens, shards // 2)
    assert max(predict(*fewer).server_busy.values()) > SERVER_BUSY, "no fewer would do"

    assert at(checkpoint={"snapshots": "s3://bucket/run"}).setting.shards == shards
    three = [{"host": "g", "port": 7000 + i} for i in range(3)]
    given = changed(plan.task.cluster, lambda raw: raw.update(global_shards=three))
    assert planned(plan.task.run, given, pins).setting.shards == 3
    of_a_piece = {**MODEL, "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    assert at(model={"config": of_a_piece}).setting.shards == 1


@pytest.mark.parametrize(
    ("regions", "exchanges", "told"),
    [
        ({"a": [(8, "d")], "b": [(8, "d")]}, {"a": 100.0, "b": 100.0}, ""),
        ({"a": [(8, "d")], "b": [(8, "d")]}, {"a": 99.0, "b": 100.0}, r"fewer than 100 exchanges .* \(a 99\)"),
        ({"a": [(8, "d")]}, {"a": 100.0}, "only region 'a' trains: .* outer.levels = 1 leaves it out"),
    ],
)
def test_what_is_seldom_wanted_is_doubted(
    regions: dict[str, list[tuple[int, str]]], exchanges: dict[str, float], told: str
) -> None:
    plan = planned(small_run(), inventory(regions, s={"tflops": 20.0}))
    assert plan.prediction.regions.keys() == regions.keys()
    found = list(doubts(plan, exchanges))
    assert len(found) == bool(told) and re.search(told, "".join(found)), found


def test_a_synchronous_worker_of_all_regions_is_told_beside_the_plan() -> None:
    """It reaches what the plan's tokens are worth over links of the rate that is named."""

    two = inventory({"a": [(8, "d")], "b": [(8, "d")]})

    def told(gbps: float) -> tuple[float, float, float]:
        near = changed(two, lambda raw: [link.update(rtt_ms=1.0, gbps=gbps) for link in raw["links"]])
        (line,) = synchronous_text(planned(small_run(), near))
        reached, mine, rate = re.findall(r"([\d,]+) (?:tokens/s|of data|Gbit)", line)
        return float(reached.replace(",", "")), float(mine.replace(",", "")), float(rate.replace(",", ""))

    assert told(1.0)[0] < 0.2 * told(1.0)[1]
    slow, fast = told(0.8 * told(100.0)[2]), told(1.25 * told(100.0)[2])
    assert slow[0] < slow[1] and fast[0] > fast[1]
    assert synchronous_text(planned(small_run(), inventory({"a": [(8, "d")]}))) == []


def test_dear_traffic_is_kept_small() -> None:
    def priced(raw: dict[str, Any]) -> None:
        for link in raw["links"]:
            link["usd_per_gb"] = 0.2 if link["regions"][0] != link["regions"][1] else 0.0

    free = planned(small_run(), inventory({"a": [(8, "d")], "b": [(8, "d")]}, 5.0))
    dear = planned(small_run(), changed(free.task.cluster, priced))
    assert dear.setting.steps > free.setting.steps
    hourly = sum(w.usd_per_hour or 0.0 for w in dear.prediction.workers.values())
    assert dear.setting.traffic_usd_per_hour <= TRAFFIC * hourly


def test_what_is_pinned_is_kept() -> None:
    outer = {"rule": {"name": "sync"}, "local_steps": 32, "up": {"name": "int8"}, "down": {"name": "int8"}}
    run = small_run(outer=outer)
    plan = planned(run, inventory({"a": [(8, "d")], "b": [(8, "d")]}), Pins(tensor=2, outer=frozenset(outer)))
    holds(plan)
    assert (plan.run.outer.rule.name, plan.run.outer.local_steps, plan.run.outer.up.name) == ("sync", 32, "int8")
    assert {w.parallel.tensor for w in plan.prediction.workers.values()} == {2}
    assert plan.run.data.train_samples % (2 * 32 * 64) == 0, "whole rounds"


def test_a_worker_spans_regions_where_one_is_too_small() -> None:
    plan = planned(small_run(), small_regions())
    holds(plan)
    (worker,) = plan.workers.values()
    assert set(worker.regions) == {"a", "b"}
    assert [r.name for r in plan.cluster.regions] == ["a", "b"]
    assert [r.name for r in plan.cluster.serving] == [plan.prediction.workers[next(iter(plan.workers))].region]
    lender = next(r for r in plan.cluster.regions if not r.workers)
    assert len(lender.hosts) == 4
    layout = worker.layout
    per_stage = len(layout.hosts) // layout.parallel.pipeline
    stages = [{s.region for s in layout.hosts[i : i + per_stage]} for i in range(0, len(layout.hosts), per_stage)]
    assert all(len(stage) == 1 for stage in stages), "gradients stay inside a region"
    crossings = sum(one != other for one, other in itertools.pairwise(stages))
    assert crossings == 1, "activations cross once"
    assert plan.prediction.workers[next(iter(plan.workers))].step.sent_bytes.keys() == {("a", "b"), ("b", "a")}
    mixed = [
        host
        for pair in zip(layout.hosts[: len(layout.hosts) // 2], layout.hosts[len(layout.hosts) // 2 :], strict=True)
        for host in pair
    ]
    naive = evaluated(plan.task, mixed, layout.slots, layout.parallel, layout.micro_batch, Refusals())
    assert naive is not None
    assert naive.step.step_s > 1.5 * layout.step.step_s


def test_a_placement_counts_codes() -> None:
    cluster = inventory({name: [(1, "d")] * 3 for name in "ab"}, 2.0, d={"memory_gb": 80.0})
    seconds = []
    for zero in ({"stage": 1}, {"stage": 1, "gradient_bits": 8, "weight_bits": 4}):
        run = small_run()
        asked = task(run.model_copy(update={"deepspeed": run.deepspeed | {"zero_optimization": zero}}), cluster)
        hosts = [host for region in asked.hosts.values() for host in region]
        links = link_tables(asked, hosts)
        links = replace(links, delay_s=0 * links.delay_s)
        shape = next(shape for shape in shapes(asked, hosts, Refusals()) if shape.columns > 1)
        seconds.append(placement_problem(asked, shape, links).gradient_s.max())
    assert seconds[1] / seconds[0] == pytest.approx((8.125 + 4.125) / 32)


@pytest.mark.parametrize("gbps", [2.0, 10.0])
@pytest.mark.parametrize("acco", [None, {"form": "exact"}, {"form": "exact", "balance": True}])
def test_a_spanning_workers_shape_is_the_fastest_of_all(acco: dict[str, Any] | None, gbps: float) -> None:
    """Also where reductions are hidden, and where slow hosts take less of the batch."""
    far = inventory({name: [(1, "d")] * 3 for name in "ab"}, gbps, d={"memory_gb": 80.0})
    unlike = inventory({"a": [(1, "d")] * 2, "b": [(1, "s")] * 3}, gbps, s={"tflops": 40.0, "memory_gb": 80.0})
    for cluster in (far, unlike):
        asked = task(small_run(acco=acco), cluster)
        hosts, refused = [host for region in asked.hosts.values() for host in region], Refusals()
        links, every = link_tables(asked, hosts), list[float]()
        for shape in shapes(asked, hosts, refused):
            problem = placement_problem(asked, shape, links)
            order = [shape.hosts[i] for stage in search(problem, 0, effort(problem)).stages for i in stage]
            for micro in micro_batches(asked, shape.replicas):
                layout = evaluated(asked, order, shape.slots, shape.parallel, micro, refused)
                every += [layout.step.step_s] if layout else []
        assert spanning_layouts(asked, hosts, refused)[0].step.step_s == pytest.approx(min(every), rel=1e-12)


def small_regions(hosts: int = 4, gbps: float = 0.5) -> ClusterConfig:
    """Two regions of four accelerators that hold half of the model each."""
    return inventory({name: [(1, "t")] * hosts for name in "ab"}, gbps, t={"memory_gb": 6.5})


def test_a_model_that_fits_nowhere() -> None:
    with pytest.raises(
        PlanError, match=r"fits on no hosts .* short of [\d,]+ bytes a rank; it would fit with 4 more hosts"
    ):
        planned(small_run(), small_regions(2))
    with pytest.raises(PlanError, match=r"it would fit with model.recompute = 'full'"):
        planned(small_run(), inventory({"a": [(1, "t")]}, t={"memory_gb": 32.0}), Pins(recompute="none"))
    with pytest.raises(PlanError, match=r"it would fit with parallel.tensor and parallel.pipeline not pinned"):
        planned(small_run(), inventory({"a": [(8, "t")]}, t={"memory_gb": 6.0}), Pins(tensor=1, pipeline=1))


def test_contradictory_pins() -> None:
    cluster = inventory({"a": [(8, "d")], "b": [(8, "d")]})
    with pytest.raises(PlanError, match=r"tensor parallelism stays inside a host .*pinned: parallel.tensor = 16"):
        planned(small_run(), cluster, Pins(tensor=16))
    with pytest.raises(PlanError, match=r"--pin-global mars: no such region; regions: a, b"):
        planned(small_run(), cluster, Pins(global_region="mars"))

    def placed(raw: dict[str, Any]) -> None:
        raw["global_ssh"] = "a-0"
        raw["links"] += [{"regions": [name, "global"], "gbps": 2.0, "rtt_ms": 1.0} for name in "ab"]

    given = changed(cluster, placed)
    with pytest.raises(PlanError, match=r"--pin-global b contradicts cluster 'inventory', .*global_ssh = 'a-0'"):
        planned(small_run(), given, Pins(global_region="b"))
    plan = planned(small_run(), given, Pins(global_region="a"))
    assert (plan.place.region, plan.cluster.global_ssh) == ("global", "a-0")


def test_missing_figures() -> None:
    cluster = inventory({"a": [(8, "d")] * 2, "b": [(8, "d")]})

    def cut(*kept: set[str]) -> ClusterConfig:
        links = tuple(link for link in cluster.links if set(link.regions) in kept)
        return cluster.model_copy(update={"links": links})

    with pytest.raises(ConfigError, match=r"no figure for the link between hosts of region 'a'; add"):
        planned(small_run(), cut({"a", "b"}))
    with pytest.raises(PlanError, match=r"no figure for the link between 'b' and 'a'|between 'a' and 'b'"):
        planned(small_run(), cut({"a"}, {"b"}))

    apart = small_regions()
    inside = tuple(link for link in apart.links if len(set(link.regions)) == 1)
    with pytest.raises(
        PlanError, match=r"fits into no region alone, and .* cannot be joined: .* between 'a' and 'b'"
    ):
        planned(small_run(), apart.model_copy(update={"links": inside}))

    def nameless(raw: dict[str, Any]) -> None:
        raw["regions"][1]["hosts"][0].pop("device")

    with pytest.raises(ConfigError, match=r"region 'b': host 'b-0' names no device"):
        planned(small_run(), changed(cluster, nameless))


def test_the_cheapest_tokens() -> None:
    cluster = inventory({"a": [(8, "d")], "b": [(8, "dear")], "c": [(8, "d")]}, dear={"usd_per_hour": 2.0})
    fast = planned(small_run(), cluster)
    cheap = planned(small_run(), cluster, objective="cost")
    assert set(fast.workers) == {"a-0", "b-0", "c-0"}
    assert set(cheap.workers) == {"a-0", "c-0"}
    holds(cheap)
    assert (cheap.prediction.usd(1e10) or 0) < (fast.prediction.usd(1e10) or 0)
    days = fast.prediction.seconds(1e10) / 86_400
    hurried = planned(small_run(), cluster, objective="cost", within_days=1.3 * days)
    assert set(hurried.workers) == {"a-0", "b-0", "c-0"}
    with pytest.raises(PlanError, match=r"within 0.01 days cannot be had: all workers together need \d"):
        planned(small_run(), cluster, objective="cost", within_days=0.01)
    unpriced = changed(cluster, lambda raw: raw["devices"]["d"].pop("usd_per_hour"))
    with pytest.raises(PlanError, match=r"devices.d has no usd_per_hour"):
        planned(small_run(), unpriced, objective="cost")


def test_a_plan_is_its_own_files() -> None:
    plan = planned(run_of("qwen3-0.6b"), world())
    setting = plan.setting
    again = resolve(plan.task, plan.workers, plan.place.region, setting.outer, plan.wish.tokens, setting.shards)
    assert again == (plan.run, plan.cluster)
    steps = plan.run.data.train_samples // plan.run.samples_per_step
    assert plan.run.deepspeed["scheduler"]["params"]["total_num_steps"] == steps
