"""The benchmark of hidden communication: what its waits last, and that trainings of the study of losses go on."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.hide import ranks
from benchmarks.hide.loss import KEY, WAYS, Training, over_zero1


class Layer(nn.Module):
    """A layer that computes for some seconds."""

    def __init__(self, clock: SimpleNamespace, own_s: float) -> None:
        super().__init__()
        self.clock, self.own_s = clock, own_s

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now_s += self.own_s
        return x


@pytest.mark.parametrize(("own_s", "waited_s", "least_s"), [((0.2, 0.4), 0, 2), ((1.5, 0.2), 10, 12), ((1, 3), 5, 9)])
def test_layers_take_what_is_stated_and_communication_comes_on_top(
    monkeypatch: pytest.MonkeyPatch, own_s: tuple[float, float], waited_s: float, least_s: float
) -> None:
    """Also where one layer computes longer than its part: the next waits less."""
    clock = SimpleNamespace(now_s=100.0)

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    monkeypatch.setattr(ranks, "time", SimpleNamespace(perf_counter=lambda: clock.now_s, sleep=sleep))
    compute, layers = ranks.Compute(), [Layer(clock, each) for each in own_s]
    compute.wait_in_layers(SimpleNamespace(decoder=SimpleNamespace(layers=layers)), 6.0)
    for _ in range(2):
        begin = clock.now_s
        compute.begin_step()
        layers[0](torch.zeros(()))
        compute.apart(sleep)(waited_s)
        layers[1](torch.zeros(()))
        assert clock.now_s - begin == pytest.approx(least_s)


@pytest.mark.parametrize("way", ["zero1", "delayed, 8 and 4 bits"])
@pytest.mark.parametrize("muon", [True, False])
def test_a_training_that_was_ended_goes_on_with_the_same_bits(way: str, muon: bool, tmp_path: Path) -> None:
    args = Namespace(hidden=16, layers=1, steps=12, rate=8e-3)
    tokens = torch.randint(0, 256, (12, 8, 65), generator=torch.Generator().manual_seed(1))
    straight, ended = (Training(WAYS[way], muon, args, 0) for _ in range(2))
    for part in tokens[:7]:
        ended.step(part)
    ended.keep(tmp_path / "it.pt")
    resumed = Training(WAYS[way], muon, args, 0)
    resumed.go_on_from(tmp_path / "it.pt")
    for part in tokens:
        straight.step(part)
    for part in tokens[7:]:
        resumed.step(part)
    assert torch.equal(resumed.masters, straight.masters) and torch.equal(resumed.held, straight.held)
    assert resumed.evaluate(tokens[0]) == straight.evaluate(tokens[0])


def test_ranks_that_are_computed_together_are_as_if_alone() -> None:
    """Codes are made of each rank's own gradient."""
    args = Namespace(hidden=16, layers=1, steps=4, rate=8e-3)
    training = Training(WAYS["zero1, 8 and 4 bits"], True, args, 0)
    tokens = torch.randint(0, 256, (4, 2, 65), generator=torch.Generator().manual_seed(2))
    flat = training.held.repeat(4, 1).requires_grad_()
    training.model.loss(flat, tokens).sum().backward()
    for gradient, own in zip(flat.grad, tokens, strict=True):
        alone = training.held[None].clone().requires_grad_()
        training.model.loss(alone, own[None]).sum().backward()
        torch.testing.assert_close(gradient, alone.grad[0], rtol=1e-4, atol=1e-6)


def test_losses_are_over_zero1s_of_the_longest_trainings_at_its_best_rate(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert over_zero1(path) == {}
    rows = [
        ("muon", 0, "zero1", 300, 3.0), ("muon", 0, "delayed", 300, 9.0),
        ("muon", 0, "zero1", 3000, 2.0), ("muon", 0, "delayed", 3000, 2.2),
        ("muon", 1, "zero1", 3000, 4.0), ("muon", 1, "delayed", 3000, 4.0),
        ("adamw", 0, "delayed", 3000, 4.0),  # whose ZeRO-1 is still to come
    ]  # fmt: skip
    named = [dict(zip(("optimizer", "seed", "way", "steps", "loss"), row, strict=True)) for row in rows]
    rest = {"hidden": 104, "layers": 4, "samples": 2, "rate": 8e-3}
    assert {*named[0], *rest} == {*KEY, "loss"}
    worse = [{**row, "rate": 4e-3, "loss": 5 + row["loss"]} for row in named]
    path.write_text("".join(json.dumps(rest | row) + "\n" for row in worse + named))
    assert over_zero1(path) == {"muon": {"zero1": 1.0, "delayed": pytest.approx(1.05)}}
