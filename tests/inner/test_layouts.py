"""Each parallel layout trains as one process does, with the memory and the bytes that the planner counts."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.config import ConfigError
from geotrain.parallelism.memory import memory_per_rank
from geotrain.plan.model.exchanges import context_exchanges, expert_exchanges
from geotrain.plan.model.work import Work
from geotrain.worker.verification import Comparison
from tests.support.checkpoints import load, save
from tests.support.collectives import counted
from tests.support.drawn import seed_of
from tests.support.inner_worlds import (
    BATCH,
    SEQUENCE,
    VOCABULARY,
    Given,
    architecture,
    assemble,
    batch,
    canonical_weights,
    pushed,
    run_world,
    start,
    stop,
)
from tests.support.layouts import CHOICES, DENSE, MODELS, PACKED, PADDED, SPARSE, Choice, Layout, draw, pairs_of

FIRST, THEN = range(3), range(3, 6)
END_OF_DOCUMENT = 0
PLAYED_S = 2400.0  # all rows, beside other long tests: ten minutes and more
SHORT = 20  # so many rows of the table `make test` plays: all values of all choices, and two of three pairs

# ------------------------------------------------------------------------------------------- what each rank plays


class StepReader(Given):
    """This replica's micro-batches of a step; with `acco.balance` any of the worker's."""

    def __init__(self, engine: Any, step: int, packed: bool) -> None:
        tokens = batch(step) * (engine.architecture.vocab_size // VOCABULARY)  # words of all tensor ranks
        if packed:
            tokens[:, ::5] = END_OF_DOCUMENT
        self.whole = tokens.split(engine.train_micro_batch_size_per_gpu())
        super().__init__(tokens.chunk(engine.dp_size)[engine.dp_rank].split(len(self.whole[0])))

    def micro_batch(self, i: int) -> torch.Tensor:
        return self.whole[i]


def state_bytes(engine: Any) -> dict[str, int]:
    """Elements of this rank's weights; bytes of them, of masters with moments, and of a checkpoint's copy."""
    from geotrain.checkpoint.saving import Checkpoints
    from geotrain.inner.model.router_bias import biased_routers

    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in engine.module.parameters()}
    own = {id(p) for p in engine.module.parameters()}
    masters = {id(t): t for group in engine.optimizer.param_groups for t in group["params"] if id(t) not in own}
    moments = [t for s in engine.basic_optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()]
    with closing(Checkpoints(engine, "nowhere", 1)) as checkpoints:
        copied, _ = checkpoints._saved(every_shard=True)
    parameters = sum(p.numel() for name, p in engine.module.named_parameters() if "shard_gap" not in name)
    return {
        "parameters": parameters + sum(router.expert_bias.numel() for _, router in biased_routers(engine.module)),
        "weights_bytes": sum(weights.values()),
        "optimizer_bytes": sum(t.nbytes for t in [*masters.values(), *moments]),
        "checkpoint_bytes": sum(tensor.nbytes for tensor in copied.values()),
    }


def play(layouts: list[tuple[Layout, str, str | None]]) -> list[dict[str, Any]]:
    """Train each layout, and record what this rank saw. Halfway it loads the state that another layout saved there,
    from its own state of a step later.

    layouts: with each the folder for its checkpoint, and the one from which it goes on; None: it goes on by itself.
    """
    from geotrain.worker.verification import figures_of

    records = []
    for layout, folder, former in layouts:
        packed, acco = layout.model in PACKED, layout.acco_config(len(FIRST) + len(THEN))
        end = END_OF_DOCUMENT if packed else None
        engine = start(
            MODELS[layout.model], layout.parallel, layout.block, layout.recompute, acco, end_of_document=end
        )
        seen: dict[str, Any] = {"start": pushed(engine)}
        seen["types"] = {p.dtype for p in engine.module.parameters()}, {s.master.dtype for s in engine.shards()}
        results = []
        with counted() as seen["sent"]:
            results.append(engine.train_step(StepReader(engine, 0, packed), 0))
            engine.settle()
        results += [engine.train_step(StepReader(engine, step, packed), step) for step in FIRST[1:]]
        engine.settle()
        save(engine, folder, "halfway", {"of": str(layout)}, keep=1, with_masters=True)
        engine.refresh()  # as after a restart nothing is predicted
        if former is not None:
            engine.train_step(StepReader(engine, len(FIRST), packed), len(FIRST))
            engine.settle()
            seen["loaded"] = load(engine, former, "halfway")
        seen["figures"] = figures_of(engine, StepReader(engine, 0, packed).micro_batch(0))
        results += [engine.train_step(StepReader(engine, step, packed), step) for step in THEN]
        engine.settle()
        seen["curve"] = [(result.loss, result.grad_norm) for result in results]
        seen["tokens"] = {result.tokens for result in results}
        seen["evaluation"] = engine.evaluate(StepReader(engine, 0, packed))
        seen["end"] = pushed(engine)
        padding = [p.view(-1)[p.numel() - place.padding :] for p, place in engine._placed if place.padding]
        seen["padding"] = [(own.numel(), own.count_nonzero().item()) for own in padding]
        if layout.acco == "off":
            seen["bytes"] = state_bytes(engine)
        stop(engine)
        records.append(seen)
    return records


# ---------------------------------------------------------------------------------------------------- all layouts


def table() -> list[Layout]:
    rows = (Path(__file__).parent / "layouts.txt").read_text().splitlines()
    kinds = [type(values[0]) for values in CHOICES.values()]
    return [
        Layout(*(kind(word.strip()) for kind, word in zip(kinds, row.split("|"), strict=True)))
        for row in rows
        if not row.startswith("#")
    ]


LAYOUTS = table()
WHOLE = pytest.mark.long("geotrain/inner", "geotrain/parallelism", "geotrain/optimizers", "tests/inner/layouts.txt")
SEED = seed_of("LAYOUT_SEED")
PARAMETERS = [
    pytest.param(layout, id=f"{layout.model}-{i}", marks=[] if i < SHORT else WHOLE)
    for i, layout in enumerate(LAYOUTS)
]


def drawn() -> list[Any]:
    """A dozen layouts and models that the commit draws, or LAYOUT_SEED, which the names of the tests have; three
    of them for `make test`."""
    return [
        pytest.param(layout, id=f"LAYOUT_SEED={SEED}-{i}", marks=[] if i < 3 else WHOLE)
        for i, layout in enumerate(draw(SEED, 12))
    ]


PARAMETERS += drawn()


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, list[Any]]:
    """Records by rank of all layouts that are asked for, and of the same trainings in one process, which come
    first. A world plays those that have as many ranks."""
    own = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = [item.callspec.params["layout"] for item in own if "layout" in item.callspec.params]
    order = sorted({*asked, *(layout.single for layout in asked)}, key=lambda layout: (layout.ranks, str(layout)))
    folder, newest, records = tmp_path_factory.mktemp("layouts"), dict[Layout, str](), dict[Layout, list[Any]]()
    for ranks, layouts in itertools.groupby(order, lambda layout: layout.ranks):
        here = []
        for layout in layouts:
            place = str(folder / str(len(records) + len(here)))
            here.append((layout, place, newest.get(layout.single) if layout.precision == "fp32" else None))
            if layout.precision == "fp32":
                newest[layout.single] = place
        by_rank = run_world(ranks, play, here, deadline_s=PLAYED_S)
        records |= {layout: [found[i] for found in by_rank] for i, (layout, *_) in enumerate(here)}
    return records


@pytest.mark.slow
@pytest.mark.timeout(PLAYED_S)
@pytest.mark.parametrize("layout", PARAMETERS)
def test_a_layout_trains_as_one_process_and_goes_on_from_the_checkpoint_of_another(
    played: dict[Layout, list[Any]], layout: Layout
) -> None:
    (alone,), ranks, a = played[layout.single], played[layout], architecture(MODELS[layout.model])
    assert Comparison().suspects([seen["figures"] for seen in ranks]) == []
    if layout in LAYOUTS:
        assert alone["curve"][-1][0] < 0.95 * alone["curve"][0][0]
        assert max(norm for _, norm in alone["curve"]) > 0.5, "clipping must be active"
    assert alone["tokens"] == {BATCH * SEQUENCE}
    started = assemble(a, [seen["start"] for seen in ranks])
    for name, weight in canonical_weights(a).items():
        assert torch.equal(started[name], weight.view(-1)), name
    tables = 0
    if a.vocab_size == PADDED and layout.parallel.tensor == 2:  # on the second tensor rank
        tables = (1 if a.tied_embeddings and layout.pipeline == 1 else 2) * layout.replicas * layout.context
    padding = [table for seen in ranks for table in seen["padding"]]
    assert padding == [((256 - PADDED) * a.hidden_size, 0)] * tables
    weights = torch.bfloat16 if "bf16" in layout.precision else torch.float32
    for seen in ranks:
        assert seen["tokens"] == alone["tokens"] and seen["types"] == ({weights}, {torch.float32})
    if layout.precision != "fp32":
        wanted = [loss for loss, _ in alone["curve"]]
        for seen in ranks:
            assert seen["curve"][0] == pytest.approx(alone["curve"][0], rel=0.01)
            assert [loss for loss, _ in seen["curve"]] == pytest.approx(wanted, rel=0.02)
        return
    for seen in ranks:
        assert seen["loaded"]["of"] != str(layout), "its state is another layout's"
        torch.testing.assert_close(seen["curve"], alone["curve"], rtol=1e-4, atol=1e-5)
        assert seen["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-4)
    ended = assemble(a, [seen["end"] for seen in ranks])
    for name, weight in assemble(a, [alone["end"]]).items():
        torch.testing.assert_close(ended[name], weight, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("layout", [row for row in PARAMETERS if row.values[0].acco == "off"])
def test_the_estimate_of_memory_is_what_a_layout_uses(played: dict[Layout, list[Any]], layout: Layout) -> None:
    a = architecture(MODELS[layout.model])
    memory = memory_per_rank(a, layout.parallel, layout.ranks, layout.block, SEQUENCE, layout.recompute)
    measured = played[layout][memory.stage * (layout.ranks // layout.pipeline)]["bytes"]
    assert measured["parameters"] == memory.parameters
    assert measured["weights_bytes"] == pytest.approx(memory.weights_bytes, rel=1e-3)  # DeepSpeed pads a little
    if "offloaded" not in layout.zero:  # then it is in the host's memory
        assert measured["optimizer_bytes"] == pytest.approx(memory.optimizer_bytes, rel=1e-3)
    assert measured["checkpoint_bytes"] == pytest.approx(memory.checkpoint_bytes, rel=1e-2)


def test_a_checkpoint_has_no_gaps_between_whole_matrices() -> None:
    """What codes lost has none, either. It is what a rank of LAYOUT_SEED=51625821-10 saved."""
    layout = Layout("mixtral", 1, "2+", 1, 2, "2 by gathering", optimizer="Muon", precision="fp32, coded")
    sizes = {"hidden_size": 36, "intermediate_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 4}
    a = architecture({**MODELS["mixtral"], **sizes, "head_dim": 8, "num_experts_per_tok": 3})
    memory = memory_per_rank(a, layout.parallel, layout.ranks, layout.block, SEQUENCE)
    assert memory.checkpoint_bytes == 62_136


def exchanges_in_layers(layout: Layout) -> bool:
    """Whether ranks exchange tokens or heads inside a layer."""
    divided = layout.expert != "1" or layout.context > 1
    return layout.acco == "off" and (divided or (layout.model in SPARSE and layout.tensor == "2+"))


@pytest.mark.parametrize("layout", [row for row in PARAMETERS if exchanges_in_layers(row.values[0])])
def test_the_planner_s_bytes_are_those_that_are_sent(played: dict[Layout, list[Any]], layout: Layout) -> None:
    """Over all ranks, since what one sends follows from its tokens' choices; to the byte, counts and weights too."""
    a = architecture(MODELS[layout.model])
    work = Work(a, SEQUENCE, layout.recompute, layout.parallel, layout.block, None)
    expected: Counter[tuple[str, str]] = Counter()
    for layers, exchanges in (
        (a.layers, context_exchanges(work)),
        (sum(map(a.has_experts, range(a.layers))), expert_exchanges(work)),
    ):
        times = layout.ranks // layout.pipeline * BATCH // (2 * layout.replicas) * layers
        for exchange in exchanges.forward + exchanges.backward:
            expected[exchange.kind, exchange.among] += times * exchange.size_bytes
    assert sum((seen["sent"] for seen in played[layout]), Counter()) == +expected
    assert expected.total() > 0


