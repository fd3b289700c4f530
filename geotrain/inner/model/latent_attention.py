"""Megatron-core's latent attention without Transformer Engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from geotrain.inner.runtime import platform

with platform.quiet_imports():
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import multi_latent_attention as megatron
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig


class CopiedLinear(nn.Linear):
    """A projection of which every tensor rank has a copy.

    Under sequence parallelism each sees its part of the tokens, so that its gradient is a part, too.
    """

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False, device=platform.device(), dtype=config.params_dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the product, and no bias, as Megatron-core's linear layers do."""
        return nn.functional.linear(x, self.weight), None


class SelfAttention(megatron.MLASelfAttention):
    """Latent attention with the norms that its specification has.

    By itself Megatron-core 0.19 takes a norm of keys and values only beside one of queries.
    """

    def _resolve_qk_norm_config(self, submodules: megatron.MLASelfAttentionSubmodules) -> dict[str, Any]:
        names = "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm"
        return {name: getattr(submodules, name) for name in names}


def spec(core_attention: type, norm: type) -> ModuleSpec:
    """Specify the attention. core_attention: from queries, keys and values to the output. norm: of the latents."""
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=megatron.MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=CopiedLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=CopiedLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=core_attention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )
