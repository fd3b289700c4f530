"""The one place that decides whether this process computes on CUDA devices, and knows what the processor can."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from geotrain.config import ConfigError

DEVICE_FILES = Path("/dev")
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
HIDING = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that show no device


def cuda_devices() -> int:
    """Count the CUDA devices that this process uses: 0 without any, or if DS_ACCELERATOR=cpu or CUDA_VISIBLE_DEVICES
    hides them.

    Raises ConfigError if there are devices that cannot be used, as when the driver is older than torch's runtime
    needs: ranks that went on with the CPU would be very slow, and nobody would know why.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in HIDING
    present = [] if hidden else sorted(path.name for path in DEVICE_FILES.glob("nvidia[0-9]*"))
    if not present:
        return 0
    try:
        driver = DRIVER_VERSION.read_text().splitlines()[0]
    except (OSError, IndexError):
        driver = "unknown, no driver is loaded"
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else "none, it was built without CUDA"
    raise ConfigError(
        f"this machine has GPUs ({', '.join(present)}) that torch cannot use: {_why()}. Driver: {driver}. Runtime of "
        f"torch {torch.__version__}: {runtime}. Install a torch that fits the driver, or set DS_ACCELERATOR=cpu to "
        "compute on the CPU"
    )


def processor_has_bf16() -> bool:
    """Whether the processor multiplies bf16 itself.

    Where that is emulated, fp32 takes a third of the time; a sixth where there is no AVX-512 either.
    """
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def _why() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0].rstrip(".")
    return "it finds no device"
