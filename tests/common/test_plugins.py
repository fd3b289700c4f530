"""A package of somebody else's, really installed, brings a rule, a codec, an optimizer and a model family."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.config import AccoConfig, ConfigError, OuterConfig, ParallelConfig, architecture_from_hf, parse
from geotrain.families import UnsupportedModelError
from geotrain.outer.codec import CodecError, make_codec, residual_dtype
from geotrain.parallelism.acco_forms import check_acco
from geotrain.parallelism.memory import memory_per_rank
from geotrain.parameters.parameter_map import canonical_parameters
from tests.support.checkpoints import load, save
from tests.support.command_line import say
from tests.support.families import transformers_model
from tests.support.inner_worlds import (
    QWEN_2,
    batch,
    canonical_weights,
    deepspeed_block,
    run_world,
    start,
    stop,
    train,
)
from tests.support.outer_world import FakeWorker, World, parameter_map

SETUP = """
from setuptools import setup

setup(
    name="tiny-plugin",
    version="1",
    py_modules=["tiny_plugin"],
    entry_points={
        "geotrain.rules": ["damped = tiny_plugin:DampedConfig", "no-rule = tiny_plugin:SignConfig"],
        "geotrain.codecs": ["sign = tiny_plugin:SignConfig", "broken = tiny_plugin:nothing"],
        "geotrain.optimizers": ["Lion = tiny_plugin:LionSettings", "NoOptimizer = tiny_plugin:SignConfig"],
        "geotrain.families": ["seed_oss = tiny_plugin:SeedOss", "olmo = tiny_plugin:SeedOss"],
    },
)
"""
PLUGIN = """
from typing import Literal

import torch
from pydantic import Field

from geotrain.config import PluggedCodec, PluggedRule
from geotrain.families.qwen2 import Qwen2
from geotrain.kernels.payload_format import PayloadFormat
from geotrain.outer.codec import Codec, CodecError, EncodedDelta
from geotrain.outer.rules import AsyncRegion, AveragingGlobal
from geotrain.outer.rules.rule import average
from geotrain.parallelism.optimizer_settings import PluggedOptimizer


class SeedOss(Qwen2):
    model_type = "seed_oss"
    transformers_class = "SeedOssForCausalLM"
    only = {**Qwen2.only, "attention_bias": True, "attention_out_bias": False}

    def config_keys(self, a):
        dropped = {"attention_dropout": 0.0, "residual_dropout": 0.0}
        return {"attention_bias": True, "attention_out_bias": False, **dropped}


class LionSettings(PluggedOptimizer):
    moments = ("momentum",)
    betas: tuple[float, float] = (0.9, 0.99)

    def optimizer(self, groups):
        return Lion(groups, self.betas)


