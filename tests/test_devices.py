"""What computes on the CPU also where a GPU is: the suite's ranks, and a benchmark of two ranks on one host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import acco
import acco_ranks

HAS_ONE = "import torch; torch.cuda.is_available = lambda: True; from geotrain.inner import platform; "


def test_processes_of_the_suite_take_no_gpu():
    subprocess.run([sys.executable, "-c", HAS_ONE + "assert platform.backend() == 'gloo'"], check=True, timeout=100)


def test_the_two_ranks_of_the_acco_benchmark_take_no_gpu(monkeypatch, tmp_path):
    """Both have local rank 0; NCCL takes no two ranks on one GPU."""
    monkeypatch.setattr(os, "environ", {})
    seen: dict[str, str] = {}

    class Rank:
        def __init__(self, job: acco_ranks.Job, rank: int, interface: str) -> None:
            seen.update(os.environ)  # engines are imported after this

        def measure(self) -> float:
            return 1.0

    monkeypatch.setattr(acco_ranks, "Rank", Rank)
    job = acco_ranks.Job("compute", acco_ranks.SMALL).to_json()
    monkeypatch.setattr(sys, "argv", ["acco_ranks.py", job, "0", "127.0.0.1", "127.0.0.1:1", str(tmp_path / "out")])
    acco_ranks.main()
    assert seen["DS_ACCELERATOR"] == "cpu" and seen["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_gpu_that_the_acco_benchmark_does_not_use_says_nothing_about_bf16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    assert not acco.multiplies_bf16()
