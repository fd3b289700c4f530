"""ACCO inside a region (arXiv 2406.02613): ZeRO-1 whose communication is hidden behind the next window's compute.

A window is one optimizer step. Its commit is ZeRO-1's own step (reduce-scatter, clip, AdamW on the owned shard,
all-gather), begun when the window's gradients are complete and awaited only when the next window's first part is
computed. `acco_forms` says on which weights that part is computed. The fp32 masters and moments change in a commit
and nowhere else; `settle` waits for the last one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from geotrain import kernels
from geotrain.inner import platform
from geotrain.inner.acco_flat import Buffers, flat_plan
from geotrain.inner.acco_lane import AccoError, Journey, Lane
from geotrain.inner.acco_predict import Prediction
from geotrain.inner.optimizer import MOMENTS, set_step_count, step_count
from geotrain.inner.parallel import Mesh, first_line
from geotrain.kernels import AdamStep
from geotrain.sharing.acco_forms import Form
from geotrain.sharing.mapping import LocalParameter

with platform.quiet_imports():
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.utils import link_hp_params

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """A commit, the same on every rank. loss: mean over the window. grad_norm: before clipping. count: micro-batches
    of all replicas."""

    step: int
    loss: float
    grad_norm: float
    count: int


class AccoOptimizer(ZeROOptimizer):
    """The optimizer that the engine gets instead of DeepSpeed's ZeRO-1; what DeepSpeed asks of one is at its end.

    A window, on the thread that computes:

        accumulate gradients of its first part;  adopt()
        predict();  accumulate those of its second part;  adopt()        if the form predicts apart
        step()
    """

    def __init__(
        self,
        basic: torch.optim.Optimizer,
        placed: Sequence[tuple[nn.Parameter, LocalParameter]],
        mesh: Mesh,
        form: Form,
        clip: float,
        synchronous_steps: int,
        timeout_s: float,
        on_commit: Callable[[Outcome], None],
    ) -> None:
        """basic: an AdamW over the parameters, whose groups and state this takes over: it never steps by itself.

        on_commit: told of each commit, on the thread that waits for it. timeout_s: of each collective.
        """
        super().__init__()
        self.form, self._clip, self._synchronous_steps, self._on_commit = form, clip, synchronous_steps, on_commit
        self._timeout_s, self._mesh, self._basic = timeout_s, mesh, basic
        self.lane = Lane(mesh, timeout_s)
        self.bit16_groups: list[list[nn.Parameter]] = [list(group["params"]) for group in basic.param_groups]
        self.fp16_groups = self.round_robin_bit16_groups = self.bit16_groups  # names that DeepSpeed knows them by
        self.plan = flat_plan([[p.numel() for p in group] for group in self.bit16_groups], mesh.dp_size)
        parameters = [p for group in self.bit16_groups for p in group]
        offsets = [o for group in self.plan.offsets for o in group]
        self._buffers = Buffers(parameters, offsets, self.plan.total)
        self._owned = self.plan.owned(mesh.dp_rank)
        self._state = self._take_over(basic, parameters[0].device)
        self._counted = self._pieces_that_count(placed)
        self._prediction = Prediction(form, self.lane, self.plan.shard, self._estimate)
        self._steps = self._begun = 0  # whose commit the masters hold; whose commit was begun
        self._commit: Journey[Outcome] | None = None  # under way
        self._predicting: Journey[None] | None = None
        self._landed = False  # whether `travelling` holds weights to adopt
        self._count, self._loss = 0, torch.zeros((), device=parameters[0].device)
        self._reading = contextlib.ExitStack()
        self._global_grad_norm = 0.0  # of the last commit that was waited for

    def _take_over(self, basic: torch.optim.Optimizer, device: torch.device) -> tuple[Tensor, ...]:
        """fp32 masters and moments of the shard; each of basic's groups gets its part of them."""
        state = tuple(torch.zeros(self.plan.shard, device=device) for _ in range(1 + len(MOMENTS)))
        state[0].copy_(self.lane.own(self._buffers.weights))
        start = self.plan.shard * self._mesh.dp_rank
        for i, (group, (begin, end)) in enumerate(zip(basic.param_groups, self._owned, strict=True)):
            master, *rest = (tensor[begin:end] for tensor in state)
            group["params"] = [master]
            basic.state[master] = dict(zip(MOMENTS, rest, strict=True))
            section, section_end = self.plan.sections[i]
            link_hp_params(
                lp_param_list=self.bit16_groups[i],
                flat_hp_partition=master,
                gradient_dict={},
                offload_gradient_dict={},
                use_offload=False,
                param_group_index=i,
                partition_start=start + begin - section if end > begin else section_end - section,
                partition_size=end - begin,
                dp_group=self._mesh.dp_group,
            )
        set_step_count(basic, 0)
        return state

    def _pieces_that_count(self, placed: Sequence[tuple[nn.Parameter, LocalParameter]]) -> list[tuple[int, int]]:
        """[begin, end) in the shard of what this rank adds to the global norm: every element of the model once."""
        pushes = {id(p): place.pushes for p, place in placed}
        start, merged = self.plan.shard * self._mesh.dp_rank, [(0, 0)]
        for group, offsets in zip(self.bit16_groups, self.plan.offsets, strict=True):
            for parameter, offset in zip(group, offsets, strict=True):
                bounds = (offset - start, offset + parameter.numel() - start)
                begin, end = (min(max(x, 0), self.plan.shard) for x in bounds)
                if not pushes[id(parameter)] or begin == end:
                    continue
                if merged[-1][1] == begin:
                    merged[-1] = (merged[-1][0], end)
                else:
                    merged.append((begin, end))
        return [piece for piece in merged if piece[0] < piece[1]]

    # ----------------------------------------------------------------------------------------------- a window

    @property
    def synchronous(self) -> bool:
        """Whether the next step is one of those at the start that wait for their own commit."""
        return self._begun < self._synchronous_steps

    def tally(self, loss: Tensor, count: int) -> None:
        """`count` micro-batches were accumulated. loss: sum of their means; 0 on ranks that do not know it."""
        self._loss, self._count = self._loss + loss, self._count + count

    def adopt(self) -> None:
        """Wait for what travels, and compute at the weights that it brought; if nothing travels, change nothing."""
        self._land()
        if self._landed:
            self._buffers.adopt()
            self._landed = False

    def predict(self) -> None:
        """From the gradients so far, which must be complete over the ranks of a replica, begin to predict."""
        buffers, count = self._buffers, self._count
        weights, travelling = buffers.weights, buffers.travelling
        with torch.no_grad():
            self._prediction.take(weights, buffers.gradients, travelling, count)
        job = lambda: self._prediction.travel(weights, travelling, count)  # noqa: E731
        self._predicting = self.lane.start("predict", job)

    def step(self) -> None:
        """The window's gradients are complete over the ranks of a replica: begin its commit."""
        synchronous = self.synchronous
        self._begun += 1
        self._buffers.send_off()
        travelling, loss, count = self._buffers.travelling, self._loss, self._count
        rates = [float(group["lr"]) for group in self._basic.param_groups]
        looks_ahead = self.form.looks_ahead and not synchronous
        self._loss, self._count = torch.zeros_like(loss), 0
        self._commit = self.lane.start(
            "commit", lambda: self._commit_job(travelling, rates, loss, count, looks_ahead)
        )
        if synchronous:
            self.adopt()

    def settle(self) -> None:
        """Wait until the masters hold every step that was begun. What is predicted stays for the next window."""
        self._land()
        set_step_count(self._basic, self._steps)

    def _land(self) -> None:
        """Wait for what travels. Raises AccoError if it failed."""
        if self._predicting is not None:  # for the step after the last that was begun
            self._arrival(self._predicting, f"prediction of step {self._begun + 1}")
            self._predicting, self._landed = None, True
        if self._commit is not None:
            outcome = self._arrival(self._commit, f"commit of step {self._begun}")
            self._commit, self._landed = None, True
            self._global_grad_norm = outcome.grad_norm
            self._on_commit(outcome)

    def _arrival(self, journey: Journey[T], what: str) -> T:
        """Wait for it. Raises AccoError if it failed."""
        try:
            return journey.wait(10 * self._timeout_s)
        except Exception as error:
            raise AccoError(
                f"acco: rank {self._mesh.rank}: the {what} failed: a rank of this worker died, hangs, or cannot be "
                f"reached (acco.timeout_s = {self._timeout_s:g} for each collective). Masters and moments are those "
                f"of step {self._steps}, which is whole; restart the worker from its last checkpoint. Cause: "
                f"{first_line(error)}"
            ) from error

    # --------------------------------------------------------------------------------------- jobs of the lane

    def _commit_job(self, flat: Tensor, rates: list[float], loss: Tensor, count: int, looks_ahead: bool) -> Outcome:
        """In `flat`: gradients in, low-precision weights out."""
        self.lane.reduce_scatter(flat)
        own = self.lane.own(flat)
        squares = [torch.linalg.vector_norm(own[b:e], dtype=torch.float32).square() for b, e in self._counted]
        square, loss_sum, total = self.lane.sum(float(sum(squares)), of_replicas=(float(loss), count))
        norm = math.sqrt(square) / total
        factor = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0
        step = self._steps + 1
        for i, (begin, end) in enumerate(self._owned):
            this, following = (self._adam(i, rates[i], step + ahead, factor / total) for ahead in (0, 1))
            (weights, m, v), gradient = (t[begin:end] for t in self._state), own[begin:end]
            kernels.adam_step(
                weights, m, v, gradient, this, out=gradient, look_ahead=following if looks_ahead else None
            )
        self._steps = step
        self.lane.all_gather(flat)
        return Outcome(step, loss_sum / total, norm, int(total))

    def _estimate(self, gradients: Tensor, scale: float, begin: int, out: Tensor) -> None:
        """AdamW of the part of the shard from `begin` on, into `out`; masters and moments stay. No clipping."""
        end, step = begin + gradients.numel(), self._steps + 1
        for i, section in enumerate(self._owned):
            low, high = max(begin, section[0]), min(end, section[1])
            if low < high:
                (weights, m, v), part = (t[low:high] for t in self._state), slice(low - begin, high - begin)
                adam = self._adam(i, float(self._basic.param_groups[i]["lr"]), step, scale)
                kernels.adam_estimate(weights, m, v, gradients[part], adam, out[part])

    def _adam(self, group: int, rate: float, step: int, scale: float) -> AdamStep:
        settings = self._basic.param_groups[group]
        beta1, beta2 = settings["betas"]
        return AdamStep(rate, beta1, beta2, settings["eps"], settings["weight_decay"], step, scale)

    # ------------------------------------------------------------------------- committed weights, checkpoints

    def update_lp_params(self) -> None:
        """Masters were overwritten: compute at them, and forget what was predicted. `settle` comes before writing."""
        self._land()
        self._landed = False
        self._steps = self._begun = step_count(self._basic)
        self._gather(self._buffers.weights, self._state[0])

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """Between windows: the parameters are the committed weights in here. All ranks must enter it."""
        self.settle()
        spare = self._buffers.gradients  # nothing is accumulated there now
        self._gather(spare, self._state[0])
        self._buffers.compute_at(spare)
        try:
            yield
        finally:
            self._buffers.compute_at(self._buffers.weights)
            spare.zero_()

    def _gather(self, flat: Tensor, own: Tensor) -> None:
        def job() -> None:
            self.lane.own(flat).copy_(own)
            self.lane.all_gather(flat)

        self._arrival(self.lane.start("gather", job), f"gathering of weights after step {self._begun}")

    @property
    def is_ahead(self) -> bool:
        """When settled: whether the next windows start on other weights than the masters; on those of `ahead`."""
        return self._landed

    def ahead(self) -> tuple[Tensor, Tensor]:
        """The owned parts of the weights at which the next window's first part, and what follows, are computed."""
        return self.lane.own(self._buffers.weights), self.lane.own(self._buffers.travelling)

    def ahead_of(self, owner: Tensor, offset: int, numel: int) -> dict[str, Tensor]:
        """`ahead`, of the elements from `offset` on of one of `param_groups`' masters."""
        ((begin, _),) = (o for o, g in zip(self._owned, self.param_groups, strict=True) if g["params"][0] is owner)
        part = slice(begin + offset, begin + offset + numel)
        return {name: flat[part] for name, flat in zip(("now", "next"), self.ahead(), strict=True)}

    def take_up(self) -> None:
        """Masters, moments and `ahead` were overwritten: go on from there."""
        self._steps = self._begun = step_count(self._basic)
        for flat in (self._buffers.weights, self._buffers.travelling):
            self._gather(flat, self.lane.own(flat))
        self._landed = True

    # ------------------------------------------------------------------------- what DeepSpeed asks of an optimizer

    loss_scale = cur_scale = 1.0
    overflow = custom_loss_scaler = dynamic_loss_scale = False
    torch_autocast_gradscaler = external_loss_scale = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._basic

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._basic.param_groups

    @property
    def state(self) -> Any:
        return self._basic.state

    @property
    def dp_process_group(self) -> Any:
        return self._mesh.dp_group

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: a window's gradients begin at zero."""

    def checkpoint_event_prologue(self) -> None:
        """DeepSpeed writes, or is about to overwrite, weights: the committed ones."""
        self._reading.enter_context(self.committed())

    def checkpoint_event_epilogue(self) -> None:
        self._reading.close()

    def state_dict(self) -> dict[str, Any]:
        """For DeepSpeed's checkpoint files; its `zero_to_fp32.py` reads the masters."""
        self.settle()
        return {
            "zero_stage": 1,
            "partition_count": self._mesh.dp_size,
            "single_partition_of_fp32_groups": [group["params"][0].clone() for group in self.param_groups],
            "moments": [tensor.clone() for tensor in self._state[1:]],
            "steps": self._steps,
            "ahead": [part.clone() for part in self.ahead()] if self.is_ahead else [],
        }

    def load_state_dict(
        self, state_dict_list: list[dict[str, Any]], load_optimizer_states: bool = True, **_: Any
    ) -> None:
        """state_dict_list: by data-parallel rank, of as many ranks as there are now."""
        own = state_dict_list[self._mesh.dp_rank]
        for group, master in zip(self.param_groups, own["single_partition_of_fp32_groups"], strict=True):
            group["params"][0].copy_(master)
        if load_optimizer_states:
            for tensor, saved in zip(self._state[1:], own["moments"], strict=True):
                tensor.copy_(saved)
            set_step_count(self._basic, own["steps"])
        if load_optimizer_states and own["ahead"]:
            for tensor, saved in zip(self.ahead(), own["ahead"], strict=True):
                tensor.copy_(saved)
            self.take_up()
        else:
            self.update_lp_params()

    def _restore_from_bit16_weights(self) -> None:
        """DeepSpeed loaded weights only; they lie where `checkpoint_event_prologue` put the committed ones."""
        self._state[0].copy_(self.lane.own(self._buffers.gradients))
        self.update_lp_params()

    refresh_fp32_params = _restore_from_bit16_weights

    def destroy(self) -> None:
        self.lane.close()
