"""The cost model of a run against sums by hand."""

from __future__ import annotations

from typing import Any

import pytest

from geotrain.commands import dry_run
from geotrain.commands.simulate import step_seconds
from geotrain.config import ClusterConfig, ConfigError, RunConfig, parse
from geotrain.monitor.utilization import training_flops_per_token
from geotrain.parameters.parameter_map import canonical_parameters, parameter_count
from geotrain.plan.model.work import stage_flops, token_flops, useful_flops
from geotrain.plan.placement.cost import problem_from_links
from geotrain.plan.predict import RunPrediction, predict
from tests.support.placement_reference import stage_cost
from tests.support.plan_cases import DEVICE, MODEL, inventory, small_run

GBPS, RTT_S = 10.0, 0.02


def cluster(hosts: list[list[dict[str, Any]]], parallel: dict[str, int], **link: float) -> ClusterConfig:
    """One worker a list of hosts, all in region eu."""
    workers = [
        {"name": f"eu-{i}", "hosts": mine, "parallel": parallel, "launcher": "ssh"} for i, mine in enumerate(hosts)
    ]
    inside = {"regions": ["eu", "eu"], "gbps": GBPS, "rtt_ms": 1000 * RTT_S}
    raw = {
        "name": "c",
        "regions": [{"name": "eu", "workers": workers}],
        "links": [inside, {"regions": ["eu", "global"], "gbps": 1.0, "rtt_ms": 100.0, **link}],
        "devices": {"d": DEVICE, "slow": {**DEVICE, "tflops": 50.0}},
    }
    return parse(ClusterConfig, raw, "c")


def host(name: str, slots: int = 1, kind: str = "d") -> dict[str, Any]:
    return {"host": name, "slots": slots, "device": kind}


QUARTERS = [range(4 * s, 4 * s + 4) for s in range(4)]


def on(run: RunConfig, hosts: list[list[dict[str, Any]]], **parallel: int) -> RunPrediction:
    return predict(run, cluster(hosts, parallel))


def test_operations_are_two_for_each_weight_that_a_token_meets() -> None:
    a = small_run().architecture
    matrices = sum(p.numel for p in canonical_parameters(a) if len(p.shape) == 2 and "embed" not in p.name)
    attention = 2 * a.heads * a.head_dim * 2048 * a.layers
    assert useful_flops(a, 2048) == 3 * (2 * matrices + attention)
    whole = [sum(x) for x in zip(*(stage_flops(a, 2048, layers, "none") for layers in QUARTERS), strict=True)]
    assert sum(whole) == pytest.approx(useful_flops(a, 2048))
    full = sum(stage_flops(a, 2048, range(a.layers), "full")) - sum(stage_flops(a, 2048, range(a.layers), "none"))
    assert full == pytest.approx(a.layers * token_flops(a, 2048, 0).layer)


EXPERTS = {
    **MODEL, "model_type": "qwen3_moe", "moe_intermediate_size": 1024, "num_experts": 16, "num_experts_per_tok": 4,
}  # fmt: skip


def test_a_token_meets_the_experts_that_it_is_sent_to() -> None:
    run = small_run(model={"config": EXPERTS})
    a = run.architecture
    chosen = [p for p in canonical_parameters(a) if len(p.shape) == 2 and "embed" not in p.name]
    matrices = sum(p.numel / (4 if ".experts." in p.name else 1) for p in chosen)
    assert useful_flops(a, 2048) == 3 * (2 * matrices + 2 * a.heads * a.head_dim * 2048 * a.layers)
    assert on(run, [[host("a")]]).workers["eu-0"].step_s == pytest.approx(64 * 2048 * useful_flops(a, 2048) / 50e12)
    met = sum(p.numel / (4 if ".experts." in p.name else 1) for p in canonical_parameters(a))
    assert training_flops_per_token(a, 2048) == 6 * (met - a.vocab_size * a.hidden_size) + 12 * 16 * 2048 * 2048
    (seconds,) = step_seconds(run, cluster([[host("a")]], {}), 50.0).values()
    assert seconds == pytest.approx(6 * met * 64 * 2048 / 50e12)


