"""AccoEngine: a GeoEngine whose optimizer communicates while the next gradients are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from geotrain.config import AccoConfig
from geotrain.inner.acco.optimizer import AccoOptimizer, CommitResult
from geotrain.inner.engine.engine import GeoEngine
from geotrain.inner.engine.step import StepReader, StepResult
from geotrain.inner.runtime import platform
from geotrain.inner.runtime.parallel import group_of
from geotrain.optimizers.inner_optimizer import InnerOptimizer
from geotrain.parallelism.acco_forms import first_part
from geotrain.parallelism.mesh import RankMesh

_queues = count()  # numbers the queues made in this process; every rank makes the same ones, so numbers agree


class AccoEngine(GeoEngine):
    """The engine of runs with an `acco` block. A step is a whole window of ACCO (`AccoOptimizer`).

    The step's commit, which uses every gradient that the step computed, is still under way when `train_step` returns.
    """

    optimizer: AccoOptimizer

    def __init__(self, *parts: Any, acco: AccoConfig) -> None:
        """Build the engine. parts: the arguments of GeoEngine."""
        self._acco = acco  # set before DeepSpeed's __init__, because that makes the optimizer, which reads it
        self._uncommitted: deque[StepResult] = deque()
        super().__init__(*parts)
        self._weights_differ = True
        self._queue = MicroBatchQueue(self.mesh, acco.timeout_s) if acco.balance else None

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> AccoOptimizer:
        assert isinstance(optimizer, InnerOptimizer), "`check_acco` refuses other packages' optimizers"
        return AccoOptimizer(
            optimizer,
            self._placed,
            self.mesh,
            self._acco,
            self.gradient_clipping(),
            self.get_data_types()[1],
            self.bits,
            self._on_commit,
        )

    def train_step(self, batch: StepReader, schedule_step: float) -> StepResult:
        """Begin one optimizer step on the worker's batch; arguments and errors are those of GeoEngine's.

        With `acco.balance` a slow replica computes fewer of the worker's micro-batches than others. Loss and gradient
        are means over all micro-batches of the worker, whoever computed them.
        """
        optimizer, of_replica = self.optimizer, self.gradient_accumulation_steps()
        queue = self._queue
        own = self._checked(batch.own, of_replica) if queue is None else ()
        lr = self._begin_step(schedule_step)
        if self.residuals:
            self._wait_for_readers()  # who save them, before gradients are added

        def part(begin: int, end: int) -> Iterable[Sequence[Tensor]]:
            """Yield this replica's micro-batches of one part of the window, in groups that one schedule takes.

            begin, end: the part, in micro-batches of one replica, as if all replicas computed equally many.
            """
            if queue is None:
                yield own[begin:end]
                return
            for taken in queue.take(begin * self.dp_size, end * self.dp_size):
                yield self._checked([batch.micro_batch(i) for i in taken], len(taken))

        first = of_replica if optimizer.synchronous else first_part(self._acco, of_replica)
        self._accumulate(part(0, first))
        self._wait_for_readers()
        optimizer.use_arrived_weights()  # from the last window's commit, which travelled meanwhile
        if first < of_replica:
            self._sum_partial_gradients()
            optimizer.predict()
            self.keep_residuals_once()  # the first part's sums come out the same when the second part's are added
            self._accumulate(part(first, of_replica))
            optimizer.use_arrived_weights()  # from the prediction, for the next window's first part
        self._sum_partial_gradients()
        result = StepResult(lr, self.settle)
        self._uncommitted.append(result)
        self.set_gradient_accumulation_boundary(True)
        self.step()
        if self.residuals:
            self.keep_residuals_once()
        return result

    def _accumulate(self, groups: Iterable[Sequence[Tensor]]) -> None:
        """Compute the gradients of these micro-batches and add them to the window's."""
        self.set_gradient_accumulation_boundary(False)
        for micro_batches in groups:
            loss = self._run_schedule(micro_batches, forward_only=False, summed=True)
            self.optimizer.count(loss, len(micro_batches))

    def _on_commit(self, outcome: CommitResult) -> None:
        samples = outcome.micro_batches * self.train_micro_batch_size_per_gpu()
        self._finish_step(self._uncommitted.popleft(), outcome.loss, outcome.grad_norm, samples)

    def settle(self) -> None:
        """Wait until the masters hold every step. Raises AccoError if another rank was lost."""
        super().settle()
        self.optimizer.settle()

    def close(self) -> None:
        super().close()
        if self._queue is not None:
            self._queue.close()

    @torch.no_grad()
    def refresh(self, changed: Collection[str] | None = None) -> None:
        self.optimizer.update_lp_params(self._holders(changed))


class MicroBatchQueue:
    """The queue from which all replicas of the worker take the micro-batches of each part of a step.

    It is a counter in torch's key-value store, a new one for each part. To take micro-batches, a replica increments
    the counter. The store does that atomically, so the counter's value says which micro-batches are this replica's.
    """

    def __init__(self, mesh: RankMesh, timeout_s: float) -> None:
        """Makes process groups: every rank of the worker must call it."""
        self._mesh = mesh
        store = dist.distributed_c10d._get_default_store()
        # The prefix keeps this engine's counters apart from those of an earlier engine of this process.
        self._store = dist.PrefixStore(f"micro-batches-{next(_queues)}", store)
        beside = mesh.tp_size * mesh.cp_size  # so many neighbours on each stage belong to one replica
        ranks = (r for r in range(dist.get_world_size()) if r // beside % mesh.replicas == mesh.replica)
        self._replica = group_of(ranks, "gloo", timedelta(seconds=timeout_s))
        self._computed: torch.cuda.Event | None = None
        self._parts = 0  # begun so far, the same on all ranks

    def take(self, begin: int, end: int) -> Iterator[range]:
        """Yields ranges of micro-batches that this replica takes of the step's next part, which is [begin, end).

        The first range is reserved for this replica, so that every replica computes some; then come others while
        there are any. A range has as many micro-batches as the pipeline has stages. All ranks of a replica must
        iterate together.
        """
        mesh, part = self._mesh, self._parts
        self._parts += 1
        width = min(mesh.pp_size, (end - begin) // mesh.replicas)
        own = begin + mesh.replica * width
        yield range(own, own + width)
        free = begin + mesh.replicas * width
        while free < end:
            self._wait_for_previous()
            turn = torch.zeros((), dtype=torch.int64)
            if mesh.tp_rank == mesh.cp_rank == mesh.pp_rank == 0:  # one rank takes for the whole replica
                turn.fill_(self._store.add(str(part), 1) - 1)
            if self._replica.size() > 1:
                dist.broadcast(turn, group=self._replica, group_src=0)
            taken = free + width * int(turn)
            if taken >= end:
                break
            yield range(taken, min(taken + width, end))
        # Counters are deleted so that the store does not grow. Four parts ago was two steps ago or more, whose commit
        # has arrived here: so every replica had finished that part, and none still takes from it.
        self._store.delete_key(str(part - 4))

    def _wait_for_previous(self) -> None:
        """Let the host be ahead of the device by one turn at most.

        On CUDA it enqueues work faster than the device does it, and a replica would otherwise take micro-batches that
        another could begin sooner.
        """
        if not platform.HAS_CUDA:
            return
        last, self._computed = self._computed, torch.cuda.Event()
        self._computed.record()
        if last is not None:
            last.synchronize()

    def close(self) -> None:
        dist.destroy_process_group(self._replica)
