"""A run begun anew from an older snapshot of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.commands.export import export_run
from geotrain.commands.rollback import roll_back, snapshots_of
from geotrain.config import ConfigError, load_run
from geotrain.net.storage.snapshots import checked_meta
from geotrain.parameters.dcp import read_dcp
from tests.support.own_loops import REGIONS, TRAINER, OwnRun, own_runs
from tests.support.small_runs import prepare_text, run_of, status, weights


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., OwnRun]]:
    with own_runs(tmp_path) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_from_an_older_snapshot_without_the_data_since(
    tmp_path: Path, start: Callable[..., OwnRun]
) -> None:
    prepare_text(tmp_path)
    checkpoint = {"keep": 100, "every_minutes": 0.02}
    slow = {region: {"min_step_s": 0.2} for region in REGIONS}

    def played(name: str, samples: int, resume: bool = False, **keys: Any) -> Path:
        run = start(name, run_of(tmp_path, samples, {"rule": {"name": "halos"}}, **keys), {} if resume else slow)
        run.serve_all(resume)
        for region in REGIONS:
            run.work(region, TRAINER, *(["resume"] if resume else []))
        run.ended()
        return run.file

    first = played("run", 160, checkpoint=checkpoint)
    before, folder = weights(first), first.parent / "out"
    listed = snapshots_of(folder)
    older = next(each for each in listed if 0 < each["committed_samples"] < 160)
    known = older["committed_samples"]
    export_run(folder, tmp_path / "dcp", "float32", as_dcp=True)
    architecture = load_run(first).architecture
    assert all(torch.equal(value, before[name]) for name, value in read_dcp(tmp_path / "dcp", architecture))
    for number, out, told in (
        (999, tmp_path / "new/out", r"--to 999: .* has snapshots 1, "),
        (older["snapshot"], tmp_path / "data", r"--out .*data exists"),
    ):
        with pytest.raises(ConfigError, match=told):
            roll_back(folder, number, out)
    (tmp_path / "new").mkdir()
    assert roll_back(folder, older["snapshot"], tmp_path / "new/out") == 160 - known
    source = folder / "servers/global/snapshots" / f"{older['snapshot']:08d}"
    for name in checked_meta((source / "meta.json").read_bytes())["files"]:
        copied = tmp_path / "new/out/servers/global/snapshots/00000001" / f"{name}.safetensors"
        assert copied.read_bytes() == (source / copied.name).read_bytes()
    last = status(played("new", 320, resume=True), "global")
    assert last["complete"] and last["committed_samples"] == known + 160
    aside = [n for begin, end in last["set_aside"] for n in range(begin, end + 1)]
    assert len(set(aside)) == len(aside) == 160 - known and max(aside) < 160
    assert 0 < last["effective"] <= 1
    assert status(first, "global")["committed_samples"] == 160  # as it was
    assert all(torch.equal(value, before[name]) for name, value in weights(first).items())


def test_a_run_that_was_killed_or_never_was_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.json"):
        snapshots_of(tmp_path)
