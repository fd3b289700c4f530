"""Builds the Megatron-core model of one rank from a Hugging Face architecture.

On CUDA, Transformer Engine's layers are used if it is installed. Otherwise the model consists of Megatron-core's own
linear layers with PyTorch's fused attention and RMSNorm.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from geotrain.config import Architecture, ParallelConfig, PrecisionConfig
from geotrain.families import family_of
from geotrain.families.architecture import Multipliers
from geotrain.inner.model import latent_attention, replaced  # noqa: F401 (it replaces functions)
from geotrain.inner.model.attention import CausalAttention
from geotrain.inner.model.context_parallel import ContextAttention, Parts, use_own_positions
from geotrain.inner.model.documents import PackedAttention
from geotrain.inner.model.gated_delta import GatedDeltaNet, GatedSelfAttention
from geotrain.inner.model.gated_silu import ClampedSwish, GatedGelu, GatedSilu, SquaredRelu
from geotrain.inner.model.mamba import Mamba2
from geotrain.inner.model.norms import CenteredRMSNorm, ProjectionNorm, RMSNorm, normed_linear
from geotrain.inner.model.predicting import add_predictors
from geotrain.inner.model.router_bias import biased_routers, keep_counts_wide
from geotrain.inner.model.stack import by_letters, parts_of, plain_name, stacked
from geotrain.inner.model.stacked_experts import StackedColumns, StackedRows
from geotrain.inner.runtime import platform
from geotrain.inner.runtime.parallel import EXPERTS
from geotrain.parallelism.local_parameters import LocalParameter, local_parameters, vocabulary_rows
from geotrain.parallelism.mesh import RankMesh
from geotrain.parallelism.transformer_engine import own_modules

with platform.quiet_imports():
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

Recompute = Literal["none", "selective", "full"]
PLAIN = PrecisionConfig()

HAS_TRANSFORMER_ENGINE = platform.HAS_CUDA and gpt_layer_specs.HAVE_TE

OWN_GROUPS = hasattr(MLP, "as_mlp_submodule")  # in Megatron-core 0.19, which so hands an MLP its process groups

# Parts of names in the model, and what stands in their place in canonical addresses: Transformer Engine fuses two
# norms into the linear layers that follow them.
_RENAMED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "core_attention.inner.": "core_attention.",  # between exchanges of context ranks
}
# Megatron-core's, which it fuses on CUDA, that of GELU by tanh; and ours.
_ACTIVATIONS: dict[str, tuple[Any, type[nn.Module]]] = {
    "silu": (nn.functional.silu, GatedSilu),
    "gelu_tanh": (nn.functional.gelu, GatedGelu),
    "clamped": (None, ClampedSwish),
    "relu2": (None, SquaredRelu),
}


def transformer_config(
    architecture: Architecture,
    parallel: ParallelConfig,
    bf16: bool,
    recompute: Recompute,
    precision: PrecisionConfig = PLAIN,
) -> TransformerConfig:
    """Build Megatron-core's configuration of the model."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    window, tp = architecture.sliding_window, parallel.tensor
    factor = rotary_frequencies(architecture)[1] if architecture.rope_scaling else 1.0
    windowed = [int(architecture.window_of(i) is not None) for i in range(architecture.decoder_layers)]
    activation = _ACTIVATIONS[architecture.activation][0]
    fused = platform.HAS_CUDA and activation is not None
    usual = architecture.multipliers is None and not architecture.rope_scaling
    family = family_of(architecture.model_type)
    letters = [architecture.letters(layer) for layer in range(architecture.decoder_layers)]
    unrotated = [int(layer in architecture.unrotated) for layer in range(architecture.decoder_layers)]
    common = dict(
        num_layers=sum(map(len, letters)),
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_size,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm is not None,
        gated_linear_unit=architecture.activation != "relu2",
        no_rope_freq=unrotated if any(unrotated) else None,
        activation_func=activation or nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        window_size=None if window is None else (window - 1, 0),  # tokens before and after a token's own
        window_attn_skip_freq=windowed if architecture.unwindowed else None,
        # Queries and keys are both multiplied by YaRN's factor, so their products by its square.
        softmax_scale=None if usual else factor**2 * architecture.attention_scale,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        rotary_interleaved=False,
        bias_activation_fusion=fused,
        use_te_activation_func=not fused,  # that is, the one in the layer's specification
        bias_dropout_fusion=platform.HAS_CUDA,
        masked_softmax_fusion=False,  # the softmax is inside the fused attention
        gradient_accumulation_fusion=False,
        # "native": it rounds gradients of logits to bf16, whatever these are; Megatron-LM calls it not deterministic
        cross_entropy_loss_fusion=bf16 and not precision.deterministic_mode,
        deterministic_mode=precision.deterministic_mode,
        fp8=precision.fp8,
        fp8_recipe=precision.fp8_recipe,
        fp8_amax_history_len=1024,  # of the recipe "delayed": Transformer Engine's own defaults, not Megatron-core's
        fp8_amax_compute_algo="max",
        tp_only_amax_red=True,  # replicas may be at different micro-batches, as with `acco.balance`
        apply_rope_fusion=HAS_TRANSFORMER_ENGINE and not own_modules(architecture),  # else `inner.rotary`
        perform_initialization=False,  # all weights come from outside
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=parallel.pipeline,
        pipeline_model_parallel_layout=_layout(architecture, parallel),
        context_parallel_size=parallel.context,
        cp_comm_type="p2p" if parallel.context_exchange == "ring" else None,
        sequence_parallel=parallel.sequence,
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=False,  # waiting for the device after each message serves old versions of torch only
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=max(map(len, letters)) if recompute == "full" else None,
        moe_token_dispatcher_type=parallel.dispatcher,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=tp,
    )
    kind = MLATransformerConfig if architecture.latent else TransformerConfig
    fields = {**common, **family.megatron(architecture)}
    for name in ("window_attn_skip_freq", "no_rope_freq", "moe_layer_freq"):  # of layers; Megatron-core's are letters
        if isinstance(each := fields.get(name), list):
            fields[name] = [value for value, of in zip(each, letters, strict=True) for _ in of]
    config = kind(**{**fields, "add_bias_linear": False})
    config.add_bias_linear = fields["add_bias_linear"]  # refused with divided experts, of which ours know what to do
    return config


