"""Reads what this host has: `python -m geotrain.launch.host_facts FOLDER [PORT …]` prints it as a line of JSON.

Only reading happens here; what it means is decided in `geotrain.launch.host_rules`.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from geotrain import __version__
from geotrain.common.ports import why_not_bound
from geotrain.config import ConfigError
from geotrain.launch import cuda_driver

MARK = "geotrain-host: "  # before the line of JSON: shells and launchers print lines of their own
SMI_S = 30.0  # without its persistence daemon the driver initializes each GPU anew
SHARED_MEMORY = Path("/dev/shm")
MIB = 1 << 20
_GPU_FIELDS = "index,uuid,name,driver_version,memory.total,memory.used,compute_mode,compute_cap"
_PROCESS_FIELDS = "gpu_uuid,pid,process_name"


@dataclass(frozen=True)
class GpuFacts:
    """One GPU, as `nvidia-smi` reports it. memory_bytes, used_bytes: None where it does not know. processes: that
    compute on it, as "NAME (process NUMBER)"; a container may not show those outside of it. capability: CUDA's
    compute capability; None: nvidia-smi does not know."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_bytes: int | None
    used_bytes: int | None
    compute_mode: str
    processes: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class HostFacts:
    """The facts of one host. clock_s: its clock, seconds since 1970. usable: CUDA devices that ranks would use, after
    what hides them in the environment. unusable: why devices that are there cannot be used. smi_error: what
    nvidia-smi said instead of its answer. cuda, nccl: versions that torch brings. transformer_engine: its version;
    None: it is not installed. headers, compiler: for Triton, which compiles its launcher. shm_bytes, free_bytes: free
    in /dev/shm, and where the run's folder lies. taken_ports: of those asked.
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
    smi_error: str
    gpus: tuple[GpuFacts, ...]
    headers: bool
    compiler: bool
    shm_bytes: int | None
    free_bytes: int
    taken_ports: tuple[int, ...]

    def to_line(self) -> str:
        return MARK + TypeAdapter(HostFacts).dump_json(self).decode()

    @staticmethod
    def from_line(line: str) -> HostFacts:
        """Decode what `to_line` wrote, wherever it begins in this line. Raises ValueError."""
        return TypeAdapter(HostFacts).validate_json(line.partition(MARK)[2])


def read_host(folder: Path, ports: Sequence[int]) -> HostFacts:
    """Read this host's facts. Where devices are to be used, torch is imported and asked. It raises nothing for what a
    host lacks."""
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
    gpus, smi_error = read_gpus() if usable or unusable else ((), "")
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
        smi_error=smi_error,
        gpus=gpus,
        headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
        compiler=any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))),
        shm_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else None,
        free_bytes=shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free,
        taken_ports=tuple(port for port in ports if why_not_bound("", port)),
        clock_s=time.time(),  # last, so that nothing that takes time comes between it and the answer
    )


def may_have_gpus() -> bool:
    """Whether torch is worth its import, which takes seconds."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


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


# -------------------------------------------------------------------------------------------------------- nvidia-smi


def read_gpus() -> tuple[tuple[GpuFacts, ...], str]:
    """Ask nvidia-smi for the host's GPUs; returns also its message if it failed. Nothing where it is not
    installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), ""
    texts = []
    for query, fields in (("gpu", _GPU_FIELDS), ("compute-apps", _PROCESS_FIELDS)):
        command = (program, f"--query-{query}={fields}", "--format=csv,noheader,nounits")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            hangs = isinstance(error, subprocess.TimeoutExpired)
            return (), f"no answer within {SMI_S:g} s" if hangs else str(error)
        if done.returncode != 0:
            said = f"{done.stdout}\n{done.stderr}".strip().splitlines()
            return (), said[0].strip() if said else f"exit code {done.returncode}"
        texts.append(done.stdout)
    return parse_gpus(*texts), ""


def parse_gpus(gpus: str, processes: str) -> tuple[GpuFacts, ...]:
    """Parse nvidia-smi's CSV, without headers and units, of `_GPU_FIELDS` and `_PROCESS_FIELDS`. Lines of another
    form are left out: a lost GPU has an error in place of its line. Memory comes in MiB."""
    on: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)
    for uuid, pid, program in _rows(processes, _PROCESS_FIELDS):
        on[uuid] += (f"{Path(program).name} (process {pid})",)
    return tuple(
        GpuFacts(int(index), uuid, name, driver, _bytes(total), _bytes(used), mode, on[uuid], _capability(capability))
        for index, uuid, name, driver, total, used, mode, capability in _rows(gpus, _GPU_FIELDS)
        if index.isdigit()
    )


def visible(gpus: tuple[GpuFacts, ...], listed: str | None) -> tuple[GpuFacts, ...]:
    """Select the GPUs that CUDA_VISIBLE_DEVICES lists, by number or by the beginning of their names; None: all."""
    if listed is None:
        return gpus
    names = [name.strip() for name in listed.split(",") if name.strip()]
    return tuple(gpu for name in names for gpu in gpus if name == str(gpu.index) or gpu.uuid.startswith(name))


def _rows(text: str, fields: str) -> list[list[str]]:
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [[cell.strip() for cell in row] for row in rows if len(row) == len(fields.split(","))]


def _bytes(mib: str) -> int | None:
    """Convert MiB to bytes. None: [N/A], [Not Supported], [Unknown Error] or the like stands in place of a number."""
    return int(mib) * MIB if mib.isdigit() else None


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


if __name__ == "__main__":
    print(read_host(Path(sys.argv[1]), [int(port) for port in sys.argv[2:]]).to_line(), flush=True)
