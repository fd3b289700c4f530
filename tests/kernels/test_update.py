"""The update kernels against the formulas and against torch's own optimizers; dispatch and its refusals."""

import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from geotrain import kernels
from geotrain.config import MomentumConfig
from geotrain.kernels import AdamStep, OuterStep, cpu, dispatch, reference
from geotrain.kernels.payload_format import PayloadFormat
from geotrain.outer.rules.halos import delayed_nesterov
from geotrain.outer.rules.region_momentum import momentum_average
from geotrain.outer.rules.rule import average
from geotrain.outer.rules.sync import nesterov

ROOT = Path(__file__).parents[2]


def test_delayed_nesterov_is_the_published_rule():
    """HALoS, arXiv 2506.04531: lr = lr_per_update · N; the momentum moves with every N-th delta."""
    lr_per_update, beta, buffer = 0.2, 0.9, 4
    settings = MomentumConfig(lr_per_update=lr_per_update, beta=beta, buffer=buffer)
    torch.manual_seed(0)
    x, m, acc = torch.randn(500), torch.zeros(500), torch.zeros(500)
    want_x, want_m, want_acc = x.double(), m.double(), acc.double()
    lr = lr_per_update * buffer
    for arrival in range(1, 14):
        delta = torch.randn(500)
        moves = arrival % buffer == 0
        want_acc += delta
        if moves:
            want_m = beta * want_m + want_acc / buffer
            want_x -= lr * (beta * want_m + delta / buffer)
            want_acc.zero_()
        else:
            want_x -= lr * delta / buffer
        kernels.outer_update(x, delta, m, delayed_nesterov(arrival, settings), acc)
    torch.testing.assert_close(x, want_x.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(m, want_m.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(acc, want_acc.float(), rtol=1e-5, atol=1e-5)


def test_nesterov_is_torchs():
    torch.manual_seed(0)
    x, m = torch.randn(300), torch.zeros(300)
    parameter = torch.nn.Parameter(x.clone())
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        parameter.grad = torch.randn(300)
        kernels.outer_update(x, parameter.grad, m, nesterov(0.7, 0.9))
        sgd.step()
    torch.testing.assert_close(x, parameter.detach(), rtol=1e-5, atol=1e-5)


def test_region_momentum_is_the_rule_of_the_study():
    weight, gain, decay = 0.25, 3.0, 0.993
    torch.manual_seed(0)
    x, m = torch.randn(300), torch.zeros(300)
    want_x, want_m = x.double(), m.double()
    for _ in range(20):
        delta = torch.randn(300)
        want_m = decay * want_m + (1 - decay) * delta
        want_x -= weight * (delta + gain * want_m)
        kernels.outer_update(x, delta, m, momentum_average(decay, gain, weight))
    torch.testing.assert_close(x, want_x.float(), rtol=1e-5, atol=1e-5)


def test_averaging_is_a_step_without_momentum():
    torch.manual_seed(0)
    x, delta = torch.randn(300), torch.randn(300)
    want = x.double() - delta.double() / 3
    average(x, delta, 1 / 3)
    torch.testing.assert_close(x, want.float(), rtol=1e-6, atol=1e-7)


def test_a_merge_keeps_what_was_committed_since_the_last_update_left():
    torch.manual_seed(0)
    sent, incoming, later = torch.randn(400), torch.randn(400), torch.randn(400)
    x, base = sent - later, sent.clone()
    kernels.merge(x, base, incoming, 0.25, ledger=True)
    torch.testing.assert_close(base, 0.75 * sent + 0.25 * incoming)
    torch.testing.assert_close(base - x, later)
    x = sent - later
    kernels.merge(x, base, incoming, 0.25, ledger=False)  # as published: a part of it is forgotten
    torch.testing.assert_close(x, 0.75 * (sent - later) + 0.25 * incoming)
    assert torch.equal(x, base)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torchs_and_an_estimate_is_the_step_that_follows(weight_decay):
    torch.manual_seed(0)
    x, m, v = torch.randn(300), torch.zeros(300), torch.zeros(300)
    parameter = torch.nn.Parameter(x.clone())
    adamw = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    out, estimate, ahead = (torch.zeros(300, dtype=torch.bfloat16) for _ in range(3))
    for t in range(1, 30):
        parameter.grad = torch.randn(300)
        step = AdamStep(1e-2, 0.9, 0.95, 1e-8, weight_decay, step=t, grad_scale=0.5)
        after = AdamStep(1e-2, 0.9, 0.95, 1e-8, weight_decay, step=t + 1, grad_scale=0.5)
        grad = parameter.grad * 2
        before = [tensor.clone() for tensor in (x, m, v)]
        kernels.adam_step(x, m, v, grad, step, out=estimate, commit=False)
        assert all(torch.equal(a, b) for a, b in zip((x, m, v), before, strict=True))
        kernels.adam_step(x, m, v, grad, step, out=ahead, look_ahead=after)
        assert torch.equal(estimate, x.bfloat16())
        kernels.adam_step(x, m, v, grad, after, out=out, commit=False)
        assert torch.equal(ahead, out)  # the look-ahead is an estimate from the committed state
        adamw.step()
    torch.testing.assert_close(x, parameter.detach(), rtol=2e-5, atol=2e-6)


def test_without_a_compiled_library_torch_does_the_work_and_says_so(monkeypatch):
    with_library = kernels.quantize(torch.ones(100), PayloadFormat("int4"))[0]
    monkeypatch.setattr(cpu, "get_config_var", lambda name: ".missing.so")
    with pytest.warns(RuntimeWarning, match="Install a C compiler"):
        assert cpu.library.__wrapped__() is None
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert dispatch._pick(torch.zeros(1)) is reference
    assert torch.equal(kernels.quantize(torch.ones(100), PayloadFormat("int4"))[0], with_library)


def test_a_stale_build_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/new.c").write_text("int x;")
    name = f"_fast{sysconfig.get_config_var('EXT_SUFFIX')}"
    (tmp_path / name).symlink_to(Path(cpu.__file__).parent / name)
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    with pytest.warns(RuntimeWarning, match="built from other sources"):
        assert cpu.library.__wrapped__() is None


X, STEP = torch.zeros(10), AdamStep(1e-3, 0.9, 0.95, 1e-8, 0, 1)
SQUARES = torch.zeros(1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kernels.outer_update(X, X, X[1:], OuterStep(0.7, moves_momentum=True)),
         "momentum must have 10 elem"),
        (lambda: kernels.outer_update(X, X, X, OuterStep(0.1)), "needs an accumulator"),
        (lambda: kernels.outer_update(X, X, X.bfloat16(), OuterStep(0.1), X),
         "accumulator must be contiguous bfloat16"),
        (lambda: kernels.outer_update(X, X, None, OuterStep(0.1, moves_momentum=True)),
         "moves the momentum needs one"),
        (lambda: kernels.adam_step(X, X, X, torch.zeros(20)[::2], STEP),
         "grad must be contiguous float32 or bfloat16"),
        (lambda: kernels.adam_step(X, X, X, X, STEP, commit=False), "not committed, needs out"),
        (lambda: kernels.dequantize(coded(5), torch.zeros(16), PayloadFormat("int4")), "payload must be 24 bytes"),
        (lambda: kernels.dequantize(coded(20_000), torch.zeros(5000), PayloadFormat("fp32"), squares=SQUARES),
         "squares must have 2 elements"),
    ],
)  # fmt: skip
def test_what_would_corrupt_memory_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def coded(size_bytes):
    return torch.zeros(size_bytes, dtype=torch.uint8)


