"""The compiled small model against what torch says, within rounding."""

from __future__ import annotations

import pytest
import torch

from geotrain.canonical import canonical_parameters
from geotrain.initial import initial_tensor
from geotrain.simulate.compiled import LIBRARY, library, torch_sgemm
from geotrain.simulate.lm import FlatAdamW, InnerSettings, SmallLM, small_architecture


@pytest.fixture(autouse=True)
def compiled_here() -> None:
    assert library() is not None, "the small model was not compiled: install gcc, reinstall"
    assert torch_sgemm() is not None, "this build of torch exports no sgemm"


def both(hidden: int, layers: int, heads: int, ffn: int, length: int) -> tuple[SmallLM, SmallLM]:
    a = small_architecture(hidden, layers, heads, ffn, length)
    start = torch.cat([initial_tensor(p, 3).flatten() for p in canonical_parameters(a)])
    start += 0.1 * torch.randn(start.numel(), generator=torch.Generator().manual_seed(0))  # norms are not all ones
    return SmallLM(a, start), SmallLM(a, start, compiled=False)


@pytest.mark.parametrize(
    ("shape", "batch"),
    [
        ((64, 2, 4, 176, 32), 4),
        ((64, 1, 4, 176, 64), 5),
        ((48, 2, 3, 40, 20), 9),
        ((16, 1, 2, 32, 7), 2),
        ((LIBRARY, 2, 2, 344, 48), 5),
        ((LIBRARY + 4, 1, 3, 24, 7), 2),
    ],
)
def test_loss_and_gradient_are_torchs(shape, batch):
    """Also where nothing is a multiple of a vector, and a batch is more than one chunk or less."""
    compiled, plain = both(*shape)
    assert (compiled._compiled.sgemm is not None) == (shape[0] >= LIBRARY)
    tokens = torch.randint(0, 256, (batch, shape[-1] + 1), generator=torch.Generator().manual_seed(1))
    assert compiled.backward(tokens) == pytest.approx(plain.backward(tokens), rel=1e-5)
    for name, leaf in plain._leaves.items():
        begin = leaf.storage_offset()
        mine = compiled.gradient[begin : begin + leaf.numel()].view_as(leaf)
        torch.testing.assert_close(
            mine, leaf.grad, rtol=1e-4, atol=1e-6 + 1e-5 * float(leaf.grad.abs().max()), msg=name
        )
    other = plain.flat * 0.9
    assert compiled.evaluate(other, tokens) == pytest.approx(plain.evaluate(other, tokens), rel=1e-5)
    shorter = tokens[:, : shape[-1] // 2]
    assert compiled.evaluate(other, shorter) == pytest.approx(plain.evaluate(other, shorter), rel=1e-5)


def test_adamw_is_torchs():
    """Steps with a gradient that is clipped, and with one that is not."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5000, generator=generator)
    decays = (torch.arange(5000) % 3 > 0).float()
    weights = [start.clone(), start.clone()]
    optimizers = [FlatAdamW(InnerSettings(), decays, compiled=c) for c in (True, False)]
    for size in (3.0, 0.001, 0.01):
        gradient = size * torch.randn(5000, generator=generator)
        for x, optimizer in zip(weights, optimizers, strict=True):
            optimizer.step(x, gradient.clone(), lr=0.01)
    for mine, theirs in zip(
        (weights[0], optimizers[0].m, optimizers[0].v), (weights[1], optimizers[1].m, optimizers[1].v), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-7)
    assert float((weights[0] - start).abs().min()) > 0


def test_what_is_not_finite_shows():
    compiled, _ = both(16, 1, 2, 32, 16)
    compiled.flat[100] = float("nan")
    tokens = torch.arange(34).view(2, 17)
    assert compiled.backward(tokens) != compiled.backward(tokens)
    with pytest.raises(AssertionError):
        compiled.backward(tokens + 300)


def test_numbers_next_to_nothing_are_zero_while_torch_computes_and_only_then(monkeypatch):
    """Attention that is sure of itself is full of them, and each costs a core a hundred ordinary ones."""
    _, plain = both(16, 1, 2, 32, 8)
    seen: list[float] = []

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(float(torch.tensor(1e-39) * 1.0))
        return type(plain).loss(plain, tokens)

    monkeypatch.setattr(plain, "loss", loss)
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    plain.backward(tokens)
    plain.evaluate(plain.flat, tokens)
    assert seen == [0.0, 0.0] and float(torch.tensor(1e-39) * 1.0) > 0
