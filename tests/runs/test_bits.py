"""Runs of the trainer in real processes, by the synchronous rule: neither being stopped and resumed, nor shards, nor
the death of one changes a bit of the weights; and other layouts train to the same loss."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.commands.export import export_run
from geotrain.config import load_run, shard_name
from geotrain.parameters.hf_checkpoint import read_checkpoint
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import parameter_map_of
from tests.support.disks import small_disk
from tests.support.own_loops import REGIONS, SITES, TRAINER, OwnRun, own_runs
from tests.support.small_runs import BATCH, LOCAL_STEPS, MODEL, losses, prepare_text, run_of, status, weights

ROUNDS = 12
ROUND = len(REGIONS) * LOCAL_STEPS * BATCH  # samples
SYNC = {"rule": {"name": "sync"}}
INT4 = {"outer": {**SYNC, "up": {"name": "int4"}, "fragments": {"pieces": 2}}}
SMALL = 14  # steps of half a batch at the beginning of runs whose batch grows: into the middle of the fourth round
RANKS = {"hosts": [{"host": "localhost", "slots": 2}]}
EXPERTS = {
    **MODEL, "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "router_aux_loss_coef": 0.01,
}  # fmt: skip


class Runs:
    """Makes runs of the text in a folder. start: see `own_runs`."""

    def __init__(self, folder: Path, start: Callable[..., OwnRun]) -> None:
        self.folder, self.start = folder, start
        prepare_text(folder)

    def made(
        self, name: str, rounds: int, workers: Any = None, shards: int = 0, grows: bool = False, **keys: Any
    ) -> OwnRun:
        run = run_of(self.folder, rounds * ROUND - grows * SMALL * BATCH // 2, **{"outer": SYNC, **keys})
        if grows:
            run["data"]["rampup_batch_size"] = BATCH // 2, BATCH // 2, SMALL * BATCH // 2
            run["deepspeed"]["train_micro_batch_size_per_gpu"] = 1
        return self.start(name, run, workers, shards)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("bits")
    with own_runs(folder) as start:
        yield Runs(folder, start)


def train(run: OwnRun, *resume: str, **ranks: int) -> OwnRun:
    run.serve_all(bool(resume))
    for region in REGIONS:
        run.work(region, TRAINER, *resume, ranks=ranks.get(region, 1))
    run.ended()
    return run


@pytest.fixture(scope="module")
def straight(runs: Runs) -> OwnRun:
    return train(runs.made("straight", ROUNDS, grows=True, **INT4))


@pytest.fixture(scope="module")
def stopped(runs: Runs) -> OwnRun:
    """A run of half the rounds, whose servers have two shards each, of which one died."""
    run = runs.made("stopped", ROUNDS // 2, shards=2, grows=True, **INT4)
    processes = run.serve_all()
    run.work("eu", TRAINER)  # the round waits for the other region
    events = run.folder / "out/servers/eu/events.jsonl"
    run.until(lambda: events.exists() and "UpdateApplied" in events.read_text())
    run.kill(processes[shard_name("eu", 1)])
    run.serve("eu", resume=True, shard=1)
    run.work("us", TRAINER)
    run.ended()
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_six_and_six_rounds_with_shards_are_twelve_without_bitwise(
    runs: Runs, straight: OwnRun, stopped: OwnRun
) -> None:
    shutil.copytree(stopped.folder / "out", runs.folder / "resumed/out")
    run = train(runs.made("resumed", ROUNDS, shards=2, grows=True, **INT4), "resume")
    found, wanted = weights(run.file), weights(straight.file)
    assert wanted.keys() == found.keys() and len(wanted) > 20
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), name
    assert losses(run.file) == losses(straight.file)
    assert len(losses(straight.file)) == 2 * ROUNDS
    for server in SITES:
        before, after = (
            {name: member["restarts"] for name, member in status(each.file, server)["members"].items()}
            for each in (stopped, run)
        )
        assert after == before, "it had ended; nobody was restarted"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_data_parallel_size_resumes_with_equal_loss(runs: Runs, straight: OwnRun, stopped: OwnRun) -> None:
    shutil.copytree(stopped.folder / "out", runs.folder / "other/out")
    run = train(runs.made("other", ROUNDS, {"us": RANKS}, shards=2, grows=True, **INT4), "resume", us=2)
    expected, found = losses(straight.file), losses(run.file)
    assert found == pytest.approx(expected, rel=1e-4)
    assert min(expected.values()) < 0.9 * max(expected.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_regions_that_share_a_model_differently_train_it_together(runs: Runs) -> None:
    """In `eu` two ranks have all experts, and half of each sequence; in `us` two have half of the experts each."""
    layouts = {"eu": {"context": 2}, "us": {"expert": 2}}
    workers = {region: {**RANKS, "parallel": parallel} for region, parallel in layouts.items()}
    keys = {"model": {"config": EXPERTS}, "checkpoint": {"every_jobs": 4}}
    run = train(runs.made("experts", ROUNDS, workers, **keys), eu=2, us=2)
    assert status(run.file, "global")["committed_samples"] == ROUNDS * ROUND
    jobs = losses(run.file)
    assert len(jobs) == 2 * ROUNDS
    for worker in ("eu-0", "us-0"):
        assert jobs[worker, ROUNDS] < 0.9 * jobs[worker, 1]
    manifests = {
        path.parts[-3]: json.loads(path.read_text())["layout"]
        for path in (run.folder / "out/checkpoints").glob("*/*/manifest.json")
    }
    found = {worker: (layout.get("context", 1), layout.get("expert", 1)) for worker, layout in manifests.items()}
    assert found == {"eu-0": (2, 1), "us-0": (1, 2)}
    export_run(run.folder / "out", run.folder / "export", "float32")
    config = load_run(run.file)
    exported = dict(read_checkpoint(run.folder / "export")[1])
    for parameter in parameter_map_of(config).parameters:
        assert not torch.equal(exported[parameter.name], initial_tensor(parameter, config.seed)), parameter.name


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_full_disk_while_checkpointing_a_run_that_began_from_an_export(
    runs: Runs, straight: OwnRun, tmp_path: Path
) -> None:
    start = runs.folder / "start"
    export_run(straight.folder / "out", start, "float32")
    with small_disk(tmp_path, "64k") as disk:
        checkpoint = {"folder": str(disk), "every_jobs": 1}
        model = {"config": MODEL, "init_from": str(start)}
        run = train(runs.made("continued", ROUNDS // 2, model=model, checkpoint=checkpoint))
        assert not [path for path in disk.rglob("*") if path.is_file()]
    assert status(run.file, "global")["committed_samples"] == ROUNDS // 2 * ROUND
    assert losses(run.file)["eu-0", 1] < 0.9 * losses(straight.file)["eu-0", 1]
    told, said = (run.folder / "out/events/eu-0.jsonl").read_text(), run.said()
    for words in (str(disk), "No space left on device", "training goes on without this checkpoint"):
        assert words in said and words in told
    assert "Traceback" not in said
