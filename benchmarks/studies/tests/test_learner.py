"""The small model against transformers' own, within rounding; and its optimizers, which are the product's."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.studies.learner.model import SmallLM, small_architecture
from benchmarks.studies.learner.optimizers import FlatOptimizer, InnerSettings
from geotrain import kernels
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import canonical_parameters


def made(hidden: int, layers: int, heads: int, ffn: int, length: int) -> SmallLM:
    a = small_architecture(hidden, layers, heads, ffn, length)
    start = torch.cat([initial_tensor(p, 3).flatten() for p in canonical_parameters(a)])
    start += 0.1 * torch.randn(start.numel(), generator=torch.Generator().manual_seed(0))  # norms are not all ones
    return SmallLM(a, start)


def llama(model: SmallLM) -> LlamaForCausalLM:
    """transformers' model with the same weights."""
    a = model.a
    config = LlamaConfig(
        vocab_size=256, hidden_size=a.hidden_size, intermediate_size=a.ffn_size, num_hidden_layers=a.layers,
        num_attention_heads=a.heads, rms_norm_eps=a.norm_eps, rope_theta=a.rope_theta, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config)
    named = {p.name: model.masters[p.name].view(p.shape) for p in model.parameters}
    theirs.load_state_dict(named | {"lm_head.weight": named["model.embed_tokens.weight"]})
    return theirs


def loss_of(theirs: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Mean nats a byte."""
    return F.cross_entropy(theirs(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize(
    ("shape", "batch"), [((64, 2, 4, 176, 32), 4), ((48, 2, 3, 40, 20), 9), ((16, 1, 2, 32, 7), 2)]
)
def test_loss_and_gradient_are_those_of_transformers(shape, batch):
    model = made(*shape)
    theirs = llama(model)
    tokens = torch.randint(0, 256, (batch, shape[-1] + 1), generator=torch.Generator().manual_seed(1))
    loss = loss_of(theirs, tokens)
    loss.backward()
    assert model.backward(tokens) == pytest.approx(loss.item(), rel=1e-5)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for p, mine in zip(model.parameters, model.gradient.split(model.sizes), strict=True):
        wanted = gradients[p.name].flatten()
        atol = 1e-6 + 1e-5 * float(wanted.abs().max())
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=atol, msg=p.name)


def test_other_weights_are_evaluated_on_more_windows_than_are_computed_at_once():
    model, other = made(16, 1, 2, 32, 32), made(16, 1, 2, 32, 32)
    other.flat *= 0.9
    tokens = torch.randint(0, 256, (150, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for part in (tokens, tokens[:, :16]):
            assert model.evaluate(other.flat, part) == pytest.approx(loss_of(llama(other), part).item(), rel=1e-5)


def test_what_is_not_finite_shows():
    model = made(16, 1, 2, 32, 16)
    model.flat[100] = float("nan")
    tokens = torch.arange(34).view(2, 17)
    assert model.backward(tokens) != model.backward(tokens)
    with pytest.raises(IndexError):
        model.backward(tokens + 300)


def test_adamw_decays_matrices_clips_and_counts_its_steps():
    """As torch's AdamW does, with a gradient that is clipped, and with one that is not."""
    model = made(16, 2, 2, 40, 8)
    settings, generator = InnerSettings(), torch.Generator().manual_seed(0)
    optimizer, start = FlatOptimizer(settings, model.parameters), model.flat.clone()
    theirs = [part.clone() for part in model.masters.values()]
    groups = [
        {
            "params": [t for p, t in zip(model.parameters, theirs, strict=True) if p.decays == decays],
            "weight_decay": w,
        }
        for decays, w in ((True, settings.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=settings.betas, eps=settings.eps)
    for size in (3.0, 0.001, 0.01):
        gradient = size * torch.randn(len(start), generator=generator)
        optimizer.step(model.flat, gradient, lr=0.01)
        gradient *= min(1.0, settings.clip / float(gradient.norm()))
        for t, g in zip(theirs, gradient.split([t.numel() for t in theirs]), strict=True):
            t.grad = g
        adamw.step()
    torch.testing.assert_close(model.flat, torch.cat(theirs), rtol=2e-5, atol=1e-7)
    assert optimizer.steps == 3 and float((model.flat - start).abs().min()) > 0


def test_muon_moves_hidden_matrices_and_leaves_the_rest_to_adamw():
    """q, k and v are three matrices, gate and up two. The update is as long as one of AdamW whose every element is
    0.2."""
    parameters = made(16, 2, 2, 40, 8).parameters
    numel = sum(p.numel for p in parameters)
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    moved, adam = torch.zeros(numel), torch.zeros(numel)
    plain = {"clip": 1e9, "weight_decay": 0.0}
    FlatOptimizer(InnerSettings(**plain, muon=0.95), parameters).step(moved, gradient, lr=0.5)
    FlatOptimizer(InnerSettings(**plain), parameters).step(adam, gradient, lr=0.5)
    inside = torch.zeros(numel, dtype=torch.bool)
    hidden = 0
    for p, end in zip(parameters, accumulate(p.numel for p in parameters), strict=True):
        if p.layer is None or len(p.shape) != 2:
            continue
        part, hidden = slice(end - p.numel, end), hidden + 1
        inside[part] = True
        alone = kernels.orthogonalize(gradient[part].view(1, *p.shape))
        wanted = -0.5 * 0.2 * max(p.shape) ** 0.5 * alone.flatten()
        torch.testing.assert_close(moved[part], wanted, rtol=0, atol=2e-4)
        assert float(moved[part].square().mean().sqrt()) == pytest.approx(0.5 * 0.2, rel=0.2)
    assert hidden == 2 * 7 and int((~inside).sum()) == 256 * 16 + 5 * 16
    torch.testing.assert_close(moved[~inside], adam[~inside], rtol=1e-6, atol=0)


def test_a_quasi_hyperbolic_momentum_has_a_share_of_its_own():
    """ν = 0 leaves the gradient alone, whatever the momentum is; ν = the momentum's decay is Nesterov's."""
    parameters = [p for p in made(16, 1, 2, 32, 8).parameters if p.name.endswith("q_proj.weight")]
    gradients = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))

    def moved(share: float | None) -> Tensor:
        x = torch.zeros(256)
        optimizer = FlatOptimizer(
            InnerSettings(clip=1e9, weight_decay=0.0, muon=0.95, momentum_share=share), parameters
        )
        for gradient in gradients:
            last = x.clone()
            optimizer.step(x, gradient, lr=1.0)
        return x - last

    alone = kernels.orthogonalize(gradients[1].view(1, 16, 16)).flatten() * -(0.2 * 16**0.5)
    torch.testing.assert_close(moved(0.0), alone, rtol=0, atol=2e-4)
    nesterov = moved(None)
    torch.testing.assert_close(moved(0.95), nesterov)
    assert float((nesterov - alone).abs().max()) > 0.01


def test_numbers_next_to_nothing_are_zero_while_the_model_computes_and_only_then(monkeypatch):
    """Attention that is sure of itself is full of them, and each costs a core a hundred ordinary ones."""
    model, seen = made(16, 1, 2, 32, 8), []
    attend = F.scaled_dot_product_attention

    def seeing(*arguments: Tensor, **options: bool) -> Tensor:
        seen.append(float(torch.tensor(1e-39) * 1.0))
        return attend(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seeing)
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    model.backward(tokens)
    model.evaluate(model.flat, tokens)
    assert seen == [0.0, 0.0] and float(torch.tensor(1e-39) * 1.0) > 0
