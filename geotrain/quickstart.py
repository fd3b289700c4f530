"""`geotrain quickstart`: two regions train one small model on this machine, from text to an exported checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.table import Table

from geotrain.canonical import canonical_parameters
from geotrain.config import ClusterConfig, ConfigError, RunConfig, load_cluster, load_run
from geotrain.data.corpus import documents
from geotrain.evaluate import evaluate
from geotrain.export import export_run, write_checkpoint
from geotrain.files import whole_file
from geotrain.initial import initial_tensor
from geotrain.launch.check import architecture_of, check_together
from geotrain.launch.dry_run import describe
from geotrain.launch.preparing import prepare_files
from geotrain.launch.progress import new_console, size, status_of_run
from geotrain.launch.region import launch, locked
from geotrain.net.store import SNAPSHOTS, Store
from geotrain.outer.messages import GLOBAL
from geotrain.sample import sample

CORPUS_BYTES = 8_000_000
PASSAGE_CHARACTERS = 2000  # of a few hundred long files: so that validation text is of many of them
VALIDATION_SHARE = 0.02
PROMPTS = ("The ", "def ")
SAMPLE_TOKENS = 160


def quickstart(run_path: Path, cluster_path: Path, resume: bool) -> int:
    """Train, export, evaluate, sample; gives the exit code. A finished run's folder is moved to <folder>.previous.

    Raises ConfigError and whatever the steps raise.
    """
    console = new_console()
    run, cluster = load_run(run_path), load_cluster(cluster_path)
    check_together(run, cluster)
    folder = run.run_folder
    ranks = sum(worker.ranks for region in cluster.regions for worker in region.workers)
    if torch.cuda.device_count() < ranks:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if not resume:
        _move_aside(folder)
        console.rule("text")
        _prepare(run, folder)
    console.rule(f"training in {len(cluster.regions)} regions; logs in {folder}/logs")
    before, started = _committed_samples(folder), time.monotonic()
    code = launch(run_path, cluster_path, resume)
    if code:
        return code
    train_s = time.monotonic() - started
    console.rule("export")
    export_run(folder, folder / "export", "float32")
    summary = summarize(run, cluster, folder, train_s, before)
    summary |= {"wall_s": round(time.time() - psutil.Process().create_time(), 1), "resumed": resume}
    with whole_file(folder / "summary.json") as file:
        file.write(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    for prompt in PROMPTS:
        console.print(sample(folder / "export", prompt, SAMPLE_TOKENS), highlight=False, markup=False)
        console.print("…", style="dim")
    console.rule(f"{folder}/summary.json")
    console.print(_table(summary))
    return 0


def summarize(
    run: RunConfig, cluster: ClusterConfig, folder: Path, train_s: float, samples_before: int
) -> dict[str, Any]:
    """What the finished run did. Bytes are those that the kernel counted on the region servers' links. They, speeds
    and what they are compared with count from the last start, when `samples_before` samples were trained."""
    _, statuses = status_of_run(folder)
    top = statuses[GLOBAL]
    regions = [statuses[region.name] for region in cluster.regions]
    samples = int(top["committed_samples"])
    steps = (samples - samples_before) // run.samples_per_step
    workers = [w for region in cluster.regions for w in region.workers]
    parameters = architecture_of(run).parameter_count
    up = sum(int(status["links"]["up_bytes"]) for status in regions)
    down = sum(int(status["links"]["down_bytes"]) for status in regions)
    all_reduce = data_parallel_bytes(parameters, len(regions), steps // len(workers))
    return {
        "validation_loss_start": round(_start_loss(run), 4),
        "validation_loss_final": round(_loss(run, folder / "export"), 4),
        "parameters": parameters,
        "tokens": samples * run.data.sequence_length,
        "tokens_per_s": round((samples - samples_before) * run.data.sequence_length / train_s, 1),
        "train_s": round(train_s, 1),
        "inner_steps": steps,
        "wan_bytes_up": up,
        "wan_bytes_down": down,
        "data_parallel_bytes": all_reduce,
        "data_parallel_formula": "4 · (regions − 1) · parameters · inner_steps / workers: a bf16 ring all-reduce "
        "between regions at every inner step, all bytes that cross between regions",
        "wan_reduction": round(all_reduce / max(1, up + down), 2),
        "workers": len(workers),
        "layouts": _layouts(run, cluster),
        "global_versions": max(top["versions"]),
        "region_versions": {r.name: max(s["versions"]) for r, s in zip(cluster.regions, regions, strict=True)},
        "committed_share": samples / run.data.train_samples,
        "lost_updates": sum(int(status["lost_updates"]) for status in regions),
    }


def data_parallel_bytes(parameters: int, regions: int, steps: int) -> int:
    """What a ring all-reduce of bf16 gradients over the regions would move between them in `steps` steps.

    In a ring each of R regions sends 2·(R−1)/R of the 2·N bytes of its gradients: 4·(R−1)·N bytes a step in all.
    """
    return 4 * (regions - 1) * parameters * steps


def _committed_samples(folder: Path) -> int:
    """Of a run that is to be resumed."""
    newest, _ = Store(folder / "servers" / GLOBAL / SNAPSHOTS).load_newest(names=())
    return int(newest.meta["leases"]["committed_samples"]) if newest else 0


def _prepare(run: RunConfig, folder: Path) -> None:
    data = Path(run.data.train).parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        corpus = Path(scratch) / "corpus.jsonl"
        with corpus.open("w", encoding="utf-8") as file:
            for text in documents(CORPUS_BYTES):
                for start in range(0, len(text), PASSAGE_CHARACTERS):
                    file.write(json.dumps({"text": text[start : start + PASSAGE_CHARACTERS]}) + "\n")
        prepare_files([str(corpus)], data, None, None, True, VALIDATION_SHARE)


def _start_loss(run: RunConfig) -> float:
    """Of the weights that the global server begins with."""
    assert isinstance(run.model.config, dict)
    parameters = canonical_parameters(architecture_of(run))
    with tempfile.TemporaryDirectory() as scratch:
        start = Path(scratch) / "start"
        tensors = ((p.name, initial_tensor(p, run.seed)) for p in parameters)
        write_checkpoint(tensors, run.model.config, start, None, "float32")
        return _loss(run, start)


def _loss(run: RunConfig, checkpoint: Path) -> float:
    assert run.data.validation is not None
    return evaluate(checkpoint, Path(run.data.validation), run.data.validation_samples, run.data.sequence_length)


def _layouts(run: RunConfig, cluster: ClusterConfig) -> dict[str, str]:
    from geotrain.sharing.checks import zero_stage

    sizes = check_together(run, cluster)
    return {
        worker.name: describe(
            worker.parallel or run.parallel, sizes[worker.name], zero_stage({**run.deepspeed, **worker.deepspeed})
        )
        for region in cluster.regions
        for worker in region.workers
    }


def _move_aside(folder: Path) -> None:
    """Keep the run that is there as <folder>.previous, in place of an older one. Raises ConfigError."""
    if not folder.exists():
        return
    with locked(folder):
        pass  # it is not running
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".lock")}
    if names and not names & {"run.json", "data"}:
        raise ConfigError(f"{folder} exists, but holds no run; move it away")
    previous = folder.with_name(folder.name + ".previous")
    if previous.exists():
        shutil.rmtree(previous)
    folder.rename(previous)


def _table(summary: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    start, final = summary["validation_loss_start"], summary["validation_loss_final"]
    for name, text in {
        "validation loss": f"{start:.3f} → {final:.3f} nats a token ({1 - final / start:.0%} lower)",
        "trained": f"{summary['tokens']:,} tokens in {summary['train_s']:.0f} s ({summary['wall_s']:.0f} s in all)",
        "between regions": f"{size(summary['wan_bytes_up'])} up, {size(summary['wan_bytes_down'])} down; "
        f"bf16 all-reduce: {size(summary['data_parallel_bytes'])}, {summary['wan_reduction']:g} times as much",
        "workers": "; ".join(f"{name}: {layout}" for name, layout in summary["layouts"].items()),
        "versions": f"{summary['global_versions']} global; {summary['region_versions']} in the regions",
        "lost updates": str(summary["lost_updates"]),
    }.items():
        table.add_row(name, text)
    return table
