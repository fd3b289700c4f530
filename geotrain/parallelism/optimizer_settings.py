"""The inner optimizer as `deepspeed.optimizer` states it: AdamW, or Muon for hidden matrices beside AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from geotrain.config import ConfigError
from geotrain.config.block import Block, parse

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamWSettings(Block):
    """`params` under DeepSpeed's and torch's names. lr: the rate, which the scheduler then changes."""

    lr: NotNegative = 1e-3
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0

    @property
    def rate_of_the_rest(self) -> float:
        """Of all but hidden matrices."""
        return self.lr


class MuonSettings(AdamWSettings):
    """Muon (Jordan, https://kellerjordan.github.io/posts/muon), its update scaled as in Moonlight (arXiv 2502.16982).

    lr, weight_decay: of hidden matrices too: an update's root mean square is 0.2·lr, about AdamW's, so that AdamW's
    values carry over. adam_lr (DeepSpeed's name): of everything else; `lr` unless stated. betas, eps: AdamW's.
    momentum, nesterov, ns_steps, ns_coefficients (torch's names): the momentum's decay and form, and the
    Newton–Schulz iteration. tp_mode (Megatron's `muon_tp_mode`): "duplicated" gathers a matrix that tensor
    parallelism cuts, and orthogonalizes it on each of the tensor ranks; "blockwise" takes each rank's part by itself,
    without traffic.
    """

    moved: ClassVar[Mapping[str, str]] = {
        "muon_lr": "`lr` is the rate of hidden matrices; write lr = %s, and adam_lr for everything else",
        "ns_method": "the iteration is chosen by the matrix's shape; leave it out",
    }

    adam_lr: NotNegative | None = None
    momentum: Decay = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(ge=1, le=100)] = 5
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    tp_mode: Literal["duplicated", "blockwise"] = "duplicated"

    @property
    def rate_of_the_rest(self) -> float:
        return self.lr if self.adam_lr is None else self.adam_lr


_TYPES: dict[str, type[AdamWSettings]] = {"adam": AdamWSettings, "adamw": AdamWSettings, "muon": MuonSettings}


def uses_muon(deepspeed_block: Mapping[str, Any]) -> bool:
    """Whether hidden matrices are trained by Muon, by the type alone: the planner asks this of every layout."""
    return _TYPES.get(str(deepspeed_block.get("optimizer", {}).get("type", "")).lower()) is MuonSettings


def optimizer_settings(deepspeed_block: Mapping[str, Any]) -> AdamWSettings:
    """What `deepspeed.optimizer` asks for; MuonSettings if its type is Muon. Raises ConfigError."""
    stated = deepspeed_block.get("optimizer", {})
    kind = _TYPES.get(str(stated.get("type", "")).lower())
    if kind is None:
        raise ConfigError(
            f"deepspeed.optimizer.type = {stated.get('type')!r} is not supported; use 'Muon' (for hidden matrices, "
            "and AdamW for the rest) or 'AdamW'"
        )
    try:
        settings = parse(kind, stated.get("params", {}), "deepspeed.optimizer.params")
    except ConfigError as error:  # one line, as all of these checks say what they find
        raise ConfigError("; ".join(line.strip() for line in str(error).splitlines())) from None
    scheduler = deepspeed_block.get("scheduler", {}).get("type")
    if settings.rate_of_the_rest != settings.lr and scheduler not in (None, "WarmupCosineLR"):
        raise ConfigError(
            f"deepspeed.optimizer.params.adam_lr = {settings.rate_of_the_rest} differs from lr = {settings.lr}, but "
            f"DeepSpeed's scheduler {scheduler!r} gives all parameters one rate; use WarmupCosineLR, or leave out "
            "adam_lr"
        )
    return settings
