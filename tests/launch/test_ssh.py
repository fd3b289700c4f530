"""Jobs behind a real sshd, whose connections are lost: started again, and never beside their former lives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from geotrain.config import RestartConfig, load_cluster, load_run
from geotrain.launch import guard
from geotrain.launch.site_processes import LaunchRequest, guarded_over_ssh, remote_site
from geotrain.launch.supervisor import ProcessSpec, Supervisor
from geotrain.monitor.events import ProcessDied
from tests.support.process_trees import MARK, marked, new_mark, only_deaths, until
from tests.support.small_runs import prepare_text, write_files

BUSY_S = 120.0
FAST = RestartConfig(limit=3, first_s=0.05)
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")

# Says so when anything is there of another life: all that it starts, also in other sessions, inherits the lock.
# It takes a second to end.
JOB = """
exec 7> {alone}; flock -n 7 || echo beside another
trap 'end=$((SECONDS + 2)); while ((SECONDS < end)); do :; done; exit 0' TERM
echo begins
setsid sleep 300 & sleep 300
"""


@contextmanager
def sshd(folder: Path, port: int) -> Iterator[psutil.Process]:
    """A server on the loopback interface that lets in a key of its own; in folder/bin an `ssh` that speaks to it, and
    gives a silent connection up after 2 s."""
    assert SSHD and shutil.which("ssh"), "install openssh's client and server"
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    Path("/run/sshd").mkdir(exist_ok=True)  # else sshd, as root, does not start
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nAcceptEnv {MARK}\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\nHostName 127.0.0.1\nPort {port}\nIdentityFile {folder}/user\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {folder}/known\nStrictHostKeyChecking accept-new\nLogLevel ERROR\n"
        f"SendEnv {MARK}\n"
    )
    (folder / "bin").mkdir()
    patience = "-o ServerAliveInterval=1 -o ServerAliveCountMax=2"  # the first word for an option counts
    (folder / "bin/ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config {patience} "$@"\n')
    (folder / "bin/ssh").chmod(0o755)
    with subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.PIPE) as server:
        try:
            assert server.stderr and b"listening" in server.stderr.readline()
            yield psutil.Process(server.pid)
        finally:
            sessions = psutil.Process(server.pid).children(recursive=True)
            server.kill()
            for session in sessions:
                with suppress(psutil.NoSuchProcess):  # one whose connection has ended goes on its own
                    session.kill()


def fall_silent(server: psutil.Process) -> None:
    """As when a link is cut: this end gives up, the far end does not know, and what it runs there goes on."""
    for session in server.children():
        session.suspend()


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("how", ["silence", "killed"])
def test_a_job_whose_connection_is_lost_is_started_again_and_never_beside_itself(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    mark, deaths, log = new_mark(), list[ProcessDied](), tmp_path / "logs/eu-0.log"
    script = JOB.format(alone=tmp_path / "alone")

    def job() -> ProcessSpec:
        command = guarded_over_ssh("far.example.org", f"{tmp_path}/eu-0", ("bash", "-c", script), mark)
        return ProcessSpec("eu-0", command, respawn=job)

    with sshd(tmp_path, free_port) as server, monkeypatch.context() as patched:
        patched.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        with Supervisor(tmp_path / "logs", restart=FAST, on_event=only_deaths(deaths)) as running:
            running.start(job())
            assert until(lambda: "begins" in log.read_text() and len(marked(mark)) == 4, BUSY_S)
            former = set(marked(mark))
            if how == "silence":
                fall_silent(server)
            else:
                (ssh,) = [child for child in psutil.Process().children() if child.name() == "ssh"]
                ssh.kill()

            def stop_when_it_began_twice() -> None:
                if log.read_text().count("begins") == 2:
                    assert not former & set(marked(mark))
                    signal.raise_signal(signal.SIGTERM)

            assert running.wait(stop_when_it_began_twice, every_s=0.05).code == 128 + signal.SIGTERM
        assert until(lambda: marked(mark) == [], BUSY_S)
    assert [(death.unit, death.how) for death in deaths] == [
        ("eu-0", "failed with exit code 255" if how == "silence" else "was ended by SIGKILL")
    ]
    assert "beside another" not in log.read_text()


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(600)
def test_a_far_region_whose_connection_is_lost_is_started_again_and_never_beside_itself(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`geotrain launch-site` with its server and its worker, until their second life has begun."""
    prepare_text(tmp_path)
    files = write_files(tmp_path, "far", 64, {"eu": [1]}, {"rule": {"name": "halos"}})
    cluster = json.loads(files[1].read_text())
    cluster["regions"][0].update(ssh="eu.example.org", server={"host": "127.0.0.2", "port": free_port + 1})
    cluster["global_server"] = {"host": "127.0.0.3", "port": free_port + 1}
    files[1].write_text(json.dumps(cluster))
    run, mark, deaths = load_run(files[0]), new_mark(), list[ProcessDied]()
    site = remote_site(LaunchRequest(run, load_cluster(files[1]), ("eu",), resume=True), "eu", "eu.example.org")

    def life(name: str) -> int:
        """Process id of the guard of a server or worker that has begun; 0: none, or more than its life is there."""
        with suppress(psutil.NoSuchProcess):
            here = marked({guard.JOB: str(run.run_folder.absolute() / name)})
            for root in map(psutil.Process, here):
                tree = root.children(recursive=True)
                if {root.pid, *(process.pid for process in tree)} == set(here) and tree:
                    return root.pid
        return 0

    with sshd(tmp_path, free_port) as server, monkeypatch.context() as patched:
        patched.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        for name, value in mark.items():
            patched.setenv(name, value)
        with Supervisor(tmp_path / "logs", restart=FAST, on_event=only_deaths(deaths)) as running:
            running.start(site)
            assert until(lambda: life("eu") and life("eu-0"), BUSY_S)
            former = {name: life(name) for name in ("eu", "eu-0")}
            fall_silent(server)

            def stop_when_both_live_again() -> None:
                if all(life(name) not in (0, former[name]) for name in former):
                    signal.raise_signal(signal.SIGTERM)

            assert running.wait(stop_when_both_live_again, every_s=0.05).code == 128 + signal.SIGTERM
        assert until(lambda: marked(mark) == [], BUSY_S)
    assert [(death.unit, death.how) for death in deaths] == [("eu.ssh", "failed with exit code 255")]
