"""The `deepspeed` block: its keys are DeepSpeed's own, and "auto" follows from the run."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from geotrain.config import ClusterConfig, ConfigError, RunConfig, Topology, load_cluster, load_run, parse
from geotrain.config.deepspeed import BLOCKS, KEYS, OURS, SCHEDULERS, WSD
from geotrain.launch.check import check_together
from geotrain.launch.preflight import cautions, schedule_cautions
from geotrain.parallelism.checks import offloads_masters
from tests.chaos.fuzz.messages import ODD, places

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = json.loads((CONFIGS / "models/llama-tiny.json").read_text())
BLOCK: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
}


def with_schedule(kind: str = "WarmupCosineLR", **params: Any) -> dict[str, Any]:
    return {**BLOCK, "scheduler": {"type": kind, "params": params}}


def run_with(block: dict[str, Any], samples: int = 800) -> RunConfig:
    data = {"train": "t", "sequence_length": 64, "train_samples": samples}
    return parse(RunConfig, {"name": "r", "model": {"config": MODEL}, "data": data, "deepspeed": block}, "run.json")


def refused(block: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        run_with(block)
    return str(error.value)


def resolved(run: RunConfig, **of_worker: Any) -> dict[str, Any]:
    worker = {"name": "w", "hosts": [{"host": "localhost", "slots": 1}], "deepspeed": of_worker}
    cluster = parse(ClusterConfig, {"name": "c", "regions": [{"name": "eu", "workers": [worker]}]}, "c.json")
    return Topology(run, cluster).workers["w"].deepspeed


# ------------------------------------------------------------------------------------------------ unknown keys


class Recording(dict[str, Any]):
    """Notes which keys are asked for."""

    def __init__(self, content: dict[str, Any], asked: set[str]) -> None:
        super().__init__(content)
        self.asked = asked

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:  # DeepSpeed asks `key in config.keys()`
        return self

    def __copy__(self) -> Recording:
        return Recording(self, self.asked)


def test_the_known_keys_are_those_that_deepspeed_reads() -> None:
    from geotrain.inner.engine.schedule import WarmupStableDecayLR
    from geotrain.inner.runtime import platform

    with platform.quiet_imports():
        from deepspeed.runtime import config, lr_schedules
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    asked = set[str]()
    config.DeepSpeedConfig(Recording({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}, asked))
    removed = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert asked > removed  # both were seen
    assert asked - removed - {"bfloat16"} == KEYS  # an older name of "bf16", at which nothing else here looks
    for key, model in (("bf16", DeepSpeedBF16Config), ("zero_optimization", DeepSpeedZeroConfig)):
        assert BLOCKS[key] - OURS == {field.alias or name for name, field in model.model_fields.items()}
        assert not OURS & model.model_fields.keys()
    assert set(SCHEDULERS) == {*lr_schedules.VALID_LR_SCHEDULES, WSD}
    for kind, known in SCHEDULERS.items():
        takes = set(inspect.signature(getattr(lr_schedules, kind, WarmupStableDecayLR)).parameters)
        takes |= {"warmup_min_ratio", "warmup_type"} if kind == WSD else set()  # handed on
        assert known == takes - {"optimizer", "last_batch_iteration", "warmup"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping: %; did you mean 'gradient_clipping'?"),
        ({"bfloat16": {"enabled": True}}, "bfloat16: %; did you mean 'bf16'?"),
        ({"amp": {"enabled": True}}, "amp: %"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge: %; did you mean 'stage'?"),
        ({"bf16": {"enable": True}}, "bf16.enable: %; did you mean 'enabled'?"),
        ({"optimizer": {"type": "AdamW", "parms": {}}}, "optimizer.parms: %; did you mean 'params'?"),
        (with_schedule(cos_min_ration=0.1), "scheduler.params.cos_min_ration: %; did you mean 'cos_min_ratio'?"),
        (with_schedule("WarmupLR", total_num_steps=5), "scheduler.params.total_num_steps: %"),
        ({"zero_optimization": 1}, "zero_optimization = 1: must be an object"),
    ],
)  # fmt: skip
def test_a_key_that_deepspeed_would_pass_over_is_refused(change: dict[str, Any], told: str) -> None:
    told = told.replace("%", "DeepSpeed knows no such key")
    assert f"  deepspeed: {told}" in refused({**BLOCK, **change})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"scheduler": {"type": []}}, "scheduler.type = []: must be a string"),
        ({"fp16": True}, "fp16 = True: must be an object"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled = 'yes': must be true or false"),
        ({"zero_optimization": {"stage": 1.5}}, "zero_optimization.stage = 1.5: must be a whole number, 0 or more"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu = 0: must be a positive integer"),
        (with_schedule(WSD, decay_type="log"), "scheduler.params.decay_type = 'log': must be one of linear, cosine"),
        (with_schedule(warmup_max_lr=-1), "scheduler.params.warmup_max_lr = -1: must be a number, 0 or more"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused(change: dict[str, Any], told: str) -> None:
    assert f"  deepspeed: {told}" in refused({**BLOCK, **change})


@pytest.mark.parametrize("odd", [v for v in ODD if not isinstance(v, bytes)], ids=repr)
def test_whatever_a_value_is_the_checks_before_a_launch_end_in_a_line(odd: Any) -> None:
    full = with_schedule(total_num_steps=10, warmup_num_steps=1, warmup_max_lr=0.1, cos_min_ratio=0.1)
    full |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}, "fp16": {}}
    cluster = load_cluster(CONFIGS / "clusters/local-two-regions.json")
    for number in range(len(list(places(full)))):
        block = copy.deepcopy(full)
        holder, key = list(places(block))[number]
        holder[key] = odd
        try:
            run = run_with(block)
            check_together(run, cluster)
            cautions(run, cluster)
        except ConfigError as error:
            assert len(str(error)) > 20


def test_a_workers_own_keys_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"deepspeed: gradient_cliping: DeepSpeed knows no such key"):
        resolved(run_with(BLOCK), gradient_cliping=1.0)


# -------------------------------------------------------------------------------------------------------- auto


def test_auto_follows_from_the_run() -> None:
    block = with_schedule(total_num_steps="auto", warmup_num_steps="auto", cos_min_ratio="auto")
    block |= {"gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}
    given = copy.deepcopy(block)
    for samples, total, warmup in ((800, 100, 10), (8, 1, 1), (800_000, 100_000, 2000)):
        run = run_with(block, samples)
        found = resolved(run)
        assert found["scheduler"]["params"] == {
            "total_num_steps": total, "warmup_num_steps": warmup, "cos_min_ratio": 0.1
        }  # fmt: skip
        assert "gradient_accumulation_steps" not in found
        assert found["zero_optimization"] == {"stage": 1}
        assert run.deepspeed == given  # as the file has it, so that a resume with more data follows it too
        assert schedule_cautions(run.deepspeed, run.total_steps) == []


def test_a_schedule_of_three_parts_follows_from_the_run() -> None:
    run = run_with(with_schedule(WSD))
    assert resolved(run)["scheduler"]["params"] == {
        "total_num_steps": 100, "warmup_num_steps": 10, "decay_num_steps": 20
    }  # fmt: skip
    assert schedule_cautions(run.deepspeed, run.total_steps) == []
    stated = resolved(run_with(with_schedule(WSD, decay_num_steps=3, total_num_steps=50)))["scheduler"]["params"]
    assert stated == {"total_num_steps": 50, "warmup_num_steps": 5, "decay_num_steps": 3}


def test_auto_warmup_follows_a_schedule_that_is_stated() -> None:
    run = run_with(with_schedule(total_num_steps=50, warmup_num_steps="auto"))
    assert resolved(run)["scheduler"]["params"]["warmup_num_steps"] == 5


def test_auto_rates_are_the_optimizers() -> None:
    run = run_with(with_schedule("WarmupDecayLR", total_num_steps="auto", warmup_max_lr="auto", warmup_min_lr="auto"))
    params = resolved(run)["scheduler"]["params"]
    assert (params["warmup_max_lr"], params["warmup_min_lr"], params["total_num_steps"]) == (3e-4, 0.0, 100)


def test_a_worker_may_have_auto() -> None:
    block = resolved(run_with({**BLOCK, "gradient_accumulation_steps": 2}), gradient_accumulation_steps="auto")
    assert "gradient_accumulation_steps" not in block


@pytest.mark.parametrize(
    "change",
    [
        {"train_batch_size": "auto"},
        {"gradient_clipping": "auto"},
        {"bf16": {"enabled": "auto"}},
        with_schedule(warmup_min_ratio="auto"),
    ],
)
def test_auto_is_refused_where_nothing_follows(change: dict[str, Any]) -> None:
    assert '= "auto": state it; "auto" may stand for' in refused({**BLOCK, **change})


# ---------------------------------------------------------------------------------------------------- warnings


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (with_schedule(total_num_steps=40, warmup_num_steps=4, cos_min_ratio=0.1),
         "total_num_steps = 40, but the run has 100 steps (data.train_samples / train_batch_size): the rest trains"),
        (with_schedule(total_num_steps=400, warmup_num_steps=4, cos_min_ratio=0.1),
         "total_num_steps = 400, but the run has 100 steps (data.train_samples / train_batch_size): the rate never"),
        (with_schedule(total_num_steps="auto", warmup_num_steps=4),
         "cos_min_ratio is not stated: by DeepSpeed's default the rate falls to 0.0001 of itself"),
        (with_schedule(total_num_steps="auto", cos_min_ratio=0.1),
         "warmup_num_steps = 1000 (DeepSpeed's default), but the run has 100 steps: the rate is never reached"),
        (with_schedule(WSD, warmup_num_steps=30, decay_num_steps=80),
         "30 steps of warm-up and 80 of decay are more than the schedule's 100"),
        (with_schedule("WarmupLR", warmup_num_steps=4),
         "warmup_max_lr is not stated: DeepSpeed's default 0.001 replaces deepspeed.optimizer.params.lr = 0.0003"),
    ],
)  # fmt: skip
def test_a_schedule_that_does_not_fit_is_warned_of(block: dict[str, Any], told: str) -> None:
    run = run_with(block)
    (found,) = schedule_cautions(run.deepspeed, run.total_steps)
    assert told in found


def test_without_a_schedule_nothing_is_warned_of() -> None:
    assert schedule_cautions(BLOCK, 100) == []


# ----------------------------------------------------------------------------------------------------- the file


def test_the_block_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds/block.json").write_text(json.dumps({"$schema": "x", **BLOCK}))
    raw = run_with(BLOCK).model_dump(by_alias=True, mode="json")
    (tmp_path / "run.json").write_text(
        json.dumps({"$schema": "../schema/run.json", **raw, "deepspeed": "ds/block.json"})
    )
    assert load_run(tmp_path / "run.json").deepspeed == run_with(BLOCK).deepspeed
    (tmp_path / "run.json").write_text(json.dumps({**raw, "deepspeed": "ds/none.json"}))
    with pytest.raises(ConfigError, match=r"ds/none\.json: cannot be read"):
        load_run(tmp_path / "run.json")
    (tmp_path / "ds/block.json").write_text(json.dumps({**BLOCK, "gradient_cliping": 1.0}))
    (tmp_path / "run.json").write_text(json.dumps({**raw, "deepspeed": "ds/block.json"}))
    with pytest.raises(ConfigError, match="did you mean 'gradient_clipping'"):
        load_run(tmp_path / "run.json")


# ---------------------------------------------------------------------------------- what this engine does not do


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled = True: is not done here"),
        ({"data_efficiency": {"enabled": True}}, "data comes by leases"),
        ({"tensor_parallel": {"autotp_size": 2}}, "write parallel.tensor"),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, "reduces gradients itself"),
        ({"checkpoint": {"load_universal": True}}, "goes on with another layout"),
    ],
)
def test_what_this_engine_does_not_do_is_refused(block: dict[str, Any], words: str) -> None:
    assert words in refused({**BLOCK, **block})
    [(key, settings)] = block.items()
    run_with({**BLOCK, key: {name: type(value)() for name, value in settings.items()}})  # turned off


def test_an_offload_to_none_is_none() -> None:
    """DeepSpeed's own word for it."""
    for offload, offloads in (({"device": "none"}, False), ({}, False), ({"device": "cpu"}, True)):
        assert offloads_masters({"zero_optimization": {"offload_optimizer": offload}}) is offloads
