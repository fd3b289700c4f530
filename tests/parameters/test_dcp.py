"""Checkpoints of torch.distributed.checkpoint, as torchtitan's Llama has them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from geotrain.config import Architecture, ConfigError, UnsupportedModelError, architecture_from_hf, load_run
from geotrain.parameters.dcp import read_dcp, start_weights, write_dcp
from geotrain.parameters.hf_checkpoint import HFCheckpointError
from geotrain.parameters.parameter_map import canonical_parameters
from tests.support import families
from tests.support.small_runs import write_files

LLAMA = {**families.LLAMA, "vocab_size": 264, "num_hidden_layers": 2}


def weights(architecture: Architecture) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {p.name: torch.randn(p.shape, generator=generator) for p in canonical_parameters(architecture)}


def test_what_is_written_has_torchtitans_names_and_comes_back(tmp_path: Path) -> None:
    architecture = architecture_from_hf(LLAMA)
    ours = weights(architecture)
    write_dcp(ours.items(), architecture, tmp_path / "out", "float32")
    a, layer = architecture, "layers.1"
    query, key, hidden, ffn = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.hidden_size, a.ffn_size
    theirs = {  # what torchtitan 0.3 has of a layer, and beside them
        f"{layer}.attention.qkv_linear.wq.weight": torch.empty(query, hidden),
        f"{layer}.attention.qkv_linear.wk.weight": torch.empty(key, hidden),
        f"{layer}.attention.qkv_linear.wv.weight": torch.empty(key, hidden),
        f"{layer}.attention.wo.weight": torch.empty(hidden, query),
        f"{layer}.feed_forward.w1.weight": torch.empty(ffn, hidden),
        f"{layer}.feed_forward.w2.weight": torch.empty(hidden, ffn),
        f"{layer}.feed_forward.w3.weight": torch.empty(ffn, hidden),
        f"{layer}.attention_norm.weight": torch.empty(hidden),
        f"{layer}.ffn_norm.weight": torch.empty(hidden),
        "tok_embeddings.weight": torch.empty(264, hidden),
        "norm.weight": torch.empty(hidden),
        "lm_head.weight": torch.empty(264, hidden),
    }
    dcp.load(theirs, checkpoint_id=tmp_path / "out", no_dist=True)
    own = "model.layers.1"
    for name, of_ours in {
        f"{layer}.attention.qkv_linear.wv.weight": f"{own}.self_attn.v_proj.weight",
        f"{layer}.attention.wo.weight": f"{own}.self_attn.o_proj.weight",
        f"{layer}.feed_forward.w1.weight": f"{own}.mlp.gate_proj.weight",
        f"{layer}.feed_forward.w2.weight": f"{own}.mlp.down_proj.weight",
        f"{layer}.feed_forward.w3.weight": f"{own}.mlp.up_proj.weight",
        f"{layer}.attention_norm.weight": f"{own}.input_layernorm.weight",
        f"{layer}.ffn_norm.weight": f"{own}.post_attention_layernorm.weight",
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }.items():
        assert torch.equal(theirs[name], ours[of_ours]), name
    # Queries times keys, rotated as each of both does it: halves against each other, neighbours as complex numbers.
    x, positions = torch.randn(5, hidden).double(), torch.arange(5.0)
    angles = torch.outer(positions, a.rope_theta ** (-torch.arange(0, a.head_dim, 2) / a.head_dim)).double()

    def halves(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def pairs(heads: torch.Tensor) -> torch.Tensor:
        turned = (
            torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
            * torch.polar(torch.ones_like(angles), angles)[:, None]
        )
        return torch.view_as_real(turned).flatten(-2)

    def products(rotate: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        q, k = (rotate((x @ each.double().T).unflatten(-1, (-1, a.head_dim))) for each in (q, k))
        return torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(a.heads // a.kv_heads, 1))

    qk = [f"{layer}.attention.qkv_linear.w{letter}.weight" for letter in "qk"]
    there = products(pairs, *(theirs[name] for name in qk))
    here = products(halves, *(ours[f"{own}.self_attn.{letter}_proj.weight"] for letter in "qk"))
    torch.testing.assert_close(there, here)
    back = list(read_dcp(tmp_path / "out", architecture))
    assert [name for name, _ in back] == list(ours)
    assert all(torch.equal(tensor, ours[name]) for name, tensor in back)


def test_a_run_starts_from_a_checkpoint_with_other_things_in_it(tmp_path: Path) -> None:
    file = write_files(tmp_path, "run", 32, {"eu": [1]}, {"rule": {"name": "halos"}})[0]
    raw = json.loads(file.read_text())
    raw["model"]["init_from"] = "start"
    file.write_text(json.dumps(raw))
    run = load_run(file)
    ours = weights(run.architecture)
    write_dcp(ours.items(), run.architecture, tmp_path / "plain", "bfloat16")
    held = dcp.FileSystemReader(tmp_path / "plain").read_metadata().state_dict_metadata
    state: dict[str, Any] = {name: torch.empty(each.size, dtype=torch.bfloat16) for name, each in held.items()}
    dcp.load(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    more = {"optimizer.state.step": torch.tensor(7.0), "train_state": {"step": 7}}
    dcp.save(state | more, checkpoint_id=tmp_path / "start", no_dist=True)
    assert all(torch.equal(tensor, ours[name].bfloat16()) for name, tensor in start_weights(run))
    changed = run.model_copy(update={"model": run.model.model_copy(update={"init_changes": ("rope_theta",)})})
    with pytest.raises(ConfigError, match=r"model.init_changes: .*is a DCP checkpoint, which has no config"):
        start_weights(changed)
    (tmp_path / "start/.metadata").write_bytes(b"no pickle")
    with pytest.raises(ConfigError, match=r"model.init_from: .*\.metadata: damaged or no DCP"):
        start_weights(run)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"num_hidden_layers": 3}, "'layers.2.attention_norm.weight' is not there, in the run's model [32]"),
        ({"vocab_size": 265}, "'tok_embeddings.weight' is [264, 32], in the run's model [265, 32]"),
    ],
)
def test_another_models_checkpoint(tmp_path: Path, model: dict[str, Any], told: str) -> None:
    architecture = architecture_from_hf(LLAMA)
    write_dcp(weights(architecture).items(), architecture, tmp_path / "out")
    with pytest.raises(HFCheckpointError, match=re.escape(told)):
        read_dcp(tmp_path / "out", architecture_from_hf({**LLAMA, **model}))


def test_other_families_are_refused(tmp_path: Path) -> None:
    architecture = architecture_from_hf({**families.MIXTRAL, "vocab_size": 264})
    with pytest.raises(UnsupportedModelError, match="DCP: 'mixtral' has no layout here; export it without --dcp"):
        write_dcp((), architecture, tmp_path / "out")


def test_nothing_is_left_of_what_cannot_be_written(tmp_path: Path) -> None:
    architecture = architecture_from_hf(LLAMA)
    ours = weights(architecture)
    for tensors, told in (
        ({**ours, "model.norm.weight": ours["model.norm.weight"] / 0}, "'model.norm.weight' is not finite"),
        ({k: v for k, v in ours.items() if k != "model.norm.weight"}, "model.norm.weight missing"),
    ):
        with pytest.raises(HFCheckpointError, match=told):
            write_dcp(tensors.items(), architecture, tmp_path / "out")
    assert not any(tmp_path.iterdir())
