"""Parallel layouts that tests train: one line each in `tests/inner/layouts.txt`, chosen so that all pairs meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from geotrain.config import AccoConfig, ConfigError, ParallelConfig
from geotrain.families import UnsupportedModelError
from geotrain.parallelism.acco_forms import check_acco
from geotrain.parallelism.checks import accumulation_steps, check_layout
from tests.support.families import (
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    GRANITE_4,
    LINEAR,
    MISTRAL,
    MIXTRAL,
    NEMOTRON_3,
    OLMO2,
    OLMO3,
    PREDICTING,
    QWEN2,
    QWEN2_MOE,
    QWEN3_NEXT,
    QWEN_MOE,
    SMOLLM3,
    YARN,
)
from tests.support.families import LLAMA_3 as LLAMA_3_1
from tests.support.inner_worlds import LLAMA, MUON, QWEN, QWEN_2, SEQUENCE, architecture, deepspeed_block

PADDED = 201  # words, of which tensor ranks have 128 and 73
# TP 2 × CP 2 take a head of four each.
LLAMA_3 = {**LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 4, "vocab_size": PADDED}
DENSE = {
    "llama": LLAMA_3,
    "packed": LLAMA_3,  # samples hold several documents, and attention stays inside them
    "qwen": {**QWEN_2, "vocab_size": PADDED},
    "qwen2": {**QWEN2, "num_hidden_layers": 3},  # with biases
    "mistral": {**MISTRAL, "num_hidden_layers": 2},  # packed, too
    "olmo3": {**OLMO3, "num_key_value_heads": 4},
    "gemma2": {**GEMMA2, "num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": PADDED},
    "gemma3": {**GEMMA3, "num_hidden_layers": 3, "num_key_value_heads": 4, "vocab_size": PADDED},
}
SPARSE = {
    "qwen_moe": {**QWEN_MOE, "num_hidden_layers": 3, "num_key_value_heads": 4},
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "gpt_oss": {**GPT_OSS, "num_hidden_layers": 3, "num_key_value_heads": 4},
    "qwen3_next": QWEN3_NEXT,
    "nemotron_3": NEMOTRON_3,
    "granite_4": {**GRANITE_4, "logits_scaling": 0.5},
    "deepseek": {**PREDICTING, "num_nextn_predict_layers": 1, "n_shared_experts": 1},
}
MODELS: dict[str, dict[str, Any]] = {**DENSE, **SPARSE}
PACKED = ("packed", "mistral", "gemma2")
UNLIKE = {
    "llama": (2, 1), "packed": (2, 1), "qwen2": (1, 2),
    "qwen_moe": (1, 2), "gemma3": (2, 1), "gpt_oss": (1, 2), "deepseek": (1, 2),
}  # fmt: skip  # layers of a pipeline's stages

Value = str | int
Choice = tuple[str, Value]
CUTS = {"tensor", "pipeline", "context", "expert", "optimizer"}  # how matrices are cut, or stepped whole
# What may be chosen, and the values of each; `2+` is tensor and sequence parallelism.
CHOICES: dict[str, tuple[Value, ...]] = {
    "model": tuple(MODELS),
    "replicas": (1, 2),
    "tensor": ("1", "2", "2+"),
    "pipeline": (1, 2),
    "context": (1, 2),
    "expert": ("1", "2", "2 by gathering"),
    "zero": ("0", "1", "2", "1 offloaded"),
    "optimizer": ("AdamW", "Muon"),
    "precision": ("fp32", "bf16", "bf16, fp32 sums", "fp32, coded"),
    "acco": ("off", "exact", "delayed", "delayed, balanced"),
    "recompute": ("none", "full", "selective"),
}


@dataclass(frozen=True)
class Layout:
    model: str = "llama"
    replicas: int = 1
    tensor: str = "1"
    pipeline: int = 1
    context: int = 1
    expert: str = "1"
    zero: str = "1"
    optimizer: str = "AdamW"
    precision: str = "fp32"
    acco: str = "off"
    recompute: str = "none"

    @property
    def ranks(self) -> int:
        return self.replicas * self.parallel.replica_ranks

    @property
    def parallel(self) -> ParallelConfig:
        dispatcher: dict[str, Any] = {"dispatcher": "allgather"} if self.expert == "2 by gathering" else {}
        return ParallelConfig(
            tensor=int(self.tensor[0]),
            sequence="+" in self.tensor,
            pipeline=self.pipeline,
            stage_layers=UNLIKE.get(self.model) if self.pipeline > 1 else None,
            context=self.context,
            expert=int(self.expert[0]),
            **dispatcher,
        )

    @property
    def block(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": int(self.zero[0])}
        if self.precision == "bf16":
            zero["overlap_comm"] = True
        if "offloaded" in self.zero:
            zero["offload_optimizer"] = {"device": "cpu"}
        more: dict[str, Any] = dict(MUON) if self.optimizer == "Muon" else {}
        if self.precision == "fp32, coded":
            zero |= {"gradient_bits": 8, "weight_bits": 4}
        elif self.precision != "fp32":
            more["bf16"] = {"enabled": True}
        if "bf16, fp32 sums" in self.precision:
            more["data_types"] = {"grad_accum_dtype": "fp32"}
        return deepspeed_block(0, micro=2, **more) | {"zero_optimization": zero}

    @property
    def predicts(self) -> bool:
        """Whether a single process predicts the same: from the same part of a step, and without rounding."""
        return "delayed" in self.acco or (self.acco == "exact" and self.replicas == 1)

    def acco_config(self, steps: int) -> AccoConfig | None:
        """ACCO's settings, for a training of so many steps; where it does not predict, these are synchronous ones."""
        if self.acco == "off":
            return None
        form, _, balanced = self.acco.partition(", ")
        synchronous = 2 if self.predicts else steps
        return AccoConfig(form=form, synchronous_steps=synchronous, balance=bool(balanced))  # type: ignore[arg-type]

    @property
    def single(self) -> Layout:
        """The same training in one process, which shares nothing and keeps everything."""
        acco = self.acco.partition(",")[0] if self.predicts else "off"
        return Layout(self.model, optimizer=self.optimizer, acco=acco)

    def check(self) -> None:
        """Raise ConfigError where the product refuses it."""
        a, parallel = architecture(MODELS[self.model]), self.parallel
        dp = check_layout(a, parallel, self.ranks, self.block, SEQUENCE)
        if acco := self.acco_config(0):
            check_acco(acco, a, parallel, self.block, accumulation_steps(self.block, dp))

    @property
    def pairs(self) -> set[frozenset[Choice]]:
        """What it tries together: two choices each. In bf16, and coded, figures are rough, so that it shows for that
        choice alone."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen["kind"] = "dense" if self.model in DENSE else "sparse"
        met = {frozenset(((one, chosen[one]), (other, chosen[other]))) for one, other in pairs_of(chosen)}
        return met if self.precision == "fp32" else {pair for pair in met if ("precision", self.precision) in pair}


def pairs_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of choices that must meet. A model's names and shapes meet how matrices are cut; all else only knows its
    kind, which is whether it has experts."""
    return [
        (one, other)
        for one, other in itertools.combinations(names, 2)
        if ("model" not in (one, other) or {one, other} & CUTS)
        and ("kind" not in (one, other) or not {one, other} & CUTS)
    ]


