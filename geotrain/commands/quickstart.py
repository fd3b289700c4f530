"""Runs `geotrain quickstart`: two regions train one small model on this machine, from text to an exported
checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from geotrain.commands.dry_run import needs
from geotrain.commands.evaluate import evaluate
from geotrain.commands.export import export_run
from geotrain.commands.operate import LiveRun
from geotrain.commands.prepare import prepare_files
from geotrain.commands.sample import sample
from geotrain.common.files import write_whole
from geotrain.common.names import GLOBAL, SHARE_DEVICES
from geotrain.config import ClusterConfig, ConfigError, RunConfig, load_cluster, load_run, shipped_configs
from geotrain.data.corpus import documents
from geotrain.kernels.devices import cuda_devices, processor_has_bf16
from geotrain.launch.check import check_together
from geotrain.launch.launcher import launch, locked
from geotrain.launch.terminal import new_console, size
from geotrain.net.storage.snapshots import SNAPSHOTS, SnapshotStore
from geotrain.parameters.hf_export import write_checkpoint
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import canonical_parameters

CORPUS_BYTES = 8_000_000
PASSAGE_CHARACTERS = 2000  # of a few hundred long files: so that validation text is of many of them
VALIDATION_SHARE = 0.02
PROMPTS = ("The ", "def ")
SAMPLE_TOKENS = 160


def quickstart(
    run_path: Path | None, cluster_path: Path | None, resume: bool, kind: str = ""
) -> tuple[int, dict[str, Any]]:
    """Train, export, evaluate, sample; gives the exit code, and the summary if that is 0.

    A finished run's folder is moved to <folder>.previous.

    run_path, cluster_path: None: the shipped ones, whose names end in `kind`; the shipped run computes in fp32 where
    the processor would only emulate bf16. Raises ConfigError and whatever the steps raise.
    """
    console = new_console()
    shipped = run_path is None
    run_path = run_path or shipped_configs() / f"runs/quickstart{kind}.json"
    cluster_path = cluster_path or shipped_configs() / f"clusters/local-two-regions{kind}.json"
    folder = load_run(run_path).run_folder.absolute()
    changes = tuple(f"data.{what}={folder / 'data' / what}" for what in ("train", "validation", "tokenizer"))
    run, cluster = load_run(run_path, changes), load_cluster(cluster_path)
    ranks = sum(worker.ranks for _, worker in cluster.workers)
    devices = cuda_devices()
    if 0 < devices < ranks:
        console.print(f"{ranks} ranks share {devices} GPUs; they communicate over gloo, through the host's memory")
        os.environ[SHARE_DEVICES] = "1"
    if devices == 0:
        os.environ["DS_ACCELERATOR"] = "cpu"
        if shipped and not processor_has_bf16():
            console.print("fp32: this processor only emulates bf16, which would take several times as long")
            changes += ("deepspeed.bf16.enabled=false",)
            run = load_run(run_path, changes)
    check_together(run, cluster)
    if not resume:
        _move_aside(folder)
        console.rule("text")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            corpus = Path(scratch) / "corpus.jsonl"
            with corpus.open("w", encoding="utf-8") as file:
                for text in documents(CORPUS_BYTES):
                    for start in range(0, len(text), PASSAGE_CHARACTERS):
                        file.write(json.dumps({"text": text[start : start + PASSAGE_CHARACTERS]}) + "\n")
            prepare_files([str(corpus)], folder / "data", None, None, True, VALIDATION_SHARE)
    console.rule(f"training in {len(cluster.regions)} regions; logs in {folder}/logs")
    newest, _ = SnapshotStore(folder / "servers" / GLOBAL / SNAPSHOTS).load_newest(names=())
    samples_before = int(newest.meta["state"]["leases"]["committed_samples"]) if newest else 0
    started = time.monotonic()
    code = launch(run_path, cluster_path, resume, changes=changes)
    if code:
        return code, {}
    train_s = time.monotonic() - started
    console.rule("export")
    export_run(folder, folder / "export", "float32")
    summary = summarize(run, cluster, folder, train_s, samples_before)
    summary |= {"wall_s": round(time.time() - psutil.Process().create_time(), 1), "resumed": resume}
    write_whole(folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    for prompt in PROMPTS:
        console.print(sample(folder / "export", prompt, SAMPLE_TOKENS), highlight=False, markup=False)
        console.print("…", style="dim")
    console.rule(f"{folder}/summary.json")
    start, final = summary["validation_loss_start"], summary["validation_loss_final"]
    table = Table(show_header=False, box=None, pad_edge=False)
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
    console.print(table)
    if shutil.which("geotrain") is None:
        hint = f"\n`geotrain` is not on the path of this shell: . {Path(sys.executable).with_name('activate')}"
        console.print(hint, highlight=False, soft_wrap=True)
    return 0, summary


def summarize(
    run: RunConfig, cluster: ClusterConfig, folder: Path, train_s: float, samples_before: int
) -> dict[str, Any]:
    """Summarize the finished run. Bytes are those that the kernel counted on the region servers' links. The speed
    counts from the last start, when `samples_before` samples were trained."""
    statuses = LiveRun(folder).see().statuses
    top = statuses[GLOBAL]
    regions = [statuses[region.name] for region in cluster.regions]
    samples = int(top["committed_samples"])
    steps = samples // run.samples_per_step
    parameters = canonical_parameters(run.architecture)
    count = sum(parameter.numel for parameter in parameters)
    up = sum(int(status["links"]["up_bytes"]) for status in regions)
    down = sum(int(status["links"]["down_bytes"]) for status in regions)
    # A ring all-reduce of bf16 gradients at every step: each of R regions sends 2·(R−1)/R of their 2·N bytes.
    all_reduce = 4 * (len(regions) - 1) * count * (steps // len(cluster.workers))
    with tempfile.TemporaryDirectory() as scratch:  # the weights that the global server began with
        tensors = ((p.name, initial_tensor(p, run.seed)) for p in parameters)
        write_checkpoint(tensors, run.model.config, Path(scratch) / "start", None, "float32")
        assert run.data.validation is not None
        data = Path(run.data.validation), run.data.validation_samples, run.data.sequence_length
        losses = [evaluate(checkpoint, *data) for checkpoint in (Path(scratch) / "start", folder / "export")]
    return {
        "validation_loss_start": round(losses[0], 4),
        "validation_loss_final": round(losses[1], 4),
        "parameters": count,
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
        "workers": len(cluster.workers),
        "layouts": {worker.name: worker.layout for worker in needs(run, cluster).workers},
        "global_versions": max(top["versions"]),
        "region_versions": {r.name: max(s["versions"]) for r, s in zip(cluster.regions, regions, strict=True)},
        "committed_share": samples / run.data.train_samples,
        "lost_updates": sum(int(status["lost_updates"]) for status in regions),
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
