"""`geotrain quickstart`: the text that it prepares, and what it computes in."""

from functools import partial
from pathlib import Path

import pytest

from geotrain.commands import quickstart
from geotrain.commands.prepare import prepare_files
from geotrain.config import load_run
from geotrain.data.dataset import read_manifest

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
