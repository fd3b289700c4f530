"""The notebook of examples/, which trains and exports a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from geotrain.commands.evaluate import evaluate
from geotrain.config import load_run
from tests.support.small_runs import losses, status

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long("examples", "geotrain/checkpoint", "geotrain/commands", "launch")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_several_workers_a_region_over_tls(tmp_path: Path) -> None:
    """In a copy of the examples, without the folders that runs may have left in one."""
    folder = tmp_path / "examples"
    for path in (*EXAMPLES.glob("*.ipynb"), *EXAMPLES.glob("*/*.json")):
        (folder / path.relative_to(EXAMPLES)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / path.relative_to(EXAMPLES))
    notebook = nbformat.read(folder / "tour.ipynb", as_version=4)
    NotebookClient(notebook, timeout=560, resources={"metadata": {"path": str(folder)}}).execute()
    run_file = folder / "own-text/run.json"
    run, top = load_run(run_file), status(run_file, "global")
    samples = run.data.train_samples
    assert top["committed_samples"] == top["train_samples"] == samples and top["open_leases"] == 0
    jobs = losses(run_file)
    assert {worker for worker, _ in jobs} == {"eu-0", "eu-1", "us-0"}
    assert len(jobs) == samples // (run.outer.local_steps * run.samples_per_step)
    exported = evaluate(folder / "own-text/exported", folder / "own-text/data/train", 64, 16)
    assert exported < 0.8 * max(jobs.values())
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)  # the losses, drawn
    printed = "".join(o["text"] for o in notebook.cells[-1]["outputs"] if o.get("name") == "stdout")  # in any pieces
    assert len(printed.strip().partition("The ")[2]) > 10  # what the export goes on with, once transformers loaded it
