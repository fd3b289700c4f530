"""The plain engine's ZeRO-1: DeepSpeed's BF16_Optimizer with communication of its own.

DeepSpeed's sends every gradient to every rank, after the last backward, and waits for it. Here a bucket of gradients
goes to its owners only, as soon as the last micro-batch's backward has completed it, so that it travels while the
rest of backward is computed; the new weights are gathered while the next forward is computed, and each module waits
for its own. The bytes are those of one reduce-scatter and one all-gather.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geotrain.inner.runtime import platform
from geotrain.inner.zero.buckets import Bucket, BucketCodes, counted_spans, owned_parts
from geotrain.inner.zero.codes import Codes
from geotrain.parallelism.checks import BUCKETS_IN_FLIGHT
from geotrain.parallelism.local_parameters import LocalParameter
from geotrain.parallelism.mesh import RankMesh

with platform.quiet_imports():
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer


class _Gradient:
    """The tensor in which a parameter's gradient is accumulated, and how many micro-batches' are in it."""

    __slots__ = ("bucket", "sum", "times")

    def __init__(self, total: Tensor, bucket: Bucket) -> None:
        self.sum, self.bucket, self.times = total, bucket, 0


class OverlappedZero1(BF16_Optimizer):
    """ZeRO-1 that communicates during backward and the next forward.

    The engine calls begin_step, the backward of every micro-batch, finish_reduction, step. Then weights may still
    travel: a forward waits for those that it uses.
    """

    def __init__(
        self,
        basic: torch.optim.Optimizer,
        model: nn.Module,
        placed: Sequence[tuple[nn.Parameter, LocalParameter]],
        mesh: RankMesh,
        names: Mapping[nn.Parameter, str],
        clip: float,
        accumulated: torch.dtype,
        wire: torch.dtype,
        bucket: int,
        experts: bool,
        bits: tuple[int, int] | None = None,
    ) -> None:
        """Take over an optimizer's groups.

        Each group of `basic` is a bucket, but for those of Muon's matrices (`is_matrices`), which are cut into
        buckets here: their shards must not cut a matrix, and in small groups they could not help it.

        names: of parameters, as DeepSpeed knows them. clip: the largest gradient norm; 0 for no clipping.
        accumulated, wire: the types in which gradients are accumulated, and travel. bucket: elements of a bucket of
        matrices. experts: whether data-parallel ranks divide experts. bits: of the codes of a gradient and of a
        weight's change; None: values are sent. With codes, sums of gradients are residuals between steps, and weights
        follow the masters: what their codes lost is still to come.
        """
        # Twice a bucket DeepSpeed's constructor reports the memory in use, and collects garbage before it does.
        with mock.patch.object(bf16_optimizer, "see_memory_usage", lambda *_, **__: None):
            # DeepSpeed asks whether bf16 is enabled, but nothing in it depends on the type of the weights.
            super().__init__(
                basic,
                names,
                bfloat16_config=SimpleNamespace(enabled=True, immediate_grad_update=True),
                mpu=mesh,
                clip_grad=clip,
                dp_process_group=mesh.dp_group,
                grad_acc_dtype=accumulated,
                has_moe_layers=experts,
            )
        self._dp_size, self._micro_batches = mesh.dp_size, 0
        self._gradients: dict[nn.Parameter, _Gradient] = {}
        # Of each group, whether its ranks send codes, and where the sums of this rank's gradients are.
        self._coded = [bits is not None and len(parts) > 1 for parts in self.bf16_partitioned_groups]
        self._reduced: list[Tensor] = [
            torch.zeros_like(own, dtype=torch.float32) if coded else own
            for coded, own in zip(self._coded, self.fp32_groups_gradient_flat_partition, strict=True)
        ]
        self._codes = [Codes(each) for each in bits or ()]
        # By the optimizer's tensor: what codes lost of this rank's part of the gradients, once it was moved here.
        own = zip(self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition, self._coded, strict=True)
        self.residuals: dict[int, Tensor] = {id(master): part for master, part, coded in own if coded}
        buckets = self._make_buckets(placed, wire, bucket, mesh)
        # The same order on all ranks, that of forward. Gradients come in the opposite one.
        self._forward = sorted(buckets, key=lambda bucket: bucket.position)
        self._backward = sorted(buckets, key=lambda bucket: (bucket.late, -bucket.position))
        self._launched = len(self._backward)  # of this step, in the order of backward
        self._travelling: deque[Bucket] = deque()  # gradients under way
        self._to_gather: deque[Bucket] = deque()  # weights that are not yet under way
        self._stale: set[Bucket] = set()  # whose weights have not arrived
        self._counted = list(self._counted_gradients({p for p, place in placed if place.pushes}))
        self._grad_acc_hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._add, gradient))
            for parameter, gradient in self._gradients.items()
        ]
        for module in model.modules():
            held = {self._gradients[p].bucket for p in module._parameters.values() if p in self._gradients}
            if held:
                self._grad_acc_hooks.append(module.register_forward_pre_hook(partial(self._before, tuple(held))))

    def create_grad_acc_hooks(self) -> None:
        """Do nothing: DeepSpeed calls it at construction, and the hooks here need what is made after that."""

    def _make_buckets(
        self, placed: Sequence[tuple[nn.Parameter, LocalParameter]], wire: torch.dtype, size: int, mesh: RankMesh
    ) -> list[Bucket]:
        position = {parameter: i for i, (parameter, _) in enumerate(placed)}
        buckets = []
        for i, (group, settings) in enumerate(zip(self.bf16_groups, self.optimizer.param_groups, strict=True)):
            gradients, weights = self.fp32_groups_gradients_flat[i], self.bf16_groups_flat[i]
            shard = self.bf16_partitioned_groups[i][0].numel()
            ranks = len(self.bf16_partitioned_groups[i])
            offsets = dict(zip(group, accumulate((p.numel() for p in group), initial=0), strict=False))
            ordered = sorted((p for p in group if p in position), key=lambda p: position[p])
            whole = not settings.get("is_matrices")
            for chunk in [ordered] if whole else _chunks(ordered, size):
                parts = {p: list(owned_parts(weights, offsets[p], offsets[p] + p.numel(), shard)) for p in chunk}
                if whole:
                    spans = [[(shard * rank, shard * (rank + 1))] for rank in range(ranks)]
                else:
                    spans = [[] for _ in range(ranks)]
                    for p in chunk:
                        spans[offsets[p] // shard].append((offsets[p], offsets[p] + p.numel()))
                sums, held = ([[t[b:e] for b, e in mine] for mine in spans] for t in (gradients, weights))
                group_of_ranks = self.real_dp_process_group[i]
                codes = None
                if self._coded[i]:
                    rank = dist.get_rank(group_of_ranks)
                    reduced, wanted = (
                        [t[b - rank * shard : e - rank * shard] for b, e in spans[rank]]
                        for t in (self._reduced[i], self.fp32_groups_flat_partition[i].detach())
                    )
                    codes = BucketCodes(self._codes[0], self._codes[1], reduced, held, wanted)
                flat = (gradients, weights) if whole else None
                late = bool(settings.get("late"))
                levels = group_of_ranks, *mesh.levels.get(group_of_ranks, ())
                bucket = Bucket(levels, sums, parts, wire, late, position[chunk[0]], flat, codes)
                buckets.append(bucket)
                for p in chunk:
                    begin = offsets[p]
                    total = gradients[begin : begin + p.numel()].view(p.shape)
                    p._hp_grad = total  # type: ignore[union-attr]  # DeepSpeed's name for it
                    self._gradients[p] = _Gradient(total, bucket)
        return buckets

    def _counted_gradients(self, pushed: Collection[nn.Parameter]) -> Iterator[Tensor]:
        """Yield views of the owned gradients whose squares this rank adds to the global norm."""
        for own, group, ranks in zip(self._reduced, self.bf16_groups, self.real_dp_process_group, strict=True):
            begins = zip(group, accumulate((p.numel() for p in group), initial=0), strict=False)
            for begin, end in counted_spans(begins, pushed, dist.get_rank(ranks) * own.numel(), own.numel()):
                yield own[begin:end]

    # ------------------------------------------------------------------------------------------------- a step

    def begin_step(self, micro_batches: int) -> None:
        """Begin to accumulate the gradients of so many micro-batches, from nothing."""
        self._micro_batches, self._launched = micro_batches, 0
        waiting: dict[Bucket, int] = defaultdict(int)
        for gradient in self._gradients.values():
            gradient.times = 0
            waiting[gradient.bucket] += 1
        for bucket, count in waiting.items():
            bucket.waits_for = count

    def _add(self, gradient: _Gradient, parameter: nn.Parameter) -> None:
        """Add a parameter's gradient of one micro-batch, and reduce a bucket that is complete; a hook of autograd."""
        computed, parameter.grad = parameter.grad, None
        assert computed is not None
        if gradient.times == 0 and gradient.bucket.codes is None:  # what an earlier step left there does not count
            gradient.sum.copy_(computed)
        else:
            gradient.sum.add_(computed)
        gradient.times += 1
        if gradient.times == self._micro_batches:
            gradient.bucket.waits_for -= 1
            self._launch()

    def _launch(self, all_of_them: bool = False) -> None:
        """Begin to reduce the buckets that are complete, in the order that all ranks keep."""
        while self._launched < len(self._backward):
            bucket = self._backward[self._launched]
            if (bucket.waits_for or bucket.late) and not all_of_them:
                return
            if len(self._travelling) == BUCKETS_IN_FLIGHT:
                self._travelling.popleft().finish_reduction()
            with torch.no_grad():
                if self._travelling:
                    self._travelling[-1].reduce_across()
                bucket.begin_reduction()
            self._travelling.append(bucket)
            self._launched += 1

    @torch.no_grad()
    def finish_reduction(self) -> None:
        """Reduce what is left, and wait for all. Late gradients must be complete."""
        for gradient in self._gradients.values():
            if gradient.times == 0 and gradient.bucket.codes is None:  # no micro-batch used the parameter
                gradient.sum.zero_()
        self._launch(all_of_them=True)
        while self._travelling:
            self._travelling.popleft().finish_reduction()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Clip, step the owned masters, and begin to gather the new weights.

        A norm that is not finite skips all this, and `overflow` says so. closure: not supported, and not called.
        """
        squares = [torch.linalg.vector_norm(view, dtype=torch.float32).square() for view in self._counted]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=self.bf16_groups_flat[0].device)
        dist.all_reduce(total)
        # Gradients are sums over the replicas.
        norm = math.sqrt(float(total)) / self._dp_size
        self.overflow = not math.isfinite(norm)
        if self.overflow:
            self._global_grad_norm = math.inf
            self.forget_residuals()  # they are not finite either
            return
        self._global_grad_norm = norm
        factor = min(1.0, self.clip_grad / (norm + 1e-6)) if self.clip_grad > 0 else 1.0
        masters = self.fp32_groups_flat_partition
        gradients = [gradient.float() for gradient in self._reduced]
        torch._foreach_mul_(gradients, factor / self._dp_size)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()
        for master in masters:
            master.grad = None
        self._lazy_init_hp_params_optimizer_state()
        self.update_lp_params(by_codes=True)

    @torch.no_grad()
    def update_lp_params(self, changed: Collection[nn.Parameter] | None = None, by_codes: bool = False) -> None:
        """Write the masters into the weights: at once on their owner, on other ranks when they have arrived.

        changed: the parameters whose masters were overwritten; None: any. Weights of the last step that have not left
        yet leave as they are now; of those that other ranks have already, only the changed ones travel. by_codes:
        where codes are sent, weights only move towards the masters, by coded changes.
        """
        if any(self._coded):
            self.wait_for_weights()  # all ranks hold the same then, which codes of a step are to change
        for bucket in self._forward:
            bucket.finish_gathering()  # what is sent must not be overwritten
            bucket.by_codes = by_codes and bucket.codes is not None
        all_of_them = changed is None and not by_codes
        self._write_masters([all_of_them or not coded for coded in self._coded], changed or ())
        self._gather(self._gradients if changed is None else changed)

    def _write_masters(self, whole: Sequence[bool], others: Collection[nn.Parameter]) -> None:
        """Write this rank's masters into its weights. whole: by group, whether all; of other groups, these
        parameters': where ranks hold weights that are not the masters, all must go on to hold the same."""
        wanted = set(others)
        for i, master in enumerate(self.fp32_groups_flat_partition):
            rank = dist.get_rank(self.real_dp_process_group[i])
            own = self.bf16_partitioned_groups[i][rank]
            if whole[i]:
                own.copy_(master)
                continue
            for parameter in wanted.intersection(self.bf16_groups[i]):
                for owner, view in self._gradients[parameter].bucket.parts(parameter):
                    if owner == rank:
                        begin = view.storage_offset() - own.storage_offset()
                        view.copy_(master[begin : begin + view.numel()])

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """Let the weights be the masters inside this context, if codes make them differ. All ranks must enter it."""
        if not any(self._coded):
            yield
            return
        self.wait_for_weights()
        ranks = [dist.get_rank(group) for group in self.real_dp_process_group]
        own = [parts[rank] for parts, rank in zip(self.bf16_partitioned_groups, ranks, strict=True)]
        held = [weights.clone() for weights in own]
        self.update_lp_params()
        try:
            yield
        finally:
            self.wait_for_weights()
            torch._foreach_copy_(own, held)
            self._gather(self._gradients)

    @torch.no_grad()
    def move_residuals(self) -> None:
        """Move what codes lost of gradients to the owners: as it is saved, and as training goes on from it."""
        for bucket in self._forward:
            bucket.move_residuals()

    @torch.no_grad()
    def forget_residuals(self) -> None:
        """Forget what codes lost of gradients."""
        for gradients, coded in zip(self.fp32_groups_gradients_flat, self._coded, strict=True):
            if coded:
                gradients.zero_()

    def _gather(self, parameters: Collection[nn.Parameter]) -> None:
        """Begin to gather the weights of these parameters, as their owners hold them."""
        for parameter in parameters:
            self._gradients[parameter].bucket.changed.add(parameter)
        self._to_gather = deque(bucket for bucket in self._forward if bucket.changed)
        self._stale = set(self._to_gather)
        self._gather_ahead()

    def _gather_ahead(self) -> None:
        while self._to_gather and len(self._stale) - len(self._to_gather) < BUCKETS_IN_FLIGHT:
            self._to_gather.popleft().begin_gathering()

    @torch.no_grad()
    def _before(self, buckets: Sequence[Bucket], module: nn.Module, inputs: Any) -> None:
        """Wait for the weights of these buckets; a hook before the forward of a module that uses them."""
        for bucket in buckets:
            if bucket in self._stale:
                self._arrive(bucket)

    def _arrive(self, bucket: Bucket) -> None:
        while bucket in self._to_gather:  # all ranks keep one order, whatever is used first
            self._to_gather.popleft().begin_gathering()
        bucket.finish_gathering()
        self._stale.remove(bucket)
        self._gather_ahead()

    @torch.no_grad()
    def wait_for_weights(self) -> None:
        """Wait until every weight is the newest, for readers other than a forward."""
        for bucket in self._forward:
            if bucket in self._stale:
                self._arrive(bucket)

    # ------------------------------------------------------------------------ what DeepSpeed asks of an optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the first micro-batch of a step overwrites the gradients of the last."""

    def destroy(self) -> None:
        with contextlib.suppress(RuntimeError):  # of a rank that was lost: nobody needs the weights any more
            self.wait_for_weights()
        for group in self.bf16_groups:
            for parameter in group:
                parameter._hp_mapping = parameter._dp_group = None
        for hook in self._grad_acc_hooks:
            hook.remove()
        # Torch's objects may outlive a collection of garbage. Nothing of theirs may lead to a process group, whose
        # threads would live as long.
        self._gradients, self._forward, self._backward, self._grad_acc_hooks = {}, [], [], []


def _chunks(parameters: Sequence[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Cut consecutive parameters into chunks of `size` elements or a little more; the last may have fewer."""
    chunks: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if room <= 0:
            chunks.append([])
            room = size
        chunks[-1].append(parameter)
        room -= parameter.numel()
    return chunks
