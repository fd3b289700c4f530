"""The compiled small model against what torch says, within rounding."""

from __future__ import annotations

import pytest
import torch

from benchmarks.learner import compiled as compiling
from benchmarks.learner.compiled import LIBRARY, library, torch_sgemm
from benchmarks.learner.model import SmallLM, small_architecture
from benchmarks.learner.optimizers import (
    FlatAdamW,
    FlatMuon,
    InnerSettings,
    MuonSettings,
    QuasiHyperbolicMuonSettings,
    hidden_matrices,
    optimizer_of,
    orthogonalized,
)
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import canonical_parameters


@pytest.fixture(autouse=True)
def compiled_here() -> None:
    assert library() is not None, "the small model was not compiled: install gcc"
    assert torch_sgemm() is not None, "this build of torch exports no sgemm"


INTEL, ZEN_2, ZEN_5 = (
    ("GenuineIntel", frozenset({"avx2", "avx512f"})),
    ("AuthenticAMD", frozenset({"avx2"})),
    ("AuthenticAMD", frozenset({"avx2", "avx512f"})),
)


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
@pytest.mark.parametrize("processor", [INTEL, ZEN_5], ids=["library", "compiled"])
def test_loss_and_gradient_are_torchs(processor, shape, batch, monkeypatch):
    """Also where nothing is a multiple of a vector, a batch is more than one chunk or less; whoever multiplies."""
    monkeypatch.setattr(compiling, "processor", lambda: processor)
    compiled, plain = both(*shape)
    assert (compiled._compiled.sgemm is not None) == (shape[0] >= LIBRARY and processor == INTEL)
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


@pytest.mark.parametrize("processor", [INTEL, ZEN_5], ids=["library", "compiled"])
@pytest.mark.parametrize("settings", [MuonSettings(), QuasiHyperbolicMuonSettings(momentum=0.99, momentum_share=0.7)])
@pytest.mark.parametrize("shape", [(64, 2, 4, 176, 32), (48, 2, 3, 40, 20), (LIBRARY, 1, 2, 344, 48)])
def test_muon_is_torchs(shape, settings, processor, monkeypatch):
    """Steps with a gradient that is clipped, and with one that is not; also where nothing is a multiple of a vector,
    and where the matrices are BLAS's. The compiled form works on XᵀX, whose rounding weighs more on small singular
    values: a step's element differs by less than a thousandth of the largest."""
    monkeypatch.setattr(compiling, "processor", lambda: processor)
    generator = torch.Generator().manual_seed(0)
    _, plain = both(*shape)
    decays, matrices = plain.decays(), hidden_matrices(plain.parameters)
    weights = [plain.flat.clone(), plain.flat.clone()]
    optimizers = [FlatMuon(settings, decays, matrices, compiled=c) for c in (True, False)]
    for size in (3.0, 0.001, 0.01):
        gradient = size * torch.randn(len(decays), generator=generator)
        before = weights[1].clone()
        for x, optimizer in zip(weights, optimizers, strict=True):
            optimizer.step(x, gradient.clone(), lr=0.01)
        assert float((weights[0] - weights[1]).abs().max()) < 1e-3 * float((weights[1] - before).abs().max())
        weights[0].copy_(weights[1])
    for mine, theirs in ((optimizers[0].m, optimizers[1].m), (optimizers[0].v, optimizers[1].v)):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-7)
    assert float((weights[0] - plain.flat).abs().min()) > 0


@pytest.mark.parametrize("compiled", [True, False])
def test_a_quasi_hyperbolic_momentum_has_a_share_of_its_own(compiled):
    """ν = 0 leaves the gradient alone, whatever the momentum is; ν = the momentum's decay is Nesterov's."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(2, 64, generator=generator)

    def moved(settings: MuonSettings) -> torch.Tensor:
        x, optimizer = torch.zeros(64), FlatMuon(settings, torch.zeros(64), ((0, 8, 8),), compiled)
        for gradient in gradients:
            last = x.clone()
            optimizer.step(x, gradient.clone(), lr=1.0)
        return x - last

    plain = dict(clip=1e9, weight_decay=0.0, scale=1.0)
    s = MuonSettings(**plain)
    alone = orthogonalized(gradients[1].view(8, 8), s.coefficients, s.iterations).flatten() * -(8**0.5)
    torch.testing.assert_close(
        moved(QuasiHyperbolicMuonSettings(**plain, momentum_share=0.0)), alone, rtol=0, atol=2e-4
    )
    nesterov = moved(s)
    assert torch.equal(moved(QuasiHyperbolicMuonSettings(**plain, momentum_share=0.95)), nesterov)
    assert float((nesterov - alone).abs().max()) > 0.01


def test_muon_knows_matrices_of_any_spectrum():
    """Singular values from 1 down to 1e-6, whose squares are lost in fp32's rounding; and no gradient at all."""
    generator = torch.Generator().manual_seed(0)
    s, none = MuonSettings(clip=1e9, weight_decay=0.0), torch.zeros(64 * 176)
    for rows, columns in ((64, 176), (176, 64), (64, 64)):
        u, _, v = torch.linalg.svd(torch.randn(rows, columns, generator=generator), full_matrices=False)
        gradient = (u * torch.logspace(0, -6, 64) @ v).flatten()
        n = rows * columns
        moved = [torch.zeros(n), torch.zeros(n)]
        for x, compiled in zip(moved, (True, False), strict=True):
            FlatMuon(s, torch.ones(n), ((0, rows, columns),), compiled).step(x, gradient.clone(), lr=1.0)
        exact = -s.scale * max(rows, columns) ** 0.5
        exact *= orthogonalized(gradient.double().view(rows, columns), s.coefficients, s.iterations).flatten()
        for x in moved:
            assert float((x - exact).norm()) < 5e-3 * float(exact.norm())
        still = torch.ones(n)
        FlatMuon(s, torch.ones(n), ((0, rows, columns),)).step(still, none[:n].clone(), lr=1.0)
        assert bool((still == 1).all())


