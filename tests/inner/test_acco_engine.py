"""ACCO in the engine: state between steps, checkpoints of both kinds, overlap, memory, bad settings."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from geotrain.commands.dry_run import needs
from geotrain.config import AccoConfig, ClusterConfig, ConfigError, ParallelConfig, RunConfig, parse
from geotrain.inner.acco.flat_buffer import RotatingBuffers
from geotrain.parallelism.acco_forms import first_part, flat_bytes
from geotrain.parallelism.whole_matrices import ShardSize
from tests.support.checkpoints import load, save
from tests.support.inner_worlds import (
    BATCH,
    QWEN_2,
    deepspeed_block,
    masters,
    micro_batches,
    run_config,
    run_world,
    start,
    stop,
    train,
)

FIRST, THEN, LAST = range(3), range(3, 6), 6
LARGE = {**QWEN_2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096, "head_dim": 64}
CODES = {"gradient_bits": 8, "weight_bits": 4}
CODED = {"zero_optimization": {"stage": 1, **CODES}, "data_types": {"grad_accum_dtype": "fp32"}}
# By name, ACCO's form, None for ZeRO-1, and what its block has besides.
FORMS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "exact": ("exact", {}),
    "delayed": ("delayed", {}),
    "delayed, coded": ("delayed", CODED),
    "coded": (None, CODED),
}


def engine_for(name: str | None, model: dict[str, Any] = QWEN_2, **block: Any) -> Any:
    """One of FORMS, or the plain engine's ZeRO-1."""
    form, more = (None, {}) if name is None else FORMS[name]
    return start(model, ParallelConfig(), deepspeed_block(1, **block) | more, acco=form)


# ------------------------------------------------------------------------------- what two replicas do, on each rank


def two_replicas(folder: str) -> dict[str, Any]:
    return {
        "checkpoint": {form: canonical_checkpoint(f"{folder}/{form}", form) for form in FORMS},
        "validated": {form: validated(form) for form in (*FORMS, None)},
        "not finite": {form: not_finite(form) for form in ("coded", None)},
        "large": {form: large(form) for form in ("delayed", "delayed, coded")},
        "watched": watched(f"{folder}/csv"),
        "bad setting": refusal(bad_run(*BAD_SETTINGS[0][:-1], ranks=2)),
    }


def refusal(run: RunConfig) -> str:
    from geotrain.inner.build import build_engine

    with pytest.raises(ConfigError) as error:
        build_engine(run, ParallelConfig(), run.deepspeed)
    return str(error.value)


def canonical_checkpoint(folder: str, form: str) -> dict[str, Any]:
    """Train past a checkpoint, and from it. Other layouts and ZeRO-1 go on from it in test_layouts.py."""
    from geotrain.checkpoint.state import state_of
    from geotrain.optimizers.inner_optimizer import step_count

    seen: dict[str, Any] = {}

    def begun(form: str | None, tag: str | None = None) -> Any:
        engine = engine_for(form)
        if tag is None:
            train(engine, FIRST)
        else:
            load(engine, folder, tag)
        return engine

    def ended(engine: Any, steps: range) -> tuple[Any, Any]:
        curve, weights = train(engine, steps), masters(engine)
        stop(engine)
        return curve, weights.tolist()

    engine = begun(form)
    engine.settle()
    if engine.residuals:
        engine.optimizer.move_residuals()  # as a checkpoint does
        seen["moved"] = [bool(state_of(engine, own)["residual"].any()) for own in engine.shards()]
    engine.refresh()  # forgets what was predicted, as a restart does
    seen["undisturbed"] = ended(engine, THEN)
    engine = begun(form)
    save(engine, folder, "first", {}, keep=9, with_masters=True)
    engine.refresh()
    seen["saved"] = ended(engine, THEN)

    engine = begun(form, "first")
    seen["resumed"] = train(engine, THEN), masters(engine).tolist()
    engine.settle()
    seen["steps"] = engine.global_steps, step_count(engine.basic_optimizer)
    thread = getattr(engine.optimizer, "communication", SimpleNamespace(exchange=None))
    exchange = thread.exchange
    thread.exchange = lambda *given: (time.sleep(0.5), exchange(*given))  # under way while that is read
    engine.train_step(micro_batches(engine, LAST), LAST)
    load(engine, folder, "first")
    del thread.exchange
    seen["into a step"] = ended(engine, THEN)
    return seen