@pytest.mark.slow
@pytest.mark.long("kernels/csrc")
@pytest.mark.parametrize(
    "architecture",
    ["x86-64", "x86-64-v3", "x86-64-v4"],
)
def test_every_instruction_set_gives_the_same_bits(architecture, tmp_path, monkeypatch):
    """The library carries clones for three of them and picks one; here each is forced and compared."""
    if architecture == "x86-64-v4" and "avx512vl" not in Path("/proc/cpuinfo").read_text():
        architecture = "x86-64-v2"  # what this machine cannot run, it cannot compare
    sources = sorted((ROOT / "kernels/csrc").glob("*.c"))
    flags = ["-O3", "-ffp-contract=off", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"]
    built = tmp_path / f"_fast{sysconfig.get_config_var('EXT_SUFFIX')}"
    macros = ["-DGEOTRAIN_NO_CLONES", '-DGEOTRAIN_SOURCE="none"']
    command = [
        "gcc",
        *flags,
        "-shared",
        "-fPIC",
        *macros,
        f"-march={architecture}",
        *map(str, sources),
        "-o",
        str(built),
        "-lm",
    ]
    subprocess.run(command, check=True, timeout=560)
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    forced = cpu.library.__wrapped__()
    assert forced is not None
    monkeypatch.setattr(cpu, "library", lambda: forced)
    from tests.support.kernel_cases import PAYLOAD_FORMATS, check_adam, check_quantize

    for fmt in PAYLOAD_FORMATS:
        check_quantize(cpu, fmt, 645)
    check_adam(cpu, 1000)
