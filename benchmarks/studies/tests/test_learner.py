"""The small model against transformers' own, its optimizers against the product's, and steps of many workers at once
against those of each alone, within rounding."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.studies.claims.methods import METHODS, OURS
from benchmarks.studies.environments import HALOS, load_environment
from benchmarks.studies.learner.model import SmallLM, small_architecture
from benchmarks.studies.learner.optimizers import InnerSettings, Stacked, StackedOptimizer
from benchmarks.studies.learner.training import Fleet, Learning, StackedStep, Study, training_task
from geotrain import kernels
from geotrain.optimizers.updates import AdamWUpdate, MatrixUpdate, OwnedMatrix, Step
from geotrain.parallelism.optimizer_settings import MuonSettings
from geotrain.parallelism.whole_matrices import LocalMatrix
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import Parameter, canonical_parameters
from geotrain.simulate.world import VirtualWorld


def made(hidden: int, layers: int, heads: int, ffn: int, length: int) -> SmallLM:
    a = small_architecture(hidden, layers, heads, ffn, length)
    start = torch.cat([initial_tensor(p, 3).flatten() for p in canonical_parameters(a)])
    start += 0.1 * torch.randn(start.numel(), generator=torch.Generator().manual_seed(0))  # norms are not all ones
    return SmallLM(a, start)


def llama(model: SmallLM, weights: Tensor) -> LlamaForCausalLM:
    """transformers' model with these weights."""
    a = model.a
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=256, hidden_size=a.hidden_size, intermediate_size=a.ffn_size, num_hidden_layers=a.layers,
        num_attention_heads=a.heads, rms_norm_eps=a.norm_eps, rope_theta=a.rope_theta, tie_word_embeddings=True,
    )  # fmt: skip
    theirs, parts = LlamaForCausalLM(config), model.parts(weights)
    named = {p.name: parts[p.name].view(p.shape) for p in model.parameters}
    theirs.load_state_dict(named | {"lm_head.weight": named["model.embed_tokens.weight"]})
    return theirs