def _held(architecture: Architecture, parallel: ParallelConfig, stage: int) -> range:
    """The decoder's layers of a pipeline stage: without those that predict further tokens."""
    held = parallel.layers_of(stage, architecture.layers)
    return range(held.start, min(held.stop, architecture.decoder_layers))


def _letters(architecture: Architecture, parallel: ParallelConfig, stage: int) -> list[str]:
    """List the letters of each layer of a pipeline stage."""
    return [architecture.letters(layer) for layer in _held(architecture, parallel, stage)]


def _owners(architecture: Architecture, parallel: ParallelConfig, stage: int) -> list[int]:
    """List the layer of each letter of a pipeline stage, counted from its first."""
    return [layer for layer, of in enumerate(_letters(architecture, parallel, stage)) for _ in of]


def _layout(architecture: Architecture, parallel: ParallelConfig) -> list[list[str]]:
    """Lists what each pipeline stage holds, as Megatron-core does."""
    stages = [["decoder"] * len(_owners(architecture, parallel, stage)) for stage in range(parallel.pipeline)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _block_spec(architecture: Architecture, parallel: ParallelConfig, layers: range, packed: bool) -> Any:
    """Specify Megatron-core's layers of one pipeline stage. layers: their numbers in the model."""

    def around(attention: Any, **settings: Any) -> Any:
        scaled = partial(_scaled_attention, attention, architecture, **settings)
        inside = parallel.context > 1 and parallel.context_exchange == "heads"
        return partial(ContextAttention, scaled) if inside else scaled

    def fused_layer(index: int) -> ModuleSpec:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=architecture.mixture.count if architecture.has_experts(index) else None,
            qk_layernorm=architecture.qk_norm is not None,
        )
        parts = spec.submodules.self_attention.submodules
        parts.core_attention = around(PackedAttention if packed else parts.core_attention, index=index)
        return spec

    norm = CenteredRMSNorm if architecture.centered_norms else RMSNorm
    before = IdentityOp if architecture.norms == "behind" else norm
    row_linear = RowParallelLinear if architecture.norms == "before" else normed_linear(norm)
    linear = MLPSubmodules(
        linear_fc1=ColumnParallelLinear,
        linear_fc2=row_linear,
        activation_func=_ACTIVATIONS[architecture.activation][1],
    )
    if architecture.activation == "clamped":
        linear.linear_fc1, linear.linear_fc2 = StackedColumns, StackedRows
    dense = partial(MLP.as_mlp_submodule, submodules=linear) if OWN_GROUPS else ModuleSpec(MLP, submodules=linear)
    sparse = ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=SequentialMLP, submodules=linear),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linear),
        ),
    )
    query_norm, key_norm = {
        None: (IdentityOp, IdentityOp),
        "head": (norm, norm),
        "projection": [ModuleSpec(module=ProjectionNorm, params={"keys": keys}) for keys in (False, True)],
    }[architecture.qk_norm]

    def attention(index: int) -> ModuleSpec:
        if architecture.latent:
            return latent_attention.spec(CausalAttention)
        if (net := architecture.net) and not architecture.attends(index):
            module = {"gated delta nets": GatedDeltaNet, "Mamba-2 layers": Mamba2}[net.name]
            return ModuleSpec(module=module, params={"net": net})
        settings = {
            "window": architecture.window_of(index),
            "cap": architecture.score_cap,
            "sinks": architecture.sinks,
        }
        return ModuleSpec(
            module=GatedSelfAttention if architecture.gated_attention else SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=around(CausalAttention, index=index, **settings),
                linear_proj=row_linear,
                q_layernorm=query_norm,
                k_layernorm=key_norm,
            ),
        )

    def layer(index: int) -> ModuleSpec:
        return ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=before,
                self_attention=attention(index),
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=before,
                mlp=sparse if architecture.has_experts(index) else dense,
                mlp_bda=get_bias_dropout_add,
            ),
        )

    if HAS_TRANSFORMER_ENGINE and own_modules(architecture) is None:
        layer, norm = fused_layer, LayerNormImpl
    cut = [half for index in layers for half in by_letters(layer(index), architecture.letters(index))]
    return TransformerBlockSubmodules(layer_specs=cut, layer_norm=norm)


