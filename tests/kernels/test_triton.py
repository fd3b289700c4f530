"""The Triton kernels: the reference's bits under the interpreter and on a GPU, and compiled for real targets."""

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from benchmarks import aot, compiled_code, kernel_space, triton_aot
from geotrain.config import codec_config
from geotrain.inner.zero.codes import Codes
from geotrain.kernels import triton_ops
from geotrain.kernels.payload_format import FORMATS
from geotrain.kernels.steps import AdamStep
from geotrain.outer.codec import make_codec
from tests.support.kernel_cases import (
    PAYLOAD_FORMATS,
    SIZES,
    check_adam,
    check_quantize,
    check_rotate,
    format_id,
)

ROOT = Path(__file__).parents[2]
STEP = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step=7)


WHOLE = pytest.mark.long("kernels")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("every", [12, pytest.param(1, marks=WHOLE)])
def test_under_the_interpreter(every):
    # the variable is read when a kernel is defined, so this needs a process of its own
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.interpreted_kernels", str(every)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.split() == [format_id(fmt) for fmt in PAYLOAD_FORMATS[::every]]


KERNELS = {
    *("quantize_dense", "quantize_plain", "quantize_topk", "dequantize_dense", "dequantize_plain"),
    *("dequantize_topk", "adam_kernel", "rotate_kernel"),
}


def sample(each: int) -> list[tuple[triton_aot.Launch, str]]:
    """Sample what `benchmarks.aot` compiles: so many of each kernel, each for another target; the largest blocks
    first."""
    found, targets = [], list(triton_aot.TARGETS)
    kept: dict[str, int] = dict.fromkeys(KERNELS, 0)
    for op in kernel_space.factors():
        for case, target in sorted(aot.by_pairs(op), key=lambda c: -dict(c[0].settings).get("block", 0)):
            for launch in case.launches(target):
                name = launch.kernel.__name__
                turn = (sorted(KERNELS).index(name) + 2 * kept[name]) % len(targets)
                if kept[name] < each and targets[turn] == target:
                    kept[name] += 1
                    found.append((launch, target))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, pytest.param(3, marks=WHOLE)])
def test_compiles_ahead_of_time_for_every_target(each):
    """A sample of the space; all of it takes minutes (`python -m benchmarks.aot`)."""
    found = sample(each)
    assert {launch.kernel.__name__ for launch, _ in found} == KERNELS
    assert {target for _, target in found} == set(triton_aot.TARGETS)
    wrong = [(finding, launch) for launch, target in found if (finding := aot.look(launch, target)).wrong]
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["int4", "bf16", "topk2"])
def test_a_kernel_is_compiled_once_for_seeds_of_all_sizes(name):
    fmt = make_codec(codec_config(name, rounding="stochastic")).spec
    values, payload = torch.zeros(fmt.block), torch.zeros(fmt.encoded_bytes(fmt.block), dtype=torch.uint8)
    signatures = [
        [launch.signature for launch in triton_aot.launches(call)]
        for seed in (0, 1, 2**31, 2**63 + 1)
        for call in [lambda: triton_ops.quantize(values, payload, fmt, None, None, seed)]  # noqa: B023
    ]
    assert all("seed" in signature for signature in signatures[0])
    assert signatures.count(signatures[0]) == len(signatures)


