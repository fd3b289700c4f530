"""Names phases of training in traces: those of `geotrain profile`, and on a GPU those of NVIDIA's tools (NVTX)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

from geotrain.kernels.devices import cuda_devices

_ON_GPU = cuda_devices() > 0


@contextmanager
def span(name: str) -> Iterator[None]:
    """Mark what runs inside, on this thread, as geotrain.<name>. It costs microseconds where nothing records."""
    with record_function(f"geotrain.{name}"):
        if not _ON_GPU:
            yield
            return
        with torch.cuda.nvtx.range(f"geotrain.{name}"):
            yield
