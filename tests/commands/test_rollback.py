"""A run begun anew from an older snapshot of another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from geotrain.commands.export import export_run
from geotrain.commands.rollback import roll_back, snapshots_of
from geotrain.config import ConfigError, load_run
from geotrain.net.storage.snapshots import checked_meta
from geotrain.parameters.dcp import read_dcp
from tests.support.small_runs import launched, prepare_text, status, weights, write_files


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_from_an_older_snapshot_without_the_data_since(tmp_path: Path) -> None:
    prepare_text(tmp_path)
    checkpoint = {"keep": 100, "every_minutes": 0.02}
    rule = {"rule": {"name": "halos"}}
    files = write_files(tmp_path, "run", 160, {"eu": [1]}, rule, min_step_s=0.2, checkpoint=checkpoint)
    launched(files)
    listed = snapshots_of(tmp_path / "run")
    older = next(each for each in listed if 0 < each["committed_samples"] < 160)
    known, before = older["committed_samples"], weights(files[0])
    export_run(tmp_path / "run", tmp_path / "dcp", "float32", as_dcp=True)
    architecture = load_run(files[0]).architecture
    assert all(torch.equal(value, before[name]) for name, value in read_dcp(tmp_path / "dcp", architecture))
    for number, out, told in (
        (999, tmp_path / "new", r"--to 999: .* has snapshots 1, "),
        (older["snapshot"], tmp_path / "data", r"--out .*data exists"),
    ):
        with pytest.raises(ConfigError, match=told):
            roll_back(tmp_path / "run", number, out)
    assert roll_back(tmp_path / "run", older["snapshot"], tmp_path / "new") == 160 - known
    after = write_files(tmp_path, "new", 160, {"eu": [1]}, rule)
    source = tmp_path / "run/servers/global/snapshots" / f"{older['snapshot']:08d}"
    for name in checked_meta((source / "meta.json").read_bytes())["files"]:
        copied = tmp_path / "new/servers/global/snapshots/00000001" / f"{name}.safetensors"
        assert copied.read_bytes() == (source / copied.name).read_bytes()
    raw = json.loads(after[0].read_text())
    raw["data"]["train_samples"] = 320
    after[0].write_text(json.dumps(raw))
    launched(after, "--resume")
    last = status(after[0], "global")
    assert last["complete"] and last["committed_samples"] == known + 160
    assert {n for first, end in last["set_aside"] for n in range(first, end + 1)} == {*range(known, 160)}
    assert 0 < last["effective"] <= 1
    assert status(files[0], "global")["committed_samples"] == 160  # as it was
    assert all(torch.equal(value, before[name]) for name, value in weights(files[0]).items())


def test_a_run_that_was_killed_or_never_was_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.json"):
        snapshots_of(tmp_path)
