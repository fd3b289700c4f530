"""The Triton kernels: the reference's bits under the interpreter and on a GPU, and compiled for real targets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import triton_aot
from geotrain.kernels import triton_ops
from geotrain.kernels.layout import FORMATS, Spec
from geotrain.kernels.steps import QUINTIC, AdamStep
from tests.support.kernel_cases import (
    OUTER_STEPS,
    SIZES,
    SPECS,
    check_adam,
    check_merge,
    check_outer_update,
    check_quantize,
    check_rotate,
    spec_id,
)
from tests.support.orthogonal_cases import LARGE_SHAPES, SHAPES, UNEQUAL, check_awkward_values, check_bf16_kernels

HERE = Path(__file__).parent
# Bytes of shared memory that one block may take. For sm_80, what its smaller kin (sm_86, sm_89) has.
SHARED = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10, "gfx942": 64 << 10}
SHARED["gfx950"] = 160 << 10
STEP = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step=7)


@pytest.mark.slow
def test_under_the_interpreter():
    # the variable is read when a kernel is defined, so this needs a process of its own
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        str(HERE / "support" / "interpreted_kernels.py"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=HERE.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(SPECS) + len(OUTER_STEPS) + 7} passed" in done.stdout


def every_launch() -> list[triton_aot.Launch]:
    """What the launchers launch for every kernel and format, with a tail."""
    numel = 5 * 128 + 77
    x, y, z, w = (torch.zeros(numel) for _ in range(4))
    half = torch.zeros(numel, dtype=torch.bfloat16)
    squares = torch.zeros(1, dtype=torch.float64)
    heads, angles = torch.zeros(4, 2, 9, 128), torch.zeros(4, 64)
    calls = []
    for name in FORMATS:
        spec = Spec(name, stochastic=name in ("bf16", "e2m1"))
        payload = torch.zeros(spec.encoded_bytes(numel), dtype=torch.uint8)
        weights, anchor = (half, None) if name == "e3m0" else (x, y)
        calls.append(lambda v=weights, p=payload, s=spec, a=anchor: triton_ops.quantize(v, p, s, a, z, 2**40))
        weight = None if name == "int8" else 0.5
        calls.append(lambda p=payload, s=spec, w=weight: triton_ops.dequantize(p, x, s, w, squares))
    for spec in (Spec("topk2", 4096), Spec("topk2", 2048, stochastic=True), Spec("int4", 4096)):  # the most a program
        large, kept = torch.zeros(spec.block), torch.zeros(spec.block)
        payload = torch.zeros(spec.encoded_bytes(spec.block), dtype=torch.uint8)
        calls.append(lambda v=large, r=kept, p=payload, s=spec: triton_ops.quantize(v, p, s, v, r, 1))
    calls += [
        lambda: triton_ops.outer_update(x, y, z, w, OUTER_STEPS[1]),
        lambda: triton_ops.merge(x, y, z, w, 0.25),
        lambda: triton_ops.rotate(heads, heads, angles, angles, True),
        lambda: triton_ops.rotate(heads.bfloat16(), heads.bfloat16(), angles, angles, False),
        lambda: triton_ops.adam(x, y, z, half, half, STEP, STEP, True),
        lambda: triton_ops.adam(x, y, z, w, w, STEP, None, False),
    ]
    for shape in ((2, 512, 1408), (2, 1408, 512), (3, 7, 90), (3, 900, 40)):  # blocks of all sizes
        for dtype in (torch.float32, torch.bfloat16):
            matrices = torch.zeros(shape, dtype=dtype)
            calls.append(lambda m=matrices: triton_ops.orthogonalize(m, QUINTIC[:2]))
    return [launch for call in calls for launch in triton_aot.launches(call)]


@pytest.mark.slow
@pytest.mark.parametrize("target", triton_aot.TARGETS)
def test_compiles_ahead_of_time_without_spilling(target):
    found = every_launch()
    assert {launch.kernel.__name__ for launch in found} == {
        *("quantize_dense", "quantize_plain", "quantize_topk", "dequantize_dense", "dequantize_plain"),
        *("dequantize_topk", "outer_update_kernel", "merge_kernel", "adam_kernel", "sum_of_squares", "rotate_kernel"),
        *("squares_kernel", "normalize_kernel", "symmetric_kernel", "product_kernel"),
    }
    for launch in found:
        resources = triton_aot.compile_launch(launch, target)
        assert 0 < resources.registers <= 255
        assert resources.spilled == 0, (resources, launch)
        assert resources.shared <= SHARED[target], (resources, launch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_quantize_and_dequantize_on_the_gpu(spec):
    for numel in (*SIZES, 70_001):
        check_quantize(triton_ops, spec, numel, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_updates_on_the_gpu():
    for numel in (0, 1, 70_001):
        check_merge(triton_ops, numel, "cuda")
        check_adam(triton_ops, numel, "cuda")
        check_rotate(triton_ops, (numel % 100 + 1, 2, 9, 128), "cuda")
        for step in OUTER_STEPS:
            check_outer_update(triton_ops, step, numel, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_orthogonalize_on_the_gpu():
    for shape in (*SHAPES[1:], *LARGE_SHAPES, (3, 640, 1920), (3, 1921, 641)):
        check_bf16_kernels(triton_ops, shape, "cuda")
    check_bf16_kernels(triton_ops, (2, 300, 500), "cuda", UNEQUAL)
    check_awkward_values(triton_ops, "cuda")
