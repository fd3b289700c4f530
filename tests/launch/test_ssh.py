"""Behind a real sshd, whose connections are lost: a worker's job is started again, never beside its former
incarnation."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from geotrain.config import RestartConfig
from geotrain.launch import guard as guard_module
from geotrain.launch.launchers.ssh import over_ssh
from geotrain.launch.supervisor import ProcessSpec, Supervisor
from geotrain.monitor.events import ProcessDied
from tests.support.process_trees import marked, new_mark, only_deaths, until
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
