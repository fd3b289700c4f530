"""The forms of ACCO: what they hide, what that costs, which runs can use them, and which way is best where.

Plain data, shared by the dry run, the planner and the engine, so that they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from geotrain.config import AccoConfig, Architecture, ConfigError, ParallelConfig
from geotrain.families import layer_weights
from geotrain.parallelism.checks import code_bytes, coded_bits, offloads_masters, zero_stage
from geotrain.parallelism.optimizer_settings import PluggedOptimizer, optimizer_settings
from geotrain.parallelism.whole_matrices import ALIGNED, ShardSize

# Elements at whose multiples shards and groups of the flat buffer begin, so that no block of codes mixes two of them.
CODE_BLOCK = ALIGNED
FIRST_SHARE = 0.5  # of a window's micro-batches, which the published form computes at predicted weights
BITS = 8, 4  # of a gradient's code and of a weight's change, which together lose nothing that shows
ENOUGH = 1.02  # times the least step: of ways within it, the one that changes least


@dataclass(frozen=True)
class Hiding:
    """A way to hide a worker's own communication. form: of ACCO; None: the plain engine's ZeRO-1. bits: of codes;
    None: values travel. step_s: the least that a step takes."""

    form: Literal["delayed"] | None
    bits: tuple[int, int] | None
    step_s: float


def least_step_s(
    form: str | None, micro_batches: int, compute_s: float, gradients_s: float, weights_s: float
) -> float:
    """Compute the least seconds of a step over a link that is never idle where it may be busy.

    ZeRO-1 (form None) hides gradients behind the last backward, two thirds of a micro-batch, and weights behind the
    first forward. `delayed` hides all behind a whole step, `exact` its commit behind the first part and a prediction,
    as large, behind the second.
    """
    sent_s, micro_s = gradients_s + weights_s, compute_s / micro_batches
    if form == "delayed":
        return max(compute_s, sent_s)
    if form == "exact":
        return max(FIRST_SHARE * compute_s, sent_s) + max((1 - FIRST_SHARE) * compute_s, sent_s)
    return compute_s + max(0.0, gradients_s - 2 / 3 * micro_s) + max(0.0, weights_s - micro_s / 3)


def best_hiding(
    muon: bool,
    micro_batches: int,
    compute_s: float,
    gradients_s: float,
    weights_s: float,
    bytes_each: tuple[int, int],
) -> Hiding:
    """Choose a way for the run's optimizer and the link's speed.

    muon: whether the optimizer is Muon, which bears a step's delay; AdamW does not. gradients_s, weights_s: of
    values, which have these bytes each.
    """
    least = [gradients_s * code_bytes(1 << 20, BITS[0]) / (bytes_each[0] << 20)]
    least.append(weights_s * code_bytes(1 << 20, BITS[1]) / (bytes_each[1] << 20))
    forms: tuple[Literal["delayed"] | None, ...] = (None, "delayed") if muon else (None,)
    ways = [
        Hiding(form, bits, least_step_s(form, micro_batches, compute_s, *seconds))
        for form in forms
        for bits, seconds in ((None, (gradients_s, weights_s)), (BITS, least))
    ]
    enough_s = ENOUGH * min(way.step_s for way in ways)
    return next(way for way in ways if way.step_s <= enough_s)


def first_part(acco: AccoConfig, micro_batches: int) -> int:
    """Split a replica's micro-batches of one window; returns how many are computed while the last commit travels.

    `exact` computes the rest while a prediction travels; `delayed` has no rest. Raises ConfigError if they cannot be
    split.
    """
    if acco.form == "delayed":
        if acco.predicted_share is not None:
            raise ConfigError(
                f"acco.predicted_share = {acco.predicted_share} does nothing with acco.form = 'delayed', which "
                "computes whole steps at one set of weights; leave it out"
            )
        return micro_batches
    share = FIRST_SHARE if acco.predicted_share is None else acco.predicted_share
    first = round(share * micro_batches)
    # A share that the run states must leave each part a micro-batch; the form's own is rounded until it does.
    if micro_batches < 2 or (acco.predicted_share is not None and not 1 <= first < micro_batches):
        raise ConfigError(
            f"acco: a step of {micro_batches} micro-batch{'es' * (micro_batches > 1)} cannot be split at a share of "
            f"{share:.3g}: each part needs a whole micro-batch; raise deepspeed.train_batch_size, lower "
            "deepspeed.train_micro_batch_size_per_gpu, or use acco.form = 'delayed', which does not split"
        )
    return min(max(first, 1), micro_batches - 1)


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
    if parallel.expert > 1 or parallel.sites > 1:
        key = "expert" if parallel.expert > 1 else "sites"
        raise ConfigError(
            f"acco does not go with parallel.{key} = {getattr(parallel, key)}: all its ranks reduce one buffer at "
            "once, and divided experts and sites want some of them first; leave out one of the two"
        )
    layers = range(architecture.layers)
    if any(weight.untrained for layer in layers for weight in layer_weights(architecture, layer)):
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
    if acco.form == "exact" and coded_bits(block) is not None:
        raise ConfigError(
            "acco.form = 'exact' does not go with deepspeed.zero_optimization.gradient_bits: its gradients travel "
            "twice, and codes keep what they lose once; use acco.form = 'delayed', or leave out the bits"
        )
    first_part(acco, micro_batches)


def flat_bytes(shard: ShardSize, weight_bytes: int, gradient_bytes: int, block: dict[str, Any], ranks: int) -> int:
    """Count the bytes that ACCO keeps on a rank beside its optimizer's shard.

    They are weights and gradients, and what travels: one buffer like the weights; or, coded, two of gradients' codes
    of all ranks, one of weights' codes, and the owned shard in fp32. ranks: data-parallel ones.
    """
    bits, total = coded_bits(block) if ranks > 1 else None, shard.total
    if bits is None:
        return total * (2 * weight_bytes + gradient_bytes)
    of_gradients, of_weights = (code_bytes(total, each) for each in bits)
    return total * (weight_bytes + gradient_bytes) + 2 * of_gradients + of_weights + 4 * total // ranks
