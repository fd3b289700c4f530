"""Tells which NVIDIA driver bears which CUDA. `make install` runs this file before anything is installed, so it takes
the standard library only: python launch/cuda_driver.py [VERSION_FILE]."""

from __future__ import annotations

import re
import sys
from pathlib import Path

VERSION_FILE = Path("/proc/driver/nvidia/version")
TORCH_CUDA = "13.0"  # that PyPI's build of the torch in constraints.txt brings
# The oldest branch of the Linux driver that runs programs of a major version of CUDA: NVIDIA's "CUDA Compatibility",
# table of minor-version compatibility. Data-center GPUs bear newer ones with NVIDIA's compatibility package, so this
# explains what torch refuses, and does not itself refuse where torch is there to be asked.
LEAST_DRIVER = {13: 580, 12: 525, 11: 450}
_VERSION = re.compile(r"\b(\d{3,4})\.\d+(?:\.\d+)?\b")


def driver_version(text: str) -> str | None:
    """The version in the first line of /proc/driver/nvidia/version, as in "550.54.15"; None: it holds none."""
    found = _VERSION.search(text.partition("\n")[0])
    return found.group() if found else None


def major(version: str) -> int:
    """The part before the first dot, of a version that begins with digits."""
    return int(version.partition(".")[0])


def bears(driver: str, cuda: str) -> bool:
    """Whether this driver runs programs of this CUDA without a compatibility package."""
    least = LEAST_DRIVER.get(major(cuda))
    return least is None or major(driver) >= least


def remedy(driver: str | None, cuda: str | None) -> str:
    """Advise for a machine where a torch of this CUDA (None: built without) finds GPUs that it cannot use."""
    if driver is None:
        return "load the NVIDIA driver (modprobe nvidia), or install it; in a container, start it with the GPUs"
    if cuda is None:
        return "install a torch with CUDA: `make install` without an index of CPU builds"
    if bears(driver, cuda):
        return "look at `nvidia-smi` there; after an update of the driver the machine must be started again"
    older = next((str(version) for version, least in LEAST_DRIVER.items() if major(driver) >= least), None)
    other = f", or install a torch for CUDA {older}" if older else ""
    return f"renew the driver: CUDA {cuda} wants {LEAST_DRIVER[major(cuda)]} or newer{other}"


def main(path: Path) -> int:
    """Say what keeps PyPI's torch from this machine's GPUs. Returns 1 if something does."""
    try:
        driver = driver_version(path.read_text())
    except OSError:
        return 0
    if driver is None or bears(driver, TORCH_CUDA):
        return 0
    print(
        f"install: the NVIDIA driver is {driver}, but PyPI's torch brings CUDA {TORCH_CUDA} and could not use the "
        f'GPUs: {remedy(driver, TORCH_CUDA)}, by PIP_ARGS="--extra-index-url INDEX" with the index that '
        "pytorch.org gives for it. DS_ACCELERATOR=cpu installs all the same",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else VERSION_FILE))
