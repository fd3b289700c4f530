"""Adopting weights: what has changed travels and nothing else, with the bits that gathering everything gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from geotrain.config import ParallelConfig
from geotrain.parameters.parameter_map import ParameterMap, canonical_parameters
from tests.support.collectives import watched
from tests.support.inner_worlds import LLAMA, MUON, deepspeed_block, micro_batches, run_world, start, stop, train

MODEL = {**LLAMA, "hidden_size": 64, "intermediate_size": 160}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
CODED = {"zero_optimization": {"stage": 1, "gradient_bits": 8, "weight_bits": 4}}
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "ZeRO-1": (deepspeed_block(1, micro=2, **BF16), None),
    "ZeRO-1, Muon": (deepspeed_block(1, micro=2, **BF16, **MUON), None),
    "ZeRO-1, coded": (deepspeed_block(1, micro=2, **BF16, **MUON) | CODED, None),
    "ZeRO-2": (deepspeed_block(2, micro=2, bf16={"enabled": True}), None),
    "fp32": (deepspeed_block(0, micro=2), None),
    **{f"ACCO, {form}": (deepspeed_block(1, micro=2, **BF16), form) for form in ("exact", "delayed")},
    "ACCO, Muon": (deepspeed_block(1, micro=2, **BF16, **MUON), "exact"),
}
LAST_LAYER, SECOND_LAYER = 3, 1


def names_of_layer(engine: Any, layer: int) -> set[str]:
    fragments = ParameterMap(canonical_parameters(engine.architecture), 1).fragments
    return {p.name for p in next(f for f in fragments if f.name == f"layers-{layer}").parameters}


def weights_of(engine: Any) -> list[torch.Tensor]:
    """Weights of the next forward, on this rank."""
    if hasattr(engine.optimizer, "wait_for_weights"):
        engine.optimizer.wait_for_weights()
    return [p.detach().clone() for n, p in engine.module.named_parameters() if "shard_gap" not in n]


def adopt(engine: Any, layer: int) -> dict[str, Any]:
    """Other masters for a layer, as an answer brings them: what travelled, and whether all weights are then those
    that a gathering of everything gives."""
    names = names_of_layer(engine, layer)
    engine.settle()
    if engine.bits is not None:  # else what codes have not brought yet would come with all, and not with these
        engine.refresh()
        weights_of(engine)
    for shard in engine.shards():
        if shard.runs[0].parameter in names:
            shard.master.mul_(-1.5)
    events: list[tuple[str, float]] = []
    with watched(events):
        engine.refresh(names)
        found = weights_of(engine)
    engine.refresh()
    expected = weights_of(engine)
    return {
        "collectives": len(events),
        "sent": sum(sent for _, sent in events),
        "same": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
        "elements": sum(p.numel for p in canonical_parameters(engine.architecture) if p.name in names),
        "bytes": next(engine.module.parameters()).element_size(),
    }


def step_and_adopt(engine: Any, layer: int | None) -> float:
    """Bytes that a step sends, and with a layer its adoption right after it, while the step's weights travel."""
    events: list[tuple[str, float]] = []
    with watched(events):
        engine.train_step(micro_batches(engine, 2), 2)
        if layer is not None:
            engine.refresh(names_of_layer(engine, layer))
        engine.optimizer.wait_for_weights()
    return sum(sent for _, sent in events)


def on_a_rank() -> dict[str, Any]:
    seen = {}
    for name, (block, form) in CASES.items():
        engine = start(MODEL, ParallelConfig(), block, acco=form)
        train(engine, range(2))
        weights_of(engine)
        held = []
        if engine.bits is not None:
            engine.refresh(names_of_layer(engine, SECOND_LAYER))
            held = weights_of(engine)
        seen[name] = [adopt(engine, SECOND_LAYER), adopt(engine, LAST_LAYER)]
        if name == "ZeRO-1":
            in_step = [step_and_adopt(engine, layer) for layer in (None, LAST_LAYER, SECOND_LAYER)]
            seen[name][0]["in step"] = in_step
        seen[name][0]["held"] = held
        assert all(torch.tensor(train(engine, range(2, 3))).isfinite().flatten())
        stop(engine)
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(2, on_a_rank)


@pytest.mark.parametrize("name", CASES)
def test_what_is_adopted_travels_and_nothing_else(ranks: list[dict[str, Any]], name: str) -> None:
    for turn in range(2):
        found = [rank[name][turn] for rank in ranks]
        assert all(each["same"] for each in found)
        # Each rank sends the other what it owns. Without ZeRO every rank has all masters.
        expected = 0 if name == "fp32" else found[0]["elements"] * found[0]["bytes"]
        if name == "ACCO, delayed" and turn == 0:  # what ranks have are weights one step ahead
            assert sum(each["sent"] for each in found) > 3 * expected
        else:
            assert sum(each["sent"] for each in found) == expected
            assert found[0]["collectives"] <= 4


def test_all_ranks_go_on_to_hold_the_same_where_some_is_adopted(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["ZeRO-1, coded"][0]["held"] for rank in ranks)
    assert one and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_has_not_left_yet_leaves_once(ranks: list[dict[str, Any]]) -> None:
    """After a step the weights of its last layers are still to be gathered: with the adopted ones in them."""
    alone, last, second = ([rank["ZeRO-1"][0]["in step"][i] for rank in ranks] for i in range(3))
    norms = 2 * 64 * 2  # in bf16, of the layer: they lie in a bucket with those of the first layers
    assert sum(last) == sum(alone) + norms
    layer = ranks[0]["ZeRO-1"][1]
    assert sum(alone) < sum(second) <= sum(alone) + layer["elements"] * layer["bytes"]
