"""Ends of a rank's process."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch.distributed as dist

from geotrain.config import EXIT_FOR_GOOD, ClusterConfig, ConfigError, load_run, parse
from geotrain.launch import pretrain
from geotrain.launch.launchers.base import EXIT_FORM, end_file
from geotrain.worker import verification  # noqa: F401 (what is first imported under `patch.dict` is imported again)
from geotrain.worker.job_line import JobLine

CONFIGS = Path(__file__).parents[2] / "configs"
ENDS_WITH = "a rank of this worker died, hangs, or cannot be reached: [a/gloo/pair.cc:5] Connection closed by peer"


def end(monkeypatch: pytest.MonkeyPatch, error: Exception | None, join: bool = False, done: bool = True) -> int:
    """The exit code of a rank whose training ends like this. join: it has met others, who are itself, before. done:
    its worker is not to be formed anew."""

    def train(*_: object) -> bool:
        if join:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        if error is not None:
            raise error
        return done

    files = ("--run", f"{CONFIGS}/runs/quickstart.json", "--cluster", f"{CONFIGS}/clusters/local-two-regions.json")
    monkeypatch.setattr(pretrain, "train", train)
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *files, "--region", "eu"])
    return pretrain.main()


def test_a_lost_rank_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from geotrain.inner.acco.communication_thread import AccoError

    assert end(monkeypatch, AccoError("acco: rank 0: the commit of step 4 failed")) == 1
    assert capsys.readouterr().err == "geotrain: worker in eu: acco: rank 0: the commit of step 4 failed\n"
    assert end(monkeypatch, RuntimeError("[a/gloo/pair.cc:5] Connection closed by peer\nframe #0")) == 1
    assert capsys.readouterr().err == f"geotrain: worker in eu: {ENDS_WITH}\n"


def test_a_rank_leaves_the_others_in_good_order_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error it does not wait for them, who may be lost."""
    assert end(monkeypatch, None, join=True) == 0
    assert not dist.is_initialized()
    try:
        assert end(monkeypatch, OSError("no"), join=True) == 1
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_other_errors_keep_their_codes_and_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert end(monkeypatch, ConfigError("no")) == EXIT_FOR_GOOD
    assert end(monkeypatch, None, done=False) == EXIT_FORM
    assert end(monkeypatch, OSError("no")) == 1
    with pytest.raises(RuntimeError, match="shapes"):
        end(monkeypatch, RuntimeError("shapes do not match"))


def test_a_line_for_a_job_but_not_for_every_one() -> None:
    numbers = {"job": 3, "start": 1024, "loss": 3.14159, "grad_norm": 0.5, "lr": 0.001, "tokens_per_s": 12345.6}
    line = JobLine(5.0)
    told = "job 3, from sample 1,024: loss 3.1416, gradient norm 0.5, learning rate 0.001, 12,346 tokens/s"
    assert [line.of(numbers, now_s) for now_s in (0.0, 4.9, 5.0, 9.0, 60.0)] == [told, "", told, "", told]
    unsaid = {**numbers, "grad_norm": float("nan"), "lr": float("nan")}  # by a loop of the user's own
    assert line.of(unsaid, 99.0) == "job 3, from sample 1,024: loss 3.1416, 12,346 tokens/s"


@pytest.mark.parametrize(("formed", "rule"), [(False, "halos"), (True, "halos"), (True, "sync")])
def test_a_rank_is_made_of_what_the_two_files_say(monkeypatch: pytest.MonkeyPatch, formed: bool, rule: str) -> None:
    """Its engine, its data, its connection and its trainer; all of these are stood in for."""
    run = load_run(CONFIGS / "runs/quickstart.json", [f'outer.rule={{"name": "{rule}"}}'])
    raw = json.loads((CONFIGS / "clusters/local-two-regions.json").read_text())
    own = {"min_step_s": 0.25, "deepspeed": {"train_micro_batch_size_per_gpu": 4}}
    raw["regions"][0]["workers"][0] |= own
    cluster = parse(ClusterConfig, raw, "cluster")
    worker = cluster.worker("eu", None)
    engine, made = MagicMock(architecture=run.architecture, dp_rank=1, dp_size=2), MagicMock()
    engine.mesh.cp_size = 1
    made.build_engine.return_value = engine
    made.training_digest.return_value, made.end_of_document.return_value = "digest", 7
    made.connected.return_value = nullcontext("member")
    of_name: dict[str, Any] = {"geotrain.inner.build": SimpleNamespace(build_engine=made.build_engine)}
    of_name["geotrain.worker.trainer"] = SimpleNamespace(Trainer=made.Trainer)
    of_name["geotrain.worker.connection"] = SimpleNamespace(connected=made.connected)
    for place, name in (("dataset", "training_digest"), ("dataset", "end_of_document"), ("loader", "open_training"),
                        ("loader", "open_source"), ("loader", "validation_batches")):  # fmt: skip
        monkeypatch.setattr(f"geotrain.data.{place}.{name}", getattr(made, name))
    with patch.dict(sys.modules, of_name), patch.dict(os.environ):
        pretrain.train(run, cluster, "eu", None, True, formed)

    (_, parallel, block), more = made.build_engine.call_args
    assert parallel == worker.parallel and block["train_micro_batch_size_per_gpu"] == 4
    assert block["scheduler"]["params"]["total_num_steps"] == run.total_steps and more["end_of_document"] == 7
    made.open_training.assert_called_once_with(run.data, run.architecture.vocab_size, 1234)
    made.validation_batches.assert_called_once_with(made.open_source.return_value, 256, 4, 1, 2)
    assert made.connected.call_args.args == (run, cluster, worker)
    assert made.connected.call_args.kwargs["data_digest"] == "digest"
    (member, of_trainer, loader), settings = made.Trainer.call_args
    assert (member, of_trainer) == ("member", engine)
    assert (loader._batches.batch, loader._micro_batch, loader._dp_rank, loader._dp_size) == (16, 4, 1, 2)
    assert settings["min_step_s"] == 0.25 and settings["validation"] is made.validation_batches.return_value
    trainer = made.Trainer.return_value
    trainer.train.assert_called_once_with(True)
    assert trainer.checkpoints.files.may_lack is formed
    asks = getattr(trainer.loop.ends, "__self__", None) == run.run_folder / end_file(worker.name)
    assert asks == (formed and rule == "halos"), "whether it is to be formed anew"
    engine.close.assert_called_once_with()
