"""TensorBoard and Weights & Biases: of the run from the global server, of a worker through DeepSpeed's own block."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from geotrain.config import ConfigError, ParallelConfig, WandbConfig
from geotrain.monitor.board import TensorBoard, Wandb, curves
from geotrain.monitor.events import Record, Trouble
from geotrain.outer.events import UpdateApplied, ValidationDone
from tests.support.inner_worlds import BATCH, LLAMA, SEQUENCE, VOCABULARY, deepspeed_block, run_config, run_world
from tests.support.local_servers import LocalClient, LocalServers
from tests.support.process_trees import until

METRICS = {"lr": 0.1, "grad_norm": 0.5, "tokens_per_s": 10.0, "compute_s": 3.0, "waiting_s": 1.0}


def merge(tokens: int | None) -> Record:
    return Record(5.0, "global", UpdateApplied("eu", 1, 1, 1, [3, 4], 2, 8, 9, 2.5, METRICS, 5.0, tokens))


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Curve → (step, value)."""
    board = EventAccumulator(str(folder))
    board.Reload()
    return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_scalars_of_a_merge() -> None:
    event = merge(10).event
    assert isinstance(event, UpdateApplied)
    tokens, found = curves(event) or (0, {})
    assert tokens == 10
    assert found["run/loss"] == found["loss/eu"] == 2.5 and found["run/version"] == 4
    assert (found["delta_norm/eu"], found["time_compute/eu"], found["staleness/eu"]) == (5.0, 0.75, 2)


def test_the_run_in_tensorboard(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    for tokens in (4096, 8192):
        board.on(merge(tokens))
    board.on(Record(6.0, "global", Trouble("not a number")))
    board.on(merge(None))
    board.on(Record(7.0, "global", ValidationDone("eu", 1, 4, 2.25, 3.0, 8192)))
    board.close()
    curves = read(tmp_path)
    assert curves["run/validation_loss"] == [(8192, 2.25)]
    assert curves["run/loss"] == [(4096, 2.5), (8192, 2.5)]
    assert curves["tokens_per_s/eu"][-1] == (8192, 10.0)


def told(folder: Path) -> list[Any]:
    """All records that Weights & Biases keeps of offline runs in the folder, in the order of their incarnations.

    Its files are logs as LevelDB's: after 7 bytes, blocks of 32 KiB with parts of records, each behind its checksum
    (4 bytes), length (2) and place (1: whole, 2: first, 3: inner, 4: last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        data, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, place = struct.unpack_from("<HB", data, at + 4)
            record += data[at + 7 : at + 7 + length]
            at += 7 + length
            if place in (1, 4):
                found.append(Record.FromString(record))
                record = b""
    return found


def test_a_run_is_one_run_of_weights_and_biases_for_its_whole_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the package itself, offline, in two incarnations of the global server."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DISABLE_GIT": "true"}.items():
        monkeypatch.setenv(name, value)
    run = run_config(LLAMA, deepspeed_block(1)).model_copy(update={"folder": str(tmp_path)})
    config = WandbConfig(project="p", group="g")
    for tokens in (4096, 8192):
        board = Wandb(config, run)
        board.on(merge(tokens))
        board.close()
    assert until(lambda: sum(record.HasField("exit") for record in told(tmp_path)) == 2)  # it writes behind
    records = told(tmp_path)
    begun = [record.run for record in records if record.HasField("run")]
    assert {(r.run_id, r.display_name, r.project, r.run_group) for r in begun} == {
        ((tmp_path / "wandb.id").read_text(), run.name, "p", "g")
    }
    settings = {u.key: json.loads(u.value_json) for r in begun for u in r.config.update}
    assert settings["data"]["train_samples"] == run.data.train_samples
    points = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    # The steps of an incarnation do not begin at 0 again, so that those of earlier ones stay when both are
    # synchronized.
    steps = [(point["_step"], point["tokens"], point["run/loss"]) for point in points]
    assert steps == [(4096, 4096, 2.5), (8192, 8192, 2.5)]
    axes = [record.metric for record in records if record.HasField("metric")]
    assert any(axis.step_metric == "tokens" for axis in axes)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        Wandb(config, run)


def train_a_worker(folder: str) -> dict[str, Any]:
    """Two jobs, with DeepSpeed's own block for TensorBoard."""
    from geotrain.data.loader import LeasedLoader, SampleSource
    from geotrain.inner.build import build_engine
    from geotrain.worker.loop import RunMember
    from geotrain.worker.trainer import Trainer

    block = {**deepspeed_block(1), "tensorboard": {"enabled": True, "output_path": folder, "job_name": "eu-0"}}
    run = run_config(LLAMA, block)
    run = run.model_copy(update={"data": run.data.model_copy(update={"train_samples": 16 * BATCH})})
    engine = build_engine(run, ParallelConfig(), block, timeout_s=60)
    tokens = torch.randint(0, VOCABULARY, (40 * SEQUENCE,), generator=torch.Generator().manual_seed(3)).numpy()
    loader = LeasedLoader(SampleSource(tokens, SEQUENCE, 1, VOCABULARY, "test"), BATCH, 2, 0, 1)
    servers = LocalServers(run)
    reports: list[dict[str, float]] = []
    member = RunMember(
        run.model_copy(update={"folder": folder}), "w", servers.identity, servers.parameter_map, LocalClient(servers),
        report=reports.append,
    )  # fmt: skip
    Trainer(member, engine, loader, peak_flops_per_token_s=1e6).train(resume=False)
    engine.close()
    return {"reports": reports}


def test_a_worker_in_tensorboard_and_what_it_reports(tmp_path: Path) -> None:
    (result,) = run_world(1, train_a_worker, str(tmp_path))
    reports = result["reports"]
    curves = read(tmp_path / "eu-0")
    assert len(curves["Train/Samples/train_loss"]) == len(curves["Train/Samples/lr"]) == 16
    for name in ("loss", "lr", "tokens_per_s", "mfu", "compute_s", "memory_bytes"):
        written = [value for _, value in curves[f"Train/Job/{name}"]]
        assert written == pytest.approx([report[name] for report in reports], rel=1e-5), name
    for report in reports:
        assert report["compute_s"] > 0 and report["communication_s"] > 0 and report["memory_bytes"] > 1e7
        assert report["mfu"] == pytest.approx(report["tokens"] / report["compute_s"] / 1e6)
        assert report["waited_s"] <= report["communication_s"]
        whole_s = report["tokens"] / report["tokens_per_s"]
        assert report["compute_s"] + report["communication_s"] <= whole_s * 1.001
    json.dumps(reports)