def _scaled_attention(
    kind: Any, architecture: Architecture, softmax_scale: float | None, index: int, **settings: Any
) -> nn.Module:
    """Build a layer's core attention. YaRN's factor is one of queries and keys that are rotated by it, so a layer
    that rotates none, or by the plain embedding, has the plain scale. index: of the layer."""
    plain = index in architecture.unrotated or architecture.rotates_locally(index)
    if softmax_scale is not None and plain:
        softmax_scale = architecture.attention_scale
    return kind(softmax_scale=softmax_scale, **settings)


def build_model(
    architecture: Architecture,
    parallel: ParallelConfig,
    mesh: RankMesh,
    sequence_length: int,
    bf16: bool,
    recompute: Recompute,
    seed: int,
    packed: bool = False,
    precision: PrecisionConfig = PLAIN,
) -> nn.Module:
    """Build this rank's part of the model, on `platform.device()`. All weights are zero: they come from outside.

    packed: the model is always given the boundaries of documents as its attention mask.

    Each parameter gets the attributes `tensor_model_parallel` and `ds_pipe_replicated`, by which DeepSpeed's gradient
    norm counts each element of the model once. With expert parallelism those of experts also get `allreduce` and
    `group_name`, by which DeepSpeed finds the ranks that have the same ones.
    """
    mine = _held(architecture, parallel, mesh.pp_rank)
    rows = vocabulary_rows(architecture.vocab_size, parallel.tensor)
    with platform.megatron_runtime():
        # Nothing in this model draws random numbers, but Megatron-core's layers demand that the generators are there.
        model_parallel_cuda_manual_seed(seed)
        model: Any = stacked(
            transformer_config(architecture, parallel, bf16, recompute, precision),
            _block_spec(architecture, parallel, mine, packed),
            ["".join(_letters(architecture, parallel, stage)) for stage in range(parallel.pipeline)],
            vocab_size=rows * parallel.tensor,
            max_sequence_length=sequence_length,
            pre_process=mesh.pp_rank == 0,
            post_process=mesh.is_last_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
            rotary_percent=architecture.rotated_share,
        )
        if architecture.predicting and mesh.is_last_stage:
            further = range(architecture.decoder_layers, architecture.layers)
            specs = [_block_spec(architecture, parallel, range(i, i + 1), packed) for i in further]
            add_predictors(model, specs, architecture.predicting_loss)
    parts = Parts(mesh.cp_rank, mesh.cp_size, parallel.context_exchange) if parallel.context > 1 else None
    if parts is not None:
        use_own_positions(model.rotary_pos_emb, parts)
    # Megatron-core knows one setting of Llama 3's only, and has YaRN's factor elsewhere.
    if architecture.rope_scaling:
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                module.inv_freq = rotary_frequencies(architecture)[0].to(platform.device())
    layers = parts_of(model, [mine[owner] for owner in _owners(architecture, parallel, mesh.pp_rank)])
    if architecture.local_theta is not None:
        _rotate_locally(layers, architecture, parts)
    if architecture.multipliers:
        _multiply(model, layers, architecture.multipliers, bf16)
    if architecture.logit_cap is not None and mesh.is_last_stage:
        model.output_layer.register_forward_hook(partial(_capped, architecture.logit_cap))
    if mesh.is_last_stage and (words := max(architecture.vocab_size - mesh.tp_rank * rows, 0)) < rows:
        model.output_layer.register_forward_hook(partial(_without_padding, words))
    keep_counts_wide(model)
    for module in model.modules():
        if isinstance(module, TopKRouter):  # else it records losses in a table as long as the process's first model
            module.layer_number = None
    for parameter, place in placements(model, architecture, parallel, mesh):
        parameter.data.zero_()
        for mark, value in (("tensor_model_parallel", place.sharded), ("ds_pipe_replicated", place.tied_copy)):
            setattr(parameter, mark, value)
        if place.expert:
            parameter.allreduce, parameter.group_name = False, EXPERTS
    return model


