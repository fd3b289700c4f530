"""Packages that `make test` installs where programs are missing, on a machine whose apt-get writes down its
arguments."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import program

ROOT = Path(__file__).parent.parent.parent
BASH = shutil.which("bash")
TOOLS = ("bash", "sort")  # what the script itself calls
OF = {
    "ip": "iproute2",
    "tc": "iproute2",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "pdsh": "pdsh",
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "promtool": "prometheus",
    "chromium": "chromium",
    "gcc": "gcc libc6-dev",
}


class Machine:
    """Has the programs that are named, and no other; `said` is what apt-get was asked."""

    def __init__(self, folder: Path, programs: set[str], user: int = 0, apt: bool = True) -> None:
        self.bin, self.log = folder / "bin", folder / "apt"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        for name in programs:
            self.add(name, "exit 0")
        self.add("id", f"echo {user}")
        if apt:
            self.add("apt-get", f'echo "$DEBIAN_FRONTEND: $*" >> {self.log}')

    def add(self, name: str, script: str) -> None:
        program(self.bin / name, f"#!{BASH}\n{script}\n")

    def run(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", ROOT / "launch/test_packages.sh"], env={"PATH": str(self.bin)}, capture_output=True, text=True
        )

    @property
    def said(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def installs(packages: str) -> list[str]:
    return ["noninteractive: update -qq", f"noninteractive: install -y -qq --no-install-recommends {packages}"]


@pytest.mark.parametrize(("program", "packages"), OF.items())
def test_root_gets_what_is_missing(tmp_path: Path, program: str, packages: str) -> None:
    machine = Machine(tmp_path, OF.keys() - {program})
    assert machine.run().returncode == 0
    assert machine.said == installs(packages)


def test_nothing_is_asked_of_apt_where_nothing_is_missing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {*OF} - {"chromium"} | {"google-chrome"})  # another name of it will do
    assert (machine.run().returncode, machine.said) == (0, [])


def test_what_apt_says_is_the_outcome(tmp_path: Path) -> None:
    machine = Machine(tmp_path, set())
    assert machine.run().returncode == 0
    assert machine.said == installs(
        "chromium gcc iproute2 libc6-dev munge openssh-client openssh-server pdsh prometheus slurm-client "
        "slurmctld slurmd"
    )
    machine.add("apt-get", "exit 100")
    assert machine.run().returncode == 100


@pytest.mark.parametrize(("user", "apt"), [(1000, True), (0, False)])
def test_who_cannot_install_is_told_what_to_install_in_a_line(tmp_path: Path, user: int, apt: bool) -> None:
    machine = Machine(tmp_path, OF.keys() - {"tc", "sshd"}, user, apt)
    done = machine.run()
    assert (done.returncode, done.stdout, machine.said) == (1, "", [])
    told = "as root: apt-get install --no-install-recommends iproute2 openssh-server"
    assert done.stderr == f"test: programs are missing; {told}\n"


@pytest.mark.parametrize("target", ["test", "test-all"])
def test_make_installs_programs_first(target: str) -> None:
    command = ["make", "--dry-run", "--always-make", target]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert plan.index("launch/test_packages.sh") < plan.index("launch/install.sh") < plan.index("-m pytest")
