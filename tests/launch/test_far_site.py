"""A site that lives on without its launcher: how it is found again, its lock, and how it ended."""

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
from unittest.mock import Mock

import pytest

from geotrain.config import EXIT_FOR_GOOD, ConfigError, load_cluster, load_run
from geotrain.config.agreement import config_digest
from geotrain.data.dataset import read_manifest
from geotrain.launch import far_site
from geotrain.launch.check import with_data_digest
from geotrain.launch.far_site import EXIT_HELD, SiteFiles
from geotrain.launch.launcher import locked, resolve
from geotrain.launch.site_processes import LaunchRequest
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.snapshots import SNAPSHOTS, SnapshotStore
from tests.support.process_trees import marked, new_mark, until
from tests.support.small_runs import prepare_text, write_files

BUSY_S = 120.0

# Keeps a process in place of a site's servers and workers.
KEEPER = """
import sys
from geotrain.launch import far_site
from geotrain.launch.supervisor import ProcessSpec, Supervisor, guarded

def run(request, files):
    with Supervisor(files.folder / "logs") as running:
        running.start(ProcessSpec("eu", guarded(("sleep", "300"))))
        files.say("keeps")
        return running.wait()

far_site._run = run
sys.exit(far_site.keep_site())
"""


def request(folder: Path, launch: str = "first", resume: bool = False) -> LaunchRequest:
    run, cluster = write_files(folder, "run", 64, {"eu": [1]}, {"rule": {"name": "halos"}})
    return LaunchRequest(load_run(run), load_cluster(cluster), ("eu",), resume, launch)


@contextmanager
def kept(asked: LaunchRequest, mark: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER], env={**os.environ, **mark}, stdin=pipe, stdout=pipe
    ) as keeper:
        assert keeper.stdin and keeper.stdout
        keeper.stdin.write(asked.to_line())
        keeper.stdin.close()
        assert keeper.stdout.readline() == b"keeps\n"
        try:
            yield keeper
        finally:
            keeper.kill()


@contextmanager
def attached(asked: LaunchRequest, keeper: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A relay that has attached to the keeper."""
    command, pipe = (sys.executable, "-m", "geotrain", "launch-site"), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as relay:
        assert relay.stdin and relay.stdout
        relay.stdin.write(asked.to_line())
        assert relay.stdout.readline() == f"attached to process {keeper.pid}\n".encode()
        yield relay


def test_a_living_site_is_found_again_and_executes_commands_of_the_last_relay(tmp_path: Path) -> None:
    first, mark = request(tmp_path), new_mark()
    files = SiteFiles.of(first)
    second = replace(first, launch="second", resume=True)
    with kept(first, mark) as keeper, attached(first, keeper) as lost:
        assert stat.S_IMODE(files.path("relay").stat().st_mode) == 0o600
        # A new run of that name is another one. A launcher that was killed comes back with --resume.
        code, told = launch_site(replace(first, launch="new"))
        assert code == EXIT_FOR_GOOD and "attach to it with --resume" in told
        with attached(second, keeper) as back:
            lost.communicate(b"stop\n", BUSY_S)  # a command that was long on its way
            assert lost.returncode == 0  # 143 of one that stops its site
            files.say("all is well")
            assert back.stdout and back.stdout.readline() == b"all is well\n"
            back.communicate(b"stop\n", BUSY_S)
            assert back.returncode == 143
            assert keeper.wait(BUSY_S) == 143 and marked(mark) == []
    assert files.keeper() is None


def test_another_configuration_stops_what_lives_and_is_started_in_its_place(tmp_path: Path) -> None:
    first, mark = request(tmp_path), new_mark()
    changed = first.run.model_copy(update={"seed": 9})
    with kept(first, mark) as keeper:
        code, told = launch_site(replace(first, run=changed, resume=True))
        assert keeper.wait(BUSY_S) == 143 and marked(mark) == []
        assert code == EXIT_FOR_GOOD and "data/train" in told  # its keeper misses the data


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
    (folder / ".launch-eu").write_text("first")
    (folder / ".site-eu.json").write_text(json.dumps({"code": code, "reason": reason}))
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


def test_a_site_whose_worker_has_lost_its_state_goes_on_only_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_text(tmp_path)
    asked = request(tmp_path, resume=True)
    told = {"state": {"members": {"eu-0": {"job": 9}}}, "ended": True}
    SnapshotStore(asked.run.run_folder / "servers/eu" / SNAPSHOTS).save(FrozenState({}), told)
    monkeypatch.setattr(far_site, "check_hosts", Mock(side_effect=InterruptedError("it goes on")))
    for without, words in ((False, "no whole checkpoint of it"), (True, "it goes on")):
        with pytest.raises((ConfigError, InterruptedError), match=words):
            far_site._run(replace(asked, without_checkpoints=without), SiteFiles.of(asked))


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
