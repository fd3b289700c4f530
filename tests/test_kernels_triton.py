"""The Triton kernels: the reference's bits under the interpreter and on a GPU, and compiled for real targets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import (
    OUTER_STEPS,
    SIZES,
    SPECS,
    check_adam,
    check_merge,
    check_outer_update,
    check_quantize,
    spec_id,
)

from geotrain.kernels import triton_aot, triton_ops
from geotrain.kernels.layout import FORMATS, Spec
from geotrain.kernels.steps import AdamStep

HERE = Path(__file__).parent
STEP = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, step=7)


@pytest.mark.slow
def test_under_the_interpreter():
    # the variable is read when a kernel is defined, so this needs a process of its own
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(HERE / "interpreted_kernels.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=HERE.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(SPECS) + len(OUTER_STEPS) + 2} passed" in done.stdout


def every_launch() -> list[triton_aot.Launch]:
    """What the launchers launch for every kernel and format, with a tail."""
    numel = 5 * 128 + 77
    x, y, z, w = (torch.zeros(numel) for _ in range(4))
    half = torch.zeros(numel, dtype=torch.bfloat16)
    calls = []
    for name in FORMATS:
        spec = Spec(name, stochastic=name in ("bf16", "e2m1"))
        payload = torch.zeros(spec.encoded_bytes(numel), dtype=torch.uint8)
        weights, anchor = (half, None) if name == "e3m0" else (x, y)
        calls.append(lambda v=weights, p=payload, s=spec, a=anchor: triton_ops.quantize(v, p, s, a, z, 2**40))
        calls.append(lambda p=payload, s=spec: triton_ops.dequantize(p, x, s, None if s.format == "int8" else 0.5))
    calls += [
        lambda: triton_ops.outer_update(x, y, z, w, OUTER_STEPS[1]),
        lambda: triton_ops.merge(x, y, z, w, 0.25),
        lambda: triton_ops.adam_step(x, y, z, half, STEP, half, STEP),
        lambda: triton_ops.adam_estimate(x, y, z, w, STEP, w),
    ]
    return [launch for call in calls for launch in triton_aot.launches(call)]


@pytest.mark.slow
@pytest.mark.parametrize("target", triton_aot.TARGETS)
def test_compiles_ahead_of_time_without_spilling(target):
    found = every_launch()
    assert {launch.kernel.__name__ for launch in found} == {
        *("quantize_dense", "quantize_plain", "quantize_topk", "dequantize_dense", "dequantize_plain"),
        *("dequantize_topk", "outer_update_kernel", "merge_kernel", "adam_kernel"),
    }
    for launch in found:
        resources = triton_aot.compile_launch(launch, target)
        assert 0 < resources.registers <= 255
        assert resources.spilled == 0, (resources, launch)


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
        for step in OUTER_STEPS:
            check_outer_update(triton_ops, step, numel, "cuda")
