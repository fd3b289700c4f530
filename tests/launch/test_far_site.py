"""A site that lives on without its launcher: the socket by which it is found again, its lock, and how it ended."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from geotrain.config import EXIT_FOR_GOOD, RestartConfig, config_digest, load_cluster, load_run
from geotrain.data.dataset import read_manifest
from geotrain.launch.check import with_data_digest
from geotrain.launch.control import attach
from geotrain.launch.far_site import EXIT_HELD
from geotrain.launch.launcher import locked, resolve
from geotrain.launch.site_processes import LaunchRequest
from geotrain.launch.supervisor import ProcessSpec, Supervisor
from geotrain.monitor.events import ProcessDied, Trouble
from geotrain.outer.events import Event
from tests.support.process_trees import marked, new_mark, stopped_when, until
from tests.support.small_runs import prepare_text, write_files

BUSY_S = 120.0

# Keeps a process as a site's servers and workers are kept.
KEEPER = """
import sys
from pathlib import Path
from geotrain.launch.control import ControlSocket
from geotrain.launch.launcher import locked
from geotrain.launch.site_processes import LaunchRequest
from geotrain.launch.supervisor import ProcessSpec, Supervisor, guarded

folder, request = Path(sys.argv[1]), LaunchRequest.from_line(sys.stdin.buffer.readline())
with locked(folder, request.sites), ControlSocket(folder, request) as control, Supervisor(folder / "logs") as running:
    control.serve_in(running)
    running.start(ProcessSpec("eu", guarded(("sleep", "300"))))
    print("keeps", flush=True)
    control.end(running.wait())