def _rotate_locally(
    layers: list[tuple[int, str, nn.Module]], architecture: Architecture, parts: Parts | None
) -> None:
    """Let layers with a window rotate queries and keys by `local_theta`, in place of what all layers are handed."""
    with platform.megatron_runtime():
        rotary = RotaryEmbedding(architecture.head_dim, 1.0, rotary_base=architecture.local_theta)
    if parts is not None:
        use_own_positions(rotary, parts)

    made: list[Any] = [None, None]  # what all layers are handed, and what takes its place: made once for all of them

    def instead(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
        if (handed := named["rotary_pos_emb"]) is not made[0]:
            made[:] = handed, rotary(len(handed) * (parts.size if parts else 1))
        return given, {**named, "rotary_pos_emb": made[1]}

    for index, name, part in layers:
        if name == "self_attention" and architecture.rotates_locally(index):
            part.register_forward_pre_hook(instead, with_kwargs=True)


def _capped(cap: float, module: nn.Module, given: Any, out: Any) -> Any:
    """Cap logits softly; a hook behind the head's forward."""
    return torch.tanh(out[0] / cap) * cap, *out[1:]


def _multiply(model: Any, layers: list[tuple[int, str, nn.Module]], by: Multipliers, bf16: bool) -> None:
    """Let the model's parts multiply what they give; of attention Megatron-core does so itself."""
    embedding = torch.tensor(by.embedding, dtype=torch.bfloat16).item() if bf16 and by.rounded else by.embedding

    def times(part: nn.Module, factor: float) -> None:
        def hook(module: nn.Module, given: Any, out: Any) -> Any:
            return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

        if factor != 1.0:
            part.register_forward_hook(hook)

    if model.pre_process:
        times(model.embedding, embedding)
    if model.post_process:
        times(model.output_layer, 1 / by.logits_divisor)
    for _, _, part in layers:
        times(part, by.residual)


@torch.no_grad()  # the softmax is 0 there, and with it the gradient of these logits: backward has nothing to do
def _without_padding(words: int, module: nn.Module, given: Any, out: Any) -> None:
    """Leave rows of the head beyond this rank's words out of the softmax; a hook behind the head's forward."""
    out[0][..., words:].fill_(-torch.inf)


@lru_cache(maxsize=16)
def rotary_frequencies(architecture: Architecture) -> tuple[Tensor, float]:
    """Ask transformers for a scaled rotary embedding's inverse frequencies (fp32, [head_dim / 2]) and its factor.

    By that factor it multiplies rotated queries and keys (1 but for YaRN).
    """
    with platform.quiet_imports():
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    # Of one head: a Llama's must divide hidden_size, as other families' need not.
    rotated = round(architecture.head_dim * architecture.rotated_share)
    one_head: dict[str, Any] = {"hidden_size": rotated, "num_attention_heads": 1}
    rope = {**dict(architecture.rope_scaling), "rope_theta": architecture.rope_theta}
    config = LlamaConfig(**one_head, max_position_embeddings=architecture.max_positions, rope_parameters=rope)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))


def placements(
    model: nn.Module, architecture: Architecture, parallel: ParallelConfig, mesh: RankMesh
) -> list[tuple[Any, LocalParameter]]:
    """Find the place of each of the model's parameters in the canonical address space; in canonical order.

    Biases that counts change, and no gradient, are among them.

    Raises RuntimeError if the model's parameters differ in name or size from those of
    `geotrain.parallelism.local_parameters`, as after a change in Megatron-core.
    """
    own, owners = dict[str, Tensor](), _owners(architecture, parallel, mesh.pp_rank)
    biases = ((f"{name}.expert_bias", router.expert_bias) for name, router in biased_routers(model))
    for name, parameter in (*model.named_parameters(), *biases):
        for there, here in _RENAMED.items():
            name = name.replace(there, here)
        own[plain_name(name, owners)] = parameter
    places = local_parameters(architecture, parallel, mesh.tp_rank, mesh.pp_rank, mesh.ep_rank)
    sizes, wanted = {n: p.numel() for n, p in own.items()}, {p.name: p.numel for p in places}
    if sizes != wanted:
        wrong = sorted(n for n in sizes.keys() | wanted.keys() if sizes.get(n) != wanted.get(n))
        raise RuntimeError(
            f"Megatron-core's model and geotrain.parallelism.local_parameters disagree on {', '.join(wrong)}"
        )
    return [(own[place.name], place) for place in places]
