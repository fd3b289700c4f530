"""torchtitan's Llama (github.com/pytorch/torchtitan, 0.3) in the shape of a run, where torchtitan is installed.

Of torchtitan there is the model, and that its blocks are compiled one by one; the loop around it is the plain
one's. Its trainer runs on GPUs only. Its attention for language models takes masks of documents; here it is its
causal one.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from geotrain.config import Architecture


def installed() -> bool:
    return importlib.util.find_spec("torchtitan") is not None


class Titan(nn.Module):
    """Called as transformers' models are."""

    def __init__(self, architecture: Architecture, length: int, device: torch.device) -> None:
        super().__init__()
        self.model = _config(architecture, length).build().to(device)
        self.model.init_weights()
        if device.type == "cuda":
            for block in self.model.layers.values():
                block.compile(fullgraph=True)

    def forward(self, tokens: Tensor) -> Any:
        return SimpleNamespace(logits=self.model(tokens))


def _config(a: Architecture, length: int) -> Any:
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

    normal = {"weight": partial(nn.init.normal_, std=0.02)}

    def norm() -> Any:
        return RMSNorm.Config(normalized_shape=a.hidden_size, param_init={"weight": nn.init.ones_})

    def layer() -> Any:
        attention = make_gqa_config(
            dim=a.hidden_size,
            n_heads=a.heads,
            n_kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            fuse_qkv=True,
            wqkv_param_init=normal,
            wo_param_init=normal,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=ComplexRoPE.Config(dim=a.head_dim, max_seq_len=length, theta=10000.0),
        )
        mlp = make_ffn_config(dim=a.hidden_size, hidden_dim=a.ffn_size, w1_param_init=normal, w2w3_param_init=normal)
        return Llama3TransformerBlock.Config(
            attention_norm=norm(), ffn_norm=norm(), attention=attention, feed_forward=mlp
        )

    return Llama3Model.Config(
        dim=a.hidden_size,
        vocab_size=a.vocab_size,
        enable_weight_tying=a.tied_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=a.vocab_size, embedding_dim=a.hidden_size, param_init=normal),
        norm=norm(),
        lm_head=Linear.Config(in_features=a.hidden_size, out_features=a.vocab_size, param_init=normal),
        layers=[layer() for _ in range(a.layers)],
    )
