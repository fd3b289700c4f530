"""The forms of ACCO: how the next weights are predicted, what that costs, and which runs can use it.

Plain data, shared by the dry run, the planner and the engine, so that they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from geotrain.config import AccoConfig, Architecture, ConfigError, ParallelConfig
from geotrain.families import family_of
from geotrain.parallelism.checks import offloads_masters, zero_stage
from geotrain.parallelism.optimizer_settings import PluggedOptimizer, optimizer_settings
from geotrain.parallelism.whole_matrices import ALIGNED, ShardSize

Traffic = Literal["nothing", "codes", "full"]
# Elements that share a scale. Shards and groups of the flat buffer begin at multiples of it, so that no block of
# codes mixes two of them.
CODE_BLOCK = ALIGNED
CODE_BITS = 4 + 16 / CODE_BLOCK  # int4 with a bf16 scale
# Elements of a chunk of a shard; a multiple of CODE_BLOCK. Each chunk costs some launches, and scratch.
CODED_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class Form:
    """A form of ACCO (arXiv 2406.02613): what a step sends, besides its commit, to predict the next weights.

    A window is one optimizer step and has up to two parts. While the first part is computed, at predicted weights,
    the last window's commit travels. While the second is computed, at committed weights, the prediction travels.

    reduces: how a rank learns the other ranks' gradients for its prediction; `nothing`: it takes its own.
    gathers: how the predicted weights reach all ranks; `nothing`: the window's second part predicts nothing.
    predicts_in_commit: the commit itself hands out weights one step ahead, by its own gradient; no second part.
    first_share: the part of a window's micro-batches that comes first, unless the run says otherwise.
    """

    name: str
    reduces: Traffic
    gathers: Traffic
    predicts_in_commit: bool
    first_share: float

    @property
    def predicts_separately(self) -> bool:
        """Whether a window has a second part, during which a prediction travels."""
        return self.gathers != "nothing"

    def prediction_traffic(self, weight_bytes: int = 2) -> float:
        """Compute s, the prediction's traffic over the commit's.

        weight_bytes: what the commit reduces, and what it gathers, for each parameter.
        """
        full = {"nothing": 0.0, "codes": CODE_BITS / (8 * weight_bytes), "full": 1.0}
        return (full[self.reduces] + full[self.gathers]) / 2


# A step takes max(a·C, M) + max((1 − a)·C, s·M): C its compute, a the first part's share of it, M the commit's
# traffic (16 bits reduced and 16 gathered a parameter), s·M the prediction's. The best share a is 1 / (1 + s), at
# which both parts hide their traffic from the same C on.
FORMS = {
    form.name: form
    for form in (
        Form("exact", "full", "full", False, 1 / 2),
        Form("int4", "codes", "codes", False, 4 / 5),
        Form("local", "nothing", "codes", False, 8 / 9),
        Form("stale", "nothing", "nothing", True, 1.0),
        Form("none", "nothing", "nothing", False, 1.0),  # DPU, delayed parameter update
    )
}


def first_part(acco: AccoConfig, micro_batches: int) -> int:
    """Split a replica's micro-batches of one window; returns how many form the first part.

    Raises ConfigError if they cannot be split.
    """
    form = FORMS[acco.prediction]
    share = form.first_share if acco.predicted_share is None else acco.predicted_share
    first = round(share * micro_batches)
    if form.predicts_in_commit and share != 1:
        raise ConfigError(
            f"acco.predicted_share = {share} does not go with acco.prediction = 'stale', which computes whole steps "
            "at predicted weights; leave it out"
        )
    if not form.predicts_separately:
        fits = first >= 1
    else:
        # A share that the run states must leave each part a micro-batch; the form's own is rounded until it does.
        fits = micro_batches >= 2 and (acco.predicted_share is None or 1 <= first < micro_batches)
        first = min(max(first, 1), micro_batches - 1)
    if not fits:
        raise ConfigError(
            f"acco: a step of {micro_batches} micro-batch{'es' * (micro_batches > 1)} cannot be split at a share of "
            f"{share:.3g}: each part needs a whole micro-batch; raise deepspeed.train_batch_size, lower "
            "deepspeed.train_micro_batch_size_per_gpu, or use acco.prediction = 'stale', which does not split"
        )
    return first


def check_acco(
    acco: AccoConfig,
    architecture: Architecture,
    parallel: ParallelConfig,
    deepspeed_block: dict[str, Any],
    micro_batches: int,
) -> None:
    """Raise ConfigError if a worker with this `deepspeed` block, which `check_layout` allows, cannot use ACCO.

    micro_batches: of one replica in one step (`gradient_accumulation_steps`).
    """
    block = deepspeed_block
    if parallel.expert > 1:
        raise ConfigError(
            f"acco does not go with parallel.expert = {parallel.expert}: all its ranks reduce one buffer, and "
            "divided experts are reduced by some of them; leave out one of the two"
        )
    if any(
        weight.untrained for weight in family_of(architecture.model_type).layer(architecture, architecture.layers - 1)
    ):
        raise ConfigError(
            f"acco does not go with the routers of a {architecture.model_type}: their biases follow what each step "
            "counted, and its steps overlap; leave out `acco`"
        )
    if zero_stage(block) != 1:
        raise ConfigError(
            f"acco needs deepspeed.zero_optimization.stage = 1, not {zero_stage(block)}: it shards the optimizer, "
            "and keeps weights and gradients whole so that they can travel while the next are computed"
        )
    if isinstance(optimizer_settings(block), PluggedOptimizer):
        raise ConfigError(
            f"acco does not go with deepspeed.optimizer.type = {block['optimizer']['type']!r}: it predicts the steps "
            "of AdamW and Muon; leave out one of the two"
        )
    if offloads_masters(block):
        raise ConfigError(
            "acco does not go with deepspeed.zero_optimization.offload_optimizer; take out one of the two"
        )
    first_part(acco, micro_batches)


def flat_bytes(prediction: str, shard: ShardSize, weight_bytes: int, gradient_bytes: int) -> int:
    """Count the bytes that ACCO keeps on a rank beside its optimizer's shard.

    They are weights and one buffer for what travels, of `weight_bytes` an element each, and gradients; with codes,
    those of all ranks.
    """
    codes = CODE_BITS / 8 if FORMS[prediction].gathers == "codes" else 0.0
    return round(shard.total * (2 * weight_bytes + gradient_bytes + codes))


def scratch_bytes(prediction: str, shard: ShardSize, weight_bytes: int, at_once: int = CODED_AT_ONCE) -> int:
    """Count the bytes that a prediction takes on top while it travels.

    They are, of one coded chunk, in fp32, the weights before (where they are not in fp32 already), the predicted ones
    and, where gradients come as codes, their sum. at_once: elements of a chunk; one that would cut a matrix goes on
    to its end.
    """
    form = FORMS[prediction]
    if form.gathers != "codes":
        return 0
    chunks = 1 + (weight_bytes < 4) + (form.reduces == "codes")
    return 4 * chunks * min(shard.adamw + shard.matrices, at_once + shard.largest_matrix)
