"""All private functions of Megatron-core that are replaced, each with the arguments for which its stand-in was
written: with others, importing this ends with a sentence, before a layer ends with a traceback."""

from __future__ import annotations

from importlib.metadata import version
from inspect import signature

from geotrain.inner.model.expert_order import permuted
from geotrain.inner.model.latent_attention import CopiedLinear
from geotrain.inner.model.rotary import rotated
from geotrain.inner.runtime import platform

with platform.quiet_imports():
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

# Of each, what it takes in Megatron-core 0.16, and in 0.19 where that differs.
_ROTARY = (
    "t, freqs, rotary_interleaved, multi_latent_attention, mscale",
    "t, freqs, rotary_interleaved, mla_rotary_interleaved, mscale, multi_latent_attention",
)
_PERMUTE = "tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad"
_KNOWN = (
    (rope_utils, "_apply_rotary_pos_emb_bshd", _ROTARY),
    (token_dispatcher, "permute", (_PERMUTE, f"{_PERMUTE}, tokens_per_expert, align_size")),
    # Replaced without CUDA, while Megatron-core runs (`platform.megatron_runtime`).
    (token_dispatcher, "maybe_move_tensor_to_cpu", ("tensor, as_numpy, record_stream",)),
    (random, "_set_cuda_rng_state", ("new_state, device, graph_safe",)),
)
for _module, _name, _arguments in _KNOWN:
    _found = ", ".join(signature(getattr(_module, _name, lambda: None)).parameters) or "nothing, or is gone"
    if _found not in _arguments:
        raise ImportError(
            f"Megatron-core {version('megatron-core')}: {_module.__name__}.{_name} takes {_found}; GeoTrain knows "
            f"0.16 to 0.19, where it takes {' or '.join(_arguments)}; install a version that setup.py asks for"
        )
rope_utils._apply_rotary_pos_emb_bshd = rotated
if ", ".join(signature(token_dispatcher.permute).parameters) == _PERMUTE:  # newer ones let no host wait, either
    token_dispatcher.permute = permuted
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # 0.16 asks, but has it with TE only
# Megatron-core takes whole projections to latents of Transformer Engine's class only. Its own layers it divides, and
# gathers what they give: of the rotated part of the keys, which all heads share, backward then keeps the gradient of
# one tensor rank's heads. Without Transformer Engine, 0.16 asks whether a layer is an instance of None.
multi_latent_attention.TELinear = CopiedLinear
