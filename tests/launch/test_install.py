"""The requests of `make install` to pip, by the driver and by what is installed. Python and pip write down their
arguments; only the driver's version is looked at by a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.programs import program

ROOT = Path(__file__).parents[2]
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar  5 22:23:56 UTC 2024\n"
# `$HERE` has the driver's file; `$TORCH` is the torch outside of the environment, which gets this program as Python.
PYTHON = """#!/bin/bash
case "$*" in
  launch/cuda_driver.py) exec {real} launch/cuda_driver.py "$HERE/version" ;;
  *metadata*) [[ $TORCH ]] && echo "torch==$TORCH" ;;
  "-m venv"*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;&
  "-m "*) echo "$* ${{PIP_CONSTRAINT:-}}" >>"$HERE/asked" ;;
esac
"""


UV = """#!/bin/bash
echo "$*" >>"$HERE/asked"
echo "$UV_DEFAULT_INDEX $UV_INDEX $UV_FIND_LINKS $UV_INDEX_STRATEGY" >"$HERE/found"
[[ $1 != venv ]] || mkdir -p "${@: -1}"
"""


CHOICES = "SYSTEM_SITE_PACKAGES", "TORCH_VERSION"


def install(folder: Path, driver: str | None, torch: str = "", **env: str | None) -> tuple[int, str, list[str]]:
    """Exit code, what it said, and what was asked of Python's modules."""
    program(folder / "python", PYTHON.format(real=sys.executable))
    if driver is not None:
        (folder / "version").write_text(DRIVER.format(driver))
    clean = {k: v for k, v in os.environ.items() if k not in ("DS_ACCELERATOR", "PIP_ARGS", *CHOICES)}
    settings = {"PYTHON": str(folder / "python"), "HERE": str(folder), "TORCH": torch, "PIP_CONSTRAINT": "/etc/pins"}
    given = {**clean, **settings, "UV": "", **env}
    done = subprocess.run(
        ["bash", "launch/install.sh", str(folder / "venv")],
        cwd=ROOT, env={k: v for k, v in given.items() if v is not None}, capture_output=True, text=True,
    )  # fmt: skip
    asked = (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []
    return done.returncode, done.stderr, asked


def test_a_driver_that_is_too_old_ends_it_before_it_begins(tmp_path: Path) -> None:
    code, said, asked = install(tmp_path, "550.54.15")
    assert (code, asked) == (1, []) and said.count("\n") == 1
    assert "the NVIDIA driver is 550.54.15" in said and "wants 580 or newer, or install a torch for CUDA 12" in said
    assert 'PIP_ARGS="--extra-index-url INDEX"' in said


@pytest.mark.parametrize(
    ("driver", "env"),
    [
        (None, {}),
        ("580.95.05", {}),
        ("550.54.15", {"PIP_ARGS": "--extra-index-url file:///of/my/own"}),
        ("550.54.15", {"DS_ACCELERATOR": "cpu"}),
    ],
)
def test_otherwise_torch_comes_first_and_pinned(tmp_path: Path, driver: str | None, env: dict[str, str]) -> None:
    code, said, asked = install(tmp_path, driver, **env)
    assert (code, said) == (0, "")
    more = f" {env['PIP_ARGS']}" if "PIP_ARGS" in env else ""
    pip = f"-m pip install --quiet --disable-pip-version-check{more} -c constraints.txt"
    assert asked == [f"-m venv {tmp_path}/venv /etc/pins", f"{pip} torch /etc/pins", f"{pip} -e .[dev] /etc/pins"]


@pytest.mark.parametrize(("torch", "seen"), [("", ""), ("2.12.0a0+nv", " --system-site-packages")])
def test_uv_does_it_where_it_is_there(tmp_path: Path, torch: str, seen: str) -> None:
    program(tmp_path / "bin/uv", UV)
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "UV": str(tmp_path / "bin/uv")}
    for found in (path, {"PATH": path["PATH"], "UV": None}):  # named, or found
        (tmp_path / "asked").unlink(missing_ok=True)
        code, said, asked = install(
            tmp_path, None, torch, **found, PIP_ARGS="--offline", SYSTEM_SITE_PACKAGES="1" if torch else ""
        )
        venv, pins = tmp_path / "venv", tmp_path / "venv/constraints.txt" if torch else "constraints.txt"
        pip = f"pip install --quiet --compile-bytecode --python {venv}/bin/python --offline -c {pins}"
        made = f"venv --quiet --seed --allow-existing --python {tmp_path}/python{seen} {venv}"
        assert (code, said, asked) == (0, "", [made, f"{pip} torch", f"{pip} -e .[dev]"])


