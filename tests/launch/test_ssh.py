"""Behind a real sshd, whose connections are lost: a worker's job is started again, never beside its former
incarnation. And DeepSpeed's launcher over pdsh."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from geotrain.config import RestartConfig
from geotrain.launch import guard as guard_module
from geotrain.launch.check import free_ports
from geotrain.launch.launchers.ssh import over_ssh
from geotrain.launch.supervisor import ProcessSpec, Supervisor, guarded_there
from geotrain.monitor.events import ProcessDied
from tests.support.process_trees import began_alone, commands, marked, new_mark, only_deaths, stopped_when, until
from tests.support.small_runs import BATCH, launched, prepare_text, status, write_files
from tests.support.sshd import fall_silent, sshd

BUSY_S = 300.0
FAST = RestartConfig(limit=3, first_s=0.05)

# Says so when anything is there of another incarnation: all that it starts, also in other sessions, inherits the
# lock. It takes a second to end.
JOB = """
exec 7> {alone}; flock -n 7 || echo beside another
trap 'end=$((SECONDS + 2)); while ((SECONDS < end)); do :; done; exit 0' TERM
echo begins
setsid sleep 300 & sleep 300
"""


@pytest.mark.slow
@pytest.mark.root
def test_a_job_whose_connection_is_lost_is_started_again_and_never_beside_itself(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, deaths, log = new_mark(), list[ProcessDied](), tmp_path / "logs/eu-0.log"
    script = JOB.format(alone=tmp_path / "alone")

    def job() -> ProcessSpec:
        environment = {**mark, guard_module.JOB: f"{tmp_path}/eu-0"}
        inside, first = guarded_there(("bash", "-c", script), environment)
        command = over_ssh("far.example.org", None, inside)
        return ProcessSpec("eu-0", command, first_input=first, respawn=lambda: [job()])

    with sshd(tmp_path, free_port) as server, monkeypatch.context() as patched:
        patched.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        with Supervisor(tmp_path / "logs", restart=FAST, on_event=only_deaths(deaths)) as running:
            running.start(job())
            assert until(lambda: "begins" in log.read_text() and len(marked(mark)) == 4, BUSY_S)
            former = set(marked(mark))
            fall_silent(server)
            assert stopped_when(running, lambda: began_alone(log, former, mark)) == 128 + signal.SIGTERM
        assert until(lambda: marked(mark) == [], BUSY_S)
    assert [(death.group, death.how) for death in deaths] == [("eu-0", "failed with exit code 255")]
    assert "beside another" not in log.read_text()


@pytest.mark.long("launch")
@pytest.mark.slow
@pytest.mark.root
def test_deepspeed_starts_a_workers_hosts_by_pdsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts, which are this machine by two names, form one worker; the second name is known to ssh only."""
    assert shutil.which("pdsh"), "install pdsh"
    prepare_text(tmp_path)
    mark, ports = new_mark(), free_ports(3)
    worker = {
        "launcher": "pdsh",
        "launcher_args": "-u 250",  # pdsh's own option: a command that takes longer is ended
        "master_port": ports[0],
        "hosts": [{"host": "127.0.0.1", "slots": 1}, {"host": "second.example.org", "slots": 1}],
        "env": {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    }
    outer = {"rule": {"name": "halos"}}
    files = write_files(tmp_path, "run", 8 * BATCH, {"eu": [2]}, outer, restarts=0, first=worker)
    cluster = json.loads(files[1].read_text())
    cluster["regions"][0]["server"] = {"host": "127.0.0.2", "port": ports[2]}  # where both find it
    files[1].write_text(json.dumps(cluster))
    with sshd(tmp_path, ports[1]), monkeypatch.context() as patched:
        patched.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        for name, value in mark.items():
            patched.setenv(name, value)
        launched(files)
        log = (tmp_path / "run/logs/eu-0.log").read_text()
        # pdsh puts the host's name before each line.
        assert all(f"{host}: " in log for host in ("127.0.0.1", "second.example.org")), log
        assert "nnodes=2" in log and status(files[0], "global")["complete"]
        assert until(lambda: marked(mark) == [], BUSY_S)


@pytest.mark.long("launch")
@pytest.mark.slow
@pytest.mark.root
def test_a_shard_on_another_host_is_started_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the global server's two shards stands on 127.0.0.2, which is reached by ssh; its process is killed."""
    prepare_text(tmp_path)
    mark, ports = new_mark(), free_ports(2)
    outer = {"rule": {"name": "halos"}, "fragments": {"pieces": 2}}  # one a shard
    files = write_files(tmp_path, "run", 16 * BATCH, {"eu": [1]}, outer, min_step_s=0.5)
    cluster = json.loads(files[1].read_text())
    cluster["global_shards"] = [{}, {"host": "127.0.0.2", "port": ports[0]}]
    files[1].write_text(json.dumps(cluster))
    with sshd(tmp_path, ports[1]), monkeypatch.context() as patched:
        patched.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        for name, value in {**mark, "DS_ACCELERATOR": "cpu"}.items():
            patched.setenv(name, value)
        command = [sys.executable, "-m", "geotrain", "launch", *map(str, files)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
            assert until(lambda: trained(files[0]) > 0 or launcher.poll() is not None, BUSY_S)
            assert launcher.poll() is None, launcher.communicate()[0]
            far, near = (process for number in "10" for process, words in commands(mark) if serves(words, number))
            above = {process: [parent.name() for parent in process.parents()] for process in (far, near)}
            assert any("sshd" in name for name in above[far]) and not any("sshd" in name for name in above[near])
            far.kill()
            said = launcher.communicate(timeout=BUSY_S)[0]
        assert launcher.returncode == 0, said
        assert "global.shard-1 failed" in said and "started again" in said
        assert status(files[0], "global")["complete"]
        assert until(lambda: marked(mark) == [], BUSY_S)


def trained(run_file: Path) -> int:
    """Samples that the global server has committed; 0 before it says so."""
    with suppress(OSError, ValueError, KeyError):
        return int(status(run_file, "global")["committed_samples"])
    return 0


def serves(words: list[str], number: str) -> bool:
    """Whether this command is that shard of the global server."""
    return words[1:8] == ["-P", "-m", "geotrain", "serve", "shard", "global", number]