def test_what_is_launched_lies_in_the_space():
    """Every call of the tests' cases, of each codec's own settings and of ACCO compiles what the space has."""
    inside = {
        kernel_space.key(launch)
        for op in kernel_space.factors()
        for case in kernel_space.whole(op)
        if dict(case.settings).get("numel") != kernel_space.LARGE
        for launch in case.launches("sm_90")
    }
    seen = set()

    def launched(call) -> None:
        for launch in triton_aot.launches(call, "sm_90"):
            seen.add(launch.kernel.__name__)
            assert kernel_space.key(launch) in inside, launch

    specs = [*PAYLOAD_FORMATS, *(make_codec(codec_config(name)).spec for name in FORMATS)]
    specs += [Codes(bits).format for bits in (4, 8)]
    for fmt in specs:
        for numel in (1, 333, fmt.block * 3, fmt.block * 5 + 77):
            values, anchor, out = (torch.zeros(numel) for _ in range(3))
            payload = torch.zeros(fmt.encoded_bytes(numel), dtype=torch.uint8)
            launched(lambda v=values, p=payload, s=fmt, a=anchor, o=out: triton_ops.quantize(v, p, s, a, o, 2**40))
            launched(lambda v=values, p=payload, s=fmt: triton_ops.quantize(v.bfloat16(), p, s, None, None, 1))
            launched(lambda p=payload, s=fmt, o=out: triton_ops.dequantize(p, o, s, 0.5))
            launched(lambda p=payload, s=fmt, o=out: triton_ops.dequantize(p, o, s, None))
    x = torch.zeros(40)
    for look_ahead, commit, out in ((STEP, True, torch.zeros(40)), (None, False, torch.zeros(40).bfloat16())):
        launched(lambda a=look_ahead, c=commit, o=out: triton_ops.adam(x, x, x, o, o, STEP, a, c))
    for heads, size in ((1, 64), (9, 128)):
        for dtype in (torch.float32, torch.bfloat16):
            states, angles = torch.zeros(4, 2, heads, size, dtype=dtype), torch.zeros(4, size // 2)
            for inverse in (False, True):
                launched(lambda t=states, a=angles, i=inverse: triton_ops.rotate(t, t, a, a, i))
    assert seen == KERNELS


def test_what_compiled_code_is_looked_at_for():
    """Offsets that overflow, and accesses that are narrow, are found where there are some."""

    @triton.jit
    def merge_kernel(weights, base, numel, WIDE: tl.constexpr, ELEMENTS: tl.constexpr):
        program = tl.program_id(0)
        if WIDE:
            program = program.to(tl.int64)
        at = program * ELEMENTS + tl.arange(0, ELEMENTS)
        tl.store(base + at, tl.load(weights + at, mask=at < numel), mask=at < numel)

    def told(wide: bool, numel: int) -> tuple[list[str], list[str]]:
        x = torch.empty(numel, device="meta")
        (launch,) = triton_aot.launches(lambda: merge_kernel[(numel // 1024,)](x, x, numel, WIDE=wide, ELEMENTS=1024))
        compiled = triton_aot.compile_launch(launch, "sm_90")
        return (
            compiled_code.narrow_offsets(launch, compiled.ttir),
            compiled_code.narrow_accesses(launch, compiled.code),
        )

    assert told(True, 1 << 33) == ([], [])
    offsets, accesses = told(False, 1 << 33)
    assert offsets and "arith.muli" in offsets[0] and not accesses
    assert told(False, 1 << 20) == ([], [])
    assert set(told(True, (1 << 20) + 19)[1]) == {"weights: 4 bytes of 16", "base: 4 bytes of 16"}


def test_each_two_settings_meet():
    values = {"a": range(5), "b": "xyz", "c": (True, False), "d": range(3)}
    rows = kernel_space.pairs(values)
    for a, b in combinations(values, 2):
        assert {(row[a], row[b]) for row in rows} == set(product(values[a], values[b]))
    assert 15 <= len(rows) <= 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fmt", PAYLOAD_FORMATS, ids=format_id)
def test_quantize_and_dequantize_on_the_gpu(fmt):
    for numel in (*SIZES, 70_001):
        check_quantize(triton_ops, fmt, numel, "cuda", moves_anchor=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_updates_on_the_gpu():
    for numel in (0, 1, 70_001):
        check_adam(triton_ops, numel, "cuda")
        check_rotate(triton_ops, (numel % 100 + 1, 2, 9, 128), "cuda")
