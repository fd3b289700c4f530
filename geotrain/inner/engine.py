"""GeoEngine: DeepSpeed's engine over a Megatron-core model. Trains, evaluates, and lends out the shards it owns."""

from __future__ import annotations

import copy
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geotrain.canonical import Architecture, architecture_from_hf
from geotrain.config import ParallelConfig, RunConfig
from geotrain.inner import parallel as layout
from geotrain.inner import platform
from geotrain.inner.model import build_model, placements
from geotrain.inner.optimizer import build_adamw, parameter_groups
from geotrain.inner.parallel import Mesh
from geotrain.inner.shards import OwnedShard, owned_shards
from geotrain.inner.step import StepResult
from geotrain.sharing import checks
from geotrain.sharing.acco_forms import check_acco
from geotrain.sharing.mapping import LocalParameter

with platform.quiet_imports():
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401 (else DeepSpeed imports it at its first engine)
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.pipeline_parallel import get_forward_backward_func

Placed = list[tuple[nn.Parameter, LocalParameter]]


class GeoEngine(DeepSpeedEngine):
    """A DeepSpeed engine driven by Megatron-core's schedules. Built by `build_engine`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        mesh: Mesh,
        placed: Placed,
        architecture: Architecture,
        sequence_length: int,
    ) -> None:
        # Before DeepSpeed's __init__: it builds the optimizer, and _configure_zero_optimizer may need these.
        self.mesh, self.architecture, self.sequence_length, self._placed = mesh, architecture, sequence_length, placed
        super().__init__(
            args=None,
            model=model,
            optimizer=optimizer,
            mpu=mesh,
            dist_init_required=False,
            config=config,
            config_class=DeepSpeedConfig(config, mesh),
        )
        self._forward_backward = get_forward_backward_func(mesh.pp_size, None)
        self._shards = owned_shards(placed, self.optimizer, self.zero_optimization(), mesh.dp_rank, mesh.dp_size)

    # ---------------------------------------------------------------------------------------- what it is

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def dp_rank(self) -> int:
        return self.mesh.dp_rank

    @property
    def dp_size(self) -> int:
        return self.mesh.dp_size

    @property
    def is_metrics_rank(self) -> bool:
        """Whether this rank reports for the worker. Exactly one does."""
        return self.mesh.rank == 0

    @property
    def parameter_count(self) -> int:
        """Of the whole model."""
        return self.architecture.parameter_count

    # ------------------------------------------------------------------------------------ train, evaluate

    def train_step(self, micro_batches: Sequence[Tensor], schedule_step: int) -> StepResult:
        """One optimizer step on this data-parallel replica's micro-batches.

        micro_batches: gradient_accumulation_steps tensors, int64 [micro_batch, sequence_length + 1]; the same on
            all tensor and pipeline ranks of a replica.
        schedule_step: the step of the run's learning-rate schedule that this is, counted from 0.
        Raises ValueError if number or shape of the micro-batches is wrong; AccoError if ACCO lost another rank.
        """
        self._check_batches(micro_batches, self.gradient_accumulation_steps())
        return self._step(micro_batches, self._begin_step(schedule_step))

    def _begin_step(self, schedule_step: int) -> float:
        """The step's learning rate."""
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(schedule_step)
        if not self.module.training:
            self.module.train()
        return float(self.get_lr()[0])

    def _step(self, micro_batches: Sequence[Tensor], lr: float) -> StepResult:
        if self.zero_optimization_partition_gradients():
            loss = self._backward_partitioned(micro_batches)
        else:
            self.set_gradient_accumulation_boundary(False)
            loss = self._run_schedule(micro_batches, forward_only=False)
            self._sum_partial_gradients()
            self.set_gradient_accumulation_boundary(True)
            self.allreduce_gradients()
            if not self.zero_optimization() and not self.gradient_clipping():
                self.clip_fp32_gradients()  # for the norm
        self.step()
        loss, norm = torch.stack((self._worker_mean(loss), self._norm())).tolist()
        result = StepResult(lr, self.settle)
        self._finish(result, loss, norm, self.train_batch_size())
        return result

    def _finish(self, result: StepResult, loss: float, norm: float, samples: int) -> None:
        result.arrive(loss, norm, samples * self.sequence_length)
        if self.monitor.enabled and self.rank == 0:
            self.monitor.write_events([("Train/Samples/train_loss", loss, self.global_samples)])

    def write_scalars(self, numbers: Mapping[str, float]) -> None:
        """Hand the worker's numbers to what DeepSpeed's config block names: `tensorboard`, `wandb`, `csv_monitor`."""
        if self.monitor.enabled and self.rank == 0:
            self.monitor.write_events(
                [(f"Train/Job/{name}", value, self.global_samples) for name, value in numbers.items()]
            )

    @property
    def peak_memory_bytes(self) -> float:
        """The most that this rank has held: of its device's memory, or else of the process's."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device))
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024

    def settle(self) -> None:
        """Wait until the masters hold every step: before reading or writing what `shards` gives. With ACCO the last
        one is still under way when `train_step` returns; otherwise there is nothing to wait for."""

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Tensor]) -> float:
        """Mean loss over the worker's micro-batches; each replica brings equally many, shaped as for train_step."""
        self._check_batches(micro_batches, len(micro_batches))
        self.module.eval()
        return float(self._worker_mean(self._run_schedule(micro_batches, forward_only=True)))

    @torch.no_grad()
    def evaluate_lent(self, weights: AbstractContextManager[None], micro_batches: Sequence[Tensor]) -> float:
        """`evaluate`, with the masters holding other weights inside the context. Training then goes on as if nothing
        had been. Every rank must call it."""
        self.settle()
        with weights:
            self._take_masters()
            loss = self.evaluate(micro_batches)
        self._take_masters()
        return loss

    def _take_masters(self) -> None:
        """Before evaluating: use what the masters hold."""
        self.refresh()

    def _check_batches(self, micro_batches: Sequence[Tensor], count: int) -> None:
        shape = (self.train_micro_batch_size_per_gpu(), self.sequence_length + 1)
        if len(micro_batches) != count or not count:
            raise ValueError(f"a step takes {count} micro-batches on each replica, not {len(micro_batches)}")
        for batch in micro_batches:
            if tuple(batch.shape) != shape or batch.dtype != torch.int64:
                raise ValueError(f"a micro-batch is int64 {shape}, not {batch.dtype} {tuple(batch.shape)}")

    def _losses(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """[micro_batch, sequence_length] on the last stage; else the stage's output."""
        tokens = tokens.to(self.device, non_blocking=True)
        return model(tokens[:, :-1], None, None, labels=tokens[:, 1:])

    def _run_schedule(self, micro_batches: Sequence[Tensor], forward_only: bool, summed: bool = False) -> Tensor:
        """Mean loss of this replica on its last stage, else 0; gradients stay in the parameters.

        summed: over the micro-batches, both loss and gradients.
        """
        factor = len(micro_batches) if summed else 1

        def loss_of(losses: Tensor) -> tuple[Tensor, Tensor]:
            mean = losses.mean()
            return mean * factor, mean.detach() * factor  # Megatron-core divides the first, in place, by their number

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
        """ZeRO 2, which has no pipeline: each backward leaves only this rank's part of the gradients."""
        losses = []
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

    def _partial_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of which each end of the pipeline, and of which each tensor rank, computes a part."""
        tied = self.mesh.pp_size > 1 and self.architecture.tied_embeddings
        ends = [_gradient(p) for p, place in self._placed if tied and place.name in _TIED]
        return ends, [_gradient(p) for p, place in self._placed if place.sums_over_tp]

    def _sum_partial_gradients(self) -> None:
        """Complete them on all ranks of the replica."""
        ends, partial = self._partial_gradients()
        self._all_reduce(ends, self.mesh.embedding_group)
        self._all_reduce(partial, self.mesh.tp_group)

    @staticmethod
    def _all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        """Sum in place, in one collective."""
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
        """Mean over replicas of what the last stage knows, on every rank, in one collective."""
        mesh = self.mesh
        share = loss / (mesh.dp_size * mesh.tp_size) if mesh.is_last_stage else torch.zeros_like(loss)
        dist.all_reduce(share)
        return share

    def _norm(self) -> Tensor:
        unknown = self._global_grad_norm is None  # zero_optimization.compute_grad_norm is off
        norm = torch.nan if unknown else self._global_grad_norm
        norm = torch.as_tensor(norm, dtype=torch.float32, device=self.device)
        return torch.where(norm < 0, torch.nan, norm)  # DeepSpeed writes −1 for a norm that is not finite

    def clip_fp32_gradients(self) -> None:
        """DeepSpeed calls it without ZeRO. Its own counts no norms but those of the first pipeline stage."""
        gradients = [_gradient(p) for p, _ in self._placed]
        counted = [
            g
            for g, (_, place) in zip(gradients, self._placed, strict=True)
            if not place.tied_copy and (place.sharded or self.mesh.tp_rank == 0)
        ]
        total = torch.stack(torch._foreach_norm(counted)).square().sum() if counted else self._zero()
        dist.all_reduce(total, group=self.mesh.model_group)
        self._global_grad_norm = total.sqrt()
        clip = self.gradient_clipping()
        if clip > 0:
            torch._foreach_mul_(gradients, (clip / (self._global_grad_norm + 1e-6)).clamp(max=1.0))

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self.device)

    # -------------------------------------------------------------------------------- words between ranks

    def agree(self, flag: bool) -> bool:
        """Whether every rank says so. A collective, on the hosts."""
        votes = torch.tensor(int(flag))
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.mesh.control_group)
        return bool(votes)

    def from_rank_0(self, text: str) -> str:
        """Rank 0's text, on every rank. A collective, on the hosts."""
        box = [text]
        dist.broadcast_object_list(box, src=0, group=self.mesh.control_group)
        return box[0]

    # --------------------------------------------------------------------------------------------- shards

    def shards(self) -> tuple[OwnedShard, ...]:
        """The parts of the fp32 masters that this rank owns, in canonical order. They stay valid."""
        return self._shards

    @torch.no_grad()
    def refresh(self, predicted: bool = False) -> None:
        """Masters were overwritten in place: make the next forward use them. Every rank must call it.

        predicted: so was what `predicted` gives: use that.
        """
        if self.zero_optimization():
            self.optimizer.update_lp_params()

    @property
    def predicts(self) -> str | None:
        """How the low-precision weights are predicted on which the next steps begin; None without ACCO."""
        return None

    @property
    def is_ahead(self) -> bool:
        """Of a settled engine: whether the next steps begin on such predicted weights, and not on the masters."""
        return False

    def predicted(self, shard: OwnedShard) -> dict[str, Tensor]:
        """Views of them, flat, in the shard's order."""
        return {}

    def close(self) -> None:
        """Release hooks and buffers. The process groups stay."""
        self.destroy()
        RotaryEmbedding.forward.cache_clear()  # class-wide, it would keep the last models, and so their groups


_TIED = ("embedding.word_embeddings.weight", "output_layer.weight")


def _gradient(parameter: Any) -> Tensor:
    """The accumulated gradient: in fp32 beside the parameter where DeepSpeed keeps it there."""
    wide = getattr(parameter, "_hp_grad", None)
    return parameter.grad if wide is None else wide


def build_engine(
    run: RunConfig, parallel: ParallelConfig, deepspeed_block: dict[str, Any], timeout_s: float = 600.0
) -> GeoEngine:
    """Join the worker and build its engine. All weights are zero until shards() are written and refresh() is called.

    deepspeed_block: the run's `deepspeed`, with the worker's keys laid over it. timeout_s: of every collective but
    those of ACCO's optimizer, which has its own. Raises ConfigError.
    """
    from geotrain.inner.acco_engine import AccoEngine  # which is a GeoEngine

    if not isinstance(run.model.config, dict):
        raise TypeError("run.model.config must be inline: load the run with geotrain.config.load_run")
    architecture = architecture_from_hf(run.model.config)
    sequence_length, bf16 = run.data.sequence_length, checks.trains_in_bf16(deepspeed_block)
    platform.choose_queues(parallel.tensor, overlaps_steps=run.acco is not None)
    ranks = layout.join(timeout_s)
    dp = checks.check_layout(architecture, parallel, ranks, deepspeed_block, sequence_length)
    if run.acco is not None:
        check_acco(run.acco, deepspeed_block, checks.accumulation_steps(deepspeed_block, dp))
    mesh, settings = layout.initialize(parallel, timeout_s), checks.adamw_settings(deepspeed_block)
    offloaded = "offload_optimizer" in deepspeed_block.get("zero_optimization", {})
    with platform.quiet_construction():
        model = build_model(architecture, parallel, mesh, sequence_length, bf16, run.model.recompute, run.seed)
        placed = placements(model, architecture, parallel, mesh)
        optimizer = build_adamw(parameter_groups(placed, settings["weight_decay"]), settings, offloaded)
        config = _completed(deepspeed_block, sum(place.numel for _, place in placed))
        parts = (model, optimizer, config, mesh, placed, architecture, sequence_length)
        return GeoEngine(*parts) if run.acco is None else AccoEngine(*parts, acco=run.acco)


def _completed(deepspeed_block: dict[str, Any], parameters: int) -> dict[str, Any]:
    """The user's block with what this engine needs; what the user states wins where both can work.

    parameters: held by this rank.
    """
    config = copy.deepcopy(deepspeed_block)
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    config.setdefault("timers", {"throughput": {"enabled": False}})  # it waits for the device at each micro-batch
    if checks.trains_in_bf16(config):
        config["bf16"]["immediate_grad_update"] = True  # the schedule, not the engine, runs backward
    stage = checks.zero_stage(config)
    if stage == 1:
        config["zero_optimization"]["overlap_comm"] = False  # one reduction a step, after the schedule
    if stage > 0:  # DeepSpeed allocates the bucket whole, however small the model
        bucket = checks.reduction_bucket(config, parameters)
        config["zero_optimization"].setdefault("reduce_bucket_size", bucket)
    return config