"""


def request(folder: Path, launch: str = "first", resume: bool = False) -> LaunchRequest:
    run, cluster = write_files(folder, "run", 64, {"eu": [1]}, {"rule": {"name": "halos"}})
    return LaunchRequest(load_run(run), load_cluster(cluster), ("eu",), resume, launch)


@contextmanager
def kept(folder: Path, asked: LaunchRequest, mark: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", KEEPER, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env={**os.environ, **mark}, stdin=pipe, stdout=pipe) as keeper:
        assert keeper.stdin and keeper.stdout
        keeper.stdin.write(asked.to_line())
        keeper.stdin.close()
        assert keeper.stdout.readline() == b"keeps\n"
        try:
            yield keeper
        finally:
            keeper.kill()


class RelayInProcess:
    """A relay in this process, in place of the one that ssh runs."""

    def __init__(self, folder: Path, asked: LaunchRequest) -> None:
        link = attach(folder, "eu")
        assert link is not None
        self.link: socket.socket = link
        self.link.settimeout(BUSY_S)
        self.received = self.link.makefile("rb")
        self.link.sendall(asked.to_line())

    def receive(self) -> dict[str, object]:
        line: dict[str, object] = json.loads(self.received.readline())
        return line


def test_a_living_site_is_found_again_and_executes_commands_of_the_last_relay(tmp_path: Path) -> None:
    folder = tmp_path / ("a long name of a run's folder " * 4)  # longer than a socket's address may be
    first, mark = request(tmp_path), new_mark()
    with kept(folder, first, mark) as keeper:
        assert stat.S_IMODE((folder / ".control-eu").stat().st_mode) == 0o600
        lost = RelayInProcess(folder, first)
        assert lost.receive() == {"attached": keeper.pid}
        # A new run of that name is another one. A launcher that was killed comes back with --resume.
        assert "attach to it with --resume" in str(
            RelayInProcess(folder, replace(first, launch="new")).receive()["refused"]
        )
        back = RelayInProcess(folder, replace(first, launch="second", resume=True))
        assert back.receive() == {"attached": keeper.pid}
        lost.link.sendall(b"stop\n")  # a command that was long on its way
        lost.link.shutdown(socket.SHUT_WR)
        assert lost.received.readline() == b"" and keeper.poll() is None
        assert not until(lambda: keeper.poll() is not None, 1.0)  # a stop takes less
        back.link.sendall(b"stop\n")
        assert back.receive() == {"ended": 143, "reason": "stopped by its launcher"}
        assert keeper.wait(BUSY_S) == 0 and marked(mark) == []
    assert attach(folder, "eu") is None and not (folder / ".control-eu").exists()


def test_another_configuration_stops_what_lives_for_it_to_be_started_again(tmp_path: Path) -> None:
    first, mark = request(tmp_path), new_mark()
    changed = first.run.model_copy(update={"seed": 9})
    with kept(tmp_path, first, mark) as keeper:
        told = [RelayInProcess(tmp_path, replace(first, run=changed, resume=True)).receive()]
        assert told == [{"ended": 143, "reason": "another configuration was asked for"}]
        assert keeper.wait(BUSY_S) == 0


def test_what_is_left_of_a_killed_site_is_known_for_that(tmp_path: Path) -> None:
    first, mark = request(tmp_path), new_mark()
    with kept(tmp_path, first, mark) as keeper:
        keeper.kill()
        keeper.wait()
        assert (tmp_path / ".control-eu").exists() and attach(tmp_path, "eu") is None
        assert until(lambda: marked(mark) == [], BUSY_S)
    with kept(tmp_path, first, mark) as keeper:
        assert RelayInProcess(tmp_path, first).receive() == {"attached": keeper.pid}


def launch_site(asked: LaunchRequest, *more: str) -> tuple[int, str]:
    """Run a relay whose commands do not end; returns its exit code and standard error."""
    command = [sys.executable, "-m", "geotrain", "launch-site", *more]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as relay:
        assert relay.stdin and relay.stderr
        relay.stdin.write(asked.to_line())
        relay.stdin.flush()
        return relay.wait(BUSY_S), relay.stderr.read().decode()


def test_there_is_one_life_of_a_site(tmp_path: Path) -> None:
    asked = request(tmp_path)
    with locked(asked.run.run_folder.absolute(), ("eu",)):
        assert launch_site(asked, "--keep")[0] == EXIT_HELD
    assert not list(asked.run.run_folder.glob(".site-*"))


@pytest.mark.parametrize(("code", "reason"), [(0, ""), (EXIT_FOR_GOOD, "no data")])
def test_how_a_site_ended_while_nobody_was_connected_is_told(tmp_path: Path, code: int, reason: str) -> None:
    """Without data, so that a site that was started would fail, with another reason."""
    asked = request(tmp_path)
    folder = asked.run.run_folder.absolute()
    folder.mkdir()
    (folder / ".site-eu.json").write_text(json.dumps({"launch": "first", "code": code, "reason": reason}))
    assert launch_site(asked) == (code, f"geotrain: {reason}\n" if reason else "")
    if code:  # another launch is not told of it
        again, told = launch_site(replace(asked, launch="second"))
        assert again == EXIT_FOR_GOOD and "data/train" in told


def test_a_site_with_other_data_is_refused_before_it_begins(tmp_path: Path) -> None:
    prepare_text(tmp_path)
    asked = request(tmp_path)
    mine = read_manifest(tmp_path / "data/train").sha256
    launched = with_data_digest(asked.run)  # as on the launcher's machine, which has the data
    assert launched.data.sha256 == mine and config_digest(launched) == config_digest(asked.run)
    data = asked.run.data.model_copy(update={"sha256": "0" * 64})
    begun = asked.run.model_copy(update={"data": data})
    assert with_data_digest(asked.run, before=begun).data.sha256 == "0" * 64  # an earlier launch has decided it
    code, told = launch_site(replace(asked, run=begun))
    assert code == EXIT_FOR_GOOD
    assert f"data/train: is other data than data.sha256 = '{'0' * 64}' asks for: its digest is '{mine}'" in told


# ------------------------------------------------------------------------------------------ the launcher's end


def relay(script: str) -> ProcessSpec:
    return ProcessSpec("eu.ssh", ("bash", "-c", script), respawn=lambda: [relay(script)], relay=True)


def test_a_lost_connection_is_tried_again_beyond_all_limits_and_told(tmp_path: Path) -> None:
    events: list[Event] = []
    script = f"echo x >> {tmp_path}/tries; echo no route; [ $(wc -l < {tmp_path}/tries) = 6 ] || exit 255"
    quick = RestartConfig(limit=0, first_s=0.01, longest_s=600.0)
    with Supervisor(tmp_path, restart=quick, on_event=events.append) as running:
        running.start(relay(script))
        assert running.wait().code == 0
    told = [event.what for event in events if isinstance(event, Trouble)]
    assert told[0] == "eu.ssh: no connection (no route); what runs there goes on; tried again in 0.01 s"
    assert len(told) == 5 and not any(isinstance(event, ProcessDied) for event in events)


def test_who_is_stopped_asks_its_relays_to_stop_and_names_those_that_it_did_not_reach(tmp_path: Path) -> None:
    events: list[Event] = []
    slow = RestartConfig(first_s=600.0, longest_s=600.0)
    with Supervisor(tmp_path, restart=slow, on_event=events.append) as running:
        running.start(relay("read command; echo told to $command; exit 143"))
        running.start(replace(relay("exit 255"), name="us.ssh"))
        lost = Trouble("us.ssh: no connection (no word); what runs there goes on; tried again in 600 s")
        assert stopped_when(running, lambda: lost in events) == 143
    assert running.log("eu.ssh").read_text() == "told to stop\n"
    assert [event for event in events if isinstance(event, Trouble)] == [
        lost,
        Trouble("us.ssh: was not reached when all was stopped: what runs there goes on, and --resume finds it"),
    ]


def test_a_launcher_that_dies_tells_its_relays_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from geotrain.launch.supervisor import *\n"
        "with Supervisor(Path(sys.argv[1])) as running:\n"
        f"    running.start(ProcessSpec('eu.ssh', ('bash', '-c', 'read o; echo heard [$o] > {tmp_path}/heard'), "
        "relay=True))\n"
        "    print('started', flush=True); running.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout and launcher.stdout.readline() == b"started\n"
        launcher.kill()
    assert until(lambda: (tmp_path / "heard").exists() and (tmp_path / "heard").read_text() != "", BUSY_S)
    assert (tmp_path / "heard").read_text() == "heard []\n"


def test_those_who_miss_the_servers_end_are_a_failure(tmp_path: Path) -> None:
    with Supervisor(tmp_path, drain_s=0.3) as running:
        running.start(ProcessSpec("global", ("true",), role="server"))
        running.start(relay("echo far away; read order"))
        outcome = running.wait()
    assert outcome.code == 1
    assert "'eu.ssh' still running 0.3 s after all servers ended: they missed the run's end" in outcome.reason


def test_a_resumed_run_has_its_ports_again(tmp_path: Path, free_port: int) -> None:
    """Regions that live on know them."""
    cluster = load_cluster(write_files(tmp_path, "run", 64, {"eu": [1]}, {"rule": {"name": "halos"}})[1])
    before = resolve(cluster)
    assert resolve(cluster, before=before) == before
    with socket.socket() as taken:
        taken.bind((before.global_server.host, before.global_server.port))
        taken.listen()
        again = resolve(cluster, before=before)
    assert again.regions == before.regions and again.global_server != before.global_server