@contextmanager
def zeroed(engine: Any) -> Iterator[None]:
    """Let the masters be zeros inside this context."""
    held = [(shard.master, shard.master.clone()) for shard in engine.shards()]
    for master, _ in held:
        master.zero_()
    yield
    for master, before in held:
        master.copy_(before)


def validated(form: str | None) -> dict[str, Any]:
    """Train with an evaluation of other weights between two steps, and without."""
    curves, loss = [], 0.0
    for swapped in (False, True):
        engine = engine_for(form)
        train(engine, FIRST)
        if swapped:
            loss = engine.evaluate_swapped_in(zeroed(engine), micro_batches(engine, LAST))
        curves.append((train(engine, THEN), masters(engine).tolist()))
        stop(engine)
    return {"curves": curves, "loss": loss}


def not_finite(form: str | None) -> dict[str, Any]:
    """Step with one gradient that is not finite, on one rank; then go on."""
    engine = engine_for(form)
    train(engine, FIRST)

    def state() -> list[torch.Tensor]:
        kept = engine.basic_optimizer.state.values()
        return [masters(engine).clone(), *(moment.clone() for moments in kept for moment in moments.values())]

    before, parameter = state(), engine.module.decoder.layers[1].mlp.linear_fc1.weight
    hook = parameter.register_hook(lambda gradient: gradient * (float("nan") if engine.dp_rank else 1.0))
    engine.train_step(micro_batches(engine, LAST), LAST)
    hook.remove()
    kept = all(map(torch.equal, state(), before))
    curve = train(engine, THEN)
    stop(engine)
    return {"kept": kept, "curve": curve}


def live_bytes() -> int:
    gc.collect()
    storages = {
        t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor or isinstance(t, torch.nn.Parameter)
    }
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def large(form: str) -> dict[str, Any]:
    before = live_bytes()
    engine = engine_for(form, LARGE)
    train(engine, range(3))
    engine.settle()
    parameters = sum(p.numel() for p in engine.module.parameters())
    scratch = engine.optimizer.communication._scratch  # of values that are reduced over gloo
    kept = live_bytes() - before - (0 if scratch is None else scratch.nbytes)
    stop(engine)
    return {"bytes": kept, "parameters": parameters}


def watched(folder: str) -> dict[str, Any]:
    import deepspeed.comm as ds_comm

    monitor = {"enabled": True, "output_path": folder, "job_name": "job"}
    logger = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
    engine = engine_for("delayed", csv_monitor=monitor, comms_logger=logger, steps_per_print=None)
    results = [engine.train_step(micro_batches(engine, step), step) for step in range(4)]
    engine.settle()
    calls = {
        name: sum(sizes[0] for sizes in log.values()) for name, log in ds_comm.comm.comms_logger.comms_dict.items()
    }
    ds_comm.comm.comms_logger.enabled = False
    files = sorted(Path(folder).rglob("*train_loss*.csv"))
    rows = files[0].read_text().split()[1:] if files else []
    stop(engine)
    return {"calls": calls, "rows": rows, "losses": [r.loss for r in results], "samples": engine.global_samples}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(2, two_replicas, str(tmp_path_factory.mktemp("acco")))


# ---------------------------------------------------------------------------------------------------------- tests


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_disturbs_nothing_and_resumes_to_the_same_bits(ranks: list[dict[str, Any]], form: str) -> None:
    for rank in ranks:
        seen = rank["checkpoint"][form]
        assert seen["undisturbed"] == seen["saved"] == seen["resumed"]
        assert seen["steps"] == (THEN.stop, THEN.stop) and all(seen.get("moved", ()))
        assert seen["into a step"] == seen["resumed"], "a load into a running engine waits for what is under way"


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMS, None])
def test_training_goes_on_as_if_other_weights_had_not_been_evaluated(ranks: list[dict[str, Any]], form: str) -> None:
    for rank in ranks:
        without, after = rank["validated"][form]["curves"]
        assert without == after
        assert rank["validated"][form]["loss"] == pytest.approx(math.log(QWEN_2["vocab_size"]))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["coded", None])
def test_a_gradient_that_is_not_finite_steps_nothing(ranks: list[dict[str, Any]], form: str) -> None:
    for rank in ranks:
        seen = rank["not finite"][form]
        assert seen["kept"] and all(map(math.isfinite, itertools.chain(*seen["curve"])))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["delayed", "delayed, coded"])
def test_memory_is_what_the_formula_says(ranks: list[dict[str, Any]], form: str) -> None:
    for rank in ranks:
        seen = rank["large"][form]
        n = seen["parameters"]
        assert seen["bytes"] == pytest.approx(
            flat_bytes(ShardSize(0, 0, n, 0), 4, 4, FORMS[form][1], 2) + 12 * n / 2, rel=0.01
        )


