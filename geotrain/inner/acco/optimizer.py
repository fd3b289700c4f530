"""ACCO inside a region: ZeRO-1 whose communication is hidden behind the next window's compute.

A window is one optimizer step. Its commit is what ZeRO-1 does in a step: reduce-scatter, clip, AdamW or Muon on the
owned shard, all-gather. The commit begins when the window's gradients are complete. Training changes the fp32 masters
and moments in commits only; `settle` waits for the last one. There are two forms:

exact     as published (arXiv 2406.02613). The commit travels while the first part of the next window is computed, at
          weights predicted from the last window's first part; the prediction travels while the second part is.
delayed   the commit travels while all of the next window is computed, which so lacks one step. Weights are handed out
          as they would be after one step more, by the same gradient, and gradients are near to what they should be.
          Gradients and weights' changes may travel in codes (`geotrain.inner.zero.codes`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from geotrain.config import AccoConfig
from geotrain.inner.acco.communication_thread import AccoError, CommunicationJob, CommunicationThread
from geotrain.inner.acco.flat_buffer import FlatBuffer, RotatingBuffers
from geotrain.inner.runtime import platform
from geotrain.inner.runtime.parallel import first_line
from geotrain.inner.zero.buckets import counted_spans, owned_parts
from geotrain.inner.zero.codes import Codes
from geotrain.optimizers.inner_optimizer import InnerOptimizer, moments, set_step_count, step_count
from geotrain.optimizers.updates import Step
from geotrain.parallelism.acco_forms import CODE_BLOCK
from geotrain.parallelism.local_parameters import LocalParameter
from geotrain.parallelism.mesh import RankMesh

with platform.quiet_imports():
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.utils import link_hp_params

T = TypeVar("T")
PIECES = 8  # in which gradients' codes are exchanged


@dataclass(frozen=True)
class CommitResult:
    """The numbers of a commit, the same on every rank.

    loss: mean over the window. grad_norm: before clipping. micro_batches: how many all replicas computed.
    """

    loss: float
    grad_norm: float
    micro_batches: int


class CodedExchange:
    """Codes of a window's gradients and of the weights' changes, which travel in place of the values.

    Compute's part are `send_gradients` and `use_arrived_weights`; the others run as jobs of the communication thread.
    The buffers are allocated once.
    """

    def __init__(self, bits: tuple[int, int], buffers: RotatingBuffers, communication: CommunicationThread) -> None:
        """Allocate the buffers. bits: of a gradient, and of a weight's change."""
        self._buffers, self._communication = buffers, communication
        self._gradients, self._weights = map(Codes, bits)
        self._own = torch.zeros_like(communication.own(buffers.weights), dtype=torch.float32)
        ranks, numel = communication.ranks, self._own.numel()
        step = -(-numel // (PIECES * CODE_BLOCK)) * CODE_BLOCK
        self._pieces = [slice(begin, min(begin + step, numel)) for begin in range(0, numel, step)]
        empty = partial(torch.zeros, dtype=torch.uint8, device=self._own.device)
        # Of each piece of the shards, a row a rank.
        self._sent, self._arrived = (
            [empty(ranks, self._gradients.bytes([self._own[piece]])) for piece in self._pieces] for _ in "sa"
        )
        self._changes = empty(ranks, self._weights.bytes([self._own]))

    def send_gradients(self) -> None:
        """Encode the gradients, which then hold what their codes lose."""
        parts = self._buffers.gradients.view(self._communication.ranks, -1)
        for piece, rows in zip(self._pieces, self._sent, strict=True):
            for part, row in zip(parts, rows, strict=True):
                self._gradients.encode_sums([part[piece]], row)

    def reduced(self) -> Tensor:
        """Exchange the codes; returns the owned shard's gradients, fp32, to be replaced by the weights wanted."""
        arrived, sent = ([rows.view(-1) for rows in pieces] for pieces in (self._arrived, self._sent))
        self._communication.exchange(arrived, sent)
        for piece, rows in zip(self._pieces, self._arrived, strict=True):
            for rank, row in enumerate(rows):
                self._gradients.decode(row, [self._own[piece]], first=rank == 0)
        return self._own

    def gather(self) -> None:
        """Bring to all ranks how the weights that they hold must change to become those wanted."""
        own = self._changes[self._communication.rank]
        self._weights.encode_changes([self._communication.own(self._buffers.weights)], [self._own], own)
        self._communication.all_gather(self._changes.view(-1))

    @torch.no_grad()
    def use_arrived_weights(self) -> None:
        """Change the weights."""
        for row, part in zip(self._changes, self._buffers.weights.view(len(self._changes), -1), strict=True):
            self._weights.change(row, [part])


class AccoOptimizer(ZeROOptimizer):
    """ZeRO-1 whose communication overlaps the next window, in place of DeepSpeed's.

    What DeepSpeed asks of an optimizer is at the class's end. The thread that computes goes through a window so; the
    second line only in the form `exact`:

        accumulate gradients of its first part;  use_arrived_weights()
        predict();  accumulate those of its second part;  use_arrived_weights()
        step()
    """

    def __init__(
        self,
        basic: InnerOptimizer,
        placed: Sequence[tuple[nn.Parameter, LocalParameter]],
        mesh: RankMesh,
        acco: AccoConfig,
        clip: float,
        accumulated: torch.dtype,
        bits: tuple[int, int] | None,
        on_commit: Callable[[CommitResult], None],
    ) -> None:
        """Take over an optimizer's groups and state. Makes process groups: every rank must call it.

        basic: over the parameters; it never steps by itself. With Muon its last group is that of the matrices, laid
        out so that no shard cuts one.

        placed: the parameters with their places. clip: the largest gradient norm; 0 for no clipping. accumulated: the
        type in which a window's gradients are summed; they travel in that of the weights, or in codes. bits: of the
        codes of a gradient and of a weight's change; None: values are sent. on_commit: called with each commit's
        numbers, on the thread that waits for it.
        """
        super().__init__()
        self._delayed, self._clip, self._on_commit = acco.form == "delayed", clip, on_commit
        self._synchronous_steps, timeout_s = acco.synchronous_steps, acco.timeout_s
        self._timeout_s, self._mesh, self.optimizer = timeout_s, mesh, basic
        self.param_groups, self.state, self.dp_process_group = basic.param_groups, basic.state, mesh.dp_group
        self.communication = CommunicationThread(mesh, timeout_s)
        self.bit16_groups: list[list[nn.Parameter]] = [list(group["params"]) for group in basic.param_groups]
        numels = [[p.numel() for p in group] for group in self.bit16_groups]
        flat = FlatBuffer(numels, mesh.dp_size)
        self._flat = flat
        parameters = [p for group in self.bit16_groups for p in group]
        offsets = [o for group in flat.offsets for o in group]
        device = parameters[0].device
        coded = bits is not None and mesh.dp_size > 1
        self._buffers = RotatingBuffers(parameters, offsets, flat.numel, accumulated, coded)
        # [begin, end) of each parameter group in this rank's shard.
        self._owned = [flat.owned(mesh.dp_rank, *group) for group in flat.groups]
        self._masters = self._take_over(basic, device)
        self._begins = dict(zip(parameters, offsets, strict=True))
        pushed, numel, self._trained = {p for p, place in placed if place.pushes}, flat.shard_numel, len(placed)
        self._counted = counted_spans(self._begins.items(), pushed, numel * mesh.dp_rank, numel)
        self._codes = CodedExchange(bits, self._buffers, self.communication) if bits is not None and coded else None
        own = self.communication.own(self._buffers.gradients)
        # By the optimizer's tensor: what codes lost of this rank's part of the gradients, once it was moved here.
        masters, parts = (id(group["params"][0]) for group in basic.param_groups), (own[b:e] for b, e in self._owned)
        self.residuals: dict[int, Tensor] = dict(zip(masters, parts, strict=True)) if coded else {}
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
            (self._buffers if self._codes is None else self._codes).use_arrived_weights()
            self.has_prediction = False

    def predict(self) -> None:
        """Begin to predict the next weights from the window's gradients so far.

        The gradients must be complete over the ranks of each replica.
        """
        in_flight, count = self._buffers.in_flight, self._micro_batches
        # Compute goes on to change the gradients, so they are copied before the job starts.
        with torch.no_grad():
            in_flight.copy_(self._buffers.gradients)
        self._predicting = self.communication.start(partial(self._prediction_job, in_flight, self._rates(), count))

    def step(self) -> None:
        """Begin the commit of the window, whose gradients must be complete over the ranks of each replica."""
        synchronous = self.synchronous
        self._steps_begun += 1
        with torch.no_grad():
            (self._buffers if self._codes is None else self._codes).send_gradients()
        # The job gets its own references to what the next window replaces meanwhile.
        in_flight, loss, count = self._buffers.in_flight, self._loss, self._micro_batches
        self._loss, self._micro_batches = torch.zeros_like(loss), 0
        look_ahead = self._delayed and not synchronous
        job = partial(self._commit_job, in_flight, self._rates(), loss, count, look_ahead)
        self._commit = self.communication.start(job)
        if synchronous:
            self.use_arrived_weights()

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups]

    def settle(self) -> None:
        """Wait until the masters hold every step that was begun. Predicted weights stay for the next window."""
        self._wait_for_communication()
        set_step_count(self.optimizer, self._steps_committed)

    wait_for_weights = settle  # they arrive with the commit

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
        if self._codes is None:
            self.communication.reduce_scatter(flat)
            own = self.communication.own(flat)
        else:
            own = self._codes.reduced()
        counted = [own[b:e] for b, e in self._counted]
        norms = torch._foreach_norm(counted, dtype=torch.float32) if counted else [torch.zeros_like(loss)]
        # Both numbers go to the host in one copy, because each copy waits for the device.
        of_rank, of_replica = torch.stack((torch.stack(norms).square().sum(), loss)).tolist()
        square, loss_sum, total = self.communication.sum(of_rank, of_replicas=(of_replica, count))
        # Gradients are sums over micro-batches: divided by the number that all replicas computed, they are the mean.
        norm = math.sqrt(square) / total
        factor = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0
        step = self._steps_committed + 1
        # The new weights replace the gradient, in place.
        self._update(own, rates, Step(0.0, step, factor / total, look_ahead=look_ahead))
        # Counted before the gathering: the masters hold this step even if the gathering fails.
        self._steps_committed = step
        if self._codes is None:
            self.communication.all_gather(flat)
        else:
            self._codes.gather()
        return CommitResult(loss_sum / total, norm, int(total) // self._mesh.cp_size)

    def _prediction_job(self, flat: Tensor, rates: list[float], count: int) -> None:
        """Predict: `flat` holds the gradients of `count` micro-batches at the beginning, the weights that a step with
        them would give at the end. It does not clip."""
        (total,) = self.communication.sum(of_replicas=[count])
        self.communication.reduce_scatter(flat)
        own = self.communication.own(flat)
        self._update(own, rates, Step(0.0, self._steps_committed + 1, 1 / total, commit=False))
        self.communication.all_gather(flat)

    def _update(self, own: Tensor, rates: list[float], step: Step) -> None:
        """Replace the gradients of the shard by the weights that a step makes. rates: of each group."""
        for group, rate, (begin, end) in zip(self.param_groups, rates, self._owned, strict=True):
            (master,), gradient = group["params"], own[begin:end]
            update = self.optimizer.update(group, master)
            update(master, moments(self.optimizer, master), gradient, replace(step, rate=rate), out=gradient)

    # ------------------------------------------------------------------------- committed weights, checkpoints

    def update_lp_params(self, changed: Collection[nn.Parameter] | None = None) -> None:
        """Compute at masters that were overwritten, and forget predictions. Call `settle` before overwriting them.

        The name is DeepSpeed's: its optimizers update their low-precision parameters so. changed: the parameters
        whose masters were overwritten; None: all. Where the last commit handed out weights one step ahead, or codes
        of changes, no other rank has the rest of the committed ones, and all travel.
        """
        self._wait_for_communication()
        ahead = self._codes is not None or (self.has_prediction and self._delayed)
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
        wanted, flat, shard = set(parameters), self._buffers.weights, self._flat.shard_numel
        begins = [(p, begin) for p, begin in self._begins.items() if p in wanted]
        return [x for p, begin in begins for x in owned_parts(flat, begin, begin + p.numel(), shard)]

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """Let the parameters be the committed weights inside this context.

        All ranks must enter it, and only between windows.
        """
        self.settle()
        weights = self._buffers.weights
        held = self.communication.own(weights).clone()
        self._gather(weights, self._masters)
        try:
            yield
        finally:
            self._gather(weights, held)

    def move_residuals(self) -> None:
        """Move what codes lost of gradients to the owners: as it is saved, and as training goes on from it."""

        def job() -> None:
            gradients = self._buffers.gradients
            self.communication.reduce_scatter(gradients)
            own = self.communication.own(gradients).clone()
            gradients.zero_()
            self.communication.own(gradients).copy_(own)

        if self._codes is not None:
            self._wait_for(self.communication.start(job), f"sum of residuals after step {self._steps_begun}")

    def forget_residuals(self) -> None:
        """Forget what codes lost of gradients."""
        if self._codes is not None:
            self._buffers.gradients.zero_()

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
