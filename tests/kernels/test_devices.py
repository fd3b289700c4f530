"""What computes on the CPU also where a GPU is: the suite's ranks, and a benchmark of two ranks on one host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmarks.hide.ranks as hide_ranks
from geotrain.common.names import SHARE_DEVICES
from geotrain.config import ConfigError
from geotrain.inner.runtime import platform
from geotrain.kernels import devices
from geotrain.launch.machine import this_machine

HAS_ONE = "import torch; torch.cuda.is_available = lambda: True; from geotrain.inner.runtime import platform; "


def test_processes_of_the_suite_take_no_gpu():
    subprocess.run([sys.executable, "-c", HAS_ONE + "assert platform.backend() == 'gloo'"], check=True, timeout=100)


@pytest.mark.parametrize(
    ("local_rank", "shares", "devices", "backend", "number"),
    [
        ("1", False, 0, "gloo", None),
        ("1", True, 0, "gloo", None),
        ("1", False, 2, "nccl", 1),
        ("1", False, 1, "nccl", 1),  # CUDA says that there is no such device
        ("1", True, 1, "gloo", 0),
        ("5", True, 2, "gloo", 1),
        ("0", True, 2, "gloo", 0),  # all ranks of a worker agree, whatever devices each sees
    ],
)
def test_the_backend_and_the_device_of_a_rank(local_rank, shares, devices, backend, number):
    env = {"LOCAL_RANK": local_rank} | ({SHARE_DEVICES: "1"} if shares else {})
    assert platform.placed(env, devices) == (backend, number)


def test_deepspeed_is_told_the_device_that_a_rank_shares():
    env = {k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"} | {"LOCAL_RANK": "3", SHARE_DEVICES: "1"}
    told = "import os; assert (os.environ['LOCAL_RANK'], str(platform.device()), platform.backend()) == {}"
    script = "import torch; torch.cuda.device_count = lambda: 2; " + HAS_ONE + told.format(("1", "cuda:1", "gloo"))
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=100)


def test_the_ranks_of_a_benchmark_on_one_machine_take_no_gpu(monkeypatch, tmp_path):
    """All have local rank 0; NCCL takes no two ranks on one GPU."""
    monkeypatch.setattr(os, "environ", {})
    seen: dict[str, str] = {}

    class Rank:
        def __init__(self, job: hide_ranks.Job, rank: int) -> None:
            seen.update(os.environ)  # engines are imported after this

        def measure(self) -> float:
            return 1.0

    monkeypatch.setattr(hide_ranks, "Rank", Rank)
    job = hide_ranks.Job("time", hide_ranks.Size(64, 4, 128, 64, 4, 5)).to_json()
    monkeypatch.setattr(sys, "argv", ["ranks.py", job, "0", "127.0.0.1", "127.0.0.1:1", str(tmp_path / "out")])
    hide_ranks.main()
    assert seen["DS_ACCELERATOR"] == "cpu" and seen["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("known", "has"),
    [({}, False), ({"avx512_f": True}, False), ({"avx512_bf16": True}, True), ({"amx_bf16": True}, True)],
)
def test_a_gpu_says_nothing_about_the_processors_bf16(known, has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    assert devices.processor_has_bf16() is has


def test_devices_that_cannot_be_used_are_an_error_with_both_versions(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.1  Thu\nGCC version: 9\n")
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(devices, "DRIVER_VERSION", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old.\nMore.")

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said = (
        r"GPUs \(nvidia0\) that torch cannot use: The NVIDIA driver on your system is too old\. "
        rf"Driver: NVRM version: .* 470\.1 .*Runtime of torch {re.escape(torch.__version__)}: CUDA 13\.0\. .*"
        "DS_ACCELERATOR=cpu"
    )
    for asked in (devices.cuda_devices, this_machine):
        with pytest.raises(ConfigError, match=said):
            asked()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.cuda_devices() == 0 and this_machine().devices == ()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert devices.cuda_devices() == 0 and this_machine().devices == ()
    monkeypatch.delenv("DS_ACCELERATOR")
    (tmp_path / "nvidia0").unlink()
    assert devices.cuda_devices() == 0 and this_machine().devices == ()


def test_one_place_decides_whether_there_are_devices():
    """Two that ask torch in different ways disagree where the runtime does not fit the driver."""
    root = Path(devices.__file__).parents[1]
    asking = re.compile(r"cuda\.(is_available|device_count)\(")
    found = {
        path.relative_to(root).as_posix()
        for folder in ("geotrain", "kernels", "launch")
        for path in (root / folder).rglob("*.py")
        if asking.search(path.read_text())
    }
    assert found == {"kernels/devices.py"}
