"""The environment of ranks; in a process of its own, torch is seen to follow it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from socket import AF_INET
from typing import Any

import psutil
import pytest

from geotrain.config import ConfigError
from geotrain.launch import networks
from geotrain.launch import rank_environment as module
from geotrain.launch.host_facts import GpuFacts
from geotrain.launch.launchers.registry import launchers
from geotrain.launch.networks import Interface, address_to, interface_to, nccl_interface, networks_to
from geotrain.launch.rank_environment import capability_here, extensions_of, library_settings, rank_environment

TOLD = """
import json, os, sys
from geotrain.launch import rank_environment as r
assert "torch" not in sys.modules
given = dict(cores=2, ranks_here=2, tensor_parallel=1, overlaps_steps=False)
os.environ.update(r.library_settings(os.environ, capability=r.capability_here(os.environ), **given))
assert "torch" not in sys.modules, "the probe must not import it"
import torch
print(json.dumps([torch.get_num_threads(), os.environ["GLOO_SOCKET_IFNAME"]]))
"""


def test_rank_environment_leaves_what_is_set() -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    assert rank_environment(slurm, launchers()["slurm"]) == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert rank_environment({**slurm, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, launchers()["slurm"]) == {}


@pytest.mark.parametrize(("visible", "local"), [("3", "0"), ("3,3", "0"), ("0,1", "1"), ("", "1"), (None, "1")])
def test_the_only_device_that_a_task_sees_is_its_first(visible: str | None, local: str) -> None:
    env = {"SLURM_LOCALID": "1"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    found = rank_environment(env, launchers()["slurm"])
    assert found["LOCAL_RANK"] == local
    assert found.get("CUDA_VISIBLE_DEVICES") == ("3" if visible == "3,3" else None)  # CUDA shows none named twice


def settings(env: dict[str, str], tensor: int = 1, acco: bool = False, **others: Any) -> dict[str, str]:
    asked = {"cores": 13, "ranks_here": 4, **others}
    return library_settings(env, tensor_parallel=tensor, overlaps_steps=acco, **asked)


def test_a_rank_that_hangs_leaves_its_collectives_with_the_run() -> None:
    told = settings({}, capability=(9, 0), traces=Path("/run/profiles/a"))
    assert told["TORCH_FR_DUMP_TEMP_FILE"] == "/run/profiles/a/collectives-rank-"
    assert "TORCH_FR_DUMP_TEMP_FILE" not in settings({}, traces=Path("/run/profiles/a"))  # gloo has none
    assert "TORCH_FR_DUMP_TEMP_FILE" not in settings(told, capability=(9, 0), traces=Path("/other"))


def test_ranks_of_one_start_compile_together_and_wait_for_no_other(tmp_path: Path) -> None:
    """Torch's lock is a file, which a start that was killed leaves."""
    say = "from pathlib import Path; from geotrain.launch.rank_environment import extensions_of as of"
    rank = f"{sys.executable} -c '{say}; print(of(Path(\"{tmp_path}\")))'"
    start = f"{rank} > 0 & {rank} > 1 & wait; cat 0 1"
    first, again = (subprocess.check_output(["bash", "-c", start], text=True, cwd=tmp_path).split() for _ in range(2))
    assert len(first) == len(again) == 2 and len({*first, *again}) == 2 and first[0] == first[1]
    told = settings({}, extensions=extensions_of(tmp_path))
    assert told["TORCH_EXTENSIONS_DIR"].startswith(f"{tmp_path}/extensions/")
    mine = {"TORCH_EXTENSIONS_DIR": "/mine"}
    assert "TORCH_EXTENSIONS_DIR" not in settings(mine, extensions=tmp_path)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), None])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("acco", [False, True])
