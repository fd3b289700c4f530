"""Whole runs of examples/: by the notebook, and from what it exported."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from geotrain.commands.evaluate import evaluate
from geotrain.commands.prepare import prepare_files
from geotrain.config import load_run
from tests.support.small_runs import launched, losses, status

EXAMPLES = Path(__file__).parents[2] / "examples"
LONG = pytest.mark.long("examples", "geotrain/checkpoint", "geotrain/commands", "launch")
UNTRAINED = math.log(264)  # loss of a model of bytes that knows nothing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, copied, after examples/tour.ipynb was executed there: it has run and exported own-text."""
    folder = tmp_path_factory.mktemp("runs") / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=lambda path, names: [n for n in names if own_folder(Path(path, n))])
    notebook = nbformat.read(folder / "tour.ipynb", as_version=4)
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        NotebookClient(notebook, timeout=560, resources={"metadata": {"path": str(folder)}}).execute()
    nbformat.write(notebook, folder / "executed.ipynb")
    return folder


def own_folder(path: Path) -> bool:
    """Whether a run left this folder in an example."""
    return path.is_dir() and path.parent.parent == EXAMPLES


@LONG
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_several_workers_a_region_over_tls(folder: Path) -> None:
    run_file = folder / "own-text/run.json"
    run, top = load_run(run_file), status(run_file, "global")
    samples = run.data.train_samples
    assert top["committed_samples"] == top["train_samples"] == samples and top["open_leases"] == 0
    jobs = losses(run_file)
    assert {worker for worker, _ in jobs} == {"eu-0", "eu-1", "us-0"}
    assert len(jobs) == samples // (run.outer.local_steps * run.samples_per_step)
    exported = evaluate(folder / "own-text/exported", folder / "own-text/data/train", 64, 16)
    assert exported < 0.8 * max(jobs.values())
    executed = nbformat.read(folder / "executed.ipynb", as_version=4)
    shown = [output for cell in executed.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)  # the losses, drawn
    printed = "".join(o["text"] for o in executed.cells[-1]["outputs"] if o.get("name") == "stdout")  # in any pieces
    assert len(printed.strip().partition("The ")[2]) > 10  # what the export goes on with, once transformers loaded it


@LONG
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_goes_on_from_an_export(folder: Path) -> None:
    example = folder / "continued"
    text = example / "code.jsonl"
    text.write_text(json.dumps({"text": inspect.getsource(argparse)}) + "\n")
    prepare_files([str(text)], example / "data", folder / "own-text/exported", None, False, 0.0, processes=1)
    launched((example / "run.json", example / "cluster.json"))
    top = status(example / "run.json", "global")
    assert top["committed_samples"] == load_run(example / "run.json").data.train_samples
    assert losses(example / "run.json")["eu-0", 1] < 0.85 * UNTRAINED