def loss_of(theirs: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Mean nats a byte."""
    return F.cross_entropy(theirs(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize(
    ("shape", "batch", "workers"),
    [((64, 2, 4, 176, 32), 4, 2), ((48, 2, 3, 40, 20), 9, 1), ((16, 1, 2, 32, 7), 2, 3)],
)
def test_losses_and_gradients_of_stacked_models_are_those_of_transformers(shape, batch, workers):
    model, generator = made(*shape), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (workers, batch, shape[-1] + 1), generator=generator)
    weights = model.start * (1 + 0.1 * torch.randn(workers, 1, generator=generator))
    losses, found = model.gradients(weights, tokens)
    for i in range(workers):
        theirs = llama(model, weights[i])
        loss = loss_of(theirs, tokens[i])
        loss.backward()
        assert float(losses[i]) == pytest.approx(loss.item(), rel=1e-5)
        gradients = {name: p.grad for name, p in theirs.named_parameters()}
        for name, mine in model.parts(found[i]).items():
            wanted = gradients[name].flatten()
            atol = 1e-6 + 1e-5 * float(wanted.abs().max())
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=atol, msg=name)


def test_weights_are_evaluated_on_more_windows_than_are_computed_at_once():
    model = made(16, 1, 2, 32, 32)
    tokens = torch.randint(0, 256, (150, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for part in (tokens, tokens[:, :16]):
            wanted = loss_of(llama(model, 0.9 * model.start), part).item()
            assert model.evaluate(0.9 * model.start, part) == pytest.approx(wanted, rel=1e-5)


def test_what_is_not_finite_shows_and_stays_in_its_row():
    model = made(16, 1, 2, 32, 16)
    weights = model.start.repeat(2, 1)
    weights[0, 100] = float("nan")
    tokens = torch.arange(34).view(1, 2, 17).repeat(2, 1, 1)
    losses, gradients = model.gradients(weights, tokens)
    assert losses.isnan().tolist() == [True, False] and gradients[1].isfinite().all()
    with pytest.raises(IndexError):
        model.gradients(weights, tokens + 300)


def test_stacked_models_are_stepped_as_the_product_steps_each():
    """Each at its own rate and count, its gradient clipped by its own norm; one that takes no step stays."""
    model, generator = made(16, 2, 2, 40, 8), torch.Generator().manual_seed(0)
    for settings in (InnerSettings(), InnerSettings(muon=0.95)):
        models = Stacked.of(model.start, 3)
        optimizer = StackedOptimizer(settings, model.parameters)
        alone = [Product(settings, model) for _ in range(3)]
        for size, active in ((3.0, (1, 1, 0)), (0.001, (1, 0, 0)), (0.01, (1, 1, 0))):
            gradients = size * torch.randn(3, len(model.start), generator=generator)
            rates = torch.tensor([0.01, 0.002, 0.03], dtype=torch.float64)
            for i, each in enumerate(alone):
                if active[i]:
                    each.step(gradients[i].clone(), float(rates[i]))
            rows = torch.tensor(active).nonzero().flatten()
            those = models.rows(rows)
            optimizer.step(those, gradients[rows], rates[rows])
            models.put(rows, those)
        assert models.steps.tolist() == [3, 2, 0] and torch.equal(models.weights[2], model.start)
        assert not models.m[2].any() and not models.v[2].any()
        for i, each in enumerate(alone):
            torch.testing.assert_close(models.weights[i], each.weights, rtol=2e-5, atol=2e-6)
        assert float((models.weights[:2] - model.start).abs().min()) > 0


class Product:
    """One model and the product's own updates of it."""

    def __init__(self, settings: InnerSettings, model: SmallLM) -> None:
        self.settings, self.weights, self.count = settings, model.start.clone(), 0
        numel = len(model.start)
        self.state = {k: torch.zeros(numel) for k in ("exp_avg", "exp_avg_sq", "momentum_buffer")}
        group = {"betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay}
        self.adamw, matrices, begin = [], [], 0
        for p in model.parameters:
            if settings.muon is not None and p.layer is not None and len(p.shape) == 2:
                matrices.append(OwnedMatrix(LocalMatrix(((0, p.numel),), *p.shape, None), begin))
            else:
                own = AdamWUpdate(group if p.decays else group | {"weight_decay": 0.0})
                self.adamw.append((slice(begin, begin + p.numel), own))
            begin += p.numel
        self.muon = MatrixUpdate(group, MuonSettings(normalize_rows=False), matrices, None)

    def step(self, gradient: Tensor, rate: float) -> None:
        self.count += 1
        step = Step(rate, self.count, min(1.0, self.settings.clip / float(gradient.norm())))
        for span, update in self.adamw:
            part = {name: self.state[name][span] for name in ("exp_avg", "exp_avg_sq")}
            update(self.weights[span], part, gradient[span], step)
        self.muon(self.weights, self.state, gradient, step)


def moved(settings: InnerSettings, parameters: list[Parameter], *gradients: Tensor) -> Tensor:
    """What the last of these steps, at a rate of 0.5, changes of weights that began with zeros."""
    models, rates = Stacked.of(torch.zeros(len(gradients[0])), 1), torch.full((1,), 0.5, dtype=torch.float64)
    optimizer = StackedOptimizer(settings, parameters)
    for gradient in gradients:
        last = models.weights[0].clone()
        optimizer.step(models, gradient[None].clone(), rates)
    return models.weights[0] - last


def test_muon_moves_hidden_matrices_and_leaves_the_rest_to_adamw():
    """q, k and v are three matrices, gate and up two. The update is as long as one of AdamW whose every element is
    0.2."""
    parameters = made(16, 2, 2, 40, 8).parameters
    gradient = torch.randn(sum(p.numel for p in parameters), generator=torch.Generator().manual_seed(1))
    plain = {"clip": 1e9, "weight_decay": 0.0}
    mine = moved(InnerSettings(**plain, muon=0.95), parameters, gradient)
    adam = moved(InnerSettings(**plain), parameters, gradient)
    inside = torch.zeros(len(gradient), dtype=torch.bool)
    hidden = 0
    for p, end in zip(parameters, accumulate(p.numel for p in parameters), strict=True):
        if p.layer is None or len(p.shape) != 2:
            continue
        part, hidden = slice(end - p.numel, end), hidden + 1
        inside[part] = True
        alone = kernels.orthogonalize(gradient[part].view(1, *p.shape))
        wanted = -0.5 * 0.2 * max(p.shape) ** 0.5 * alone.flatten()
        torch.testing.assert_close(mine[part], wanted, rtol=0, atol=2e-4)
        assert float(mine[part].square().mean().sqrt()) == pytest.approx(0.5 * 0.2, rel=0.2)
    assert hidden == 2 * 7 and int((~inside).sum()) == 256 * 16 + 5 * 16
    torch.testing.assert_close(mine[~inside], adam[~inside], rtol=1e-6, atol=0)


def test_a_quasi_hyperbolic_momentum_has_a_share_of_its_own():
    """ν = 0 leaves the gradient alone, whatever the momentum is; ν = the momentum's decay is Nesterov's."""
    parameters = [p for p in made(16, 1, 2, 32, 8).parameters if p.name.endswith("q_proj.weight")]
    gradients = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))

    def last(share: float | None) -> Tensor:
        return moved(
            InnerSettings(clip=1e9, weight_decay=0.0, muon=0.95, momentum_share=share), parameters, *gradients
        )

    alone = kernels.orthogonalize(gradients[1].view(1, 16, 16)).flatten() * -(0.5 * 0.2 * 16**0.5)
    torch.testing.assert_close(last(0.0), alone, rtol=0, atol=2e-4)
    nesterov = last(None)
    torch.testing.assert_close(last(0.95), nesterov)
    assert float((nesterov - alone).abs().max()) > 0.01


