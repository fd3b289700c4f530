"""A Hugging Face `Trainer`: by an address; and against state machines without sockets, resumed and refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import geotrain
from geotrain.common.names import ENDLESS_SAMPLES
from geotrain.config import ConfigError, load_run
from tests.support.forks import preload
from tests.support.inner_worlds import run_world
from tests.support.local_servers import LocalClient, LocalServers
from tests.support.own_loops import AloneRun, own_runs

preload("geotrain.own_loop.hf_trainer", "transformers.trainer")

BATCH, STEPS = 4, 12


class Killed(RuntimeError):
    """Ends a life."""


class Regression(nn.Module):
    """A model as `Trainer` wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x)[:, 0] - labels).square().mean()}


class Samples:
    """A data set that notes which samples were read."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.seen.append(index)
        return {"x": torch.full((3,), index / 50), "labels": torch.tensor(1.0)}


def _trains(port: int, token: str, folder: Path, steps: int) -> tuple[list[int], list[float]]:
    """A rank of a Trainer that joins by an address; the samples that it read, and its weights at the end."""
    from transformers import Trainer, TrainingArguments

    outer = geotrain.OuterLoopCallback(f"127.0.0.1:{port}", "eu", every=2, token=token, folder=folder / "eu")
    with pytest.raises(ConfigError, match="set max_steps to the --steps of its `geotrain serve`"):
        outer.total_steps  # noqa: B018
    settings = TrainingArguments(
        output_dir=str(folder / "hf"), max_steps=steps, lr_scheduler_type="constant", learning_rate=0.1,
        per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]), save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, ddp_backend="gloo",
    )  # fmt: skip
    data, model = Samples(), Regression()
    Trainer(model, settings, train_dataset=outer.stream(data), callbacks=[outer]).train()
    return data.seen, model.layer.weight[0].tolist()


@pytest.mark.parametrize(("ranks", "served"), [(1, STEPS), (2, STEPS), (2, None)])
def test_a_trainer_joins_by_an_address(tmp_path: Path, ranks: int, served: int | None) -> None:
    """served: steps of the run; None: it ends when the Trainer leaves it."""
    with own_runs(tmp_path, AloneRun) as made:
        run = made("served")
        server = run.serve(steps=served)
        ends = run_world(ranks, _trains, run.port, run.token, tmp_path, STEPS)
        run.ended(server)
    assert sorted(ends[0][0][: BATCH * STEPS]) == list(range(BATCH * STEPS)) and not any(seen for seen, _ in ends[1:])
    assert sum(event["samples"] for event in run.events("UpdateApplied")) == BATCH * STEPS
    assert all(weights == ends[0][1] != Regression().layer.weight[0].tolist() for _, weights in ends)


Train = Callable[..., Samples]


@pytest.fixture
def servers(tmp_path: Path) -> LocalServers:
    geotrain.save_parameters(tmp_path / "model.safetensors", Regression())
    run = {
        "name": "own", "folder": str(tmp_path / "out"), "model": {"weights": "model.safetensors"},
        "data": {"train_samples": BATCH * STEPS, "samples_per_step": BATCH},
        "outer": {"local_steps": 2, "rule": {"name": "region_momentum", "updates_per_send": 1}},
        "checkpoint": {"every_jobs": 1},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run))
    cluster = {"name": "c", "regions": [{"name": "eu", "workers": [{"name": "eu-0"}]}]}
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    return LocalServers(load_run(tmp_path / "run.json"), ("eu-0",))


@pytest.fixture
def train(servers: LocalServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    rates: list[float] = []

    class Watch(TrainerCallback):
        def __init__(self, dies: int | None) -> None:
            self.dies, self.steps = dies, 0

        def on_step_begin(self, *args: Any, optimizer: Any, **more: Any) -> None:
            if self.steps == self.dies:
                raise Killed
            self.steps += 1
            rates.append(optimizer.param_groups[0]["lr"])

    def lived(dies: int | None = None, schedule: Any = None, resume: bool = False, **settings: Any) -> Samples:
        client: Any = LocalClient(servers, "eu-0")
        client.close, client.retries = lambda: None, 0
        monkeypatch.setattr("geotrain.worker.connection.WorkerClient", lambda *_, **__: client)
        data, model, outer = Samples(), Regression(), geotrain.OuterLoopCallback(tmp_path / "run.json", "eu")
        usual = {
            "output_dir": str(tmp_path / "hf"), "max_steps": STEPS, "per_device_train_batch_size": BATCH,
            "lr_scheduler_type": "linear", "learning_rate": 1.0, "save_strategy": "steps", "save_steps": 1,
            "save_total_limit": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        }  # fmt: skip
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizers = {"optimizers": (adam, schedule(adam))} if schedule else {}
        Trainer(
            model, TrainingArguments(**{**usual, **settings}), train_dataset=outer.stream(data),
            eval_dataset=data, callbacks=[outer, Watch(dies)], **optimizers,
        ).train(resume_from_checkpoint=resume)  # fmt: skip
        data.rates, data.outer, data.model = list(rates), outer.outer, model  # type: ignore[attr-defined]
        return data

    return lived


@pytest.mark.parametrize("lost", [False, True])
def test_a_resume_skips_no_leased_sample(
    servers: LocalServers, train: Train, tmp_path: Path, lost: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """lost: with them went what the callback had saved, which is told."""
    with pytest.raises(Killed):
        train(dies=5)
    committed = servers.top.status()["committed_samples"]
    assert committed == 4 * BATCH
    if lost:
        shutil.rmtree(tmp_path / "out/checkpoints")
    second: Any = train(resume=True)
    assert servers.top.status()["complete"] and second.outer.finished
    assert second.outer.resumed_job == (0 if lost else 2)
    told = "eu-0: has trained 2 jobs before, and begins without its saved state: no whole checkpoint is in "
    assert (told in capsys.readouterr().err) == lost
    (log,) = (second.outer.run.run_folder / "events").glob("*.jsonl")
    events = map(json.loads, log.read_text().splitlines())
    assert all(event["loss"] > 0 for event in events if event["event"] == "JobTrained")
    assert len(second.seen) == len(set(second.seen)) == BATCH * STEPS - committed
    # Linear over the run's steps, whichever life trains them; the fifth step is trained twice.
    assert second.rates == pytest.approx([1 - step / STEPS for step in (*range(5), *range(4, STEPS))])


def test_a_run_without_an_end_takes_only_schedules_without_one(train: Train, tmp_path: Path) -> None:
    """As `geotrain serve` without --steps makes it."""
    path = tmp_path / "run.json"
    run = json.loads(path.read_text())
    run["data"]["train_samples"] = ENDLESS_SAMPLES * BATCH
    path.write_text(json.dumps(run))
    for schedule in ("linear", "cosine"):
        with pytest.raises(ConfigError, match=r"the run has no end.* state --steps to `geotrain serve`"):
            train(lr_scheduler_type=schedule)
    trained: Any = train(lr_scheduler_type="constant", max_steps=6)
    assert trained.rates == [1.0] * 6
    with pytest.raises(ConfigError, match="the run has no end"):
        _ = trained.outer.total_steps


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": lambda adam: CosineAnnealingLR(adam, STEPS)},
         "schedule CosineAnnealingLR goes by this worker's"),
        ({"schedule": lambda adam: OneCycleLR(adam, 1e-3, STEPS)}, "schedule OneCycleLR goes by this worker's own"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 4},
         "schedule ReduceLROnPlateau .* use one that is a LambdaLR"),
        ({"max_steps": 3}, r"max_steps is 3, the run has 12 steps .* set max_steps=callback\.total_steps"),
        ({"per_device_train_batch_size": 2}, "Trainer trains 2 samples in a step"),
        ({"dataloader_num_workers": 1}, "dataloader_num_workers: .* set it to 0"),
    ],
)  # fmt: skip
def test_what_cannot_go_by_the_runs_progress_is_refused(train: Train, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train(**options)
