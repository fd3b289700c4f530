"""GeoEngine: DeepSpeed's engine over a Megatron-core model. It trains, evaluates, and gives access to its shards."""

from __future__ import annotations

import resource
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geotrain.config import Architecture
from geotrain.config.deepspeed import WSD, without_ours
from geotrain.inner.engine.schedule import WarmupStableDecayLR
from geotrain.inner.engine.step import StepReader, StepResult
from geotrain.inner.model.context_parallel import Parts
from geotrain.inner.model.documents import cu_seqlens
from geotrain.inner.model.router_bias import update_biases
from geotrain.inner.runtime import platform
from geotrain.inner.runtime.parallel import EXPERTS
from geotrain.inner.runtime.shards import OwnedShard, owned_shards
from geotrain.inner.zero.of_deepspeed import update_weights
from geotrain.inner.zero.optimizer import OverlappedZero1
from geotrain.parallelism.checks import coded_bits
from geotrain.parallelism.local_parameters import LocalParameter, tied_copies
from geotrain.parallelism.mesh import RankMesh

with platform.quiet_imports():
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401 (else DeepSpeed imports it at its first engine)
    from deepspeed.utils import groups
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker


class GeoEngine(DeepSpeedEngine):
    """A DeepSpeed engine driven by Megatron-core's schedules. Built by `geotrain.inner.build.build_engine`.

    placed: the model's parameters with their places in the canonical address space. end_of_document: the id behind
    which attention begins anew; None: nowhere in a sample. parts: which of a sample's tokens are this rank's.
    """

    end_of_document: int | None = None
    parts = Parts(0, 1, "heads")

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        mesh: RankMesh,
        placed: Sequence[tuple[nn.Parameter, LocalParameter]],
        architecture: Architecture,
        sequence_length: int,
    ) -> None:
        # These are set before DeepSpeed's __init__, because it calls _configure_zero_optimizer, which AccoEngine
        # overrides and which needs them.
        self.mesh, self.architecture, self.sequence_length = mesh, architecture, sequence_length
        self._placed = [(parameter, place) for parameter, place in placed if not place.untrained]  # what is trained
        self.bits = coded_bits(config)
        self._weights_differ = self.bits is not None  # whether a forward takes other weights than rounded masters
        config = without_ours(config)
        super().__init__(
            args=None,
            model=model,
            optimizer=optimizer,
            mpu=mesh,
            dist_init_required=False,
            config=config,
            # All that it asks of an `mpu`: among how many ranks a batch's samples are divided.
            config_class=DeepSpeedConfig(config, SimpleNamespace(get_data_parallel_world_size=lambda: mesh.replicas)),
        )
        self.rank, self.dp_rank, self.dp_size = mesh.rank, mesh.replica, mesh.replicas  # of samples
        self.is_metrics_rank = mesh.rank == 0  # the one that reports for the worker
        self._forward_backward = get_forward_backward_func(mesh.pp_size, None)
        self._shards = owned_shards(placed, self.optimizer, self.zero_optimization(), mesh)
        self._readers: list[Callable[[], None]] = []  # each waits until masters and moments were copied

    def _configure_distributed_model(self, model: nn.Module) -> None:
        """Declare to DeepSpeed which ranks divide Megatron-core's experts, and which have the same ones.

        It would look in the model for expert layers of its own.
        """
        if any(place.expert for _, place in self._placed):  # a pipeline stage may have none
            self.has_moe_layers = True
            groups._EXPERT_PARALLEL_GROUP[EXPERTS] = self.mesh.ep_group
            groups._EXPERT_DATA_PARALLEL_GROUP[EXPERTS] = self.mesh.expert_dp_group
        super()._configure_distributed_model(model)

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        if self.zero_optimization_stage() != 1 or self.zero_cpu_offload():
            return super()._configure_zero_optimizer(optimizer)
        clip, accumulated, wire = self.gradient_clipping(), self.get_data_types()[1], self.communication_data_type
        how = clip, accumulated, wire, self.zero_reduce_bucket_size(), self.has_moe_layers, self.bits
        return OverlappedZero1(optimizer, self.module, self._placed, self.mesh, self.param_names, *how)

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Build the same optimizer where DeepSpeed takes this way: gradients of bf16 weights accumulated in fp32."""
        return self._configure_zero_optimizer(optimizer)

    # ------------------------------------------------------------------------------------ train, evaluate

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples of the steps to come, and so the micro-batches of each replica. DeepSpeed's own, which this
        overrides, takes context ranks for replicas."""
        self._config.train_batch_size = train_batch_size
        per_pass = self.train_micro_batch_size_per_gpu() * self.mesh.replicas
        self._config.gradient_accumulation_steps = train_batch_size // per_pass

    def train_step(self, batch: StepReader, schedule_step: float) -> StepResult:
        """One optimizer step on the worker's batch, of `train_batch_size` samples.

        schedule_step: the step of the run's learning-rate schedule that this is, counted from 0.
        Raises ValueError if number or shape of the micro-batches is wrong; AccoError if ACCO lost another rank.
        """
        micro_batches = self._checked(batch.own, self.gradient_accumulation_steps())
        lr = self._begin_step(schedule_step)
        if self.residuals:
            self._wait_for_readers()  # who save them, before gradients are added
        if self.zero_optimization_partition_gradients():
            loss = self._backward_partitioned(micro_batches)
        elif isinstance(self.optimizer, OverlappedZero1):
            self.optimizer.begin_step(len(micro_batches))
            loss = self._run_schedule(micro_batches, forward_only=False)
            self._sum_partial_gradients()
            self.optimizer.finish_reduction()
            self.set_gradient_accumulation_boundary(True)
        else:
            # DeepSpeed's hooks reduce gradients during the backward of the micro-batch that it takes for the last
            # one. The boundary flag says that none is, until the partial gradients below are complete.
            self.set_gradient_accumulation_boundary(False)
            loss = self._run_schedule(micro_batches, forward_only=False)
            self._sum_partial_gradients()
            self.set_gradient_accumulation_boundary(True)
            self.allreduce_gradients()
            if not self.zero_optimization() and not self.gradient_clipping():
                self.clip_fp32_gradients()  # DeepSpeed calls it only where it clips; here the norm is wanted always
        self._wait_for_readers()
        self.step()
        if self.residuals:
            self.keep_residuals_once()
        update_biases(self.module)
        norm = self._global_grad_norm
        norm = torch.nan if norm is None else norm  # where zero_optimization.compute_grad_norm is off
        # Filled, not copied: a number that is copied to the device waits for it.
        norm = norm if torch.is_tensor(norm) else torch.full((), norm, device=self.device)
        norm = torch.where(norm < 0, torch.nan, norm)  # DeepSpeed writes −1 for a norm that is not finite
        numbers, samples = torch.stack((self._worker_mean(loss), norm)), self.train_batch_size()

        def to_host() -> None:  # when one is asked for, both in one copy: each copy waits for the device
            mean_loss, grad_norm = numbers.tolist()
            self._finish_step(result, mean_loss, grad_norm, samples)

        result = StepResult(lr, to_host)
        if self.monitor.enabled:  # it writes the loss beside a count of samples that goes on
            result.read()
        return result

    def allreduce_and_copy(self, bucket: list[Tensor], dp_group: Any, dp_world_size: int | None = None) -> None:
        """Reduce a bucket of gradients, as DeepSpeed does, but not among one rank."""
        if max(dist.get_world_size(dp_group), dp_world_size or 1) > 1:  # else it would copy; lone experts are scaled
            super().allreduce_and_copy(bucket, dp_group, dp_world_size)

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        """Make the schedule that the block states; DeepSpeed calls this."""
        if self.scheduler_name() == WSD:
            return WarmupStableDecayLR(optimizer, **self.scheduler_params())
        return super()._scheduler_from_config(optimizer)

    def _begin_step(self, schedule_step: float) -> float:
        """Set the learning rate of this step and return it."""
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(schedule_step)
        if not self.module.training:  # an evaluation came before
            self.module.train()
        return float(self.get_lr()[-1])  # of the hidden matrices, where Muon gives them a rate of their own

    def _finish_step(self, result: StepResult, loss: float, grad_norm: float, samples: int) -> None:
        result.arrive(loss, grad_norm, samples * self.sequence_length)
        if self.monitor.enabled and self.rank == 0:
            self.monitor.write_events([("Train/Samples/train_loss", loss, self.global_samples)])

    def write_scalars(self, numbers: Mapping[str, float]) -> None:
        """Write the worker's numbers wherever the DeepSpeed block says: `tensorboard`, `wandb`, `csv_monitor`."""
        if self.monitor.enabled and self.rank == 0:
            self.monitor.write_events(
                [(f"Train/Job/{name}", value, self.global_samples) for name, value in numbers.items()]
            )

    @property
    def peak_memory_bytes(self) -> float:
        """Peak memory of this rank: on its GPU or, without one, of its process."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device))
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024

    def settle(self) -> None:
        """Wait until the masters hold every step: with ACCO the last is under way when `train_step` returns. Call it
        before reading or writing what `shards` gives."""
        self._wait_for_readers()

    def read_until(self, wait: Callable[[], None]) -> None:
        """Register a reader that is copying what `shards` gives, and its moments.

        wait: lets the device begin what comes next after the copy; called before anything that writes to them.
        """
        self._readers.append(wait)

    def _wait_for_readers(self) -> None:
        while self._readers:
            self._readers.pop()()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Tensor]) -> float:
        """Mean loss at the masters over the worker's micro-batches: equally many a replica, shaped as in a step."""
        self._checked(micro_batches, len(micro_batches))
        self.module.eval()
        with self.optimizer.committed() if self._weights_differ else nullcontext():
            return float(self._worker_mean(self._run_schedule(micro_batches, forward_only=True)))

    @torch.no_grad()
    def evaluate_swapped_in(self, swapped_in: AbstractContextManager[None], micro_batches: Sequence[Tensor]) -> float:
        """Mean loss at other weights, which the masters hold while inside the context `swapped_in`.

        Afterwards training goes on as if nothing had happened: its bits do not differ. Every rank must call it.
        """
        self.settle()  # a step still under way would otherwise write to the masters of the other weights
        if self.bits is not None:
            self.optimizer.wait_for_weights()  # coded changes that have not left yet would lead to the other weights
        with swapped_in:
            self._use_masters()
            loss = self.evaluate(micro_batches)
        self._use_masters()
        return loss

    def _use_masters(self) -> None:
        """Make the next `evaluate` use masters that were overwritten for it, unless it takes these by itself."""
        if not self._weights_differ:
            self.refresh()

    def _checked(self, micro_batches: Sequence[Tensor], count: int) -> Sequence[Tensor]:
        """Return the micro-batches. Raises ValueError if their number, shape or dtype is wrong."""
        shape = (self.train_micro_batch_size_per_gpu(), self.sequence_length + 1)
        if len(micro_batches) != count or not count:
            raise ValueError(f"a step takes {count} micro-batches on each replica, not {len(micro_batches)}")
        for batch in micro_batches:
            if tuple(batch.shape) != shape or batch.dtype != torch.int64:
                raise ValueError(f"a micro-batch is int64 {shape}, not {batch.dtype} {tuple(batch.shape)}")
        return micro_batches

    def _losses(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Run forward; returns losses [micro_batch, sequence_length / context] on the last pipeline stage, else the
        stage's output."""
        boundaries = None
        if self.end_of_document is not None:  # found before the copy: on a device it would have to be waited for
            boundaries = cu_seqlens(tokens[:, :-1], self.end_of_document).to(self.device, non_blocking=True)
        inputs, labels = self.parts.inputs_and_labels(tokens.to(self.device, non_blocking=True))
        # No position ids and no mask: the positions are rotary, and the attention is causal by itself.
        return model(inputs, None, boundaries, labels=labels)

    def _run_schedule(self, micro_batches: Sequence[Tensor], forward_only: bool, summed: bool = False) -> Tensor:
        """Run forward and, unless forward_only, backward of micro-batches, by Megatron-core's pipeline schedule.

        Returns the replica's mean loss on its last pipeline stage, 0 on the others. Gradients of the mean are added
        to the parameters' gradients. summed: both loss and gradients are sums over the micro-batches instead of
        means.
        """
        factor = len(micro_batches) if summed else 1

        def loss_of(losses: Tensor) -> tuple[Tensor, Tensor]:
            mean = losses.mean()
            # Megatron-core divides the first by the number of micro-batches and multiplies it by that of context
            # ranks, in place. The multiplication gives the second memory of its own, which `detach` alone would not.
            return mean / self.mesh.cp_size, mean.detach() * factor

        # By it Megatron-core scales also the losses that balance experts, which are no part of the model's.
        self.module.config.grad_scale_func = (lambda loss: loss * factor) if summed else None

        def forward_step(batches: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Any]:
            return self._losses(model, next(batches)), loss_of

        with platform.megatron_runtime():
            losses = self._forward_backward(
                forward_step_func=forward_step,
                data_iterator=iter(micro_batches),
                model=self.module,
                num_microbatches=len(micro_batches),
                seq_length=self.sequence_length,
                micro_batch_size=self.train_micro_batch_size_per_gpu(),
                forward_only=forward_only,
            )
        return torch.stack(losses).mean() if losses else self._zero()

    def _backward_partitioned(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Run forward and backward with ZeRO 2, which goes without a pipeline; returns the replica's mean loss.

        Backward goes through DeepSpeed's engine, which reduces gradients as they come and keeps only this rank's
        part.
        """
        losses = []
        # As Megatron-core's schedules scale what balances experts: context ranks have a summand each of that.
        scale = torch.full((1,), self.mesh.cp_size / len(micro_batches), device=self.device)
        MoEAuxLossAutoScaler.set_loss_scale(scale)
        with platform.megatron_runtime():
            for i, tokens in enumerate(micro_batches):
                self.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
                loss = self._losses(self, tokens).mean()
                losses.append(loss.detach())
                self.backward(loss)
        for i, group in enumerate(self.optimizer.param_groups):
            if group["sums_over_tp"]:
                self._all_reduce(self.optimizer.averaged_gradients[i], self.mesh.tp_group)
        return torch.stack(losses).mean()

    def _partial_gradients(self, copies: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of which each rank of a replica computes only a summand, in two lists.

        First those to be summed over both ends of the pipeline: of a tied embedding, which the first stage uses as
        embedding and the last as head. Then those to be summed over all tensor ranks: of norms that see only a part
        of the tokens or heads on each. copies: only where another rank pushes the parameter.
        """
        tied = tied_copies(self.architecture, self.mesh.pp_size)
        held = [(p, place) for p, place in self._placed if not (copies and place.pushes)]
        return [_gradient(p) for p, x in held if x.name in tied], [_gradient(p) for p, x in held if x.sums_over_tp]

    def _sum_partial_gradients(self) -> None:
        """Complete the partial gradients on all ranks of the replica, which Megatron-core leaves to the trainer."""
        ends, partial = self._partial_gradients()
        self._all_reduce(ends, self.mesh.embedding_group)
        self._all_reduce(partial, self.mesh.tp_group)

    def keep_residuals_once(self) -> None:
        """Keep what partial gradients leave, of codes or of a part of a step, on the rank that pushes them alone.

        All that share them have the same, and will sum it again when the next gradients have been added.
        """
        for gradients in self._partial_gradients(copies=True):
            for gradient in gradients:
                gradient.zero_()

    @staticmethod
    def _all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        """Sum each tensor over the group, in place. All of them travel in one collective."""
        if not tensors:
            return
        if len(tensors) == 1 and tensors[0].is_contiguous():
            dist.all_reduce(tensors[0], group=group)
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _worker_mean(self, loss: Tensor) -> Tensor:
        """Average over replicas the loss, which only last pipeline stages know; the result is on every rank."""
        mesh = self.mesh
        # One sum over all ranks serves as mean and as broadcast. Each tensor rank of a last stage has the same loss
        # and so contributes one tp_size-th of it.
        share = loss / (mesh.dp_size * mesh.tp_size) if mesh.is_last_stage else torch.zeros_like(loss)
        dist.all_reduce(share)
        return share

    def clip_fp32_gradients(self) -> None:
        """Compute the gradient's norm and clip; DeepSpeed calls it when training in fp32 without ZeRO.

        DeepSpeed's own, which this overrides, leaves out norm weights of all but the first pipeline stage, and counts
        a tied embedding twice.
        """
        gradients = [_gradient(p) for p, _ in self._placed]

        def squares(expert: bool) -> Tensor:
            # Every element of the model once: of what tensor ranks replicate, only rank 0's copy.
            counted = [
                g
                for g, (_, place) in zip(gradients, self._placed, strict=True)
                if place.expert == expert and not place.tied_copy and (place.sharded or self.mesh.tp_rank == 0)
            ]
            return torch.stack(torch._foreach_norm(counted)).square().sum() if counted else self._zero()

        total = squares(expert=False)
        if self.mesh.ep_size > 1:
            of_experts = squares(expert=True)
            dist.all_reduce(of_experts, group=self.mesh.ep_group)
            total += of_experts
        dist.all_reduce(total, group=self.mesh.model_group)
        self._global_grad_norm = total.sqrt()
        clip = self.gradient_clipping()
        if clip > 0:
            torch._foreach_mul_(gradients, (clip / (self._global_grad_norm + 1e-6)).clamp(max=1.0))

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self.device)

    # ---------------------------------------------------------------------------- collectives on the hosts

    def agree(self, flag: bool) -> bool:
        """Whether the flag is true on every rank. A collective over gloo, so it does not wait for the device."""
        votes = torch.tensor(int(flag))
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.mesh.control_group)
        return bool(votes)

    def from_rank_0(self, text: str) -> str:
        """Rank 0's text, on every rank. A collective over gloo."""
        box = [text]
        dist.broadcast_object_list(box, src=0, group=self.mesh.control_group)
        return box[0]

    def mean_loss(self, loss: float) -> float:
        """Return the loss: `train_step` gives its mean over the worker on every rank already."""
        return loss

    # --------------------------------------------------------------------------------------------- shards

    @property
    def residuals(self) -> dict[int, Tensor]:
        """What codes lost of gradients, of this rank's part, by the id of the optimizer's tensor; empty: none."""
        return getattr(self.optimizer, "residuals", {})

    def shards(self) -> tuple[OwnedShard, ...]:
        """The parts of the fp32 masters that this rank owns, in canonical order; valid as long as the engine is."""
        return self._shards

    @torch.no_grad()
    def refresh(self, changed: Collection[str] | None = None) -> None:
        """Make the next forward use masters that were overwritten in place. Every rank must call it.

        changed: the canonical names of the parameters whose masters were, on any rank: no others travel; None: all.
        """
        if isinstance(self.optimizer, OverlappedZero1):
            self.optimizer.update_lp_params(self._holders(changed))
        elif self.zero_optimization():
            update_weights(self.optimizer, self._holders(changed))

    def _holders(self, names: Collection[str] | None) -> list[nn.Parameter]:
        """Find the local parameters that hold something of these canonical ones; all, if None."""
        return [p for p, place in self._placed if names is None or any(run.parameter in names for run in place.runs)]

    def close(self) -> None:
        """Release hooks and buffers. The process groups stay."""
        self.destroy()
        for of_experts in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
            of_experts.pop(EXPERTS, None)
        # This cache belongs to the class and holds the last models, which hold their process groups.
        RotaryEmbedding.forward.cache_clear()
        # So does this, for what balances experts, with an entry for each of the last model's layers.
        get_moe_layer_wise_logging_tracker().clear()


def _gradient(parameter: Any) -> Tensor:
    """Return the accumulated gradient: DeepSpeed's fp32 one where it keeps one (with the optimizer offloaded under
    another name), otherwise the usual `grad`."""
    wide = (getattr(parameter, name, None) for name in ("_hp_grad", "grad_accum"))
    return next((gradient for gradient in wide if gradient is not None), parameter.grad)