# ----------------------------------------------------------------------------------- which are in the table, and why

STATES = "qwen3_next", "granite_4", "nemotron_3"
# Choices that never go together, and what a user is told.
REFUSED: list[tuple[str, tuple[Any, ...], str, tuple[Any, ...], str]] = [
    ("expert", ("2", "2 by gathering"), "model", tuple(DENSE), "no experts"),
    ("tensor", ("2",), "model", tuple(SPARSE), "with experts needs parallel.sequence = true"),
    ("tensor", ("2",), "expert", ("2", "2 by gathering"), "with experts needs parallel.sequence = true"),
    ("context", (2,), "model", STATES, "whose state passes from token to token"),
    ("context", (2,), "model", ("deepseek",), "context = 2 does not go with the latent attention of a deepseek_v3"),
    ("zero", ("2",), "pipeline", (2,), "stage = 2 does not go with parallel.pipeline = 2"),
    ("zero", ("2",), "optimizer", ("Muon",), "stage = 2 does not go with the optimizer Muon"),
    ("zero", ("1 offloaded",), "optimizer", ("Muon",), "offload_optimizer does not go with the optimizer Muon"),
    (
        "zero",
        ("0",),
        "precision",
        CHOICES["precision"][1:3],
        "bf16.enabled needs deepspeed.zero_optimization.stage 1",
    ),
    ("zero", ("0", "2", "1 offloaded"), "precision", ("fp32, coded",), "weight_bits = 4 needs deepspeed.zero_optim"),
    ("acco", ("exact",), "precision", ("fp32, coded",), "acco.form = 'exact' does not go with deepspeed.zero_optim"),
    ("zero", ("0", "2"), "acco", CHOICES["acco"][1:], "acco needs deepspeed.zero_optimization.stage = 1, not"),
    ("zero", ("1 offloaded",), "acco", CHOICES["acco"][1:], "does not go with deepspeed.zero_optimization.offload"),
    ("expert", ("2", "2 by gathering"), "acco", CHOICES["acco"][1:], "does not go with parallel.expert = 2"),
]


