"""`geotrain quickstart`: the text that it prepares, and what it computes in."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from geotrain.commands import quickstart
from geotrain.commands.prepare import prepare_files
from geotrain.common.names import SHARE_DEVICES
from geotrain.config import ConfigError, load_run
from geotrain.data.dataset import read_manifest
from geotrain.launch.launcher import RunsAlready, locked

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(("has_bf16", "mine"), [(True, False), (False, False), (False, True)])
def test_the_quickstart_computes_in_what_the_processor_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_bf16: bool, mine: bool
) -> None:
    """The shipped run in fp32 where bf16 is only emulated; a user's own as it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(quickstart, "processor_has_bf16", lambda: has_bf16)
    monkeypatch.setattr(quickstart, "prepare_files", partial(prepare_files, processes=1))
    monkeypatch.setattr(quickstart, "CORPUS_BYTES", 400_000)
    seen: list[bool] = []

    def launch(run: Path, cluster: Path, resume: bool, changes: tuple[str, ...]) -> int:
        seen.append(load_run(run, changes).deepspeed["bf16"]["enabled"])
        train, held_out = (read_manifest(tmp_path / "runs/quickstart/data" / n) for n in ("train", "validation"))
        assert train.tokens > 20 * held_out.tokens > 0
        return 3

    monkeypatch.setattr(quickstart, "launch", launch)
    assert quickstart.quickstart(CONFIGS / "runs/quickstart.json" if mine else None, None, resume=False) == (3, {})
    assert seen == [has_bf16 or mine]


@pytest.mark.parametrize(
    ("devices", "variable"), [(0, "DS_ACCELERATOR"), (1, SHARE_DEVICES), (3, SHARE_DEVICES), (4, "")]
)
def test_the_quickstart_of_four_ranks_takes_the_gpus_that_are_there(
    monkeypatch: pytest.MonkeyPatch, devices: int, variable: str
) -> None:
    """Fewer are shared, none are the CPU."""
    environment = {k: v for k, v in os.environ.items() if k not in ("DS_ACCELERATOR", SHARE_DEVICES)}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(quickstart, "cuda_devices", lambda: devices)
    seen: list[set[str]] = []

    def launch(*_: Any, **__: Any) -> int:
        seen.append({"DS_ACCELERATOR", SHARE_DEVICES} & environment.keys())
        return 3

    monkeypatch.setattr(quickstart, "launch", launch)
    assert quickstart.quickstart(None, None, resume=True) == (3, {})
    assert seen == [{variable} - {""}]


def test_the_run_before_is_kept_and_what_is_none_or_goes_on_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    for number in range(3):
        quickstart._move_aside(folder)
        folder.mkdir()
        (folder / "run.json").write_text(str(number))
    assert (tmp_path / "quickstart.previous/run.json").read_text() == "1"
    with locked(folder), pytest.raises(RunsAlready, match="is running already"):
        quickstart._move_aside(folder)
    (folder / "run.json").rename(folder / "mine.txt")
    with pytest.raises(ConfigError, match="holds no run"):
        quickstart._move_aside(folder)