def test_context_ranks_exchange_heads_for_tokens() -> None:
    """By hand: each of four has 512 tokens of a sample, sends three quarters of q, k, v and of the output (2048,
    1024, 1024 and 2048 elements of a token, in bf16) to the others, and as much backward; forward again with
    "full"."""
    alone = on(small_run(), [[host("a")]]).workers["eu-0"].step
    for recompute, ways in (("none", 2), ("full", 3)):
        run = small_run(model={"config": MODEL, "recompute": recompute})
        found = on(run, [[host("a", 4)]], context=4).workers["eu-0"]
        once_s = 8e-9 * 3 / 4 * 512 * (2048 + 2 * 1024 + 2048) * 2 / DEVICE["host_gbps"]
        assert found.step.context_s == pytest.approx(64 * 16 * ways * once_s)
        assert found.replicas == 1 and found.step.tensor_s == found.step.expert_s == 0
        assert found.step.compute_s == pytest.approx(
            alone.compute_s * (1 if recompute == "none" else 4 / 3) / 4, rel=0.02
        )
    # Across hosts, the two of a host share its line: each sends half of what it has to the other's two.
    far = on(small_run(), [[host("a", 2), host("b", 2)]], context=4).workers["eu-0"].step
    part = 8e-9 * 512 * 2 / 4 * 4 / GBPS
    assert far.context_s == pytest.approx(64 * 16 * 2 * sum(RTT_S / 2 + part * width for width in (4096, 2048)))


FP32 = {"bf16": {"enabled": False}, "data_types": {}, "zero_optimization": {"stage": 0}}


def test_tokens_travel_to_their_experts_and_back() -> None:
    """By hand: a rank of four sends each of a sample's 2,048 tokens to four experts, three quarters of them on other
    ranks, and gets the results back; with it goes a weight, and before it how many there are."""
    run = small_run(model={"config": EXPERTS})
    whole, divided = (on(run, [[host("a", 4)]], expert=n).workers["eu-0"].step for n in (1, 4))
    there_and_back = 2048 * 4 * (2 * 2048 * 2 + 4) * 3 / 4
    counts = 3 * 16 * 8
    micro_batches, layers, byte_s = 16, 16, 8e-9 / DEVICE["host_gbps"]
    assert whole.expert_s == 0
    assert divided.expert_s == pytest.approx(micro_batches * layers * (2 * there_and_back + counts) * byte_s)
    assert divided.compute_s == whole.compute_s
    # Were the fullest rank to get half as many again, its experts and what it sends would take so much longer.
    uneven = predict(run, cluster([[host("a", 4)]], {"expert": 4}), imbalance=1.5).workers["eu-0"].step
    assert uneven.expert_s == pytest.approx(1.5 * divided.expert_s, rel=1e-5)
    of_experts = 3 * 2.0 * 16 * 4 * 3 * 2048 * 1024 * 2048 * micro_batches / 50e12
    assert uneven.compute_s - divided.compute_s == pytest.approx(0.5 * of_experts)


def test_divided_experts_are_reduced_among_those_that_have_them() -> None:
    """Two hosts of two ranks, which divide the experts: a ring over all four for what all have, and one for each half
    of the experts, which share the hosts' lines. In fp32 without ZeRO nothing hides it."""
    run = small_run(model={"config": EXPERTS}, deepspeed={**small_run().deepspeed, **FP32})
    step = on(run, [[host("a", 2), host("b", 2)]], expert=2).workers["eu-0"].step
    experts = sum(p.numel for p in canonical_parameters(run.architecture) if ".experts." in p.name)
    dense = parameter_count(run.architecture) - experts
    byte_s, hop_s = 8e-9 / GBPS, 2 * RTT_S / 2
    of_all = 3 * (8 * dense / 4 * byte_s + hop_s)
    of_halves = 8 * experts / 2 / 2 * 2 * byte_s + hop_s
    assert step.reduction_s == pytest.approx(of_all + of_halves)


def test_what_experts_send_across_regions_is_counted() -> None:
    where = cluster([[host("a"), host("b")]], {"expert": 2}).model_dump(by_alias=True, mode="json")
    where["regions"][0]["workers"][0]["hosts"][1]["region"] = "us"
    where["regions"].append({"name": "us", "hosts": [host("b")]})
    where["links"].append({"regions": ["eu", "us"], "gbps": GBPS, "rtt_ms": 1000 * RTT_S})
    run = small_run(model={"config": EXPERTS})
    step = predict(run, parse(ClusterConfig, where, "c")).workers["eu-0"].step
    sent = 2 * 2048 * 4 * (2 * 2048 * 2 + 4) / 2 + 16 * 8  # of a micro-batch and layer; half goes to the other
    experts = sum(p.numel for p in canonical_parameters(run.architecture) if ".experts." in p.name)
    dense = parameter_count(run.architecture) - experts
    assert step.sent_bytes["us", "eu"] == pytest.approx(32 * 16 * sent + 4 * dense / 2)
    assert step.sent_bytes["eu", "us"] == step.sent_bytes["us", "eu"]


def test_one_accelerator_computes_and_nothing_else() -> None:
    run = small_run()
    found = on(run, [[host("a")]])
    expected = 64 * 2048 * useful_flops(run.architecture, 2048) / 50e12
    assert found.workers["eu-0"].step_s == pytest.approx(expected)
    assert found.workers["eu-0"].compute_s == pytest.approx(expected)
    assert found.workers["eu-0"].limit.startswith("waiting for the outer loop")
    assert found.workers["eu-0"].utilization == pytest.approx(8 * expected / found.workers["eu-0"].job_s)
    slow = on(run, [[host("a", kind="slow")]])
    assert slow.workers["eu-0"].step_s == pytest.approx(2 * expected)


