"""Findings from the facts of hosts that are right but for one thing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from geotrain.launch import cuda_driver
from geotrain.launch.host_facts import MARK, GpuFacts, HostFacts, visible
from geotrain.launch.host_rules import EXCLUSIVE, HostNeeds, Look, findings
from geotrain.launch.networks import Interface, Networks

GB = 10**9
MIB = 1 << 20
ETH0, ETH1 = Interface("eth0", "10.0.0.5", 1000), Interface("eth1", "10.1.0.5", 100_000)
OTHERS = "python3 (process 4242)", "? (process 4243)"


def h100(index: int = 0, **facts: Any) -> GpuFacts:
    first = GpuFacts(0, "GPU-2d1e", "NVIDIA H100 80GB HBM3", "580.95.05", 81559 * MIB, 4 * MIB, "Default", (), (9, 0))
    return replace(first, index=index, uuid=("GPU-2d1e", "GPU-77aa31c4")[index], **facts)


NVRM = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.2.0\n"
)
NVRM_OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"

FREE = h100(), h100(1)
BUSY = h100(), h100(1, used_bytes=61234 * MIB)
GOOD = HostFacts(
    name="h", clock_s=1000.0, python="3.12.3", geotrain="0.1.0", torch="2.13.0", cuda="13.0", nccl="2.29.7",
    transformer_engine=None, driver="580.95.05", usable=2, unusable="", nvml_error="", gpus=FREE, headers=True,
    compiler=True, shm_bytes=64 * GB, free_bytes=1000 * GB, taken_ports=(),
)  # fmt: skip
NEEDS = HostNeeds("w", 2, 40 * GB, 100 * GB, "h100", (29500,))
WITHOUT = replace(GOOD, usable=0, gpus=(), driver=None, nccl=None, cuda=None)
OLD = "this machine has GPUs (nvidia0) that torch cannot use: too old. Driver: 550. Install a torch that fits, or so"


def look(facts: HostFacts, *needs: HostNeeds) -> Look:
    return Look(facts, needs or (NEEDS,), 999.0, 1001.0)


def test_gpus_that_the_environment_hides() -> None:
    assert visible(FREE, None) == FREE
    assert visible(FREE, "1,0") == FREE[::-1]
    assert visible(FREE, "GPU-77aa31c4") == FREE[1:]
    assert visible(FREE, "") == visible(FREE, "-1") == ()


def test_facts_travel_as_a_line() -> None:
    assert HostFacts.from_line("some noise " + GOOD.to_line()) == GOOD
    with pytest.raises(ValueError, match="JSON"):
        HostFacts.from_line(MARK + "{")


def test_good_hosts_have_no_findings() -> None:
    assert findings({"a": look(GOOD), "b": look(replace(GOOD, name="b"))}) == []
    assert findings({"a": look(WITHOUT, replace(NEEDS, device=None))}) == []  # a machine without GPUs


@pytest.mark.parametrize(
    ("change", "told", "remedy", "refuses"),
    [
        ({"gpus": (h100(), h100(1, memory_bytes=24576 * MIB))},
         "has 25.8 GB, a rank needs about 40.0 GB", "dry-run", False),
        ({"gpus": (h100(), h100(1, compute_mode="Prohibited"))},
         "GPU 1 (NVIDIA H100 80GB HBM3) is in compute mode Prohibited", "nvidia-smi -i 1 -c DEFAULT", True),
        ({"free_bytes": 199 * GB},
         "199.0 GB are free for the run's folder, two checkpoints take 200.0 GB", "room", False),
        ({"torch": None}, "Python 3.12.3 there has no torch", "make install", True),
        ({"usable": 0, "unusable": OLD, "driver": "550.54.15"}, "that torch cannot use: too old. Driver: 550",
         "CUDA 13.0 wants 580 or newer, or install a torch for CUDA 12", True),
        ({"usable": 0, "unusable": OLD, "driver": None}, "too old", "load the NVIDIA driver", True),
        ({"usable": 0, "unusable": OLD, "cuda": None}, "too old", "install a torch with CUDA", True),
        ({"usable": 0, "unusable": OLD}, "too old", "must be started again", True),
        ({"gpus": (h100(), h100(1, ecc_errors=3))},
         "the memory of GPU 1 (NVIDIA H100 80GB HBM3) has had 3 uncorrectable errors", "nvidia-smi -r -i 1", False),
        ({"nvml_error": "RM has detected an NVML/RM version mismatch."}, "version mismatch",
         "updated under way", False),
        ({"nvml_error": "GPU 3: GPU is lost"}, "GPU 3: GPU is lost",
         "start the machine again", False),
        ({"nvml_error": "something new"}, "the driver says: something new", "dmesg", False),
        ({"usable": 1}, "2 ranks, but 1 GPUs", "GEOTRAIN_SHARE_DEVICES=1", True),
        ({"gpus": (h100(), h100(1, used_bytes=61234 * MIB, processes=OTHERS))},
         "GPU 1 (NVIDIA H100 80GB HBM3) is used by python3 (process 4242), ? (process 4243), 64.2 GB",
         "CUDA_VISIBLE_DEVICES", False),
        ({"gpus": BUSY}, "used by processes that this container does not show, 64.2 GB", "", False),
        ({"networks": Networks((ETH0, ETH1), gloo=ETH0, nccl=ETH1)},
         "gloo will use eth0 (10.0.0.5, 1,000 Mbit/s), where eth1 (10.1.0.5, 100,000 Mbit/s) is faster",
         "GLOO_SOCKET_IFNAME=eth1", False),
        ({"headers": False}, "Python.h is missing", "python3-dev", True),
        ({"compiler": False}, "no C compiler", "gcc", True),
        ({"shm_bytes": 64 << 20}, "64 MiB are free in /dev/shm", "--shm-size", False),
        ({"taken_ports": (29500,)}, "port 29500 is taken", "master_port", True),
        ({"clock_s": 1006.5}, "its clock is 6 s ahead of this machine's", "chrony", False),
        ({"clock_s": 993.0}, "its clock is 6 s behind this machine's", "chrony", False),
        ({"usable": 0, "gpus": ()}, "no GPU is visible, the cluster file says h100", "driver", False),
    ],
)  # fmt: skip
def test_a_host_with_one_thing_wrong(change: dict, told: str, remedy: str, refuses: bool) -> None:
    (found,) = findings({"h": look(replace(GOOD, **change))})
    assert found.host == "h" and told in found.what and remedy in found.remedy and found.refuses == refuses


def test_ranks_that_share_a_gpu_need_its_memory_together_and_its_consent() -> None:
    needs = replace(NEEDS, shares=True)
    assert findings({"h": look(replace(GOOD, usable=1, gpus=GOOD.gpus[:1]), needs)}) == []  # 80 of 81 GB
    (alone,) = findings({"h": look(replace(GOOD, usable=1), needs, replace(NEEDS, worker="v", ranks=1))})
    assert "3 ranks, but 1 GPUs" in alone.what  # whoever does not share wants one of its own
    (full,) = findings({"h": look(replace(GOOD, usable=1, gpus=GOOD.gpus[:1]), needs, replace(needs, worker="v"))})
    assert "has 85.5 GB, its 4 ranks need about 160.0 GB" in full.what and not full.refuses
    own = (h100(compute_mode=EXCLUSIVE),)
    (refused,) = findings({"h": look(replace(GOOD, usable=1, gpus=own), needs)})
    assert f"compute mode {EXCLUSIVE}" in refused.what and refused.refuses
    assert findings({"h": look(replace(GOOD, gpus=own), replace(NEEDS, ranks=1))}) == []


def test_what_a_host_bears_with() -> None:
    """Clocks within the time that asking took, small shared memory of a single rank, a CPU without a compiler."""
    assert findings({"h": look(replace(GOOD, clock_s=1005.0))}) == []
    assert findings({"h": look(replace(GOOD, shm_bytes=0), replace(NEEDS, ranks=1))}) == []
    assert (
        findings({"h": look(replace(GOOD, usable=1, headers=False, unusable=OLD), replace(NEEDS, on_cpu=True))}) == []
    )
    # a GPU that no rank takes
    busy = replace(GOOD, gpus=BUSY)
    assert findings({"h": look(busy, replace(NEEDS, ranks=1))}) == []
    # of a resumed run, its own former process may hold the port
    (port,) = findings({"h": look(replace(GOOD, taken_ports=(29500,)))}, resume=True)
    assert not port.refuses


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"torch": "2.12.0"}, "unlike versions of torch: 2.13.0 on a, 2.12.0 on b"),
        ({"nccl": "2.28.9"}, "unlike versions of NCCL: 2.29.7 on a, 2.28.9 on b"),
        ({"geotrain": "0.0.9"}, "unlike versions of GeoTrain"),
        ({"usable": 0, "gpus": (), "nccl": None}, "some of its hosts have GPUs, b has none"),
    ],
)
def test_hosts_of_one_worker_must_be_alike(change: dict, told: str) -> None:
    needs = replace(NEEDS, device=None)
    other = replace(GOOD, name="b", **change)
    (found,) = findings({"a": look(GOOD, needs), "b": look(other, needs)})
    assert found.host == "w" and told in found.what and found.refuses
    # two workers, each with hosts alike, may differ
    assert findings({"a": look(GOOD, needs), "b": look(other, replace(needs, worker="v"))}) == []


def test_drivers() -> None:
    assert cuda_driver.driver_version(NVRM) == "550.54.15"
    assert cuda_driver.driver_version(NVRM_OPEN) == "580.95.05"
    assert cuda_driver.driver_version("\n") is None
    for driver, cuda, fits in (("580.65.06", "13.0", True), ("575.57", "13.0", False), ("525.60.13", "12.8", True),
                               ("470.57.02", "12.1", False), ("450.80.02", "11.8", True)):  # fmt: skip
        assert cuda_driver.bears(driver, cuda) == fits
    assert cuda_driver.remedy("390.157", "13.0") == "renew the driver: CUDA 13.0 wants 580 or newer"


@pytest.mark.parametrize(
    ("facts", "needs", "words"),
    [
        (GOOD, {"capability": (8, 9)}, "KEY needs Transformer Engine, which is not installed"),
        (replace(GOOD, transformer_engine="2.20.2"), {"capability": (10, 0)},
         "KEY needs compute capability 10.0, GPU 0 (NVIDIA H100 80GB HBM3) has 9.0"),
        (GOOD, {"on_cpu": True}, "KEY needs GPUs; its ranks compute on the CPU"),
        (WITHOUT, {"device": None}, "KEY needs GPUs; its ranks compute on the CPU"),
    ],
)  # fmt: skip
def test_what_transformer_engine_needs(facts: HostFacts, needs: dict[str, Any], words: str) -> None:
    found = findings({"a": look(facts, replace(NEEDS, ports=(), asks="KEY", **needs))})
    assert words in [each.what for each in found] and all(each.refuses for each in found)
    able = replace(facts, transformer_engine="2.20.2", usable=2, gpus=FREE)
    assert findings({"a": look(able, replace(NEEDS, asks="KEY", capability=(9, 0)))}) == []
