"""ACCO inside a region (arXiv 2406.02613): ZeRO-1 whose communication is hidden behind the next window's compute.

A window is one optimizer step. Its commit is what ZeRO-1 does in a step: reduce-scatter, clip, AdamW or Muon on the
owned shard, all-gather. The commit begins when the window's gradients are complete, and is awaited only when the
first part of the next window has been computed. `geotrain.parallelism.acco_forms` says at which weights that part is
computed. Training changes the fp32 masters and moments in commits only; `settle` waits for the last one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from geotrain.inner.acco.communication_thread import AccoError, CommunicationJob, CommunicationThread
from geotrain.inner.acco.flat_buffer import FlatBuffer, RotatingBuffers
from geotrain.inner.acco.prediction import WeightPrediction
from geotrain.inner.runtime import platform
from geotrain.inner.runtime.parallel import first_line
from geotrain.inner.zero.buckets import joined_spans, owned_parts
from geotrain.optimizers.inner_optimizer import InnerOptimizer, moments, set_step_count, step_count
from geotrain.optimizers.updates import Step
from geotrain.parallelism.acco_forms import CODED_AT_ONCE, Form
from geotrain.parallelism.local_parameters import LocalParameter
from geotrain.parallelism.mesh import RankMesh

with platform.quiet_imports():
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.utils import link_hp_params

T = TypeVar("T")


@dataclass(frozen=True)
class CommitResult:
    """The numbers of a commit, the same on every rank.

    loss: mean over the window. grad_norm: before clipping. micro_batches: how many all replicas computed.
    """

    loss: float
    grad_norm: float
    micro_batches: int


class AccoOptimizer(ZeROOptimizer):
    """ZeRO-1 whose communication overlaps the next window, in place of DeepSpeed's.

    What DeepSpeed asks of an optimizer is at the class's end. The thread that computes goes through a window so; the
    second line only if the form predicts separately:

        accumulate gradients of its first part;  use_arrived_weights()
        predict();  accumulate those of its second part;  use_arrived_weights()
        step()
    """

    def __init__(
        self,
        basic: InnerOptimizer,
        placed: Sequence[tuple[nn.Parameter, LocalParameter]],
        mesh: RankMesh,
        form: Form,
        clip: float,
        accumulated: torch.dtype,
        synchronous_steps: int,
        timeout_s: float,
        on_commit: Callable[[CommitResult], None],
    ) -> None:
        """Take over an optimizer's groups and state. Makes process groups: every rank must call it.

        basic: over the parameters; it never steps by itself. With Muon its last group is that of the matrices, laid
        out so that no shard cuts one.

        placed: the parameters with their places. form: how the next weights are predicted. clip: the largest gradient
        norm; 0 for no clipping. accumulated: the type in which a window's gradients are summed; they travel in that
        of the weights. synchronous_steps: so many steps at the start wait for their own commit. timeout_s: the
        longest that each collective may wait. on_commit: called with each commit's numbers, on the thread that waits
        for it.
        """
        super().__init__()
        self.form, self._clip, self._synchronous_steps, self._on_commit = form, clip, synchronous_steps, on_commit
        self._timeout_s, self._mesh, self.optimizer = timeout_s, mesh, basic
        self.param_groups, self.state, self.dp_process_group = basic.param_groups, basic.state, mesh.dp_group
        self.communication = CommunicationThread(mesh, timeout_s)
        self.bit16_groups: list[list[nn.Parameter]] = [list(group["params"]) for group in basic.param_groups]
        numels = [[p.numel() for p in group] for group in self.bit16_groups]
        whole = [bool(group.get("is_matrices")) for group in basic.param_groups]
        flat = FlatBuffer(numels, mesh.dp_size, whole)
        self._flat = flat
        parameters = [p for group in self.bit16_groups for p in group]
        offsets = [o for group in flat.offsets for o in group]
        device = parameters[0].device
        self._buffers = RotatingBuffers(parameters, offsets, flat.numel, accumulated)
        # [begin, end) of each parameter group in this rank's shard.
        self._owned = [flat.owned(mesh.dp_rank, *group) for group in flat.groups]
        self._masters = self._take_over(basic, device)
        self._counted, self._trained = self._counted_spans(placed), len(placed)
        chunks = [flat.chunks(rank, CODED_AT_ONCE) for rank in range(mesh.dp_size)]
        self._prediction = WeightPrediction(form, self.communication, chunks, self._estimate)
        self._steps_committed = 0  # the last step that the masters hold
        self._steps_begun = 0  # the last step whose commit was begun: equal, or one more
        self._commit: CommunicationJob[CommitResult] | None = None  # under way, as is the next
        self._predicting: CommunicationJob[None] | None = None
        # Whether the buffer in flight holds weights that arrived and that compute has not yet changed to. Of a
        # settled optimizer: whether the next window starts on predicted weights instead of the masters.
        self.has_prediction = False
        self._micro_batches, self._loss = 0, torch.zeros((), device=device)  # of this replica, in this window
        self._global_grad_norm = 0.0  # of the last commit that arrived; DeepSpeed reads it

    def _take_over(self, basic: InnerOptimizer, device: torch.device) -> Tensor:
        """Make the shard's fp32 masters and each group's moments the parameters and state of `basic`.

        Returns the masters, 1-D fp32 [shard_numel].
        """
        flat, rank = self._flat, self._mesh.dp_rank
        masters = torch.zeros(flat.shard_numel, device=device)
        masters.copy_(self.communication.own(self._buffers.weights))
        for i, (group, (begin, end)) in enumerate(zip(basic.param_groups, self._owned, strict=True)):
            master = masters[begin:end]
            group["params"] = [master]
            moments(basic, master)
            group_begin, group_end = flat.groups[i]
            start = flat.shard_numel * rank + begin - group_begin  # where the owned part begins in the group
            # DeepSpeed's link from each parameter to its masters, by which `owned_shards` finds them.
            link_hp_params(
                lp_param_list=self.bit16_groups[i],
                flat_hp_partition=master,
                gradient_dict={},
                offload_gradient_dict={},
                use_offload=False,
                param_group_index=i,
                # An empty part is placed behind the group's end, so that no parameter is linked to it.
                partition_start=start if end > begin else group_end - group_begin,
                partition_size=end - begin,
                dp_group=self._mesh.dp_group,
            )
        set_step_count(basic, 0)
        return masters

    def _counted_spans(self, placed: Sequence[tuple[nn.Parameter, LocalParameter]]) -> list[tuple[int, int]]:
        """List [begin, end) of the parts of the shard whose squares this rank adds to the global gradient norm.

        Over all ranks they are every element of the model once.
        """
        pushes = {parameter for parameter, place in placed if place.pushes}  # without the gaps between matrices
        return joined_spans(
            self._flat.owned(self._mesh.dp_rank, offset, offset + parameter.numel())
            for group, offsets in zip(self.bit16_groups, self._flat.offsets, strict=True)
            for parameter, offset in zip(group, offsets, strict=True)
            if parameter in pushes
        )

    # ----------------------------------------------------------------------------------------------- a window

    @property
    def synchronous(self) -> bool:
        """Whether the next step is one of the first `synchronous_steps`, which wait for their own commit."""
        return self._steps_begun < self._synchronous_steps

    def count(self, loss: Tensor, micro_batches: int) -> None:
        """Count micro-batches whose gradients were accumulated.

        loss: the sum of their mean losses; 0 on ranks that do not know it.
        """
        self._loss, self._micro_batches = self._loss + loss, self._micro_batches + micro_batches

    def use_arrived_weights(self) -> None:
        """Wait for what is being communicated, and compute at the weights that it brought, if any."""
        self._wait_for_communication()
        if self.has_prediction:
            self._buffers.use_arrived_weights()
            self.has_prediction = False

    def predict(self) -> None:
        """Begin to predict the next weights from the window's gradients so far.

        The gradients must be complete over the ranks of each replica.
        """
        buffers, count = self._buffers, self._micro_batches
        weights, in_flight = buffers.weights, buffers.in_flight
        # Compute goes on to change the gradients, so what the prediction needs of them is read before the job starts.
        with torch.no_grad():
            self._prediction.prepare(weights, buffers.gradients, in_flight, count)
        job = partial(self._prediction.communicate, weights, in_flight, count)
        self._predicting = self.communication.start(job)

    def step(self) -> None:
        """Begin the commit of the window, whose gradients must be complete over the ranks of each replica."""
        synchronous = self.synchronous
        self._steps_begun += 1
        self._buffers.send_gradients()
        # The job gets its own references to what the next window replaces meanwhile.
        in_flight, loss, count = self._buffers.in_flight, self._loss, self._micro_batches
        rates = [float(group["lr"]) for group in self.param_groups]
        look_ahead = self.form.predicts_in_commit and not synchronous
        self._loss, self._micro_batches = torch.zeros_like(loss), 0
        job = partial(self._commit_job, in_flight, rates, loss, count, look_ahead)
        self._commit = self.communication.start(job)
        if synchronous:
            self.use_arrived_weights()

    def settle(self) -> None:
        """Wait until the masters hold every step that was begun. Predicted weights stay for the next window."""
        self._wait_for_communication()
        set_step_count(self.optimizer, self._steps_committed)

    def _wait_for_communication(self) -> None:
        """Wait for the prediction and the commit that are under way, if any. Raises AccoError if one failed."""
        if self._predicting is not None:  # it is for the step after the last that was begun
            self._wait_for(self._predicting, f"prediction of step {self._steps_begun + 1}")
            self._predicting, self.has_prediction = None, True
        if self._commit is not None:
            outcome = self._wait_for(self._commit, f"commit of step {self._steps_begun}")
            self._commit, self.has_prediction = None, True
            self._global_grad_norm = outcome.grad_norm
            self._on_commit(outcome)

    def _wait_for(self, job: CommunicationJob[T], what: str) -> T:
        """Return the job's result. what: names the job in the AccoError that is raised if it failed."""
        try:
            # A job makes several collectives, each with its own deadline, which fires long before this one.
            return job.wait(10 * self._timeout_s)
        except Exception as error:  # whatever torch raises when a rank is lost
            raise AccoError(
                f"acco: rank {self._mesh.rank}: the {what} failed: a rank of this worker died, hangs, or cannot be "
                f"reached (acco.timeout_s = {self._timeout_s:g} for each collective). Masters and moments are those "
                f"of step {self._steps_committed}, which is whole; restart the worker from its last checkpoint. "
                f"Cause: {first_line(error)}"
            ) from error

    # ------------------------------------------------------------------------- jobs of the communication thread

    def _commit_job(
        self, flat: Tensor, rates: list[float], loss: Tensor, count: int, look_ahead: bool
    ) -> CommitResult:
        """Commit a window: `flat` holds its gradients at the beginning, the new low-precision weights at the end.

        rates: the learning rate of each group. loss: sum over this replica's `count` micro-batches. look_ahead:
        whether the weights handed out are one more step ahead of the masters, predicted with the same gradient.
        """
        self.communication.reduce_scatter(flat)
        own = self.communication.own(flat)
        counted = [own[b:e] for b, e in self._counted]
        norms = torch._foreach_norm(counted, dtype=torch.float32) if counted else [torch.zeros_like(loss)]
        # Both numbers go to the host in one copy, because each copy waits for the device.
        of_rank, of_replica = torch.stack((torch.stack(norms).square().sum(), loss)).tolist()
        square, loss_sum, total = self.communication.sum(of_rank, of_replicas=(of_replica, count))
        # Gradients are sums over micro-batches: divided by the number that all replicas computed, they are the mean.
        norm = math.sqrt(square) / total
        factor = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0
        step = self._steps_committed + 1
        for i, (begin, end) in enumerate(self._owned):
            (master,), gradient = self.param_groups[i]["params"], own[begin:end]
            this = Step(rates[i], step, factor / total, look_ahead=look_ahead)
            update = self.optimizer.update(self.param_groups[i], master)
            # The new low-precision weights replace the gradient, in place.
            update(master, moments(self.optimizer, master), gradient, this, out=gradient)
        # Counted before the gathering: the masters hold this step even if the gathering fails.
        self._steps_committed = step
        self.communication.all_gather(flat)
        return CommitResult(loss_sum / total, norm, int(total) // self._mesh.cp_size)

    def _estimate(self, gradients: Tensor, scale: float, begin: int, out: Tensor) -> None:
        """Write to `out` what a step would make of the shard from `begin` on, and change neither masters nor moments.

        gradients: of that part, to be multiplied by `scale`. The prediction does not clip.
        """
        end, step = begin + gradients.numel(), self._steps_committed + 1
        for i, owned in enumerate(self._owned):
            low, high = max(begin, owned[0]), min(end, owned[1])
            if low < high:
                (master,), part = self.param_groups[i]["params"], slice(low - begin, high - begin)
                inside = slice(low - owned[0], high - owned[0])
                state = {name: moment[inside] for name, moment in moments(self.optimizer, master).items()}
                this = Step(float(self.param_groups[i]["lr"]), step, scale, commit=False)
                update = self.optimizer.update(self.param_groups[i], master)
                update(master[inside], state, gradients[part], this, out=out[part], begin=inside.start)

    # ------------------------------------------------------------------------- committed weights, checkpoints

    def update_lp_params(self, changed: Collection[nn.Parameter] | None = None) -> None:
        """Compute at masters that were overwritten, and forget predictions. Call `settle` before overwriting them.

        The name is DeepSpeed's: its optimizers update their low-precision parameters so. changed: the parameters
        whose masters were overwritten; None: all. Where the last commit handed out weights one step ahead, no other
        rank has the rest of the committed ones, and all travel.
        """
        self._wait_for_communication()
        ahead = self.has_prediction and self.form.predicts_in_commit
        if ahead or changed is None or len(changed) == self._trained:
            parts = None
        else:
            self.use_arrived_weights()
            parts = self._parts(changed)
        self.has_prediction = False
        self._steps_committed = self._steps_begun = step_count(self.optimizer)
        self._gather(self._buffers.weights, self._masters, parts)

    def _parts(self, parameters: Collection[nn.Parameter]) -> list[tuple[int, Tensor]]:
        """List (owner, view) of what each shard holds of these parameters' weights."""
        wanted, flat = set(parameters), self._buffers.weights
        begins = {
            parameter: offset
            for group, offsets in zip(self.bit16_groups, self._flat.offsets, strict=True)
            for parameter, offset in zip(group, offsets, strict=True)
            if parameter in wanted
        }
        shard = self._flat.shard_numel
        return [x for p, begin in begins.items() for x in owned_parts(flat, begin, begin + p.numel(), shard)]

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """Let the parameters be the committed weights inside this context.

        All ranks must enter it, and only between windows.
        """
        self.settle()
        spare = self._buffers.spare
        self._gather(spare, self._masters)
        self._buffers.compute_at(spare)
        try:
            yield
        finally:
            self._buffers.compute_at(self._buffers.weights)
            spare.zero_()

    def _gather(self, flat: Tensor, own: Tensor, parts: Sequence[tuple[int, Tensor]] | None = None) -> None:
        """Write `own` into the rank's shard of `flat` and bring it to all ranks.

        parts: (owner, view) of what travels; None: everything.
        """

        def job() -> None:
            self.communication.own(flat).copy_(own)
            if parts is None:
                self.communication.all_gather(flat)
            else:
                self.communication.gather_parts(parts)

        what = f"gathering of weights after step {self._steps_begun}"
        self._wait_for(self.communication.start(job), what)

    # ------------------------------------------------------------------------- what DeepSpeed asks of an optimizer

    loss_scale = cur_scale = 1.0
    overflow = custom_loss_scaler = dynamic_loss_scale = False
    torch_autocast_gradscaler = external_loss_scale = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: `RotatingBuffers.send_gradients` zeroes the gradients of each new window."""

    def destroy(self) -> None:
        self._buffers.close()
        self.communication.close()
