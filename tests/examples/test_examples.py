"""The complete runs of examples/: their files are ones that `launch` takes, and git holds no output of the notebook.
tests/runs/test_examples.py runs `own-text`, by the notebook; tests/plan/test_command.py `planned`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from geotrain.config import load_run
from geotrain.data.prepare import prepare
from geotrain.data.tokenizer import byte_tokenizer
from geotrain.parameters.hf_export import write_checkpoint
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import canonical_parameters
from tests.support.command_line import say

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/run.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples' files, with a little text prepared for each, and an export of own-text's first weights."""
    folder = tmp_path_factory.mktemp("examples")
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"the number {i} and the next. " * 50}) + "\n" for i in range(200)))
    prepare([text], folder / "data", byte_tokenizer(), validation_fraction=0.1)
    byte_tokenizer().save(folder / "data/tokenizer")
    for path in EXAMPLES.glob("*/*.json"):
        (folder / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, folder / path.parent.name)
    for name in NAMES:
        shutil.copytree(folder / "data", folder / name / "data")
    run = load_run(folder / "own-text/run.json")
    tensors = ((p.name, initial_tensor(p, run.seed)) for p in canonical_parameters(run.architecture))
    write_checkpoint(tensors, run.model.config, folder / "own-text/exported", folder / "data/tokenizer", "float32")
    return folder


def said(folder: Path, *words: str) -> str:
    """What a command says that is given in this folder, and succeeds."""
    done = say(*words, cwd=folder)
    assert done.returncode == 0, f"{words}\n{done.text}"
    return done.text


@pytest.mark.parametrize("name", NAMES)
def test_the_dry_run_of_an_example(name: str, folder: Path) -> None:
    """As its README says, in its folder: nothing is refused, and of its schedule and links nothing is warned."""
    files = "run.json", "cluster.json"
    if name == "own-text":
        said(folder / name, "certs", "cluster.json", "certs")
    if name == "planned":
        said(folder / name, "plan", "run.json", "inventory.json", "--out", "planned")
        files = "planned/run.json", "planned/cluster.json"
    report = said(folder / name, "dry-run", *files)
    assert "parameters" in report
    assert "deepspeed.scheduler" not in report and "without `security`" not in report, report


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    for cell in code:
        assert cell["outputs"] == [] and cell["execution_count"] is None, "clear its outputs before committing it"