FAMILIES = (
    LLAMA, QWEN, QWEN2, MISTRAL, SMOLLM3, GRANITE, OLMO2, OLMO3, GEMMA2,
    GEMMA3, QWEN_MOE, MIXTRAL, GPT_OSS, QWEN2_MOE, QWEN3_NEXT, GRANITE_4, NEMOTRON_3, PREDICTING,
)  # fmt: skip
# Of a drawn model's config.json; what a family does not know, or refuses, is drawn anew.
DRAWN: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (2, 3, 4),
    "num_nextn_predict_layers": (0, 1, 2),
    "num_key_value_heads": (2, 4),
    "hidden_size": (30, 32, 36),
    "head_dim": (8, 12),
    "vocab_size": (96, PADDED),
    "tie_word_embeddings": (False, True),
    "rope_scaling": (None, *(model["rope_scaling"] for model in (LLAMA_3_1, YARN, LINEAR))),
    "num_experts_per_tok": (1, 2, 3),
    "norm_topk_prob": (False, True),
}


def draw(seed: int, count: int) -> list[Layout]:
    """Draw models and layouts of two to four ranks that the product takes. The models are put into `MODELS`."""
    generator, found = random.Random(seed), list[Layout]()
    while len(found) < count:
        name, family = f"drawn {len(found)}", generator.choice(FAMILIES)
        known = {*family, "head_dim", "rope_scaling"} - ({"head_dim"} if family is PREDICTING else set())
        MODELS[name] = {**family, **{key: generator.choice(DRAWN[key]) for key in DRAWN if key in known}}
        chosen = {key: generator.choice(values) for key, values in CHOICES.items()} | {"model": name}
        if generator.random() < 0.5:
            chosen["precision"] = "fp32"
        if MODELS[name]["num_hidden_layers"] == 3:
            UNLIKE[name] = (1, 2)
        layout = Layout(**chosen)
        with suppress(ConfigError, UnsupportedModelError):
            if 2 <= layout.ranks <= 4:
                layout.check()
                found.append(layout)
    return found
