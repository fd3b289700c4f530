"""The interface of a model family. Each family is a file beside this one, which says what differs from Llama."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from geotrain.families import reading, weights
from geotrain.families.architecture import Architecture, Experts, UnsupportedModelError
from geotrain.families.weights import Weight, matrix, norm


class Family:
    """A decoder as Llama's: RMSNorm before attention and MLP, rotary embeddings, grouped queries, SwiGLU, no biases.

    A subclass states its names, and what is otherwise. It keeps no state, imports neither torch nor Megatron-core,
    and answers the same whenever it is asked: servers, planner and workers ask it, each in a process of its own.
    """

    model_type: ClassVar[str]  # in config.json
    transformers_class: ClassVar[str]  # that transformers loads it with
    # Keys of config.json that must have this value where they are there: what else they may say is not built.
    only: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "use_sliding_window": False,
        "partial_rotary_factor": 1.0,
        "rope_interleaved": False,
        "is_encoder_decoder": False,
        "add_cross_attention": False,
    }
    idle: ClassVar[frozenset[str]] = frozenset()  # keys of config.json without effect beside the values in `only`
    # transformers' defaults of keys that a config may lack.
    positions: ClassVar[int] = 2048
    eps: ClassVar[float] = 1e-6
    theta: ClassVar[float] = 10000.0
    usual_head_dim: ClassVar[int | None] = None  # None: hidden_size / num_attention_heads
    ffn_key: ClassVar[str] = "intermediate_size"  # of config.json: `Architecture.ffn_size`
    count_key: ClassVar[str] = "num_experts"  # of config.json: how many there are, if there are any
    loss_key: ClassVar[str] = "router_aux_loss_coef"
    tied: ClassVar[bool] = False
    qk_norm: ClassVar[Literal["head", "projection"] | None] = None
    norms: ClassVar[Literal["before", "behind", "around"]] = "before"
    full_every: ClassVar[int | None] = None  # of so many layers the last sees all tokens; None: all have one window
    qkv_bias: ClassVar[bool] = False
    trunk: ClassVar[str] = "model"  # before the names of all but the head

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """Read a Hugging Face `config.json` (already parsed). Raises UnsupportedModelError.

        Whatever would make transformers compute something else than Megatron-core does must be refused, so that an
        exported checkpoint is the model that was trained. What is not asked for here is refused by
        `architecture_from_hf`.
        """
        reading.must_be(config, self.only)
        layers = self.layers(config)
        positions = reading.whole(config, "max_position_embeddings", self.positions)
        theta, scaling, local_theta = self.rope(config, positions)
        window = self.sliding_window(config)
        heads, hidden = reading.whole(config, "num_attention_heads"), reading.whole(config, "hidden_size")
        # Without a number, each head has its own keys and values.
        kv_heads = reading.whole(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise UnsupportedModelError(
                f"model config: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
            )
        head_dim = self.head_dim(config, hidden, heads)
        if head_dim % 2:
            raise UnsupportedModelError(f"model config: head_dim = {head_dim} must be even: pairs are rotated")
        return Architecture(
            model_type=self.model_type,
            vocab_size=reading.whole(config, "vocab_size"),
            hidden_size=hidden,
            ffn_size=reading.whole(config, self.ffn_key),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=reading.number(config, "rms_norm_eps", self.eps),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=positions,
            tied_embeddings=reading.flag(config, "tie_word_embeddings", self.tied),
            qk_norm=self.qk_norm,
            qkv_bias=self.qkv_bias,
            sliding_window=window,
            unwindowed=self.full_layers(config, layers, window),
            local_theta=local_theta,
            norms=self.norms,
            init_std=reading.number(config, "initializer_range", 0.02, most=1.0),
            experts=self.experts(config),
        )

    def layers(self, config: Mapping[str, Any]) -> int:
        """Read how many layers there are. Raises UnsupportedModelError."""
        return reading.whole(config, "num_hidden_layers", most=reading.MOST_LAYERS)

    def experts(self, config: Mapping[str, Any]) -> Experts | None:
        """Read the experts from config.json; None: layers have one MLP. Raises UnsupportedModelError."""
        return None

    def head_dim(self, config: Mapping[str, Any], hidden: int, heads: int) -> int:
        """Read how much of a head is rotated, which is all of it. Raises UnsupportedModelError."""
        usual = self.usual_head_dim if "head_dim" not in config else None
        if config.get("head_dim") is None and not usual and hidden % heads:
            raise UnsupportedModelError(
                f"model config: hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}; "
                "set head_dim"
            )
        return reading.whole(config, "head_dim", usual or max(hidden // heads, 1))

    def sliding_window(self, config: Mapping[str, Any]) -> int | None:
        """Read the window of all layers that have one; None: there is none."""
        return None

    def full_layers(self, config: Mapping[str, Any], layers: int, window: int | None) -> tuple[int, ...]:
        """Read the layers that see all tokens although there is a window."""
        return reading.full_layers(config, layers, window, self.full_every)

    def rope(
        self, config: Mapping[str, Any], positions: int
    ) -> tuple[float, tuple[tuple[str, Any], ...], float | None]:
        """Read the rotary embedding: `rope_theta`, `rope_scaling` and `local_theta` of `Architecture`."""
        return *reading.rope(config, self.theta, positions), None

    def hf_config(self, a: Architecture) -> dict[str, Any]:
        """State the model as an exported config.json: what was read, and nothing else.

        All of it, since transformers' defaults differ. Version 4 reads `rope_theta` and `rope_scaling`, version 5
        `rope_parameters`.
        """
        scaling, mixture = dict(a.rope_scaling), dict[str, Any]()
        if a.experts:
            mixture = {self.count_key: a.experts.count, "num_experts_per_tok": a.experts.per_token}
            mixture |= {self.loss_key: a.experts.aux_loss}
            mixture |= {"router_z_loss_coef": a.experts.z_loss} if a.experts.z_loss else {}
        return {
            "architectures": [self.transformers_class],
            "model_type": self.model_type,
            "vocab_size": a.vocab_size,
            "hidden_size": a.hidden_size,
            self.ffn_key: a.ffn_size,
            "num_hidden_layers": a.decoder_layers,
            "num_attention_heads": a.heads,
            "num_key_value_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": a.norm_eps,
            "rope_theta": a.rope_theta,
            "rope_scaling": scaling or None,
            "rope_parameters": {"rope_type": "default", "rope_theta": a.rope_theta, **scaling},
            "max_position_embeddings": a.max_positions,
            "tie_word_embeddings": a.tied_embeddings,
            "initializer_range": a.init_std,
            **mixture,
            **self.config_keys(a),
        }

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        """State the keys of an exported config.json beside those that all families have."""
        return {}

    # ------------------------------------------------------------------------------------------------- weights

    def attention(self, a: Architecture, layer: int) -> Iterator[Weight]:
        return weights.grouped_attention(a)

    def mlp(self, a: Architecture, layer: int) -> Iterator[Weight]:
        return weights.routed_experts(a) if a.experts else weights.gated_mlp(a, a.ffn_size)

    def layer(self, a: Architecture, layer: int) -> Iterator[Weight]:
        """List a layer's weights, in Hugging Face's order."""
        h, before, behind = a.hidden_size, a.norms != "behind", a.norms != "before"
        if before:
            yield norm(a, "input_layernorm.weight", h, "input_layernorm.weight")
        yield from self.attention(a, layer)
        if behind:
            yield norm(a, "post_attention_layernorm.weight", h, "self_attention.linear_proj.norm.weight")
        if before:
            name = "pre_feedforward_layernorm.weight" if behind else "post_attention_layernorm.weight"
            yield norm(a, name, h, "pre_mlp_layernorm.weight")
        yield from self.mlp(a, layer)
        if behind:
            yield norm(a, "post_feedforward_layernorm.weight", h, "mlp.linear_fc2.norm.weight")

    def weights(self, a: Architecture) -> Iterator[tuple[int | None, Weight]]:
        """List every weight of the model once, in Hugging Face's order, with the number of its layer."""
        yield None, self.embedding(a)
        for i in range(a.layers):
            yield from ((i, weight.of_layer(i, i, self.trunk)) for weight in self.layer(a, i))
        yield None, self.final_norm(a)
        if not a.tied_embeddings:
            yield None, self.head(a)

    def embedding(self, a: Architecture) -> Weight:
        name, within = "model.embed_tokens.weight", "embedding.word_embeddings.weight"
        return matrix(name, a.vocab_size, a.hidden_size, within, a.init_std)

    def final_norm(self, a: Architecture) -> Weight:
        return norm(a, "model.norm.weight", a.hidden_size, "decoder.final_layernorm.weight")

    def head(self, a: Architecture) -> Weight:
        """Describe the head; not asked for where it is the embedding."""
        return matrix("lm_head.weight", a.vocab_size, a.hidden_size, "output_layer.weight", a.init_std)

    # ------------------------------------------------------------------------------------------------ Megatron

    def divided(self, a: Architecture) -> dict[str, int]:
        """List the keys of config.json, with their values, that tensor parallelism must divide: all whose parts it
        deals out but the vocabulary, which is padded."""
        return {"num_attention_heads": a.heads, "num_key_value_heads": a.kv_heads, self.ffn_key: a.ffn_size}

    def megatron(self, a: Architecture) -> dict[str, Any]:
        """Set fields of Megatron-core's TransformerConfig, beside those that follow from any Architecture.

        `geotrain.inner.model.model` has the others; the layer specification follows from them, too.
        """
        return weights.expert_settings(a) if a.experts else {}
