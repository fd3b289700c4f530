"""Parameters of a model of the user's own: their names, shapes, places, and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import geotrain
from geotrain.common.files import OutputError
from geotrain.config import ConfigError
from geotrain.net.server.first_weights import initial_weights
from geotrain.own_loop.masters import Masters, box_runs
from geotrain.parameters.parameter_file import read_shapes
from geotrain.parameters.parameter_map import ParameterMap, any_parameters, parameter_map_of
from tests.support.inner_worlds import at, run_world
from tests.support.own_network import network, write_run


def test_names_shapes_and_types_are_compared(tmp_path: Path) -> None:
    parameter_map = parameter_map_of(write_run(tmp_path))
    cases: list[tuple[Any, str]] = [
        (nn.Sequential(nn.Linear(3, 5)), r"has no parameter 2\.bias"),
        (nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 2)), r"3\.weight is not one of"),
        (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), r"0\.bias has shape \[4\], the run's \[5\]"),
        (network().to(torch.bfloat16), r"0\.bias is bfloat16: its fp32 masters cannot be reached"),
        (network().named_parameters(), "model: a generator; give the model itself"),
    ]
    for model, message in cases:
        with pytest.raises(ConfigError, match=message):
            Masters(parameter_map, model, 0, 1)
    wrapped = nn.ModuleDict({"module": torch.compile(network(), backend="eager")})  # as DDP names what is compiled
    assert Masters(parameter_map, wrapped, 0, 1).shards
    images = nn.Sequential(nn.Conv2d(3, 4, 2)).to(memory_format=torch.channels_last)
    with pytest.raises(
        ConfigError, match=r"0\.weight is float32, not contiguous \(channels_last\?\): .* parameters not"
    ):
        Masters(ParameterMap(any_parameters({"0.weight": (4, 3, 2, 2), "0.bias": (4,)})), images, 0, 1)


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((6, 4), [(2, 3), (0, 4)]),
        ((6, 4), [(0, 6), (1, 2)]),
        ((6, 4), [(2, 3), (1, 2)]),
        ((3, 4, 5), [(1, 2), (1, 2), (0, 5)]),
        ((3, 4, 5), [(0, 3), (1, 2), (2, 2)]),
        ((7,), [(3, 2)]),
        ((), []),
    ],
)
def test_the_runs_of_a_box(shape: tuple[int, ...], box: list[tuple[int, int]]) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    part = whole[tuple(slice(start, start + length) for start, length in box)]
    found = torch.cat([at(whole.view(-1), run).reshape(-1) for run in box_runs("p", shape, box)])
    assert torch.equal(found, part.reshape(-1))


PLACEMENTS: list[Sequence[Any]] = [
    [Shard(0), Shard(0)],
    [Replicate(), Shard(1)],
    [Shard(1), Replicate()],
    [Shard(0), Shard(1)],
]


def chunks() -> Any:
    """Give, on 4 ranks, what each has of a [5, 6] parameter under each placement, and the sum of what is pushed."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(30.0).view(5, 6)
    found = []
    for placements in PLACEMENTS:
        model = nn.ParameterDict({"p": nn.Parameter(distribute_tensor(whole, mesh, placements))})
        assert isinstance(model["p"], DTensor)
        parameter_map = ParameterMap(any_parameters({"p": (5, 6)}))
        masters = Masters(parameter_map, model, torch.distributed.get_rank(), 4)
        pushed, held = torch.zeros(30), True
        for shard in masters.shards:
            values = shard.master.split([run.numel for run in shard.runs])
            for run, own in zip(shard.runs, values, strict=True):
                held &= torch.equal(at(whole.view(-1), run).reshape(-1), own)
                if shard.pushes:
                    at(pushed, run).add_(1)
        found.append((pushed, held))
    return found


def test_placements_say_what_lies_here_and_each_element_is_pushed_once() -> None:
    ranks = run_world(4, chunks)
    for number, placements in enumerate(PLACEMENTS):
        assert all(found[number][1] for found in ranks), placements
        assert torch.equal(sum(found[number][0] for found in ranks), torch.ones(30)), placements


def test_a_file_of_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    model = nn.Sequential(network(), nn.Linear(2, 2).requires_grad_(False), nn.BatchNorm1d(2).eval())
    geotrain.save_parameters(path, model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert read_shapes(path) == shapes and "2.running_mean" not in shapes and "1.weight" not in shapes
    whole = path.read_bytes()
    run = write_run(tmp_path)
    (vector,) = initial_weights(run, parameter_map := parameter_map_of(run)).values()
    assert all(torch.equal(t, network().get_parameter(name)) for name, t in parameter_map.split(0, vector))
    path.write_bytes(whole)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OutputError, match="cannot be written: No space left"):
            geotrain.save_parameters(path, network())
    assert path.read_bytes() == whole and {file.name for file in tmp_path.iterdir()} == {path.name, "run.json"}
    for damage in (whole[:-4], b"\xff" * 64, whole[:40], b""):
        path.write_bytes(damage)
        with pytest.raises(ConfigError, match="not a whole safetensors file"):
            read_shapes(path)
    with pytest.raises(OutputError, match="no parameter that requires a gradient"):
        geotrain.save_parameters(path, model[1])


def test_fragments_of_any_model() -> None:
    shapes = {"patch.weight": (4,), "blocks.0.w": (1,), "blocks.1.w": (2,), "blocks.2.w": (3,), "head.weight": (5,)}
    parameter_map = ParameterMap(any_parameters(shapes), layers_per_fragment=2)
    named = {fragment.name: [p.name for p in fragment.parameters] for fragment in parameter_map.fragments}
    assert named == {
        "layers-0": ["blocks.0.w", "blocks.2.w"],
        "layers-1": ["blocks.1.w"],
        "embedding": ["patch.weight"],
        "head": ["head.weight"],
    }
    with pytest.raises(ConfigError, match="has no layers"):
        ParameterMap(any_parameters({"weight": (4,)}), layers_per_fragment=1)
