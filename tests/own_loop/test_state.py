"""What a user's loop saves for the next life of its worker: whole, the newest, and its own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from geotrain.checkpoint.folders import CheckpointError
from geotrain.config import ConfigError
from geotrain.own_loop.rank import TorchRank
from geotrain.own_loop.state import LoopCheckpoints
from tests.support.inner_worlds import run_world


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def trained(model: nn.Module, steps: int = 1) -> torch.optim.Optimizer:
    adam = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        adam.step()
    return adam


def checkpoints(folder: Path, model: str = "d", **state: Any) -> LoopCheckpoints:
    return LoopCheckpoints(folder, TorchRank(), state, model, keep=2)


def moment(adam: torch.optim.Optimizer) -> torch.Tensor:
    return adam.state_dict()["state"][0]["exp_avg"]


def test_the_state_saved_last_is_loaded_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    model = network()
    for job in (101, 102, 3):  # the last by a region that had lost its server's state
        adam = trained(model, job % 9)
        assert checkpoints(tmp_path, adam=adam).save(job) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-00000003", "job-00000102"]
    (tmp_path / "job-00000004.tmp").mkdir()  # killed while it was written
    new = torch.optim.AdamW(model.parameters())
    assert checkpoints(tmp_path, adam=new).load() == 3 and torch.equal(moment(new), moment(adam))
    file, random = tmp_path / "job-00000003/rank-00000.pt", np.random.default_rng(1)
    whole = file.read_bytes()
    for place in random.integers(0, len(whole), 40).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(random.integers(0, 8))
        file.write_bytes(damaged)
        assert checkpoints(tmp_path, adam=new).load() == 102, place
    assert checkpoints(tmp_path / "elsewhere", adam=new).load() == 0 and checkpoints(tmp_path).load() == 0


def test_another_runs_state_is_left_as_it_is(tmp_path: Path) -> None:
    for origin in ("one", "one", ""):  # "": it is not known yet
        mine = checkpoints(tmp_path, adam=trained(network()))
        mine.claim(origin)
        assert mine.save(3) == ""
        with pytest.raises(ConfigError, match="job-00000003: is of another run") if origin else nullcontext():
            checkpoints(tmp_path, adam=trained(network())).claim("two")
    checkpoints(tmp_path).claim("two")  # that saves nothing


def as_one_of_two(folder: str) -> str:
    torch.distributed.init_process_group("gloo")
    mine = Path(folder) / f"host-{torch.distributed.get_rank()}"  # hosts need not share a file system
    assert checkpoints(mine, adam=trained(network())).save(5) == ""
    assert checkpoints(mine, adam=torch.optim.AdamW(network().parameters())).load() == 5
    return sorted(path.name for path in (mine / "job-00000005").iterdir())[-1]


@pytest.mark.parametrize(
    ("model", "state", "words"),
    [
        ("another", {"adam": torch.optim.AdamW}, "'job-00000005' is of another model"),
        ("d", {"adam": torch.optim.SGD}, r"holds the state of adam \(AdamW\), not of adam \(SGD\): give OuterLoop"),
        ("d", {"optimizer": torch.optim.AdamW}, "a `state` of the same names and types, or resume=False"),
        ("d", {"adam": torch.optim.AdamW}, "resume with the layout {'ranks': 2}, or begin without"),
    ],
)
def test_a_state_that_does_not_go_with_the_loop_is_refused(
    two_ranks: Path, model: str, state: dict[str, Any], words: str
) -> None:
    parts = {name: kind(network().parameters()) for name, kind in state.items()}
    with pytest.raises(CheckpointError, match=words):
        checkpoints(two_ranks, model, **parts).load()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    assert run_world(2, as_one_of_two, str(folder)) == ["rank-00000.pt", "rank-00001.pt"]
    for path in (folder / "host-1").glob("*/*.pt"):  # as hosts have them that do share a folder
        path.rename(folder / "host-0" / path.parent.name / path.name)
    return folder / "host-0"


class Odd:
    """Has a state that torch does not load without running what it names."""

    def state_dict(self) -> dict[str, Any]:
        return {"itself": self}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_state_that_could_not_be_read_back_is_told_at_the_first_save(tmp_path: Path) -> None:
    adam = trained(network())
    told = r"^[^\n]*rank 0: state\['odd'\], a Odd: Unsupported global: \S+ \S+Odd was not[^\n]*resume=False[^\n]*$"
    with pytest.raises(CheckpointError, match=told):
        checkpoints(tmp_path, adam=adam, odd=Odd()).save(1)
    assert not list(tmp_path.iterdir())


def test_a_part_that_does_not_take_its_state_is_named(tmp_path: Path) -> None:
    model = network()
    checkpoints(tmp_path, first=trained(model), second=trained(model)).save(1)
    other = torch.optim.AdamW([*model.parameters()][:2])
    told = r"rank 0: state\['second'\], a AdamW: loaded state dict contains a parameter group that does.*resume=F"
    with pytest.raises(CheckpointError, match=told):
        checkpoints(tmp_path, first=trained(model), second=other).load()
