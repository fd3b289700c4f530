"""The Megatron-core GPT of one rank, from a Hugging Face architecture.

Transformer Engine's layers are used where it is installed and there is CUDA; else Megatron-core's own linear
layers with PyTorch's fused attention and RMSNorm.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from geotrain.canonical import Architecture
from geotrain.config import ParallelConfig
from geotrain.inner import platform
from geotrain.inner.parallel import Mesh
from geotrain.sharing.mapping import LocalParameter, local_parameters

with platform.quiet_imports():
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

Recompute = Literal["none", "selective", "full"]

HAS_TRANSFORMER_ENGINE = platform.HAS_CUDA and gpt_layer_specs.HAVE_TE

# Transformer Engine fuses two norms into the linear layers that follow them.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class CausalAttention(nn.Module):
    """Causal, grouped-query core attention by torch's scaled_dot_product_attention. No weights."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.grouped = config.num_query_groups != config.num_attention_heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any) -> Tensor:
        """query: [sequence, batch, heads, head_dim]; key, value with fewer heads; the mask is not used.

        Returns [sequence, batch, heads · head_dim].
        """
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.grouped
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm with the arguments Megatron-core builds norms with."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, device=platform.device(), dtype=config.params_dtype)


def transformer_config(
    a: Architecture, parallel: ParallelConfig, bf16: bool, recompute: Recompute
) -> TransformerConfig:
    """Megatron-core's configuration of the model."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    return TransformerConfig(
        num_layers=a.layers,
        hidden_size=a.hidden_size,
        ffn_hidden_size=a.ffn_size,
        num_attention_heads=a.heads,
        num_query_groups=a.kv_heads,
        kv_channels=a.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=a.norm_eps,
        qk_layernorm=a.qk_norm,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        rotary_interleaved=False,
        bias_activation_fusion=platform.HAS_CUDA,
        bias_dropout_fusion=platform.HAS_CUDA,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=HAS_TRANSFORMER_ENGINE,
        perform_initialization=False,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        sequence_parallel=parallel.sequence,
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=False,
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
    )


def _block_spec(a: Architecture, layers: int) -> Any:
    if HAS_TRANSFORMER_ENGINE:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=a.qk_norm)
    head_norm = RMSNorm if a.qk_norm else IdentityOp
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=CausalAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def build_model(
    a: Architecture,
    parallel: ParallelConfig,
    mesh: Mesh,
    sequence_length: int,
    bf16: bool,
    recompute: Recompute,
    seed: int,
) -> GPTModel:
    """This rank's part of the model, on `platform.device()`, with all weights zero: they come from outside.

    Each parameter is marked for DeepSpeed's gradient norm: `tensor_model_parallel`, `ds_pipe_replicated`.
    """
    with platform.megatron_runtime():
        model_parallel_cuda_manual_seed(seed)  # nothing here draws, but Megatron-core's layers insist on the states
        model = GPTModel(
            config=transformer_config(a, parallel, bf16, recompute),
            transformer_layer_spec=_block_spec(a, a.layers // parallel.pipeline),
            vocab_size=a.vocab_size,
            max_sequence_length=sequence_length,
            pre_process=mesh.is_first_stage,
            post_process=mesh.is_last_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=a.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=a.rope_theta,
        )
    for parameter, place in placements(model, a, parallel, mesh):
        parameter.data.zero_()
        for mark, value in (("tensor_model_parallel", place.sharded), ("ds_pipe_replicated", place.tied_copy)):
            setattr(parameter, mark, value)
    return model


def placements(
    model: GPTModel, a: Architecture, parallel: ParallelConfig, mesh: Mesh
) -> list[tuple[nn.Parameter, LocalParameter]]:
    """Each of the model's parameters with its place in the canonical address space, in canonical order.

    Raises RuntimeError if the model and the mapping disagree on names or sizes.
    """
    own: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        for fused, plain in _FUSED_NORMS.items():
            name = name.replace(fused, plain)
        own[name] = parameter
    places = local_parameters(a, parallel, mesh.tp_rank, mesh.pp_rank)
    sizes, wanted = {n: p.numel() for n, p in own.items()}, {p.name: p.numel for p in places}
    if sizes != wanted:
        wrong = sorted(n for n in sizes.keys() | wanted.keys() if sizes.get(n) != wanted.get(n))
        raise RuntimeError(f"Megatron-core's model and geotrain.sharing.mapping disagree on {', '.join(wrong)}")
    return [(own[place.name], place) for place in places]