def test_replicas_reduce_at_the_cost_that_dt_fm_gives() -> None:
    """With equal links a ring costs what DT-FM counts, for gradients reduced and weights gathered. Of these, the last
    micro-batch's backward hides the one, and the first one's forward the other, but for a bucket each."""
    run = small_run()
    found = on(run, [[host(f"h{i}") for i in range(4)]]).workers["eu-0"]
    gigabytes = parameter_count(run.architecture) * 2 / 1e9
    n = range(4)
    problem = problem_from_links(
        [[RTT_S / 2 for _ in n] for _ in n], [[GBPS for _ in n] for _ in n], stages=1, replicas=4,
        gradient_gigabytes=gigabytes, activation_gigabytes=0.0,
    )  # fmt: skip
    dt_fm = stage_cost(problem, list(n))
    forward, backward = (2048 * f / 50e12 for f in stage_flops(run.architecture, 2048, range(16), "none"))
    buckets = -(-parameter_count(run.architecture) // 40_000_000)
    assert dt_fm / 2 > backward > forward, "so that something is left to be seen"
    hidden = (forward + backward) * (1 - 1 / buckets)
    assert found.step.reduction_s == pytest.approx(dt_fm - hidden, rel=1e-6)
    # Of a fast link only one bucket each way is left.
    near = on(run, [[host("h", 4)]]).workers["eu-0"].step.reduction_s
    assert near == pytest.approx(2 * 3 / 4 * 8 * gigabytes / DEVICE["host_gbps"] / buckets, rel=1e-6)
    whole = on(run, [[host("a")]]).workers["eu-0"].compute_s
    assert found.step.compute_s == pytest.approx(whole / 4)


def test_a_pipeline_waits_for_its_bubble_and_its_links() -> None:
    run = small_run()
    near = on(run, [[host("a", 4)]], pipeline=4).workers["eu-0"]
    m = 64
    busiest = max(sum(stage_flops(run.architecture, 2048, of, "none")) for of in QUARTERS) * 2048 / 50e12
    assert near.step.compute_s == pytest.approx(m * busiest)
    assert 0 < near.step.pipeline_s < 0.15 * near.step_s
    far = on(run, [[host(f"h{i}") for i in range(4)]], pipeline=4).workers["eu-0"]
    transfer = RTT_S / 2 + 8e-9 * 2048 * 2048 * 2 / GBPS
    assert far.step_s >= m * (busiest + transfer)  # what it sends and what it gets pass each other
    assert far.step_s < (m + 8) * (busiest + 2 * transfer)


def test_tensor_parallelism_reduces_twice_a_layer_each_way() -> None:
    run = small_run()
    found = on(run, [[host("a", 2)]], tensor=2).workers["eu-0"]
    once = 2 * 8e-9 * (2048 * 2048 * 2 / 2) / DEVICE["host_gbps"]
    assert found.step.tensor_s == pytest.approx(64 * (4 * 16 + 2) * once)


def test_acco_hides_the_reduction() -> None:
    plain = on(small_run(), [[host("a"), host("b")]]).workers["eu-0"].step
    hidden = on(small_run(acco={"form": "delayed"}), [[host("a"), host("b")]]).workers["eu-0"].step
    assert plain.reduction_s > 0.5
    assert hidden.reduction_s == pytest.approx(0.0, abs=1e-9)
    assert hidden.compute_s == plain.compute_s


def test_acco_s_balance_lets_a_fast_replica_take_more() -> None:
    """The slow host has half the speed: two thirds of the micro-batches are the fast one's."""
    hosts = [[host("a"), host("b", kind="slow")]]
    seldom = {"outer": {"local_steps": 64}}  # so that exchanges hardly count
    waits = on(small_run(acco={"form": "delayed"}, **seldom), hosts).workers["eu-0"]
    shares = on(small_run(acco={"form": "delayed", "balance": True}, **seldom), hosts).workers["eu-0"]
    micro_s = waits.step.compute_s / 32  # the slow host's; there are 2 · 32 of them
    assert shares.step.compute_s + shares.step.pipeline_s == pytest.approx(43 * micro_s / 2)
    assert waits.step.step_s - shares.step.step_s == pytest.approx((32 - 43 / 2) * micro_s)
    assert shares.tokens_per_s > 1.4 * waits.tokens_per_s
    assert shares.limit != waits.limit
    assert "unequal work" in waits.limit


def spread(gbps: float, **acco: Any) -> RunPrediction:
    """A worker of two replicas, one in another region. Four steps hide an exchange, and no answer is waited for."""
    overlap = {"steps": 4, "adopt": "rebase", "late": "continue"}
    run = small_run(outer={"local_steps": 8, "overlap": overlap}, **acco)
    where = cluster([[host("a"), host("b")]], {}).model_dump(by_alias=True, mode="json")
    where["regions"][0]["workers"][0]["hosts"][1]["region"] = "us"
    where["regions"].append({"name": "us", "hosts": [host("b")]})
    where["links"].append({"regions": ["eu", "us"], "gbps": gbps, "rtt_ms": 1000 * RTT_S})
    return predict(run, parse(ClusterConfig, where, "c"))


@pytest.mark.parametrize("gbps", [10.0, 1.0])  # a commit travels faster than it is computed, and slower
@pytest.mark.parametrize(("form", "share", "ahead"), [("exact", 1 / 2, 1.0), ("delayed", 1.0, 0.0)])
def test_acco_hides_nothing_where_the_outer_loop_needs_whole_weights(
    form: str, share: float, ahead: float, gbps: float
) -> None:
    """By hand: of a job's two exchanges' ends (a delta leaves, an answer is adopted) each awaits a commit, which the
    next first part would have hidden; the second gathers the weights, half of a commit's traffic."""
    found = spread(gbps, acco={"form": form})
    zero_1 = spread(gbps).workers["eu-0"]
    worker = found.workers["eu-0"]
    parameters = parameter_count(small_run().architecture)
    commit = 2 * (RTT_S / 2 + 8e-9 * parameters / gbps)  # half of the weights, 2 bytes each, twice
    first, second = share * worker.compute_s, (1 - share) * worker.compute_s
    words = zero_1.step.small_collectives_s
    assert (commit < first) == (gbps == 10.0)
    assert worker.step_s == pytest.approx(max(first, commit) + max(second, ahead * commit) + words)
    assert worker.job_s - 8 * worker.step_s == pytest.approx(2 * min(first, commit) + commit / 2)
    assert worker.wait_s == pytest.approx(worker.job_s - 8 * worker.step_s)
    assert zero_1.job_s - 8 * zero_1.step_s == pytest.approx(commit / 2), "ZeRO-1 gathers adopted weights as well"
    there = next(link for link in found.links if (link.sender, link.receiver) == ("eu", "us"))
    assert there.bytes_per_s == pytest.approx(parameters * (8 * 2 * (1 + ahead) + 1) / worker.job_s)


def test_memory_is_what_the_dry_run_says() -> None:
    run, where = small_run(), cluster([[host("a", 4)], [host("b", 2)]], {"pipeline": 2})
    found = predict(run, where)
    needs = dry_run.needs(run, where)
    assert {w.name: w.memory for w in needs.workers} == {name: w.memory for name, w in found.workers.items()}
    assert found.workers["eu-0"].memory_limit_bytes == 40e9


def test_bytes_and_money() -> None:
    run = small_run(outer={"local_steps": 8, "up": {"name": "bf16"}, "down": {"name": "int4"}})
    found = predict(run, cluster([[host("a", 2)]], {}, usd_per_gb=0.1))
    parameters = parameter_count(run.architecture)
    round_s = 4 * found.workers["eu-0"].job_s
    assert found.regions["eu"].round_s == found.round_s == pytest.approx(round_s)
    up, down = found.links
    assert (up.sender, up.receiver, down.sender) == ("eu", "global", "global")
    assert up.bytes_per_s == pytest.approx(2 * parameters / round_s)
    assert down.bytes_per_day == pytest.approx(86_400 * (0.5 + 2 / 128) * parameters / round_s, rel=1e-3)
    traffic = 0.1 * 3600 * (up.bytes_per_s + down.bytes_per_s) / 1e9
    assert found.usd_per_hour == pytest.approx(2 * 1.0 + traffic)
    assert found.usd(1e9) == pytest.approx(found.usd_per_hour * 1e9 / found.tokens_per_s / 3600)


def test_what_is_missing_is_named() -> None:
    run = small_run()
    no_device = [{"host": "a", "slots": 1}]
    with pytest.raises(ConfigError, match=r"worker 'eu-0': host 'a' names no device.*\(d, slow\)"):
        on(run, [no_device])
    where = cluster([[host("a"), host("b")]], {})
    for kept, message in ((1, "between hosts of region 'eu'"), (0, "between 'eu' and 'global'")):
        with pytest.raises(ConfigError, match=f"no figure for the link {message}; add .*geotrain probe"):
            predict(run, where.model_copy(update={"links": where.links[kept : kept + 1]}))
    with pytest.raises(ConfigError, match="has no workers; `geotrain plan`"):
        predict(run, inventory({"eu": [(1, "d")]}))
