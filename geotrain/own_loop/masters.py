"""Finds the fp32 masters that this rank owns of any model: plain, under DDP, under FSDP2, or in a DeepSpeed engine.

Nothing here imports DeepSpeed: what its engines put on parameters is recognized by its names (0.19).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _NormBase

from geotrain.config import ConfigError
from geotrain.inner.runtime.shards import OwnedShard, replica_parts
from geotrain.own_loop.save import fingerprint, named_tensors
from geotrain.parameters.parameter_map import ParameterMap, StridedSlice, clip_runs


class Masters:
    """The fp32 masters of a model that this rank owns, by canonical address.

    model: a module, or a DeepSpeed engine. rank, world_size: of the worker; its ranks hold copies of whatever is not
    sharded. Collective where frozen parameters are sharded. Raises ConfigError: names or shapes are not those of the
    parameter map, what is not trained is not what the run's file of weights was written with, or there are no fp32
    masters that can be reached.
    """

    def __init__(self, parameter_map: ParameterMap, model: nn.Module, rank: int, world_size: int) -> None:
        self.module = module_of(model)
        self.engine: Any = None if self.module is model else model
        self._rank, self._world_size = rank, world_size
        found = dict(named_tensors(self.module))
        self.named = self._check_names(parameter_map, found)
        # What is not trained: a tensor, its version, its fingerprint. Only a new version is looked at again.
        self._fixed: dict[str, tuple[Tensor, int, int]] = {
            name: (tensor, tensor._version, fingerprint(tensor))
            for name, tensor in found.items()
            if name not in self.named
        }
        self._check_fixed(parameter_map.fixed)
        self.shards: list[OwnedShard] = []
        # Of each parameter that has masters here: its name, a view of them as they lie now, and as they lay at first.
        self._places: list[tuple[str, Callable[[], Tensor], tuple[int, torch.Size]]] = []
        for name, parameter in self.named.items():
            self.shards += self._owned(name, parameter)
        spans = sorted((at, at + view().nbytes, name) for name, view, (at, _) in self._places)
        for (_, end, one), (begin, _, other) in pairwise(spans):
            if begin < end:
                raise ConfigError(
                    f"parameters {one} and {other} share memory, and each would overwrite the other: tie them as one "
                    "parameter of two names, or copy one"
                )
        # Where ZeRO offloads masters, they and their deltas stay on the host.
        self.device = self.shards[0].master.device if self.shards else next(iter(self.named.values())).device

    @property
    def zero_3(self) -> bool:
        """Whether the engine shards parameters, too (ZeRO 3)."""
        return self.engine is not None and hasattr(self.engine.optimizer, "fp32_partitioned_groups_flat")

    @torch.no_grad()
    def refresh(self, changed: Collection[str] | None = None) -> None:
        """Make the next forward use masters that were overwritten. Collective with ZeRO; elsewhere parameters are
        their own masters. changed: of these parameters, on any rank; None: of all."""
        self._reshard()
        optimizer: Any = None if self.engine is None else self.engine.optimizer
        if hasattr(optimizer, "update_lp_params"):
            # Here, because it imports DeepSpeed, which others need not have.
            from geotrain.inner.zero.of_deepspeed import update_weights

            update_weights(optimizer, [self.named[name] for name in (self.named if changed is None else changed)])
        elif self.zero_3:
            optimizer._partition_all_parameters()
            for group in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            if optimizer.persistent_parameters:  # small ones, of which every rank keeps the whole
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def check(self) -> None:
        """Raise RuntimeError, with its name, for a parameter or a buffer that is not what it was when this was made:
        answers would be written to where the model no longer looks, or regions would train different models.
        Collective where frozen parameters are sharded."""
        self._reshard()
        now = dict(named_tensors(self.module))
        known = self.named | {name: tensor for name, (tensor, _, _) in self._fixed.items()}
        for name in sorted(now.keys() ^ known.keys()):
            raise _changed(name, "added" if name in now else "removed")
        for name, parameter in self.named.items():
            if now[name] is not parameter:
                raise _changed(name, "replaced")
        for name, view, first in self._places:
            if (view().data_ptr(), view().shape) != first:
                raise _changed(name, "moved or cut")
        for name, (tensor, version, checksum) in self._fixed.items():
            if now[name].requires_grad and tensor.numel():
                raise _changed(name, "unfrozen, though the run does not train it,")
            if now[name] is not tensor or tensor._version != version:
                if fingerprint(now[name]) != checksum:
                    raise _changed(name, "changed, though it is not exchanged,")
                self._fixed[name] = now[name], now[name]._version, checksum

    # -- inside

    def _reshard(self) -> None:
        """Let FSDP2 forget what it has gathered, which a forward pass outside of training leaves: the next one would
        use weights from before the answer."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _check_names(self, parameter_map: ParameterMap, found: dict[str, Tensor]) -> dict[str, nn.Parameter]:
        """Check names and shapes against the run's; returns the parameters in the parameter map's order."""
        known = {p.name: p.shape for p in parameter_map.parameters}
        named = {name: p for name, p in found.items() if isinstance(p, nn.Parameter) and 0 not in shape_of(p)}
        for name, parameter in named.items():
            if name not in known and parameter.requires_grad:
                raise ConfigError(
                    f"the model's parameter {name} is not one of the run's (model.weights or model.config); give the "
                    "run the same model, or set requires_grad to False where it is not trained"
                )
        for name, shape in known.items():
            if name not in named:
                raise ConfigError(
                    f"the model has no parameter {name}, which the run's has (model.weights or model.config)"
                )
            if (here := shape_of(named[name])) != shape:
                raise ConfigError(f"the model's parameter {name} has shape {list(here)}, the run's {list(shape)}")
        return {name: named[name] for name in known}

    def _check_fixed(self, expected: Mapping[str, int]) -> None:
        """Check what is not trained against what the run's file of weights was written with."""
        for name, module in self.module.named_modules():
            if isinstance(module, _NormBase) and module.training and module.track_running_stats:
                raise ConfigError(
                    f"{name or 'the model'} is a {type(module).__name__}: its running means are not exchanged, so "
                    "each region would have its own, and the export none; use GroupNorm or LayerNorm, "
                    "track_running_stats=False, or freeze it in eval mode"
                )
        here = {name: checksum for name, (_, _, checksum) in self._fixed.items()}
        for name in sorted(here.keys() | expected.keys()):
            if here.get(name) != expected.get(name):
                raise ConfigError(
                    f"{name}, a frozen parameter or a buffer, is not what the run's model.weights was written with: "
                    "regions must have the same; load the same values in all, or write the file by "
                    "geotrain.save_parameters from this model, and give it to all"
                )

    def _owned(self, name: str, parameter: nn.Parameter) -> Iterator[OwnedShard]:
        """Yield this rank's shards of a parameter."""
        if self.engine is None and (hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")):
            raise ConfigError(f"parameter {name} belongs to a DeepSpeed engine: give OuterLoop the engine as model")
        if hasattr(parameter, "ds_id"):
            found = self._of_zero_3(name, parameter)
        elif hasattr(parameter, "_hp_mapping"):
            found = self._of_zero_1_and_2(name, parameter)
        elif isinstance(parameter, DTensor):
            found = self._of_dtensor(name, parameter)
        else:
            runs = (StridedSlice(0, parameter.numel(), parameter=name),)
            found = runs, lambda: parameter.detach(), self._rank, self._world_size
        if found is None:  # wholly other ranks'
            return
        runs, view, replica, replicas = found
        local = view()
        if local.dtype != torch.float32 or not local.is_contiguous():
            raise ConfigError(
                f"parameter {name} is {str(local.dtype).removeprefix('torch.')}"
                f"{'' if local.is_contiguous() else ', not contiguous (channels_last?)'}: its fp32 masters cannot be "
                "reached; keep it fp32 and contiguous, and compute in bf16 by autocast, FSDP2's MixedPrecisionPolicy "
                "or ZeRO; images may be channels_last, parameters not"
            )
        self._places.append((name, view, (local.data_ptr(), local.shape)))
        flat = local.view(-1)
        for begin, end, mine in replica_parts(flat.numel(), replica, replicas):
            clipped = tuple(clip_runs(runs, begin, end))
            yield OwnedShard(clipped, flat[begin:end], mine, parameter, begin)

    def _of_dtensor(self, name: str, parameter: DTensor) -> Any:
        """A parameter of FSDP2 and its like: torch says which box of it lies here."""
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh.size() != self._world_size:
            raise ConfigError(
                f"parameter {name} lies on a mesh of {mesh.size()} ranks, the worker has {self._world_size}; "
                "use one mesh for all ranks"
            )
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        replica, replicas = 0, 1
        for place, index, size in zip(placements, coordinate, mesh.shape, strict=True):
            if type(place) is Replicate:
                replica, replicas = replica * size + index, replicas * size
            elif type(place) is not Shard:
                raise ConfigError(f"parameter {name} is placed as {place}: only Shard and Replicate are understood")
        shape, start = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        if 0 in shape:
            return None
        return (
            box_runs(name, tuple(parameter.shape), list(zip(start, shape, strict=True))),
            lambda: cast(DTensor, parameter.detach()).to_local(),
            replica,
            replicas,
        )

    def _of_zero_1_and_2(self, name: str, parameter: nn.Parameter) -> Any:
        """A parameter under ZeRO 1 or 2: DeepSpeed links it to its part of this rank's fp32 partition, if it has
        one."""
        link: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if link is None:
            return None
        start = link.lp_fragment_address.start
        runs = (StridedSlice(start, link.lp_fragment_address.numel, parameter=name),)
        return runs, lambda: parameter._hp_mapping.get_hp_fragment().detach(), 0, 1  # type: ignore[attr-defined]

    def _of_zero_3(self, name: str, parameter: Any) -> Any:
        """A parameter under ZeRO 3: a rank's part of it lies in one of its flat fp32 groups; the last is padded."""
        optimizer: Any = self.engine.optimizer
        if getattr(optimizer, "swap_optimizer", False):
            raise ConfigError(
                f"parameter {name}: its masters are on NVMe, which is not supported; offload to the CPU"
            )
        group, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = self._rank * numel
        length = min(numel, parameter.ds_numel - start)
        if length <= 0:
            return None

        def view() -> Tensor:
            return optimizer.fp32_partitioned_groups_flat[group].detach().narrow(0, offset, length)

        return (StridedSlice(start, length, parameter=name),), view, 0, 1


def box_runs(name: str, shape: tuple[int, ...], box: list[tuple[int, int]]) -> tuple[StridedSlice, ...]:
    """List the runs of a box of a parameter, read flat. box: (start, length) in each dimension."""
    # Dimensions behind the last one that is cut are whole: together they are one row's elements.
    cut = max((d for d, (_, length) in enumerate(box) if length != shape[d]), default=0) if shape else 0
    inner = prod(shape[cut + 1 :])
    row = shape[cut] * inner if shape else 1
    starts = [0]  # of the rows, over the dimensions in front of it
    for size, (start, length) in zip(shape[:cut], box[:cut], strict=True):
        starts = [at * size + i for at in starts for i in range(start, start + length)]
    first, length = (box[cut][0] * inner, box[cut][1] * inner) if shape else (0, 1)
    if len(starts) > 1 and starts == list(range(starts[0], starts[0] + len(starts))):  # neighbours: one strided run
        return (StridedSlice(starts[0] * row + first, length, row, len(starts), name),)
    return tuple(StridedSlice(at * row + first, length, parameter=name) for at in starts)


def _changed(name: str, how: str) -> RuntimeError:
    return RuntimeError(
        f"{name} was {how} after the OuterLoop was made (by model.to, load_state_dict(assign=True), requires_grad_, "
        "a norm that tracks means or the like): make the OuterLoop after that"
    )


def module_of(model: nn.Module) -> nn.Module:
    """Return the module itself, or a DeepSpeed engine's. Raises ConfigError: it is neither."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: a {type(model).__name__}; give the model itself, or the DeepSpeed engine, since buffers and "
            "frozen parameters are compared, too"
        )
    engine: Any = model
    module = engine.module if hasattr(engine, "module") and hasattr(engine, "optimizer") else model
    if lacks := next((name for name, tensor in named_tensors(module) if tensor.is_meta), None):
        raise ConfigError(f"{lacks} is on the meta device, where it has no values: give the model its values before")
    return module


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
