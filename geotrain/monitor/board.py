"""The run's curves in TensorBoard and Weights & Biases, written by the global server from its events."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import Any

from geotrain.common.files import write_whole
from geotrain.config import ConfigError, RunConfig, WandbConfig
from geotrain.monitor.events import Record
from geotrain.monitor.registry import time_shares
from geotrain.outer.events import Event, UpdateApplied, ValidationDone
from geotrain.outer.metrics import WORKER_METRICS

WANDB_ID = "wandb.id"  # in the run's folder: of its run there


def curves(event: Event) -> tuple[int, dict[str, float]] | None:
    """The points that an event adds to curves: (tokens committed by then, curve → value); None if it adds none.

    The name of a member's curve ends in the member's name.
    """
    if isinstance(event, ValidationDone):
        return event.tokens, {"run/validation_loss": event.loss}
    if not isinstance(event, UpdateApplied) or event.tokens is None:
        return None
    member, found = event.member, {"run/version": float(max(event.versions, default=0))}
    if event.loss is not None:
        found |= {"run/loss": event.loss, f"loss/{member}": event.loss}
    found |= {f"{name}/{member}": event.metrics[name] for name in WORKER_METRICS if name in event.metrics}
    found |= {f"time_{part}/{member}": share for part, share in time_shares(event.metrics).items()}
    found[f"staleness/{member}"] = float(event.staleness)
    if event.delta_norm is not None:
        found[f"delta_norm/{member}"] = event.delta_norm
    return event.tokens, found


class TensorBoard:
    """Writes curves for TensorBoard; `on` is a sink. The x-axis of every curve is the number of tokens committed."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here, because it takes seconds

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def on(self, record: Record) -> None:
        if found := curves(record.event):
            for name, value in found[1].items():
                self._writer.add_scalar(name, value, found[0], walltime=record.time_s)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Sends curves to Weights & Biases; `on` is a sink, which may wait long for a network. The x-axis of every curve
    is the number of tokens committed.

    It is one run there for the whole life of a run here: its id is kept in the run's folder. Without a network, set
    WANDB_MODE=offline, and `wandb sync` later. Raises ConfigError if the package is not installed.
    """

    def __init__(self, config: WandbConfig, run: RunConfig) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("monitor.wandb: the package is not installed here: pip install wandb") from None
        folder = run.run_folder
        kept = folder / WANDB_ID
        if not kept.exists():
            write_whole(kept, secrets.token_hex(8))
        self._run: Any = None
        self._begin = partial(
            wandb.init,
            project=config.project,
            entity=config.entity,
            group=config.group,
            name=run.name,
            id=kept.read_text().strip(),
            config=run.model_dump(by_alias=True, mode="json"),
            dir=str(folder),
            resume="allow",
        )

    def on(self, record: Record) -> None:
        if found := curves(record.event):
            if self._run is None:
                self._run = self._begin()
                self._run.define_metric("*", step_metric="tokens")
            self._run.log({"tokens": found[0], **found[1]}, step=found[0])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
