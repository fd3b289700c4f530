"""The run's curves in TensorBoard and Weights & Biases, written by the global server from its events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geotrain.config import ConfigError, WandbConfig
from geotrain.monitor.events import Event, Record, UpdateApplied, ValidationDone
from geotrain.monitor.metrics import time_shares

SHOWN = ("lr", "grad_norm", "tokens_per_s", "mfu")


def scalars(event: UpdateApplied) -> dict[str, float]:
    """Of one merge: name → value; by member where it is a member's."""
    member, found = event.member, {"run/version": float(max(event.versions, default=0))}
    if event.loss is not None:
        found |= {"run/loss": event.loss, f"loss/{member}": event.loss}
    found |= {f"{name}/{member}": event.metrics[name] for name in SHOWN if name in event.metrics}
    found |= {f"time_{part}/{member}": share for part, share in time_shares(event.metrics).items()}
    found[f"staleness/{member}"] = float(event.staleness)
    if event.delta_norms:
        found[f"delta_norm/{member}"] = sum(norm**2 for norm in event.delta_norms) ** 0.5
    return found


def curves(event: Event) -> tuple[int, dict[str, float]] | None:
    """(tokens committed by then, name → value) of an event that has any."""
    match event:
        case UpdateApplied(tokens=int(tokens)):
            return tokens, scalars(event)
        case ValidationDone(tokens=tokens, loss=loss):
            return tokens, {"run/validation_loss": loss}
    return None


class TensorBoard:
    """A sink. The step of every curve is the number of tokens committed."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds: only when asked for

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def on(self, record: Record) -> None:
        if told := curves(record.event):
            for name, value in told[1].items():
                self._writer.add_scalar(name, value, told[0], walltime=record.time_s)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A sink. Raises ConfigError when the package is not installed."""

    def __init__(self, config: WandbConfig, run: str, folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("monitor.wandb: the package is not installed here: pip install wandb") from None
        self._run: Any = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            name=run,
            dir=str(folder),
            resume="allow",
        )

    def on(self, record: Record) -> None:
        if told := curves(record.event):
            self._run.log({"tokens": told[0], **told[1]})

    def close(self) -> None:
        self._run.finish()