@pytest.mark.slow
def test_deepspeed_s_comms_logger_and_monitors(ranks: list[dict[str, Any]]) -> None:
    seen = ranks[0]["watched"]
    assert seen["calls"]["all_to_all_single"] == seen["calls"]["all_gather_into_tensor"] - 1 == 4
    assert [float(row.split(",")[1]) for row in seen["rows"]] == pytest.approx(seen["losses"], rel=1e-4)
    assert seen["samples"] == 4 * 8


# -------------------------------------------------------------------------------------------------- bad settings

OFFLOADED = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}


def zero(**more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 1, **more}}


BAD_SETTINGS = [
    ("delayed", None, {"zero_optimization": {"stage": 2}}, 4, "needs deepspeed.zero_optimization.stage = 1, not 2"),
    ("exact", None, {"zero_optimization": {}}, 4, "stage = 1, not 0"),
    ("exact", None, {}, 1, "a step of 1 micro-batch cannot be split"),
    ("exact", 0.1, {}, 4, "a step of 4 micro-batches cannot be split at a share of 0.1"),
    ("exact", 1.0, {}, 4, "cannot be split"),
    ("delayed", 0.5, {}, 4, "leave it out"),
    ("delayed", None, OFFLOADED, 4, "does not go with deepspeed.zero_optimization.offload_optimizer"),
    ("exact", None, CODED, 4, "'exact' does not go with deepspeed.zero_optimization.gradient_bits"),
    ("delayed", None, zero(gradient_bits=8), 4, "gradient_bits = 8: coded collectives need both"),
    ("delayed", None, zero(gradient_bits=8, weight_bits=2), 4, "of 4 or 8 each"),
    ("delayed", None, zero(**CODES) | {"bf16": {"enabled": True}}, 4, "set deepspeed.data_types.grad_accum_dtype"),
    ("delayed", None, zero(stage=2, **CODES), 4, "needs deepspeed.zero_optimization.stage = 1 without offload"),
]


def bad_run(form: Any, share: float | None, more: dict[str, Any], micro_batches: int, ranks: int) -> RunConfig:
    block = deepspeed_block(1, micro=BATCH // ranks // micro_batches) | more
    return run_config(QWEN_2, block, acco=AccoConfig(form=form, predicted_share=share))


@pytest.mark.parametrize(("form", "share", "more", "micro_batches", "message"), BAD_SETTINGS)
def test_bad_settings_are_refused_before_anything_starts(
    form: Any, share: float | None, more: dict[str, Any], micro_batches: int, message: str
) -> None:
    workers = [{"name": "w", "hosts": [{"host": "localhost", "slots": 2}]}]
    cluster = parse(ClusterConfig, {"name": "c", "regions": [{"name": "eu", "workers": workers}]}, "c.json")
    good = run_config(QWEN_2, deepspeed_block(1, micro=1), acco=AccoConfig())
    assert needs(good, cluster).parameters
    with pytest.raises(ConfigError, match=f"worker 'w': .*{message}"):
        needs(bad_run(form, share, more, micro_batches, ranks=2), cluster)


@pytest.mark.slow
def test_a_bad_setting_is_refused_by_a_rank(ranks: list[dict[str, Any]]) -> None:
    assert all(BAD_SETTINGS[0][-1] in rank["bad setting"] for rank in ranks)


def test_a_window_s_gradients_may_be_summed_in_fp32() -> None:
    """Sum 258 ones, of which bf16 keeps 256. Afterwards the buffer is zero again."""
    sums = {}
    for accumulated in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        buffers = RotatingBuffers([weight], [0], 4, accumulated, False)
        for _ in range(258):
            weight.sum().backward()
        buffers.send_gradients()
        sums[accumulated] = buffers.in_flight.tolist()
        assert not buffers.gradients.any()
        buffers.close()
    assert sums == {torch.float32: [258.0] * 4, torch.bfloat16: [256.0] * 4}


@pytest.mark.parametrize(
    ("form", "micro_batches", "first"),
    [
        ("exact", 4, 2),
        ("exact", 2, 1),
        ("exact", 5, 2),
        ("delayed", 1, 1),
        ("delayed", 3, 3),
    ],
)
def test_how_a_window_is_split(form: Any, micro_batches: int, first: int) -> None:
    assert first_part(AccoConfig(form=form), micro_batches) == first