def test_steps_of_many_workers_at_once_are_those_of_each_alone(monkeypatch):
    study = Study(steps=96, hidden=16, layers=1, heads=2, ffn=32, batch=2, length=32, inner=InnerSettings(muon=0.95))
    outer = METHODS[OURS].outer({}, load_environment(HALOS), study.steps)
    widths: list[int] = []
    step, settle = StackedStep.__call__, Fleet.settle

    def seen(self: StackedStep, rows: np.ndarray, *inputs: np.ndarray) -> Tensor:
        widths.append(len(rows))
        return step(self, rows, *inputs)

    def alone(self: Fleet, mine: Learning) -> None:
        others = [member for member in self.members if member is not mine]
        waiting = [member.queue for member in others]
        for member in others:
            member.queue = deque()
        settle(self, mine)
        for member, queue in zip(others, waiting, strict=True):
            member.queue = queue

    monkeypatch.setattr(StackedStep, "__call__", seen)
    found: dict[str, Tensor] = {}
    for how in ("alone", "at once"):
        widths.clear()
        task = training_task(study, outer, 1 << 20)
        with monkeypatch.context() as patched:
            if how == "alone":
                patched.setattr(Fleet, "settle", alone)
            world = VirtualWorld(load_environment(HALOS).world, task)
            world.run()
        found[how] = torch.cat([world.top.server.weights(f) for f in range(len(task.parameter_map.fragments))])
        assert (max(widths) == 1) == (how == "alone")
        torch.testing.assert_close(found[how], found["alone"], rtol=1e-4, atol=1e-6)
    assert float((found["alone"] - torch.cat(task.start)).abs().max()) > 0.01


def test_numbers_next_to_nothing_are_zero_while_the_model_computes_and_only_then(monkeypatch):
    """Attention that is sure of itself is full of them, and each costs a core a hundred ordinary ones."""
    model, seen = made(16, 1, 2, 32, 8), []
    attend = F.scaled_dot_product_attention

    def seeing(*arguments: Tensor, **options: bool) -> Tensor:
        seen.append(float(torch.tensor(1e-39) * 1.0))
        return attend(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seeing)
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    model.gradients(model.start[None], tokens[None])
    model.evaluate(model.start, tokens)
    assert seen == [0.0, 0.0] and float(torch.tensor(1e-39) * 1.0) > 0
