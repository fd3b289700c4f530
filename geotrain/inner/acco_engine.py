"""AccoEngine: a GeoEngine whose optimizer communicates while the next gradients are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from geotrain.config import AccoConfig
from geotrain.inner.acco import AccoOptimizer, Outcome
from geotrain.inner.acco_claims import Claims
from geotrain.inner.engine import GeoEngine
from geotrain.inner.shards import OwnedShard
from geotrain.inner.step import StepResult
from geotrain.sharing.acco_forms import FORMS, first_part

Chunks = Iterable[Sequence[Tensor]]


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
        self._claims = Claims(self.mesh, acco.timeout_s) if acco.balance else None
        self._shared_steps = 0

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

    @property
    def balances(self) -> bool:
        """Whether `train_step_shared` is to be used."""
        return self._claims is not None

    def train_step_shared(self, read: Callable[[int], Tensor], schedule_step: int) -> StepResult:
        """`train_step` with `acco.balance`: a slow replica computes fewer of the worker's micro-batches; means are
        weighed by their numbers.

        read: gives micro-batch i of the batch, 0 ≤ i < gradient_accumulation_steps · dp_size, shaped as for
            train_step. Every rank of a replica reads the same ones.
        """
        assert self._claims is not None, "train_step_shared is for runs with acco.balance"
        claims, of_replica = self._claims, self.gradient_accumulation_steps()
        lr = self._begin_step(schedule_step)

        def chunks(part: int, begin: int, end: int) -> Iterator[list[Tensor]]:
            for claimed in claims.of_part(part, begin * self.dp_size, end * self.dp_size):
                micro_batches = [read(i) for i in claimed]
                self._check_batches(micro_batches, len(claimed))
                yield micro_batches

        first, part = self._split(of_replica), 2 * self._shared_steps
        self._shared_steps += 1
        rest = chunks(part + 1, first, of_replica) if first < of_replica else None
        return self._window(chunks(part, 0, first), rest, lr)

    def _step(self, micro_batches: Sequence[Tensor], lr: float) -> StepResult:
        first = self._split(len(micro_batches))
        rest = micro_batches[first:]
        return self._window([micro_batches[:first]], [rest] if rest else None, lr)

    def _split(self, micro_batches: int) -> int:
        """How many of them come first."""
        return micro_batches if self.optimizer.synchronous else self._first_part

    def _window(self, first: Chunks, second: Chunks | None, lr: float) -> StepResult:
        optimizer = self.optimizer
        self._accumulate(first)
        optimizer.adopt()
        if second is not None:
            if optimizer.form.predicts_apart:
                self._sum_partial_gradients()
                optimizer.predict()
                self._share_partial_gradients()
            self._accumulate(second)
            optimizer.adopt()
        self._sum_partial_gradients()
        result = StepResult(lr, self.settle)
        self._uncommitted.append(result)
        self.set_gradient_accumulation_boundary(True)
        self.step()
        return result

    def _accumulate(self, chunks: Chunks) -> None:
        """Add the gradients of these micro-batches; a chunk goes through the pipeline at once."""
        self.set_gradient_accumulation_boundary(False)
        for micro_batches in chunks:
            with self.optimizer.lane.timed("compute"):
                loss = self._run_schedule(micro_batches, forward_only=False, summed=True)
            self.optimizer.tally(loss, len(micro_batches))

    def _share_partial_gradients(self) -> None:
        """Split what was completed, so that more may be added and completed again."""
        for gradients, shares in zip(self._partial_gradients(), (2, self.mesh.tp_size), strict=True):
            for gradient in gradients:
                gradient.div_(shares)

    def _on_commit(self, outcome: Outcome) -> None:
        samples = outcome.count * self.train_micro_batch_size_per_gpu()
        self._finish(self._uncommitted.popleft(), outcome.loss, outcome.grad_norm, samples)

    def settle(self) -> None:
        """As GeoEngine's. Raises AccoError if another rank was lost."""
        self.optimizer.settle()

    def close(self) -> None:
        super().close()
        if self._claims is not None:
            self._claims.close()

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
