"""Hosts of a worker that share no file system with the launcher: they get the run's files, and must have its data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from geotrain.config import Address, ConfigError, load_cluster, load_run
from geotrain.launch import far_hosts
from geotrain.launch.far_hosts import prepare_far_hosts
from geotrain.launch.machine import HostMachine
from geotrain.launch.site_processes import LaunchRequest, local_processes
from tests.support.programs import SSH, stand_in
from tests.support.small_runs import write_files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The launcher's folder, and in the path an ssh to hosts that have none of its files."""
    here = tmp_path / "here"
    here.mkdir()
    stand_in(monkeypatch, tmp_path / "bin/ssh", SSH)
    monkeypatch.setenv("HERE", str(here))
    return here


def request(here: Path, *hosts: str) -> tuple[LaunchRequest, Path]:
    """A run whose worker "eu-0" has these hosts, and the run's folder with its files."""
    placed = [{"host": host, "slots": 1, "region": "us" if host == "away" else None} for host in hosts]
    worker = {"launcher": "ssh", "hosts": placed}
    files = write_files(here, "run", 64, {"eu": [1], "us": [1]}, {"rule": {"name": "halos"}}, first=worker)
    run = load_run(files[0], [f"data.validation={here}/data/validation"])
    made = LaunchRequest(run, load_cluster(files[1]), ("global", "eu"), False)
    folder = made.run.run_folder.absolute()
    made.write_files(folder)
    local_processes(made, folder, HostMachine(1))
    return made, folder


def data_on(here: Path, host: str) -> None:
    place = Path(f"{here}-{host}") / "data"
    place.mkdir(parents=True)
    for suffix in (".bin", ".idx", ".json"):
        (place / f"train{suffix}").touch()
        (place / f"validation{suffix}").touch()


def test_the_runs_files_are_brought_and_nothing_is_left_beside_them(here: Path) -> None:
    made, folder = request(here, "h1", "h2")
    for host in ("h1", "h2"):
        data_on(here, host)
    for _ in range(2):  # a resumed run replaces them
        prepare_far_hosts(made, folder)
        for host in ("h1", "h2"):
            there = Path(str(folder).replace(str(here), f"{here}-{host}"))
            found = {str(path.relative_to(there)): path.read_text() for path in there.rglob("*") if path.is_file()}
            names = ["cluster.json", "hosts/eu-0", "run.json"]
            assert found == {name: (folder / name).read_text() for name in names}
            assert sorted(path.name for path in there.iterdir()) == ["cluster.json", "hosts", "run.json"]


def test_shards_elsewhere_hear_of_the_sites_that_join_a_live_run(here: Path) -> None:
    made, folder = request(here, "h1")
    cluster = made.cluster.model_copy(update={"global_shards": (Address(host="h3", port=7001),)})
    prepare_far_hosts(replace(made, cluster=cluster, sites=("us",)), folder, added=True)
    there = Path(str(folder).replace(str(here), f"{here}-h3"))
    assert sorted(path.name for path in there.iterdir()) == ["cluster.json", "hosts", "run.json"]


def test_each_site_prepares_its_own_hosts_of_a_worker_that_spans_regions(here: Path) -> None:
    made, folder = request(here, "h1", "away")
    data_on(here, "away")
    prepare_far_hosts(replace(made, sites=("us",)), folder)
    assert [Path(str(folder).replace(str(here), f"{here}-{h}")).exists() for h in ("h1", "away")] == [False, True]


@pytest.mark.parametrize("file", ("train.bin", "train.idx", "train.json", "validation.bin"))
def test_missing_data_is_told_before_anything_starts(here: Path, file: str) -> None:
    made, folder = request(here, "h1", "h2")
    for host in ("h1", "h2"):
        data_on(here, host)
    (Path(f"{here}-h2") / "data" / file).unlink()
    with pytest.raises(ConfigError, match=rf"host h2: not ready for a worker: cannot read .*data/{file}"):
        prepare_far_hosts(made, folder)


def test_a_host_that_cannot_be_reached_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, folder = request(here, "gone")
    with pytest.raises(ConfigError, match=r"host gone: not ready for a worker: ssh: .*: No route to host"):
        prepare_far_hosts(made, folder)
    monkeypatch.setattr(far_hosts, "DEADLINE_S", 0.5)
    made, folder = request(here, "silent")
    with pytest.raises(ConfigError, match=r"host silent: not ready for a worker: no answer within 0\.5 s"):
        prepare_far_hosts(made, folder)
