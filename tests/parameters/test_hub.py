"""Checkpoints go to a hub and come from it, by its real client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.config import ConfigError
from geotrain.parameters.hf_checkpoint import read_checkpoint
from geotrain.parameters.hf_export import write_checkpoint
from geotrain.parameters.hub import repository
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import canonical_parameters
from tests.support.hub import hub_for_tests
from tests.support.inner_worlds import LLAMA, architecture

UPLOAD = "import sys\nfrom pathlib import Path\nfrom geotrain.parameters.hub import upload\n"
UPLOAD += "print(upload(Path(sys.argv[1]), sys.argv[2], 'of a test'))"
START = """
import json, sys, torch
from geotrain.config import load_run
from geotrain.parameters.hf_checkpoint import read_start
torch.save(dict(read_start(load_run(sys.argv[1]))), sys.argv[2])
"""


@pytest.mark.parametrize(
    ("url", "read"),
    [("hf://me/mine", ("me/mine", None)), ("hf://an-org/a.b_c@refs/pr/1", ("an-org/a.b_c", "refs/pr/1"))],
)
def test_a_repositorys_name(url: str, read: tuple[str, str | None]) -> None:
    assert repository(url) == read


@pytest.mark.parametrize("url", ["hf://mine", "hf://a/b/c", "hf://a/b@", "hf:/a/b", "hf://a b/c"])
def test_what_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="write hf://OWNER/NAME"):
        repository(url)


def test_a_checkpoint_goes_there_and_starts_a_run(tmp_path: Path) -> None:
    original = {p.name: initial_tensor(p, 1) for p in canonical_parameters(architecture(LLAMA))}
    write_checkpoint(original.items(), LLAMA, tmp_path / "out", None, "float32")
    run: dict[str, Any] = {
        "name": "r", "model": {"config": LLAMA, "init_from": "hf://me/mine"},
        "data": {"train": "none", "sequence_length": 16, "train_samples": 8},
        "deepspeed": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run))
    with hub_for_tests() as hub:
        refused = hub.run(tmp_path, "-c", UPLOAD, str(tmp_path / "out"), "hf://me/mine", token="hf_wrong")
        assert "HubError" in refused.stderr and "HF_TOKEN" in refused.stderr and not hub.repositories
        done = hub.run(tmp_path, "-c", UPLOAD, str(tmp_path / "out"), "hf://me/mine")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"{hub.url}/me/mine/commit/{'1' * 40}"
        assert hub.made == {"me/mine": True}  # private
        sent = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name[0] != "."}
        assert hub.repositories["me/mine"] == sent and list(hub.objects.values()) == [sent["model.safetensors"]]
        done = hub.run(tmp_path, "-c", START, str(tmp_path / "run.json"), str(tmp_path / "start.pt"))
        assert done.returncode == 0, done.stderr
        hub.repositories.clear()
        (tmp_path / "hf").rename(tmp_path / "other")  # the client would take what is in its cache
        gone = hub.run(tmp_path, "-c", START, str(tmp_path / "run.json"), str(tmp_path / "start.pt"))
        assert "ConfigError: model.init_from: hf://me/mine: " in gone.stderr and "HF_TOKEN" in gone.stderr
    read = torch.load(tmp_path / "start.pt")
    assert read.keys() == dict(read_checkpoint(tmp_path / "out")[1]).keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in original.items())
