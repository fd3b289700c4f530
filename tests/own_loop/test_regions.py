"""The loops of `examples/` over two regions, with real servers: against GeoTrain's own trainer, and with kills."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import geotrain
from geotrain.commands.export import export_run
from tests.support.own_loops import EVERY_BIT, EXAMPLES, HF, REGIONS, TRAINER, OwnRun, own_runs
from tests.support.small_runs import losses, prepare_text, status, weights

LLAMA = {
    "model_type": "llama", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0, "tie_word_embeddings": True, "initializer_range": 0.05,
}  # fmt: skip
BATCH, STEPS = 4, 24
LONG = pytest.mark.long("examples", "geotrain/own_loop", "geotrain/worker")
Start = Callable[..., OwnRun]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with own_runs(tmp_path_factory.mktemp("runs")) as made:
        yield made


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run's content, with prepared data."""
    folder = tmp_path_factory.mktemp("text")
    prepare_text(folder)
    data = {"train": str(folder / "data/train"), "sequence_length": 16, "train_samples": STEPS * BATCH}
    adam = {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.0}}
    return {
        "name": "own",
        "model": {"config": LLAMA},
        "data": data,
        "deepspeed": {
            "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1}, "optimizer": adam,
        },
        "outer": {"local_steps": 3, "rule": {"name": "sync"}, **EVERY_BIT},
        "checkpoint": {"every_jobs": 2},
    }  # fmt: skip


Worker = tuple[str, tuple[str, ...], int]  # example, its further arguments, ranks


def trained(run: OwnRun, eu: Worker, us: Worker) -> tuple[dict[tuple[str, int], float], dict[str, torch.Tensor]]:
    """Losses by worker and job, and the weights at the end."""
    run.serve_all()
    for region, (example, more, ranks) in zip(REGIONS, (eu, us), strict=True):
        run.work(region, example, *more, ranks=ranks)
    run.ended()
    return losses(run.file), weights(run.file)


@pytest.fixture(scope="module")
def of_the_trainer(start: Start, text: dict[str, Any]) -> Any:
    return trained(start("trainer", text), (TRAINER, (), 1), (TRAINER, (), 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eu", "us"),
    [
        (("own_loop.py", (), 1), (HF, (), 1)),
        (("own_loop_fsdp.py", (), 2), ("own_loop_deepspeed.py", ("3",), 2)),
        pytest.param(("own_loop_fsdp.py", ("ddp",), 2), ("own_loop_deepspeed.py", ("1",), 2), marks=LONG),
    ],
    ids=["plain, hugging face", "fsdp2, zero 3", "ddp, zero 1"],
)
def test_an_own_loop_ends_where_the_trainer_does(
    of_the_trainer: Any, start: Start, text: dict[str, Any], eu: Worker, us: Worker
) -> None:
    """The same weights at the beginning, the same samples in the same order."""
    run = start("-".join((eu[0], *eu[1], us[0], *us[1])), text)
    told, ended = trained(run, eu, us)
    assert ("begins without them" in (run.folder / "us-0.0.log").read_text()) == ("3" in us[1])
    expected_losses, expected = of_the_trainer
    assert len(expected_losses) == 2 * STEPS // 2 // 3 and expected_losses["eu-0", 4] < expected_losses["eu-0", 1] - 1
    assert told == pytest.approx(expected_losses, abs=1e-4)
    for name, tensor in expected.items():
        torch.testing.assert_close(ended[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_vision_model_of_which_geotrain_knows_names_and_shapes(start: Start, tmp_path: Path) -> None:
    example = runpy.run_path(str(EXAMPLES / "vision.py"))
    run = start("vision", {
        "name": "vision",
        "model": {"weights": "vision.safetensors"},
        "data": {"train_samples": 64 * 16, "samples_per_step": 16},
        "outer": {
            "local_steps": 4, "up": {"name": "int8"}, "fragments": {"layers_per_fragment": 6},
            "overlap": {"steps": 1, "adopt": "rebase"}, "rule": {"name": "region_momentum", "updates_per_send": 1},
        },
    })  # fmt: skip
    torch.manual_seed(1)
    model = example["network"]()
    geotrain.save_parameters(run.folder / "vision.safetensors", model)
    run.serve_all()
    for region in REGIONS:
        run.work(region, "vision.py")
    run.ended()
    assert len(status(run.file, "global")["versions"]) == 2  # fragments
    told = [loss for _, loss in sorted(losses(run.file).items(), key=lambda item: item[0][1])]
    assert len(told) == 16 and sum(told[-4:]) < 0.8 * sum(told[:2]) * 2

    export_run(run.folder / "out", tmp_path / "exported", "float32")
    exported = load_file(tmp_path / "exported/model.safetensors")
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    assert {n: t.shape for n, t in exported.items()} == {n: p.shape for n, p in parameters.items()}
    before = held_out_loss(model, example["Stripes"]())
    model.load_state_dict(exported, strict=False)
    assert held_out_loss(model, example["Stripes"]()) < before - 0.5


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, data: Any) -> float:
    images, labels = torch.utils.data.default_collate([data[4096 + i] for i in range(128)])
    return float(torch.nn.functional.cross_entropy(model(images), labels))
