"""Context parallelism: ranks that share every sequence must train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from geotrain.config import AccoConfig, ParallelConfig
from tests.support.checkpoints import load, save
from tests.support.expert_models import QWEN_MOE
from tests.support.inner_worlds import (
    BATCH,
    LLAMA,
    QWEN_2,
    SEQUENCE,
    Given,
    architecture,
    assemble,
    batch,
    canonical_weights,
    deepspeed_block,
    micro_batches,
    pushed,
    run_config,
    run_world,
    stop,
    train,
    write,
)

STEPS = range(20)
END = 0  # of a document
LLAMA_4 = {**LLAMA, "num_hidden_layers": 1, "num_key_value_heads": 4}  # TP 2 × CP 2 take a head of four each
MISTRAL = {**LLAMA, "num_hidden_layers": 1, "model_type": "mistral", "sliding_window": 5}
MOE = {**QWEN_MOE, "num_hidden_layers": 1}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}}
EXACT = AccoConfig(prediction="exact", synchronous_steps=2)
DELAYED = AccoConfig(prediction="none", synchronous_steps=2)
HIDING_NOTHING = AccoConfig(prediction="exact", synchronous_steps=len(STEPS))
SHARED = AccoConfig(prediction="none", synchronous_steps=2, balance=True)


def block(stage: int = 1, micro: int = 4, **more: Any) -> dict[str, Any]:
    return deepspeed_block(stage, micro, **more)


class AnyOf(Given):
    """This replica's micro-batches, or any of the worker's."""

    def __init__(self, mine: Given, step: int) -> None:
        super().__init__(mine)
        self.step = step

    def micro_batch(self, i: int) -> torch.Tensor:
        return batch(self.step).split(len(self[0]))[i]


# Model, layout, DeepSpeed block, ACCO, recomputation, whether attention stays inside documents
Case = tuple[dict[str, Any], ParallelConfig, dict[str, Any], AccoConfig | None, str, bool]


def begin(case: Case) -> Any:
    from geotrain.inner.build import build_engine

    model, parallel, block, acco, recompute, documents = case
    run = run_config(model, block, recompute, acco)
    engine = build_engine(run, parallel, block, 120, end_of_document=END if documents else None)
    write(engine, canonical_weights(engine.architecture))
    return engine


def curves(cases: list[Case]) -> list[Any]:
    """On each rank, for each case: (curve, tokens of a step, evaluation, pushed at the end)."""
    found = []
    for case in cases:
        engine = begin(case)
        results = [engine.train_step(AnyOf(micro_batches(engine, step), step), step) for step in STEPS]
        curve = [(result.loss, result.grad_norm) for result in results]
        tokens = {result.tokens for result in results}
        engine.settle()
        found.append((curve, tokens, engine.evaluate(micro_batches(engine, 0)), pushed(engine)))
        stop(engine)
    return found


def layout(context: int = 2, **more: Any) -> ParallelConfig:
    return ParallelConfig(context=context, **more)


TWO: list[Case] = [
    (QWEN_2, layout(), block(0), None, "none", False),
    (QWEN_2, layout(), block(2), None, "full", False),
    (MISTRAL, layout(), block(), None, "selective", True),
    (QWEN_2, layout(), block(), EXACT, "none", False),
    (MOE, layout(expert=2), block(), None, "none", False),
    (MOE, layout(), block(2), None, "none", False),
    (MOE, layout(), block(), EXACT, "none", False),
    (MOE, layout(), block(), HIDING_NOTHING, "none", False),
]
FOUR: list[Case] = [
    (LLAMA_4, layout(tensor=2, sequence=True), block(), None, "none", False),
    (QWEN_2, layout(pipeline=2), block(), None, "none", False),
    (QWEN_2, layout(), block(**MUON), None, "none", False),
    (QWEN_2, layout(), block(micro=2), SHARED, "none", False),
]


MOE_4 = {**QWEN_MOE, "num_key_value_heads": 4}
EIGHT: list[Case] = [  # all that the ranks allow at once
    (MOE_4, layout(tensor=2, sequence=True, pipeline=2, expert=2), block(), None, "none", False)
]


def single(case: Case) -> Case:
    """The same in one process, which shares nothing and keeps everything."""
    model, _, block, acco, _, documents = case
    one = {**block, "zero_optimization": {"stage": 1}}
    if acco is HIDING_NOTHING:  # its sums must not change the weight of balancing losses
        acco = None
    return model, ParallelConfig(), one, DELAYED if acco is SHARED else acco, "none", documents


def save_and_resume(folder: str) -> dict[str, Any]:
    """On two ranks: train with shared sequences and divided experts, save, go on; then from the checkpoint on other
    layouts."""
    results = {}
    divided = layout(expert=2)
    engine = begin((MOE, divided, block(), None, "none", False))
    train(engine, range(4))
    save(engine, folder, "four", {}, keep=1, with_masters=True)
    results["straight"] = train(engine, range(4, 8))
    stop(engine)
    for name, parallel in (
        ("the same", divided),
        ("data", ParallelConfig()),
        ("tensor", ParallelConfig(tensor=2, sequence=True)),
    ):
        engine = begin((MOE, parallel, block(), None, "none", False))
        load(engine, folder, "four")
        results[name] = train(engine, range(4, 8))
        stop(engine)
    return results


def on_two_ranks(folder: str) -> tuple[list[Any], dict[str, Any]]:
    return curves(TWO), save_and_resume(folder)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[Any], dict[str, Any]]]:
    return run_world(2, on_two_ranks, str(tmp_path_factory.mktemp("context")))


@pytest.mark.slow
def test_ranks_that_share_sequences_train_as_one_process(two_ranks: list[Any]) -> None:
    distinct: list[Case] = []
    for case in map(single, (*TWO, *FOUR, *EIGHT)):
        distinct += [case] * (case not in distinct)
    (alone,) = run_world(1, curves, distinct)
    worlds = ([found for found, _ in two_ranks], run_world(4, curves, FOUR), run_world(8, curves, EIGHT))
    for by_rank, cases in zip(worlds, (TWO, FOUR, EIGHT), strict=True):
        for i, case in enumerate(cases):
            curve, tokens, evaluation, after = alone[distinct.index(single(case))]
            assert curve[-1][0] < 0.8 * curve[0][0]
            assert tokens == {BATCH * SEQUENCE}
            for found in by_rank:
                torch.testing.assert_close(found[i][0], curve, rtol=1e-4, atol=1e-5, msg=f"{case}")
                assert found[i][1] == tokens
                assert found[i][2] == pytest.approx(evaluation, rel=1e-4), case
            a = architecture(case[0])
            ours, theirs = assemble(a, [found[i][3] for found in by_rank]), assemble(a, [after])
            for name, weight in theirs.items():
                torch.testing.assert_close(ours[name], weight, rtol=2e-3, atol=2e-4, msg=f"{case}: {name}")


@pytest.mark.slow
def test_a_checkpoint_of_shared_sequences_resumes_without_them(two_ranks: list[Any]) -> None:
    for _, results in two_ranks:
        straight = results["straight"]
        assert results["the same"] == straight
        for name in ("data", "tensor"):
            torch.testing.assert_close(results[name], straight, rtol=1e-4, atol=1e-5, msg=name)
