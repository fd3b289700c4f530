"""The Dockerfiles, as far as no Docker is needed: hadolint's rules, and that what they call is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from geotrain.launch.cuda_driver import TORCH_CUDA

ROOT = Path(__file__).parents[2]
HADOLINT = Path(sys.executable).with_name("hadolint")
DOCKERFILES = sorted((ROOT / "containers").glob("*.Dockerfile"))


def lint(text: str) -> str:
    return subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_nothing_is_there_that_hadolint_warns_of(path: Path) -> None:
    assert lint(path.read_text()) == ""
    assert "DL3020" in lint(path.read_text().replace("COPY ", "ADD "))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_they_call_is_there(path: Path) -> None:
    text = path.read_text()
    (image,) = re.findall(r"^(?:ARG IMAGE=|FROM )([^$\s]+)$", text, re.MULTILINE)
    assert re.search(r":\d+\.\d+", image), f"{image} is not pinned"
    (command,) = re.findall(r"^RUN (make .*)$", text, re.MULTILINE)
    plan = subprocess.run([*command.split(), "--dry-run", "--always-make"], cwd=ROOT, capture_output=True, text=True)
    assert plan.returncode == 0 and "launch/install.sh .venv" in plan.stdout
    assert ('SYSTEM_SITE_PACKAGES="1"' in plan.stdout) == ("pytorch" in image)
    assert (".venv" in text) and f"--file containers/{path.name}" in text  # the environment, and how it is built


def test_a_plain_image_has_the_cuda_of_our_torch() -> None:
    assert f"nvidia/cuda:{TORCH_CUDA}." in (ROOT / "containers/cuda.Dockerfile").read_text()


def test_images_do_not_take_what_git_ignores() -> None:
    """Environments, builds and runs of the machine that builds the image would not work in it."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in (ROOT / ".gitignore").read_text().split():
        if line.startswith("/examples/"):
            continue  # small
        name = line.strip("/")
        assert {name, f"**/{name}", re.sub(r"^\.\w+_cache$", "**/.*_cache", name)} & {
            *ignored,
            ".ipynb_checkpoints",
        }, name