class Lion(torch.optim.Optimizer):
    def __init__(self, groups, betas):
        super().__init__(groups, {"betas": betas, "step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(p.grad, m, first).sign(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - second)


class DampedConfig(PluggedRule):
    name: Literal["damped"]
    share: float = Field(0.5, gt=0, description="What part of a worker's delta a region takes.")

    def region_rule(self, members, updates):
        return DampedRegion(self)

    def global_rule(self, members):
        return AveragingGlobal()


class DampedRegion(AsyncRegion):
    def __init__(self, config):
        super().__init__(config.updates_per_send, config.merge_alpha, ledger=True)
        self.share = config.share

    def apply(self, v, member, delta, told):
        average(v.x, delta, self.share)


class SignConfig(PluggedCodec):
    name: Literal["sign"]

    def codec(self):
        return SignCodec()


class SignCodec(Codec):
    \"\"\"The mean magnitude (fp32), then a bit an element: its sign.\"\"\"

    def __init__(self):
        self.name = "sign"

    def encoded_bytes(self, numel):
        return 4 + -(-numel // 8)

    def encode(self, values, *, anchor=None, residual=None, seed=0, what="", moves_anchor=False):
        v = values.flatten().float() if anchor is None else anchor.flatten() - values.flatten()
        v = v if residual is None else v + residual.flatten()
        bits = torch.zeros(-(-v.numel() // 8) * 8, dtype=torch.uint8)
        bits[: v.numel()] = v >= 0
        packed = (bits.view(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8)
        payload = torch.cat([v.abs().mean()[None].view(torch.uint8), packed])
        if residual is not None:
            residual.copy_((v - self.decode(payload, v.numel())).view_as(residual))
        if moves_anchor:
            anchor.copy_(values)
        return EncodedDelta(payload, bool(v.isfinite().all()), what).check()

    def check(self, payload, numel):
        self._check_size(payload, numel)
        if not payload[:4].clone().view(torch.float32).isfinite():
            raise CodecError("sign: the scale is not finite")

    def _decode(self, payload, out, weight, checked):
        if not checked:
            self.check(payload, out.numel())
        bits = (payload[4:, None] >> torch.arange(8)) & 1
        values = payload[:4].clone().view(torch.float32) * (2.0 * bits.flatten()[: out.numel()] - 1.0)
        out.copy_(values) if weight is None else out.add_(values, alpha=weight)

    def decode_measured(self, payload, out):
        self._decode(payload, out, None, False)
        return float(out.double().square().sum())
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed, on the path of this process."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "setup.py").write_text(SETUP)
    (folder / "tiny_plugin.py").write_text(PLUGIN)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--target", str(folder / "site"), str(folder)]
    subprocess.run(command, check=True, timeout=500)
    return folder / "site"


@pytest.fixture
def installed(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(plugin)


OUTER = {"rule": {"name": "damped", "share": 0.25, "updates_per_send": 2}, "up": {"name": "sign"}}


def test_a_rule_and_a_codec_of_another_package_train_a_world(installed: None) -> None:
    """Worker, region and global server in this process; the second codec is built in."""
    config = parse(OuterConfig, OUTER, "here")
    again = parse(OuterConfig, json.loads(config.model_dump_json(by_alias=True)), "what a run's folder holds")
    assert again == config and again.model_dump()["rule"]["share"] == 0.25
    lay = parameter_map()
    whole = [lay.whole(fragment.index) for fragment in lay.fragments]
    worker, start = FakeWorker("a", lay, [whole]), [torch.zeros(f.numel) for f in lay.fragments]
    world = World(config, {"eu": [worker]}, start, lay)
    for _ in range(2):
        for part in worker.parts({0: torch.ones(lay.numel)}):
            world.tell("eu", part)
    region = world.regions["eu"]
    assert torch.equal(region.weights(0), torch.full((lay.numel,), -0.5))  # two deltas, a fourth of each
    sent = world.deliver("eu")
    (delta,) = sent.deltas  # type: ignore[union-attr]
    assert len(delta.payload) == 4 + lay.numel // 8
    assert torch.allclose(world.top.weights(0), torch.full((lay.numel,), -0.5))


def test_the_codec_keeps_what_it_leaves_out(installed: None) -> None:
    config = parse(OuterConfig, OUTER, "here")
    codec = make_codec(config.up)
    kept = [residual_dtype(each, bf16_state=True) for each in (config.up, config.down)]
    assert kept == [torch.float32, torch.bfloat16]  # it was not written for others
    values, residual = torch.tensor([3.0, -1.0, 0.5]), torch.zeros(3)
    coded = codec.encode(values, residual=residual)
    assert torch.allclose(codec.decode(coded.payload, 3) + residual, values)
    with pytest.raises(CodecError, match="must be 5 bytes"):
        codec.decode(coded.payload[:-1], 3)


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        ({"rule": {"name": "damped", "share": -1.0}}, "greater than 0"),
        ({"rule": {"name": "damped", "shre": 0.5}}, "shre"),
        ({"rule": {"name": "no-rule"}}, "plug-in 'no-rule' (tiny_plugin:SignConfig) is no subclass of PluggedRule"),
        ({"up": {"name": "broken"}}, "plug-in 'broken' (tiny_plugin:nothing) cannot be loaded: "),
        ({"rule": {"name": "damqed"}}, 'rule.name = "damqed": known: sync, halos, region_momentum'),
    ],
)
def test_what_is_wrong_with_a_plugin_is_one_line(installed: None, outer: object, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(OuterConfig, outer, "here")
    assert told in str(refused.value)


def test_without_the_package_its_names_are_unknown() -> None:
    with pytest.raises(ConfigError, match=r'rule\.name = "damped": known: sync, halos, region_momentum'):
        parse(OuterConfig, OUTER, "here")


def test_the_command_line_finds_it(installed: None, tmp_path: Path) -> None:
    raw = json.loads((Path(__file__).parents[2] / "configs/runs/quickstart.json").read_text())
    raw["model"]["config"] = str(Path(__file__).parents[2] / "configs/models/llama-tiny.json")
    raw["outer"] = OUTER
    (tmp_path / "run.json").write_text(json.dumps(raw))
    cluster = Path(__file__).parents[2] / "configs/clusters/local-wan.json"
    done = say("simulate", "run.json", str(cluster), "--tflops", "1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["links"]


LION = {"optimizer": {"type": "Lion", "params": {"lr": 2e-3, "weight_decay": 0.1, "betas": [0.8, 0.95]}}}
FIRST, THEN = range(3), range(3, 7)


def save_and_resume(plugin: str, folder: str) -> dict[str, Any]:
    """Two ranks: with ZeRO 1 through a checkpoint, again from it, and without ZeRO."""
    sys.path.insert(0, plugin)
    found: dict[str, Any] = {}
    for name, stage in (("saved", 1), ("resumed", 1), ("whole", 0)):
        engine = start(QWEN_2, ParallelConfig(), deepspeed_block(stage, **LION))
        if name == "resumed":
            load(engine, folder)
        else:
            found[f"{name} first"] = train(engine, FIRST)
        if name == "saved":
            save(engine, folder, "three", {}, keep=2, with_masters=True)
        found[name] = train(engine, THEN)
        found[f"{name} masters"] = [shard.master.clone() for shard in engine.shards()]
        found["optimizer"] = type(engine.basic_optimizer).__name__
        stop(engine)
    return found


@pytest.mark.slow
def test_an_optimizer_of_another_package_trains_and_resumes(plugin: Path, tmp_path: Path) -> None:
    """Cut by ZeRO as without, and from its own checkpoint to the same bits."""
    found = run_world(2, save_and_resume, str(plugin), str(tmp_path / "checkpoints"))[0]
    assert found["optimizer"] == "Lion" and found["resumed"] == found["saved"]
    masters = zip(found["saved masters"], found["resumed masters"], strict=True)
    assert all(torch.equal(a, b) for a, b in masters)
    curves = [torch.tensor(found[f"{name} first"] + found[name]) for name in ("saved", "whole")]
    assert torch.allclose(*curves, rtol=1e-4)
    assert curves[0][-1, 0] < curves[0][0, 0]


def test_what_holds_for_every_optimizer_is_known_of_it(installed: None) -> None:
    """Memory for the dry run and the planner, and what it does not go with."""
    architecture, parallel = architecture_from_hf(QWEN_2), ParallelConfig()
    adamw, lion = deepspeed_block(1), deepspeed_block(1, **LION)
    needs = [memory_per_rank(architecture, parallel, 2, block, 16).optimizer_bytes for block in (adamw, lion)]
    assert needs[1] == needs[0] * 2 // 3  # masters and one moment, not two
    with pytest.raises(ConfigError, match=r"acco does not go with deepspeed\.optimizer\.type = 'Lion'"):
        check_acco(AccoConfig(), architecture, ParallelConfig(), lion, 2)
    for change, told in (
        (
            {"type": "NoOptimizer"},
            "plug-in 'NoOptimizer' (tiny_plugin:SignConfig) is no subclass of PluggedOptimizer",
        ),
        ({"type": "Lyon"}, "deepspeed.optimizer.type = 'Lyon' is not supported"),
        ({"type": "Lion", "params": {"beta": 1}}, "beta"),
    ):
        with pytest.raises(ConfigError) as refused:
            memory_per_rank(architecture, parallel, 2, deepspeed_block(1, optimizer=change), 16)
        assert told in str(refused.value)


SEED_OSS = {**QWEN_2, "model_type": "seed_oss", "tie_word_embeddings": False}


def beside_transformers(plugin: str) -> Any:
    from geotrain.inner.runtime import platform

    sys.path.insert(0, plugin)
    engine = start(SEED_OSS, ParallelConfig(), deepspeed_block(1))
    theirs, tokens = transformers_model(SEED_OSS, canonical_weights(engine.architecture)), batch(7)[:2]
    with torch.no_grad(), platform.megatron_runtime():
        logits = engine.module(tokens, None, None), theirs(tokens).logits
    losses = [loss for loss, _ in train(engine, range(4))]
    stop(engine)
    return type(theirs).__name__, logits, losses


def test_a_family_of_another_package_is_the_model_of_transformers(plugin: Path) -> None:
    ((theirs, logits, losses),) = run_world(1, beside_transformers, str(plugin))
    assert theirs == "SeedOssForCausalLM" and logits[1].std() > 0.1
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert losses[-1] < losses[0]


def test_a_family_is_known_by_its_model_type(installed: None) -> None:
    assert "bias" in " ".join(p.name for p in canonical_parameters(architecture_from_hf(SEED_OSS)))
    for name, told in (("olmo", "is a family with another model_type"), ("gpt2", "'gpt2' is not supported")):
        with pytest.raises(UnsupportedModelError, match=told):
            architecture_from_hf({**SEED_OSS, "model_type": name})


def test_without_the_package_its_family_is_unknown() -> None:
    with pytest.raises(UnsupportedModelError, match="'seed_oss' is not supported; supported: llama, "):
        architecture_from_hf(SEED_OSS)