def test_uv_finds_what_pip_would(tmp_path: Path) -> None:
    program(tmp_path / "uv", UV)
    pips = {"PIP_INDEX_URL": "a", "PIP_EXTRA_INDEX_URL": "b c", "PIP_FIND_LINKS": "d e"}
    install(tmp_path, None, UV=str(tmp_path / "uv"), **pips)
    assert (tmp_path / "found").read_text() == "a b c d,e unsafe-best-match\n"
    install(tmp_path, None, UV=str(tmp_path / "uv"), **pips, UV_FIND_LINKS="f", UV_INDEX_STRATEGY="first-index")
    assert (tmp_path / "found").read_text() == "a b c f first-index\n"


def pinned(python: str) -> dict[str, str]:
    """The version of each package for a Python, such as "3.12"."""
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
    here = {"python_full_version": f"{python}.0"}
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.marker is None or pin.marker.evaluate(here)
    }


def test_every_package_of_the_environment_is_pinned_and_no_other() -> None:
    """What geotrain[dev] brings, with all that comes along. Triton is pinned for torch's CUDA build, which by itself
    requires one version of each of CUDA's libraries."""
    todo, needed = [("geotrain", "dev")], dict[str, str]()
    seen = set(todo)
    while todo:
        name, extra = todo.pop()
        found = metadata.distribution(name)
        needed[canonicalize_name(name)] = found.version.partition("+")[0]
        for line in found.requires or ():
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                new = {(canonicalize_name(wanted.name), each) for each in ("", *wanted.extras)} - seen
                todo.extend(new)
                seen |= new
    of_cuda = {name for name in needed if name.startswith(("nvidia-", "cuda-"))} - {"nvidia-ml-py"}
    needed = {name: version for name, version in needed.items() if name not in of_cuda}
    pins = pinned("{}.{}".format(*sys.version_info))
    assert pins.pop("triton") and needed.pop("geotrain") and needed.pop("triton")
    assert pins == needed


@pytest.mark.parametrize(("python", "megatron"), [("3.11", "0.16.1"), ("3.12", "0.19.2"), ("3.13", "0.19.2")])
def test_each_python_has_a_pin_for_each_requirement_in_its_range(python: str, megatron: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": "dev"}
    pins, asked = pinned(python), [Requirement(line) for line in metadata.requires("geotrain") or ()]
    wanted = [each for each in asked if each.marker is None or each.marker.evaluate(environment)]
    outside = [str(each) for each in wanted if not each.specifier.contains(pins[canonicalize_name(each.name)])]
    assert outside == [] and len(wanted) > 40 and pins["megatron-core"] == megatron
    assert Version(python) in SpecifierSet(str(metadata.metadata("geotrain")["Requires-Python"]))


@pytest.mark.parametrize(
    ("driver", "there", "env", "seen", "kept_torch"),
    [
        # NVIDIA's images bring a compatibility package for older drivers
        ("550.54.15", "2.12.0a0+nv", {"SYSTEM_SITE_PACKAGES": "1"}, " --system-site-packages", "2.12.0a0+nv"),
        ("580.95.05", "", {"TORCH_VERSION": "2.11.0"}, "", "2.11.0"),
        (
            None,
            "2.12.0",
            {"SYSTEM_SITE_PACKAGES": "1", "TORCH_VERSION": "2.11.0"},
            " --system-site-packages",
            "2.12.0",
        ),
    ],
)
def test_a_containers_torch_or_one_that_is_named_stays(
    tmp_path: Path, driver: str | None, there: str, env: dict[str, str], seen: str, kept_torch: str
) -> None:
    """Neither our torch nor our Triton is pinned then; what an image pins for its own system counts no more."""
    code, said, asked = install(tmp_path, driver, there, **env)
    assert (code, said) == (0, "")
    pins = tmp_path / "venv/constraints.txt"
    pip = f"-m pip install --quiet --disable-pip-version-check -c {pins}"
    assert asked == [f"-m venv{seen} {tmp_path}/venv /etc/pins", f"{pip} torch ", f"{pip} -e .[dev] "]
    ours = (ROOT / "constraints.txt").read_text().splitlines()
    kept = pins.read_text().splitlines()
    assert [line for line in ours if line not in kept] == [x for x in ours if x.split("==")[0] in ("torch", "triton")]
    assert [line for line in kept if line not in ours] == [f"torch=={kept_torch}"]


def test_without_a_torch_there_the_driver_counts(tmp_path: Path) -> None:
    code, said, asked = install(tmp_path, "550.54.15", SYSTEM_SITE_PACKAGES="1")
    assert (code, asked) == (1, []) and "550.54.15" in said
