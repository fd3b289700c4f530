"""AccoEngine: a GeoEngine whose optimizer communicates while the next gradients are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from geotrain.config import AccoConfig
from geotrain.inner.acco import AccoOptimizer, Outcome
from geotrain.inner.engine import GeoEngine
from geotrain.inner.shards import OwnedShard
from geotrain.inner.step import StepResult
from geotrain.sharing.acco_forms import FORMS, first_part

More = Callable[[], Tensor | None]


class AccoEngine(GeoEngine):
    """A step is a whole window of ACCO, see `AccoOptimizer`: its commit, still under way when `train_step` returns,
    holds every gradient that it computed. Built by `build_engine` when the run has an `acco` block."""

    optimizer: AccoOptimizer

    def __init__(self, *parts: Any, acco: AccoConfig) -> None:
        """parts: as for GeoEngine."""
        self._acco = acco  # before DeepSpeed's __init__, which makes the optimizer
        self._uncommitted: deque[StepResult] = deque()
        super().__init__(*parts)
        self._first_part = first_part(acco, self.gradient_accumulation_steps())

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> AccoOptimizer:
        return AccoOptimizer(
            optimizer,
            self._placed,
            self.mesh,
            FORMS[self._acco.prediction],
            self.gradient_clipping(),
            self._acco.synchronous_steps,
            self._acco.timeout_s,
            self._on_commit,
        )

    def _step(self, micro_batches: Sequence[Tensor], more: More | None, lr: float) -> StepResult:
        optimizer = self.optimizer
        first = len(micro_batches) if optimizer.synchronous else self._first_part
        self._accumulate(micro_batches[:first], more)
        optimizer.adopt()
        if first < len(micro_batches):
            if optimizer.form.predicts_apart:
                self._sum_partial_gradients()
                optimizer.predict()
                self._share_partial_gradients()
            self._accumulate(micro_batches[first:], more)
            optimizer.adopt()
        self._sum_partial_gradients()
        result = StepResult(lr, self.settle)
        self._uncommitted.append(result)
        self.set_gradient_accumulation_boundary(True)
        self.step()
        return result

    def _accumulate(self, micro_batches: Sequence[Tensor], more: More | None) -> None:
        """Add the gradients of these micro-batches, and of others while what travels is not there."""
        self.set_gradient_accumulation_boundary(False)
        while micro_batches:
            with self.optimizer.lane.timed("compute"):
                loss = self._run_schedule(micro_batches, forward_only=False, summed=True)
            self.optimizer.tally(loss, len(micro_batches))
            extra = more() if more is not None and self.optimizer.would_wait() else None
            micro_batches = [] if extra is None else [extra]

    def _share_partial_gradients(self) -> None:
        """Split what was completed, so that more may be added and completed again."""
        for gradients, shares in zip(self._partial_gradients(), (2, self.mesh.tp_size), strict=True):
            for gradient in gradients:
                gradient.div_(shares)

    def _on_commit(self, outcome: Outcome) -> None:
        samples = outcome.count * self.train_micro_batch_size_per_gpu()
        self.global_samples += samples - self.train_batch_size()  # DeepSpeed counted a batch of the usual size
        self._finish(self._uncommitted.popleft(), outcome.loss, outcome.grad_norm, samples)

    def settle(self) -> None:
        """As GeoEngine's. Raises AccoError if another rank was lost."""
        self.optimizer.settle()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, which skips the epilogue when it fails: parameters would stay in the gradients' place."""
        try:
            return super().save_checkpoint(*args, **kwargs)
        finally:
            self.optimizer.checkpoint_event_epilogue()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, as `save_checkpoint`."""
        try:
            return super().load_checkpoint(*args, **kwargs)
        finally:
            self.optimizer.checkpoint_event_epilogue()

    def evaluate(self, micro_batches: Sequence[Tensor]) -> float:
        """As GeoEngine's: at the committed weights."""
        with self.optimizer.committed():
            return super().evaluate(micro_batches)

    def _take_masters(self) -> None:
        """`evaluate` gathers them by itself; predicted weights stay as they are."""

    @torch.no_grad()
    def refresh(self, predicted: bool = False) -> None:
        if predicted:
            self.optimizer.take_up()
        else:
            self.optimizer.update_lp_params()

    @property
    def predicts(self) -> str | None:
        return self.optimizer.form.name

    @property
    def is_ahead(self) -> bool:
        return self.optimizer.is_ahead

    def predicted(self, shard: OwnedShard) -> dict[str, Tensor]:
        return self.optimizer.ahead_of(shard.owner, shard.offset, shard.numel)