@pytest.mark.parametrize("shape", [(64, 64), (64, 176), (176, 64)])
def test_orthogonalized_matrices_have_singular_values_near_1(shape):
    """By Jordan's coefficients, of all directions with more than a hundredth of the matrix's norm; U and V stay."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, sigma, v = torch.linalg.svd(matrix, full_matrices=False)
    kept = u.T @ orthogonalized(matrix, (3.4445, -4.7750, 2.0315), 5) @ v.T
    found = kept.diagonal()[sigma > 0.01 * matrix.norm()]
    assert len(found) > 50 and float(found.min()) > 0.68 and float(found.max()) < 1.14
    assert float((kept - kept.diagonal().diag()).abs().max()) < 1e-9


def test_muon_moves_hidden_matrices_and_leaves_the_rest_to_adamw():
    """q, k and v are three matrices, gate and up two, though each group lies together as one. The update is as
    long as one of AdamW whose every element is 0.2."""
    _, plain = both(16, 2, 2, 40, 8)
    decays, matrices = plain.decays(), hidden_matrices(plain.parameters)
    assert [shape for _, *shape in matrices] == 2 * [*4 * [[16, 16]], [40, 16], [40, 16], [16, 40]]
    gradient = torch.randn(len(decays), generator=torch.Generator().manual_seed(1))
    settings = MuonSettings(clip=1e9, weight_decay=0.0)
    moved, adam = torch.zeros_like(decays), torch.zeros_like(decays)
    optimizer_of(settings, decays, plain.parameters).step(moved, gradient.clone(), lr=0.5)
    optimizer_of(InnerSettings(clip=1e9, weight_decay=0.0), decays, plain.parameters).step(adam, gradient, lr=0.5)
    inside = torch.zeros(len(decays), dtype=torch.bool)
    for begin, rows, columns in matrices:
        part = slice(begin, begin + rows * columns)
        inside[part] = True
        alone = orthogonalized(gradient[part].view(rows, columns), settings.coefficients, settings.iterations)
        wanted = -0.5 * 0.2 * max(rows, columns) ** 0.5 * alone.flatten()
        torch.testing.assert_close(moved[part], wanted, rtol=0, atol=2e-4)
        assert float(moved[part].square().mean().sqrt()) == pytest.approx(0.5 * 0.2, rel=0.2)
    torch.testing.assert_close(moved[~inside], adam[~inside], rtol=1e-6, atol=0)
    assert int((~inside).sum()) == 256 * 16 + 5 * 16


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


@pytest.mark.slow
def test_it_is_compiled_once_and_again_for_other_flags(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "CACHE", tmp_path / "cache")
    built = compiling._built()
    written_ns = built.stat().st_mtime_ns
    assert compiling._built() == built and built.stat().st_mtime_ns == written_ns
    monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-DOTHER"))
    other = compiling._built()
    assert other != built and set(built.parent.iterdir()) == {built, other}


def test_without_a_compiler_torch_does_its_work(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "CACHE", tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.warns(RuntimeWarning, match="no-such-compiler.*Install gcc"):
        assert library.__wrapped__() is None


def test_the_processor_says_what_multiplies(monkeypatch):
    """And no trial's time: the same run has the same bits the next time."""
    for processor, large in (
        (INTEL, "library"),
        (ZEN_2, "library"),
        (ZEN_5, "compiled"),
        (("", frozenset()), "library"),
    ):
        monkeypatch.setattr(compiling, "processor", lambda processor=processor: processor)
        assert (compiling.products(LIBRARY - 1), compiling.products(LIBRARY)) == ("compiled", large)


def test_the_processors_own_words_are_understood(monkeypatch, tmp_path):
    told = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f\n\nprocessor\t: 1\n"
    monkeypatch.setattr(compiling.Path, "read_text", lambda self: told)
    assert compiling.processor.__wrapped__() == ("AuthenticAMD", frozenset({"fpu", "avx512f"}))
