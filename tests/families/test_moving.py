"""A DeepSpeed checkpoint of a transformers model becomes the first weights of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from geotrain.parameters.hf_checkpoint import read_checkpoint
from tests.support.inner_worlds import LLAMA, run_world

# DeepSpeed's own Adam is compiled for two minutes, and a build that was killed leaves a lock that others wait for.
STEPS = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "bf16": {"enabled": True},
}


def train_and_save(folder: Path) -> dict[str, torch.Tensor]:
    """Train a transformers model for two steps under DeepSpeed, as its users do; the masters that it saved."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param
    from transformers import AutoConfig, AutoModelForCausalLM

    from geotrain.inner.runtime.platform import compile_no_ops

    compile_no_ops()
    config = AutoConfig.for_model(**LLAMA)
    config.save_pretrained(folder)
    config.save_pretrained(folder / "out")
    model = AutoModelForCausalLM.from_config(config)
    settings = {**STEPS, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    tokens = torch.randint(0, LLAMA["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(folder)
    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


@pytest.mark.long("geotrain/parameters", "constraints.txt")
def test_a_deepspeed_checkpoint_is_read_as_first_weights(tmp_path: Path) -> None:
    (masters,) = run_world(1, train_and_save, tmp_path)
    command = [sys.executable, "zero_to_fp32.py", ".", "out", "--safe_serialization"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    read = dict(read_checkpoint(tmp_path / "out")[1])
    assert read.keys() == masters.keys()
    for name, weight in masters.items():
        assert torch.equal(read[name], weight), name
