"""An export has a run's newest weights, whether its servers run, were killed or have ended, and says which."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from geotrain.commands.export import about, export_run, in_words
from geotrain.parameters.hf_checkpoint import read_checkpoint
from tests.support.process_trees import until
from tests.support.server_processes import Site

JOBS, NAME = 6, "model.embed_tokens.weight"


def exported(site: Site, out: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    said = export_run(site.folder, out, "float32")
    return said, dict(read_checkpoint(out)[1])


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("shards", [0, 2])
def test_the_newest_weights_are_exported(tmp_path: Path, shards: int) -> None:
    """Killed: what the journal has beyond the snapshot is in them, and what is read stays as it is, to the byte."""
    (folder := tmp_path / "run").mkdir()
    (folder / "servers").symlink_to(folder)
    site = Site(folder, train_samples=400, regions={"eu": ("a",)}, every_minutes=60.0, shards=shards)
    for name in site.processes:
        site.serve(name)
    worker = site.worker("a")
    worker.join()
    first, begun = exported(site, tmp_path / "first")
    assert first["samples"] == 0 and first["version"] == 0

    def train() -> int:
        for _ in range(JOBS):
            worker.train(worker.lease())
        committed: list[int] = []

        def rests() -> bool:
            committed.append(site.status("global")["committed_samples"])
            time.sleep(0.3)
            return site.status("global")["committed_samples"] == committed[-1] > 0

        assert until(rests)
        return committed[-1]

    trained = train()
    said, living = exported(site, tmp_path / "living")
    assert said["samples"] == trained and 0 <= said["age_s"] < 60
    assert not torch.equal(living[NAME], begun[NAME])
    more = train()
    assert more > trained
    site.kill()
    torn = max((folder / "global/journal").iterdir())
    torn.write_bytes(torn.read_bytes() + b"a record that was cut off")
    before = files(folder)
    said, killed = exported(site, tmp_path / "killed")
    assert files(folder) == before
    assert said["samples"] == more and said["version"] > 0
    assert not torch.equal(killed[NAME], living[NAME])
    noted = about(tmp_path / "killed")
    assert noted["samples"] == more and in_words(noted).startswith(f"version {noted['version']}, {more} samples, ")
    for name in site.processes:
        site.serve(name, resume=True)
    assert until(lambda: all(shard["up"] for shard in site.status("global")["shards"]))
    said, again = exported(site, tmp_path / "again")
    assert said["samples"] == more
    for name, tensor in again.items():
        assert torch.equal(tensor, killed[name]), name
    worker.close()
    site.kill()
    assert json.loads((tmp_path / "again/.geotrain.json").read_text())["weights"]["samples"] == more
