"""A rank that computes wrongly is found by its equals, and those that compute well are not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from geotrain.config import ParallelConfig
from geotrain.inner.engine.recompute import Result
from geotrain.worker.verification import Comparison, Figures
from tests.support.inner_worlds import QWEN_2, batch, deepspeed_block, masters, micro_batches, run_world, start, stop

RANKS, SICK, STEPS = 4, 2, 6
CODED = {"zero_optimization": {"stage": 1, "gradient_bits": 8, "weight_bits": 4}}
BF16 = {"bf16": {"enabled": True}}
# ZeRO's stage, what the block has besides, ACCO's form.
ENGINES: dict[str, tuple[int, dict[str, Any], str | None]] = {
    "without ZeRO": (0, {}, None),
    "ZeRO 1, coded": (1, CODED, None),
    "ZeRO 2": (2, BF16, None),
    "ACCO, coded": (1, CODED, "delayed"),
}


def on_a_rank() -> dict[str, Any]:
    return {name: {share: trained(share, *engine) for share in (0.0, 1.0)} for name, engine in ENGINES.items()}


def trained(share: float, stage: int, block: dict[str, Any], acco: str | None) -> dict[str, Any]:
    """What is found while all is well, and when a word of a weight's memory is always another; where anything is
    verified, also when it is another for once, and when a layer is wrong now and then."""
    from geotrain.worker.rank_watch import RankWatch
    from geotrain.worker.verification import Verifier

    engine = start(QWEN_2, ParallelConfig(), deepspeed_block(stage, micro=1, **block), acco=acco)
    seen: dict[str, Any] = {}

    def found(what: str, name: str, harm: Callable[..., Any]) -> None:
        told, failed, calls = list[str](), list[Any](), count()
        member: Any = SimpleNamespace(trouble=told.append, device_failed=lambda *what: failed.append(what))
        watch = RankWatch(engine.device, told.append)
        verify = Verifier(engine, member, watch, share)
        (module,) = (module for at, module in engine.module.named_modules() if at.endswith(name))
        hook = module.register_forward_hook(lambda *of: harm(next(calls), *of) if engine.rank == SICK else None)
        for number in range(STEPS):
            verify(SimpleNamespace(micro_batch=batch(number).split(1).__getitem__))  # type: ignore[arg-type]
            engine.train_step(micro_batches(engine, number), number)
        hook.remove()
        seen[what] = told, failed, watch.numbers()["wrong_results"]

    def stuck(call: int, module: Any, *_: Any) -> None:
        module.weight.data.view(-1)[0] = 0.125

    found("nothing", "word_embeddings", lambda *_: None)
    seen["masters"] = masters(engine).tolist()
    if share == 0.0:
        found("weights", "word_embeddings", stuck)
        stop(engine)
        return seen
    found("results", "1.mlp", lambda call, module, inputs, output: (1.5 * output[0], None) if call % 3 == 0 else None)
    found("once", "word_embeddings", lambda call, *of: stuck(call, *of) if call == 0 else None)
    found("weights", "word_embeddings", stuck)
    stop(engine)
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(RANKS, on_a_rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_verifying_finds_a_rank_that_computes_wrongly_and_changes_no_bit(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for number, rank in enumerate(ranks):
        seen, without = rank[name][1.0], rank[name][0.0]
        assert seen["masters"] == without.pop("masters") and seen["nothing"] == ([], [], 0.0)
        assert without == dict.fromkeys(("nothing", "weights"), ([], [], 0.0))
        for what in ("weights", "results"):
            told, failed, times = seen[what]
            assert times >= 4 and len(told) == (number == 0), seen[what]
            assert all(f"its {what} are not" in words and "; once more" in words for words in told)
            assert [each[:2] for each in failed] == [(SICK, "cpu")] * (number == SICK)
            assert all(f"its {what} are" in each[2] and each[2].endswith(", 2 times") for each in failed)
        if name != "without ZeRO":  # whose ranks have no other's masters to take the word from
            assert seen["once"][1:] == ([], 1.0)


def said(replica: int, stage: int, weights: int = 0, host: str = "", kind: str = "", **runs: Any) -> Figures:
    """What a rank says. runs: bits or norms of its results, and of its gradients, both times."""
    both = (
        (Result(runs.get("results", (0, 0))[i], 1.0), Result(*runs.get("gradients", ((0, 1.0),) * 2)[i]))
        for i in (0, 1)
    )
    return Figures(replica, (stage,), host, kind, weights, tuple(both))  # type: ignore[arg-type]


WRONG = {"results": (7, 7), "gradients": ((7, 2.0), (7, 2.0))}


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([said(0, 0), said(1, 0)], []),
        ([said(0, 0), said(1, 0, weights=1)], [((0, 1), False, "weights")]),
        ([said(0, 0), said(1, 0, weights=1), said(2, 0)], [((1,), True, "weights")]),
        ([said(0, 0), said(1, 0, **WRONG)], [((0, 1), False, "results")]),
        ([said(0, 0), said(1, 0, results=(0, 7))], [((1,), True, "results")]),  # now and then
        ([said(0, 0), said(1, 0, kind="older", **WRONG)], []),  # no equal
        # Two tensor ranks on two hosts, which have passed it on.
        (
            [
                said(r, 0, **WRONG if r == 1 else {})._replace(place=(0, t), host=f"h{t}")
                for r in range(3)
                for t in (0, 1)
            ],
            [((2,), False, "results"), ((3,), False, "results")],
        ),
        # What the first stage gives out is wrong on both; of gradients the last one's come first.
        ([said(r, s, **WRONG if r == 1 else {}) for r in range(3) for s in (0, 1)], [((2,), True, "results")]),
        (
            [said(r, s, **{"gradients": WRONG["gradients"]} if r == 1 else {}) for r in range(3) for s in (0, 1)],
            [((3,), True, "gradients")],
        ),
    ],
)
def test_who_differs_from_most_equals_is_suspected(ranks: list[Figures], found: list[Any]) -> None:
    comparison = Comparison()
    assert comparison.suspects([f._replace(weights=0, runs=ranks[0].runs) for f in ranks]) == []
    assert [each[:3] for each in comparison.suspects(ranks)] == found


def test_a_rank_alone_is_held_against_itself() -> None:
    comparison = Comparison()
    assert comparison.suspects([said(0, 0)]) == []
    assert [each[:3] for each in comparison.suspects([said(0, 0, results=(1, 2))])] == [((0,), True, "results")]


def test_kernels_that_are_not_deterministic_are_compared_within_their_spread() -> None:
    comparison, near = Comparison(), [((1, 1.0), (2, 1.001)), ((3, 1.002), (4, 1.0)), ((5, 1.003), (6, 1.001))]
    ranks = [said(replica, 0, gradients=pair) for replica, pair in enumerate(near)]
    assert comparison.suspects(ranks) == []
    for wrong in (((7, 1.1), (8, 1.101)), ((7, 1.0), (8, 1.1)), ((7, float("nan")), (8, 1.0))):
        found = comparison.suspects([*ranks, said(3, 0, gradients=wrong)])
        assert [each[:3] for each in found] == [((3,), True, "gradients")]
