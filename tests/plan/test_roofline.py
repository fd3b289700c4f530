"""The roofline of a step against sums by hand, against the planner's count of operations, and for what is shipped."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from geotrain.config import AccoConfig, ParallelConfig, load_run
from geotrain.plan.model.accelerators import Accelerator
from geotrain.plan.model.roofline import (
    CEILING,
    COMPARED,
    EXPECTED,
    exchanged_bytes,
    micro_batch,
    roofline,
)
from geotrain.plan.model.work import Work, stage_flops, token_flops, useful_flops

RUNS = Path(__file__).parents[2] / "configs/runs"
ADAMW = {
    **load_run(RUNS / "8b.json").deepspeed,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
}
ENDLESS = Accelerator("no waits for memory", 1e15, math.inf, math.inf, math.inf, math.inf)


def work_of(name: str, **parallel: int | bool) -> Work:
    run = load_run(RUNS / name)
    layout = ParallelConfig(**parallel) if parallel else run.parallel  # type: ignore[arg-type]
    return Work(
        run.architecture, run.data.sequence_length, run.model.recompute, layout, dict(run.deepspeed), run.acco
    )


@pytest.mark.parametrize("name", ["8b.json", "70b.json", "moe-30b-a3b.json"])
def test_the_products_are_the_planners(name: str) -> None:
    """Of all stages and ranks of a replica; `work` counts them token by token."""
    for recompute in ("none", "full"):
        work = replace(work_of(name, tensor=2, pipeline=2, sequence=True), recompute=recompute)
        a, length = work.architecture, work.sequence_length
        n = a.layers // 2
        products = sum(o.flops for stage in range(2) for o in micro_batch(work, stage) if o.name == "products")
        planned = sum(sum(stage_flops(a, length, range(n * s, n * s + n), recompute)) for s in range(2))
        once = sum(token_flops(a, length, layer).attention for layer in range(a.layers))
        planned -= (4 if recompute == "full" else 3) * once
        assert 2 * products / work.micro_tokens == pytest.approx(planned)


def test_where_nothing_waits_for_memory_only_attention_is_done_twice() -> None:
    work = replace(work_of("8b.json", tensor=1), recompute="none", deepspeed=ADAMW)
    useful = useful_flops(work.architecture, work.sequence_length)
    again = 0.5 * work.architecture.layers * token_flops(work.architecture, work.sequence_length, 0).attention
    assert roofline(work, 1, ENDLESS, CEILING).mfu == pytest.approx(useful / (useful + again))
    half = replace(CEILING, products=0.5, attention=0.5)
    assert roofline(work, 1, ENDLESS, half).mfu == pytest.approx(useful / (useful + again) / 2)


def test_ranks_of_a_replica_send_each_other_activations() -> None:
    alone, tensor = work_of("8b.json", tensor=1), work_of("8b.json", tensor=4)
    assert exchanged_bytes(alone) == 0.0
    a, times = alone.architecture, 3 if alone.recompute == "full" else 2
    parts = replace(tensor, parallel=ParallelConfig(tensor=4, sequence=True))
    again = a.layers * 2 * 3 / 4 * 2 * tensor.micro_tokens * 4096  # inputs, for the gradients of weights
    assert exchanged_bytes(parts) == pytest.approx(exchanged_bytes(tensor) + again)
    assert exchanged_bytes(tensor) == pytest.approx(
        times * a.layers * 2 * (2 * 3 / 4) * 2 * tensor.micro_tokens * 4096
    )


def test_a_pipeline_waits_and_traffic_between_replicas_hides_where_there_is_compute() -> None:
    work, device = replace(work_of("70b.json"), acco=None), COMPARED[0]
    found = roofline(work, 4, device)
    slot = found.pipeline_s / (work.parallel.pipeline - 1)
    assert found.step_s > slot and found.exposed_s == 0.0
    assert roofline(work, 4, replace(device, network=1e6)).exposed_s > found.step_s
    assert found.mfu < roofline(work, 4, device, CEILING).mfu


def test_codes_take_fewer_bytes_between_replicas_and_a_prediction_as_many_again() -> None:
    """Over a link so slow that next to nothing of them is hidden."""
    plain, slow = replace(work_of("8b.json", tensor=1), acco=None), replace(COMPARED[0], network=1.0, link=1.0)
    bits = {"stage": 1, "gradient_bits": 8, "weight_bits": 4}
    coded = replace(plain, deepspeed=plain.deepspeed | {"zero_optimization": bits})
    exact = replace(plain, acco=AccoConfig(form="exact"))
    values_s, codes_s, twice_s = (roofline(work, 16, slow).exposed_s for work in (plain, coded, exact))
    assert codes_s / values_s == pytest.approx((8.125 + 4.125) / 32, rel=1e-4)
    assert twice_s / values_s == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.json")), ids=lambda path: path.stem)
def test_of_everything_shipped_the_expected_is_below_the_ceiling(path: Path) -> None:
    work = work_of(path.name)
    for device in COMPARED:
        expected, ceiling = (roofline(work, 1, device, shares) for shares in (EXPECTED, CEILING))
        assert 0.0 < expected.mfu < ceiling.mfu < 1.0


def test_in_fp8_products_go_at_its_peak_and_what_is_cast_moves_more() -> None:
    work = work_of("8b.json", tensor=1)
    fp8, (h100, *_) = replace(work, fp8=True), COMPARED
    before, after = ([o for o in micro_batch(w, 0) if o.name == "products"] for w in (work, fp8))
    assert sum(o.flops for o in before) == sum(o.flops for o in after)
    a, tokens = work.architecture, work.micro_tokens
    head = 3 * 2 * tokens * a.hidden_size * a.vocab_size
    assert sum(o.flops for o in after if not o.fp8) == pytest.approx(head)  # the head's stay in bf16
    for o in after:
        peak = h100.fp8_flops if o.fp8 else h100.flops
        assert o.seconds(h100, CEILING) == pytest.approx(max(o.flops / peak, o.bytes / h100.bandwidth))
    moved = [sum(o.bytes for o in micro_batch(w, 0) if o.name == "memory") for w in (work, fp8)]
    assert moved[1] > moved[0]
    slow, fast = (roofline(w, 8, h100) for w in (work, fp8))
    assert fast.products_s < 0.6 * slow.products_s and fast.step_s < slow.step_s and fast.mfu < slow.mfu
    assert roofline(fp8, 8, h100, CEILING).mfu < 1


def test_a_ring_sends_keys_and_values_to_every_other_rank() -> None:
    heads = work_of("long-8b.json")
    ring = replace(heads, parallel=heads.parallel.model_copy(update={"context_exchange": "ring"}))
    a, parallel = heads.architecture, heads.parallel
    kv, q, cp = a.kv_heads * a.head_dim, a.heads * a.head_dim, parallel.context
    each = heads.micro_tokens / cp * a.layers / parallel.tensor * 2 * (3 if heads.recompute == "full" else 2)
    difference = each * ((cp - 1) * 2 * kv - (cp - 1) / cp * (2 * q + 2 * kv))
    assert exchanged_bytes(ring) - exchanged_bytes(heads) == pytest.approx(difference / parallel.pipeline)
