"""The forms of ACCO: how the next weights are predicted, what that costs, and which runs can use it. No tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from geotrain.config import AccoConfig, ConfigError
from geotrain.sharing.checks import trains_in_bf16, zero_stage

Traffic = Literal["nothing", "codes", "full"]
CODE_BLOCK = 128  # elements of a block that share a scale; shards and sections of the flat space are aligned to it
CODE_BITS = 4 + 16 / CODE_BLOCK  # int4 with a bf16 scale


@dataclass(frozen=True)
class Form:
    """What an optimizer step of ACCO (arXiv 2406.02613) sends besides its commit, to predict the next weights.

    A window, which is one optimizer step, has up to two parts. While the first, at the predicted weights, is
    computed, the last window's commit travels; while the second, at the committed weights, the prediction travels.

    reduces: how a rank learns the other ranks' gradients for its prediction; `nothing`: it takes its own.
    gathers: how the predicted weights reach all ranks; `nothing`: the window's second part predicts nothing.
    looks_ahead: the commit itself hands out weights one step ahead, by its own gradient; the window has one part.
    share: the part of a window's micro-batches that comes first, unless the run says otherwise.
    """

    name: str
    reduces: Traffic
    gathers: Traffic
    looks_ahead: bool
    share: float

    @property
    def predicts_apart(self) -> bool:
        return self.gathers != "nothing"

    def ahead_traffic(self, weight_bytes: int = 2) -> float:
        """The prediction's traffic over the commit's, which reduces and gathers so many bytes a parameter each."""
        full = {"nothing": 0.0, "codes": CODE_BITS / (8 * weight_bytes), "full": 1.0}
        return (full[self.reduces] + full[self.gathers]) / 2


# A step takes max(a·C, M) + max((1 − a)·C, s·M), with s the prediction's traffic over the commit's (which reduces
# and gathers 16 bits each): the best share a is 1 / (1 + s).
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
    """How many of a replica's micro-batches of a window come first. Raises ConfigError if they cannot be split so."""
    form = FORMS[acco.prediction]
    share = form.share if acco.predicted_share is None else acco.predicted_share
    first = round(share * micro_batches)
    if form.looks_ahead and share != 1:
        raise ConfigError(
            f"acco.predicted_share = {share} does not go with acco.prediction = 'stale', which computes whole steps "
            "at predicted weights; leave it out"
        )
    if not form.predicts_apart:
        if first < 1:
            raise ConfigError(_too_small(share, micro_batches))
        return first
    if micro_batches < 2 or (acco.predicted_share is not None and not 1 <= first < micro_batches):
        raise ConfigError(_too_small(share, micro_batches))
    return min(max(first, 1), micro_batches - 1)


def _too_small(share: float, micro_batches: int) -> str:
    return (
        f"acco: a step of {micro_batches} micro-batch{'es' * (micro_batches > 1)} cannot be split at a share of "
        f"{share:.3g}: each part needs a whole micro-batch; raise deepspeed.train_batch_size, lower "
        "deepspeed.train_micro_batch_size_per_gpu, or use acco.prediction = 'stale', which does not split"
    )


def check_acco(acco: AccoConfig, deepspeed_block: dict[str, Any], micro_batches: int) -> None:
    """Raises ConfigError if a worker with this `deepspeed` block, which `check_layout` allows, cannot use ACCO.

    micro_batches: of one replica in one step (`gradient_accumulation_steps`).
    """
    block = deepspeed_block
    if zero_stage(block) != 1:
        raise ConfigError(
            f"acco needs deepspeed.zero_optimization.stage = 1, not {zero_stage(block)}: it shards the optimizer, "
            "and keeps weights and gradients whole so that they can travel while the next are computed"
        )
    if "offload_optimizer" in block.get("zero_optimization", {}):
        raise ConfigError(
            "acco does not go with deepspeed.zero_optimization.offload_optimizer; take out one of the two"
        )
    wide = str(block.get("data_types", {}).get("grad_accum_dtype", ""))
    if trains_in_bf16(block) and wide not in ("", "bf16", "bfloat16"):
        raise ConfigError(
            f"acco accumulates gradients in the weights' type, bf16, not in deepspeed.data_types.grad_accum_dtype = "
            f"{wide!r}; leave it out"
        )
    first_part(acco, micro_batches)


def bytes_per_parameter(prediction: str, dp: int, weight_bytes: int) -> float:
    """What ACCO keeps on a rank for each of its parameters, while it trains: weights, gradients and one buffer for
    what travels; fp32 masters and both moments, sharded; with codes, those of all ranks."""
    codes = CODE_BITS / 8 if FORMS[prediction].gathers == "codes" else 0.0
    return 3 * weight_bytes + 12 / dp + codes
