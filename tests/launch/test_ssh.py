"""Behind a real sshd, whose connections are lost: a worker's job is started again, never beside its former
incarnation; a region lives on. And DeepSpeed's launcher over pdsh."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from geotrain.config import RestartConfig, load_cluster, load_run
from geotrain.launch import guard as guard_module
from geotrain.launch.check import free_ports
from geotrain.launch.host_check import check_hosts
from geotrain.launch.launchers.ssh import over_ssh
from geotrain.launch.supervisor import ProcessSpec, Supervisor
from geotrain.monitor.events import ProcessDied
from tests.support.process_trees import MARK, marked, new_mark, only_deaths, until
from tests.support.small_runs import BATCH, launched, prepare_text, status, write_files

BUSY_S = 300.0
STEPS, STEP_S = 120, 0.1  # of a run that is not over while its launcher is lost
FAST = RestartConfig(limit=3, first_s=0.05)
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")

# Says so when anything is there of another incarnation: all that it starts, also in other sessions, inherits the
# lock. It takes a second to end.
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
    """Cut the link: this end gives up, the far end does not know, and what it runs there goes on."""
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
        guard = (sys.executable, "-m", "geotrain.launch.guard", "--", "bash", "-c", script)
        command = over_ssh("far.example.org", None, guard, {**mark, guard_module.JOB: f"{tmp_path}/eu-0"})
        return ProcessSpec("eu-0", command, respawn=lambda: [job()])

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
    assert [(death.group, death.how) for death in deaths] == [
        ("eu-0", "failed with exit code 255" if how == "silence" else "was ended by SIGKILL")
    ]
    assert "beside another" not in log.read_text()


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(900)
def test_a_far_region_lives_on_when_its_connection_and_then_its_launcher_are_lost(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same processes train from the run's beginning to its end; a launcher that comes back finds them."""
    prepare_text(tmp_path)
    files = write_files(tmp_path, "far", STEPS * BATCH, {"eu": [1]}, {"rule": {"name": "halos"}}, min_step_s=STEP_S)
    cluster = json.loads(files[1].read_text())
    cluster["regions"][0].update(ssh="eu.example.org", server={"host": "127.0.0.2", "port": free_port + 1})
    cluster["restart"] = {"limit": 0, "first_s": 0.05}  # whatever dies fails the run
    files[1].write_text(json.dumps(cluster))
    folder, mark = load_run(files[0]).run_folder.absolute(), new_mark()

    def launch(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "geotrain", "launch", *map(str, files), *more]
        return subprocess.Popen(command, env={**os.environ, **mark}, stdout=PIPE, stderr=subprocess.STDOUT, text=True)

    def lives() -> set[int]:
        """The region's processes: its keeper, and what it started."""
        keepers = [p for p in map(psutil.Process, marked(mark)) if "--keep" in p.cmdline()]
        return {process.pid for keeper in keepers for process in (keeper, *keeper.children(recursive=True))}

    def told(name: str, what: str) -> int:
        return (folder / "logs" / name).read_text().count(what) if (folder / "logs" / name).exists() else 0

    def jobs() -> int:
        events = folder / "events/eu-0.jsonl"
        return events.read_text().count("JobTrained") if events.exists() else 0

    with sshd(tmp_path, free_port) as server, monkeypatch.context() as patched:
        patched.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        launcher = launch()
        assert until(lambda: launcher.poll() is not None or jobs() > 0, BUSY_S)
        assert launcher.poll() is None, launcher.communicate()[0]
        region = lives()
        fall_silent(server)
        assert until(lambda: told("eu.ssh.log", "attached to process") == 2, BUSY_S)
        launcher.kill()
        said = launcher.communicate()[0]
        assert "eu.ssh: no connection" in said and "what runs there goes on" in said
        done = jobs()
        assert lives() == region
        launcher = launch("--resume")
        said = launcher.communicate(timeout=3 * BUSY_S)[0]  # to the end of the run
        assert launcher.returncode == 0 and "committed 100%" in said, said
        assert jobs() > done
    assert told("eu.ssh.log", "attached to process") == 3 and told("eu.launcher.log", "given up") == 0
    events = [json.loads(line) for line in (folder / "events/launcher-eu.jsonl").read_text().splitlines()]
    assert [e["process"] for e in events if e["event"] == "ProcessStarted"] == ["eu", "eu-0"]
    assert until(lambda: marked(mark) == [], BUSY_S)


@pytest.mark.slow
@pytest.mark.root
def test_deepspeed_starts_a_workers_hosts_by_pdsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts, which are this machine by two names, form one worker; the second name is known to ssh only."""
    assert shutil.which("pdsh"), "install pdsh"
    prepare_text(tmp_path)
    files = write_files(tmp_path, "run", 8 * BATCH, {"eu": [2]}, {"rule": {"name": "halos"}}, restarts=0)
    cluster, mark, ports = json.loads(files[1].read_text()), new_mark(), free_ports(2)
    cluster["regions"][0]["workers"][0] |= {
        "launcher": "pdsh",
        "launcher_args": "-u 250",  # pdsh's own option: a command that takes longer is ended
        "master_port": ports[0],
        "hosts": [{"host": "127.0.0.1", "slots": 1}, {"host": "second.example.org", "slots": 1}],
        "env": {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    }
    files[1].write_text(json.dumps(cluster))
    with sshd(tmp_path, ports[1]), monkeypatch.context() as patched:
        patched.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        for name, value in mark.items():
            patched.setenv(name, value)
        with socket.socket() as somebody:
            somebody.bind(("", ports[0]))
            (found,) = check_hosts(load_run(files[0]), load_cluster(files[1]), ("global", "eu"))
            assert (found.host, found.what) == ("127.0.0.1", f"port {ports[0]} is taken")  # where rank 0 is
        launched(files)  # which asks both again
        log = (tmp_path / "run/logs/eu-0.log").read_text()
        # pdsh puts the host's name before each line.
        assert all(f"{host}: " in log for host in ("127.0.0.1", "second.example.org")), log
        assert "nnodes=2" in log and status(files[0], "global")["complete"]
        assert until(lambda: marked(mark) == [], BUSY_S)
