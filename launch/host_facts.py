"""Reads what this host has: `python -m geotrain.launch.host_facts FOLDER MASTER [PORT …]` prints it as a line
of JSON.

Only reading happens here; what it means is decided in `geotrain.launch.host_rules`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pynvml
from pydantic import TypeAdapter

from geotrain import __version__
from geotrain.common.nvml import ecc_errors, known, within
from geotrain.common.ports import why_not_bound
from geotrain.config import ConfigError
from geotrain.launch import cuda_driver
from geotrain.launch.networks import Networks, networks_to

MARK = "geotrain-host: "  # before the line of JSON: shells and launchers print lines of their own
NVML_S = 30.0  # without its persistence daemon the driver initializes each GPU anew
SHARED_MEMORY = Path("/dev/shm")
MIB = 1 << 20
COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "Default",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "Prohibited",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "Exclusive_Process",
}


@dataclass(frozen=True)
class GpuFacts:
    """One GPU, as its driver reports it. memory_bytes, used_bytes: None where it does not know. processes: that
    compute on it, as "NAME (process NUMBER)"; a container may not show those outside of it. capability: CUDA's
    compute capability. ecc_errors: of its memory, uncorrectable, since its last reset; None: it does not know."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_bytes: int | None
    used_bytes: int | None
    compute_mode: str
    processes: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    ecc_errors: int | None = None


@dataclass(frozen=True)
class HostFacts:
    """The facts of one host. clock_s: its clock, seconds since 1970. usable: CUDA devices that ranks would use, after
    what hides them in the environment. unusable: why devices that are there cannot be used. nvml_error: what the
    driver said of GPUs in place of an answer. cuda, nccl: versions that torch brings. transformer_engine: its
    version; None: it is not installed. headers, compiler: for Triton, which compiles its launcher. shm_bytes,
    free_bytes: free in /dev/shm, and where the run's folder lies. taken_ports: of those asked. networks: None: no
    worker here has several hosts.
    """

    name: str
    clock_s: float
    python: str
    geotrain: str
    torch: str | None
    cuda: str | None
    nccl: str | None
    transformer_engine: str | None
    driver: str | None
    usable: int
    unusable: str
    nvml_error: str
    gpus: tuple[GpuFacts, ...]
    headers: bool
    compiler: bool
    shm_bytes: int | None
    free_bytes: int
    taken_ports: tuple[int, ...]
    networks: Networks | None = None

    def to_line(self) -> str:
        return MARK + TypeAdapter(HostFacts).dump_json(self).decode()

    @staticmethod
    def from_line(line: str) -> HostFacts:
        """Decode what `to_line` wrote, wherever it begins in this line. Raises ValueError."""
        return TypeAdapter(HostFacts).validate_json(line.partition(MARK)[2])


def read_host(folder: Path, ports: Sequence[int], master: str = "") -> HostFacts:
    """Read this host's facts. master: the host of rank 0, if it may be another one. Where devices are to be used,
    torch is imported and asked. It raises nothing for what a host lacks."""
    usable, unusable, nccl = 0, "", None
    if os.environ.get("DS_ACCELERATOR") != "cpu" and may_have_gpus():
        try:
            from geotrain.kernels.devices import cuda_devices

            usable = cuda_devices()
            nccl = _nccl() if usable else None
        except ConfigError as error:
            unusable = str(error)
        except (ImportError, OSError) as error:  # a library of its CUDA is missing or broken
            unusable = f"torch cannot be imported: {str(error).splitlines()[0]}"
    gpus, nvml_error = read_gpus() if usable or unusable else ((), "")
    gpus = visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    driver = next((gpu.driver for gpu in gpus), None)
    with contextlib.suppress(OSError):
        driver = driver or cuda_driver.driver_version(cuda_driver.VERSION_FILE.read_text())
    torch, cuda = torch_build()
    return HostFacts(
        # Slurm's name for it, which need not be its own
        name=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        python=platform.python_version(),
        geotrain=__version__,
        torch=torch,
        cuda=cuda,
        nccl=nccl,
        transformer_engine=_version_of("transformer-engine"),
        driver=driver,
        usable=usable,
        unusable=unusable,
        nvml_error=nvml_error,
        gpus=gpus,
        headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
        compiler=any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))),
        shm_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else None,
        free_bytes=shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free,
        networks=networks_to(master, os.environ) if master else None,
        taken_ports=tuple(port for port in ports if why_not_bound("", port)),
        clock_s=time.time(),  # last, so that nothing that takes time comes between it and the answer
    )


def may_have_gpus() -> bool:
    """Whether torch is worth its import, which takes seconds."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()  # or in WSL


def torch_build() -> tuple[str | None, str | None]:
    """Version of the installed torch, and of its CUDA, without importing it; None: there is none."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None, None
    text = (Path(found.submodule_search_locations[0]) / "version.py").read_text()
    cuda = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, re.MULTILINE)
    return importlib.metadata.version("torch"), cuda.group(1) if cuda else None


def _version_of(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def _nccl() -> str | None:
    import torch

    with contextlib.suppress(AttributeError, RuntimeError):  # built without it
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None


# -------------------------------------------------------------------------------------------------------------- NVML


def read_gpus() -> tuple[tuple[GpuFacts, ...], str]:
    """Ask the driver for the host's GPUs; returns also what it said of those that it could not read. Nothing where
    no driver is installed."""
    try:
        return within(NVML_S, _all_gpus)
    except pynvml.NVMLError_LibraryNotFound:
        return (), ""
    except (pynvml.NVMLError, TimeoutError) as error:
        return (), str(error)


def _all_gpus() -> tuple[tuple[GpuFacts, ...], str]:
    pynvml.nvmlInit()
    found, said = list[GpuFacts](), ""
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            found.append(_gpu(index))
        except pynvml.NVMLError as error:  # it has fallen off the bus, or must be reset
            said = f"GPU {index}: {error}"
    return tuple(found), said


def _gpu(index: int) -> GpuFacts:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = known(partial(pynvml.nvmlDeviceGetMemoryInfo, version=pynvml.nvmlMemory_v2), handle)
    programs = known(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    names = {each.pid: known(pynvml.nvmlSystemGetProcessName, each.pid) or "?" for each in programs}
    return GpuFacts(
        index,
        pynvml.nvmlDeviceGetUUID(handle),
        pynvml.nvmlDeviceGetName(handle),
        pynvml.nvmlSystemGetDriverVersion(),
        memory and int(memory.total),
        memory and int(memory.used),
        COMPUTE_MODES.get(known(pynvml.nvmlDeviceGetComputeMode, handle), ""),
        tuple(f"{Path(name).name} (process {pid})" for pid, name in names.items()),
        known(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        ecc_errors(handle),
    )


def visible(gpus: tuple[GpuFacts, ...], listed: str | None) -> tuple[GpuFacts, ...]:
    """Select the GPUs that CUDA_VISIBLE_DEVICES lists, by number or by the beginning of their names; None: all."""
    if listed is None:
        return gpus
    names = [name.strip() for name in listed.split(",") if name.strip()]
    return tuple(gpu for name in names for gpu in gpus if name == str(gpu.index) or gpu.uuid.startswith(name))


if __name__ == "__main__":
    asked_ports = [int(port) for port in sys.argv[3:]]
    print(read_host(Path(sys.argv[1]), asked_ports, sys.argv[2].strip("-")).to_line(), flush=True)