def test_the_device_decides_how_many_queues_cuda_has(
    capability: tuple[int, int] | None, tensor: int, acco: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 on Blackwell; before it one, where tensor ranks hide their collectives."""
    gpus = tuple(GpuFacts(i, f"GPU-{i}", "", "", None, None, "Default", (), capability) for i in range(8))
    monkeypatch.setattr(module, "read_gpus", lambda: (gpus, ""))
    assert capability_here({"CUDA_VISIBLE_DEVICES": "2,3"}) == capability_here({}) == capability
    assert capability_here({"DS_ACCELERATOR": "cpu"}) is capability_here({"CUDA_VISIBLE_DEVICES": ""}) is None
    told = settings({}, tensor, acco, capability=capability).get("CUDA_DEVICE_MAX_CONNECTIONS")
    assert told == ("32" if capability == (10, 0) else "1" if tensor > 1 and not acco else None)
    mine = {"CUDA_DEVICE_MAX_CONNECTIONS": "4"}
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in settings(mine, tensor, acco, capability=capability)


def test_ranks_share_the_cores_and_what_the_user_says_stands() -> None:
    assert settings({}) == {"OMP_NUM_THREADS": "3", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert settings({}, cores=2)["OMP_NUM_THREADS"] == "1"
    mine = {
        "OMP_NUM_THREADS": "7",
        "PYTORCH_ALLOC_CONF": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "GLOO_SOCKET_IFNAME": "ib0",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert settings(mine, tensor=2) == {}


def test_ranks_meet_over_the_interface_that_leads_to_the_first() -> None:
    for master in ("127.0.0.1", "::1"):
        assert settings({"MASTER_ADDR": master})["GLOO_SOCKET_IFNAME"] == "lo"
    assert interface_to("no such host.invalid") is None
    assert "GLOO_SOCKET_IFNAME" not in settings({"MASTER_ADDR": "no such host.invalid"})
    of = {name: {each.address for each in found} for name, found in psutil.net_if_addrs().items()}
    for address in {
        each.address for found in psutil.net_if_addrs().values() for each in found if each.family == AF_INET
    }:
        assert address_to(address) == address  # rank 0's own machine, by its address in the network
        assert address in of[interface_to(address) or "none"]


def test_torch_follows() -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    env["MASTER_ADDR"] = "127.0.0.1"
    said = subprocess.check_output([sys.executable, "-c", TOLD], env=env, text=True, timeout=120)
    assert json.loads(said) == [1, "lo"]


def deterministic(env: dict[str, str]) -> dict[str, str]:
    return library_settings(env, cores=4, ranks_here=4, tensor_parallel=1, overlaps_steps=False, deterministic=True)


def test_equal_bits_are_asked_of_the_libraries() -> None:
    told = deterministic({"NCCL_ALGO": "Ring"})
    assert told.items() >= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}.items()
    assert "NCCL_ALGO" not in told and deterministic({})["NCCL_ALGO"] == "^NVLS,NVLSTree"
    assert not settings({}).keys() & told.keys() - {"OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_ALGO", "NVLS,Ring"), ("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")],
)
def test_an_environment_that_contradicts_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"deterministic_mode does not go with {name} = '{value}'"):
        deterministic({name: value})


@pytest.mark.parametrize(
    ("stated", "chosen"),
    [
        ("", "ib0"), ("eth", "eth0"), ("=eth", ""), ("=eth1", "eth1"), ("^ib", "lo"), ("^ib,lo,docker", "eth0"),
        ("mlx,docker", "docker0"),
    ],
)  # fmt: skip
def test_the_interface_that_nccl_takes(stated: str, chosen: str) -> None:
    assert nccl_interface(["lo", "docker0", "eth0", "eth1", "ib0"], stated) == chosen
    assert nccl_interface(["lo", "docker0", "eth0"]) == "eth0" and nccl_interface(["lo"]) == "lo"


def test_what_this_hosts_ranks_would_meet_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (port := tmp_path / name / "ports/1").mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    monkeypatch.setattr(networks, "RDMA", tmp_path)
    here = networks_to("127.0.0.1", {"NCCL_SOCKET_IFNAME": "=lo"})
    assert here.gloo == here.nccl == Interface("lo", "127.0.0.1") and here.gloo in here.interfaces
    lo = "lo (127.0.0.1, at an unknown rate)"
    assert str(here) == f"gloo uses {lo}, NCCL {lo}, its data over mlx5_0 (400 Gb/sec (4X NDR))"
    other = next((each for each in here.interfaces if each.name != "lo"), here.gloo)
    told = networks_to("127.0.0.1", {"GLOO_SOCKET_IFNAME": other.name, "NCCL_IB_DISABLE": "1"})
    assert told.gloo == other and not told.rdma
