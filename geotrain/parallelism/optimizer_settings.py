"""Settings of the inner optimizer, as `deepspeed.optimizer` states them: AdamW, or Muon for hidden matrices and AdamW
for the rest; or of another package's, which an entry point of the group "geotrain.optimizers" names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from geotrain.common.entry_points import registered
from geotrain.config import ConfigError
from geotrain.config.block import Block, parse
from geotrain.config.deepspeed import RATIO_SCHEDULERS

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Block):
    """The block `params`, under DeepSpeed's and torch's names. lr: the rate, which the scheduler then changes."""

    # Names of an element's state, fp32; not of Muon's matrices.
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    lr: NotNegative = 1e-3
    weight_decay: NotNegative = 0.0

    @property
    def rate_of_the_rest(self) -> float:
        """Learning rate of all but hidden matrices."""
        return self.lr


class AdamWSettings(OptimizerSettings):
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: NotNegative = 1e-8


class MuonSettings(AdamWSettings):
    """Muon (Jordan, https://kellerjordan.github.io/posts/muon), its update scaled as in Moonlight (arXiv 2502.16982).

    lr, weight_decay: of hidden matrices too: an update's root mean square is 0.2·lr, about AdamW's, so that AdamW's
    values carry over. adam_lr (DeepSpeed's name): of everything else; `lr` unless stated. betas, eps: AdamW's.
    momentum, nesterov, ns_steps, ns_coefficients (torch's names): the momentum's decay and form, and the
    Newton–Schulz iteration. tp_mode (Megatron's `muon_tp_mode`): "duplicated" gathers a matrix that tensor
    parallelism cuts, and orthogonalizes it on each of the tensor ranks; "blockwise" takes each rank's part by itself,
    without traffic. normalize_rows: whether all rows of an update (a neuron's inputs each) then get one norm, as
    NorMuon's (arXiv 2510.05491) without its mean over steps, which lowers the loss (docs/evidence.md); it changes
    matrices with more rows than columns. Plain Muon: False.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {
        "muon_lr": "`lr` is the rate of hidden matrices; write lr = %s, and adam_lr for everything else",
        "ns_method": "the iteration is chosen by the matrix's shape; leave it out",
    }

    adam_lr: NotNegative | None = None
    momentum: Decay = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(ge=1, le=100)] = 5
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    tp_mode: Literal["duplicated", "blockwise"] = "duplicated"
    normalize_rows: bool = True

    @property
    def rate_of_the_rest(self) -> float:
        return self.lr if self.adam_lr is None else self.adam_lr


class PluggedOptimizer(OptimizerSettings):
    """The settings of another package's optimizer, and how it is made.

    It must step each element by itself, since shards cut parameters anywhere. A subclass states `moments`, and its
    own fields.
    """

    @abstractmethod
    def optimizer(self, groups: list[dict[str, Any]]) -> Any:
        """Make a torch.optim.Optimizer of parameter groups, which have their `lr` and `weight_decay`.

        It keeps `moments`, and nothing else that must outlive it, in `state[tensor]`, each as large as the tensor and
        zero at first, and counts its steps in each group's `step`. Its tensors are fp32.
        """


_TYPES: dict[str, type[OptimizerSettings]] = {"adam": AdamWSettings, "adamw": AdamWSettings, "muon": MuonSettings}
_GROUP = "geotrain.optimizers"


def optimizer_kind(deepspeed_block: Mapping[str, Any]) -> type[OptimizerSettings]:
    """Find the class of settings that the type of `deepspeed.optimizer` names. Raises ConfigError."""
    stated = deepspeed_block.get("optimizer", {}).get("type")
    name = str(stated or "")
    try:
        kind = _TYPES.get(name.lower()) or registered(_GROUP, name, PluggedOptimizer)
    except ValueError as error:
        raise ConfigError(f"deepspeed.optimizer.type: {error}") from None
    if kind is None:
        raise ConfigError(
            f"deepspeed.optimizer.type = {stated!r} is not supported; use 'Muon' (for hidden matrices, "
            "and AdamW for the rest), 'AdamW', or one of an installed package (docs/extending.md)"
        )
    return kind


def uses_muon(deepspeed_block: Mapping[str, Any]) -> bool:
    """Whether hidden matrices are trained by Muon."""
    return _TYPES.get(str(deepspeed_block.get("optimizer", {}).get("type", "")).lower()) is MuonSettings


def optimizer_settings(deepspeed_block: Mapping[str, Any]) -> AdamWSettings | PluggedOptimizer:
    """Read the settings from `deepspeed.optimizer`; MuonSettings if its type is Muon. Raises ConfigError."""
    stated, kind = deepspeed_block.get("optimizer", {}), optimizer_kind(deepspeed_block)
    try:
        settings: Any = parse(kind, stated.get("params", {}), "deepspeed.optimizer.params")
    except ConfigError as error:  # one line, as all of these checks say what they find
        raise ConfigError("; ".join(line.strip() for line in str(error).splitlines())) from None
    scheduler = deepspeed_block.get("scheduler", {}).get("type")
    if settings.rate_of_the_rest != settings.lr and scheduler not in RATIO_SCHEDULERS:
        raise ConfigError(
            f"deepspeed.optimizer.params.adam_lr = {settings.rate_of_the_rest} differs from lr = {settings.lr}, but "
            f"DeepSpeed's scheduler {scheduler!r} gives all parameters one rate; use WarmupCosineLR or "
            "WarmupStableDecayLR, or leave out adam_lr"
        )
    return settings
