"""The model of a user's loop stays what the run knows: its parameters' places, and what is not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import geotrain
from geotrain.config import ConfigError
from geotrain.own_loop.masters import Masters
from geotrain.parameters.parameter_file import read_fixed, read_shapes
from geotrain.parameters.parameter_map import ParameterMap, any_parameters
from tests.support.inner_worlds import run_world


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def mixed() -> Any:
    """A model with a frozen layer and buffers."""
    model = nn.Sequential(*network(), nn.Linear(2, 2).requires_grad_(False))
    model.register_buffer("scale", torch.ones(2))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    return model


def known(model: nn.Module, folder: Path) -> ParameterMap:
    """The parameter map of a run that begins with this model."""
    geotrain.save_parameters(folder / "model.safetensors", model)
    shapes, fixed = read_shapes(folder / "model.safetensors"), read_fixed(folder / "model.safetensors")
    return ParameterMap(any_parameters(shapes), fixed=fixed)


def replace(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def move(model: Any) -> None:
    model[2].weight.data = model[2].weight.data.clone()


def shrink(model: Any) -> None:
    model[0].bias.data = model[0].bias.data[:2]


def assign(model: Any) -> None:
    model.load_state_dict(model.state_dict(), assign=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (move, r"^2\.weight was moved or cut after the OuterLoop was made"),
        (shrink, r"^0\.bias was moved or cut"),
        (replace, r"^0\.weight was replaced"),
        (assign, r"^0\.(weight|bias) was replaced"),
        (lambda model: model.append(nn.Linear(2, 2)), r"^4\.bias was added"),
        (lambda model: delattr(model, "scale"), r"^scale was removed"),
        (lambda model: model[3].requires_grad_(), r"^3\.weight was unfrozen"),
        (lambda model: model[3].weight.add_(1), r"^3\.weight was changed, though it is not exchanged"),
        (lambda model: model.scale.mul_(2), r"^scale was changed"),
        (lambda model: setattr(model, "scale", torch.zeros(2)), r"^scale was changed"),
    ],
)
def test_a_model_that_changes_after_the_start_is_an_error(tmp_path: Path, change: Any, words: str) -> None:
    model = mixed()
    masters = Masters(known(model, tmp_path), model, 0, 1)
    with torch.no_grad():
        model[0].weight.add_(1)  # it is trained
        model.scale.mul_(1)  # the same values
        model.cache.mul_(2)  # in no state_dict
    masters.check()
    if change in (move, shrink, replace, assign):
        change(model)
    else:
        torch.no_grad()(change)(model)
    with pytest.raises(RuntimeError, match=words):
        masters.check()


def test_parameters_that_share_memory_or_have_no_values_are_refused(tmp_path: Path) -> None:
    model = network()
    parameter_map, values = known(model, tmp_path), torch.zeros(17)
    model[0].weight.data, model[2].weight.data = values[:15].view(5, 3), values[7:].view(2, 5)
    with pytest.raises(ConfigError, match=r"0\.weight and 2\.weight share memory"):
        Masters(parameter_map, model, 0, 1)
    with pytest.raises(ConfigError, match=r"0\.weight is on the meta device"):
        Masters(parameter_map, network().to("meta"), 0, 1)


def test_what_is_not_trained_is_the_same_in_all_regions(tmp_path: Path) -> None:
    model = mixed()
    parameter_map = known(model, tmp_path)
    assert sorted(parameter_map.fixed) == ["3.bias", "3.weight", "scale"]
    model[3].to(torch.bfloat16)
    assert Masters(parameter_map, model, 0, 1).shards  # one region may hold it in fewer bits
    with torch.no_grad():
        model[3].weight.add_(0.1)
    for other, name in (
        (model, "3.weight"),
        (network(), "3.bias"),
        (nn.Sequential(*model[:3], model[3]), "3.weight"),
    ):
        with pytest.raises(ConfigError, match=rf"{name}, a frozen parameter or a buffer, is not what the run's"):
            Masters(parameter_map, other, 0, 1)
    assert known(model, tmp_path).digest != parameter_map.digest  # by which servers refuse another region
    tracks = nn.Sequential(*network(), nn.BatchNorm1d(2, affine=False))
    with pytest.raises(ConfigError, match=r"3 is a BatchNorm1d: its running means are not exchanged.*GroupNorm"):
        Masters(known(network(), tmp_path), tracks, 0, 1)


def wrapped(folder: str) -> list[str]:
    """Under FSDP2, and compiled over DDP: what is written to the masters is what the next forward pass uses, though
    a pass outside of training has gathered the parameters; no wrapper is taken for a change. Gives what failed."""
    torch.distributed.init_process_group("gloo")
    rank, failed, x = torch.distributed.get_rank(), [], torch.ones(4, 3)
    parameter_map = known(network(), Path(folder) / str(rank))
    buffered = network()
    buffered.register_buffer("scale", torch.ones(2))  # DDP sends it to all ranks before each pass
    of_buffered = known(buffered, Path(folder) / str(rank))
    forms: dict[str, tuple[Any, ParameterMap]] = {
        "fsdp2": (fully_shard(network()), parameter_map),
        "ddp": (torch.compile(DistributedDataParallel(buffered), backend="eager"), of_buffered),
    }
    for form, (model, known_map) in forms.items():
        masters = Masters(known_map, model, rank, 2)
        adam = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(x).sum().backward()
            adam.step()
            adam.zero_grad()
            with torch.no_grad():
                model(x)
            masters.check()
            with torch.no_grad():
                for shard in masters.shards:
                    shard.master.zero_()
            masters.refresh()
            if model(x).any():
                failed.append(form)
            model(x).sum().backward()
    return failed


def test_wrapped_models_use_what_is_written_to_their_masters(tmp_path: Path) -> None:
    assert run_world(2, wrapped, str(tmp_path)) == [[], []]


def test_lightnings_fabric_changes_no_name(tmp_path: Path) -> None:
    """It holds a module twice: as it was, and as it is wrapped, by DDP here."""
    model, fabric = mixed(), nn.Module()
    fabric._forward_module, fabric._original_module = nn.ModuleDict({"module": model}), model
    (tmp_path / "fabric").mkdir()
    wrapped, plain = known(fabric, tmp_path / "fabric"), known(model, tmp_path)
    assert wrapped.digest == plain.digest and wrapped.fixed == plain.fixed
