"""The Triton kernels: the reference's bits under the interpreter and on a GPU, and compiled for real targets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import triton_aot
from geotrain.kernels import triton_ops
from tests.support.kernel_cases import (
    PAYLOAD_FORMATS,
    SIZES,
    check_adam,
    check_quantize,
    check_rotate,
    format_id,
)

ROOT = Path(__file__).parents[2]
WHOLE = pytest.mark.long("kernels")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=WHOLE)])
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


@pytest.mark.slow
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=WHOLE)])
def test_compiles_ahead_of_time_for_every_target(every):
    """What the product launches, each for another target; no register is spilled, and it fits. For every target:
    `python -m benchmarks.triton_aot`."""
    targets = list(triton_aot.TARGETS)
    kernels = [launch.kernel.__name__ for launch in triton_aot.product_launches(targets[0])]
    assert set(kernels) == KERNELS
    for turn, place in enumerate(sorted({*map(kernels.index, KERNELS), *range(0, len(kernels), every)})):
        target = targets[turn % len(targets)]
        words, taken, _ = triton_aot.look(place, target)
        assert not taken.spilled and 0 < taken.registers <= 512, (words, taken)
        assert taken.shared <= triton_aot.SHARED[target], (words, taken)


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