def refused_pairs() -> dict[frozenset[Choice], str]:
    return {
        frozenset(((one, a), (other, b))): says
        for one, values, other, others, says in REFUSED
        for a, b in itertools.product(values, others)
    }


def test_all_pairs_of_choices_are_trained_or_refused() -> None:
    choices = {**CHOICES, "kind": ("dense", "sparse")}
    pairs = {
        frozenset(((one, a), (other, b)))
        for one, other in pairs_of(choices)
        for a, b in itertools.product(choices[one], choices[other])
    }
    trained = set().union(*(layout.pairs for layout in LAYOUTS))
    assert pairs - trained == refused_pairs().keys()
    for layout in LAYOUTS:
        layout.check()
    singles = {choice for pair in set().union(*(layout.pairs for layout in LAYOUTS[:SHORT])) for choice in pair}
    assert singles >= {(name, value) for name, values in CHOICES.items() for value in values}


@pytest.mark.parametrize(
    "pair", refused_pairs(), ids=lambda pair: ", ".join(f"{n} {v}" for n, v in sorted(pair, key=str))
)
def test_what_does_not_go_together_is_refused(pair: frozenset[Choice]) -> None:
    chosen: dict[str, Any] = dict(pair)
    with pytest.raises(ConfigError) as error:
        Layout(**{"replicas": 2, "model": "mixtral" if "expert" in chosen else "llama"} | chosen).check()
    assert refused_pairs()[pair] in str(error.value)
