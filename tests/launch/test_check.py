"""Checks before anything starts: ports, the run's folder; and how addresses are resolved."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from geotrain.config import (
    Address,
    ClusterConfig,
    ConfigError,
    DataSet,
    RunConfig,
    codec_config,
    load_cluster,
    load_run,
)
from geotrain.emulate.wan import Wan
from geotrain.launch import launcher
from geotrain.launch.check import check_port_is_free, free_ports
from geotrain.launch.launcher import locked, resolve
from geotrain.launch.launchers.ssh import over_ssh
from geotrain.launch.machine import HostMachine
from geotrain.launch.site_processes import LaunchRequest, local_processes
from tests.support.command_line import say

CONFIGS = Path(__file__).parents[2] / "configs"


def quickstart() -> RunConfig:
    return load_run(CONFIGS / "runs/quickstart.json")


def cluster() -> ClusterConfig:
    return load_cluster(CONFIGS / "clusters/local-two-regions.json")


@pytest.mark.parametrize("command", ["dry-run", "launch"])
def test_a_loops_run_file_is_for_serve(command: str) -> None:
    done = say(command, "examples/vision.json", "examples/cluster.json")
    assert done.returncode == 2 and "`geotrain serve` starts its servers" in done.text


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = Address(port=server.getsockname()[1])
        used = "Address already in use; stop what uses the port"
        with pytest.raises(ConfigError, match=f"cannot listen on {taken}: {used}"):
            check_port_is_free(taken)
        check_port_is_free(Address(host="::1", port=taken.port))
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        taken = Address(host="192.0.2.1", port=5000, bind="::1", bind_port=server.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"cannot listen on \[::1\]:{taken.bind_port}: {used}"):
            check_port_is_free(taken)
    not_ours = r"192\.0\.2\.1:5000: Cannot assign requested address; .* set `bind`"
    with pytest.raises(ConfigError, match="cannot listen on " + not_ours):
        check_port_is_free(Address(host="192.0.2.1", port=5000))
    check_port_is_free(Address(host="192.0.2.1", port=free_ports(1)[0], bind="0.0.0.0"))


def test_addresses_are_resolved() -> None:
    fixed = cluster().model_copy(update={"global_server": Address(host="127.0.0.1", port=free_ports(1)[0])})
    resolved = resolve(fixed)
    assert resolved.global_server == fixed.global_server
    given = Address(host="192.0.2.1", bind="::1")
    found = resolve(fixed.model_copy(update={"global_server": given})).global_server
    assert (found.host, found.bind) == (given.host, given.bind) and found.port == found.listening[1] > 0
    ports = [r.server.port for r in resolved.regions]
    assert 0 not in ports
    assert len(set(ports)) == 2
    with pytest.raises(ConfigError, match=r"cannot listen on 198\.18\.9\.1"):  # no such link is up
        resolve(fixed, Wan("198.18.9.1", {"eu": "198.18.9.2", "us": "198.18.9.3"}, {}, (), ()))


def test_a_folder_is_begun_once(tmp_path: Path) -> None:
    run = quickstart()
    with pytest.raises(ConfigError, match="holds no run to resume"):
        launcher._check_folder(run, tmp_path, resume=True)
    launcher._check_folder(run, tmp_path, resume=False)
    (tmp_path / "servers").mkdir()
    LaunchRequest(run, cluster(), (), False).write_files(tmp_path)
    with pytest.raises(ConfigError, match="holds a run already: continue it with --resume"):
        launcher._check_folder(run, tmp_path, resume=False)
    launcher._check_folder(run, tmp_path, resume=True)
    launcher._check_folder(run, tmp_path, resume=False, only=("eu",))  # which has no state yet
    other = run.outer.model_copy(update={"local_steps": 64, "up": codec_config("int8")})
    mixed = (*run.data.train, DataSet(prefix="other", weight=2.0))
    for changes, words in (
        ({"seed": 7}, rf"begun with other settings \(seed: was {run.seed}, is 7\); resume with the same"),
        ({"outer": other}, r'\(outer.local_steps: was 8, is 64; .*outer.up.name: was "int4", is "int8".*`geotr'),
        ({"data": run.data.model_copy(update={"sequence_length": 16})}, r"data.sequence_length: was \d+, is 16"),
        (
            {"data": run.data.model_copy(update={"train": mixed})},
            r"\(data.train.1.weight: was nothing, is 2.0\); resume",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            launcher._check_folder(run.model_copy(update=changes), tmp_path, resume=True)


def apart(**more: Any) -> ClusterConfig:
    """The regions, behind ssh, whose servers have fixed ports."""
    regions = tuple(
        region.model_copy(update={"ssh": "far", "server": Address(host="10.0.0.1", port=port)})
        for port, region in enumerate(cluster().regions, 7001)
    )
    return cluster().model_copy(update={"global_server": Address(port=7000), "regions": regions, **more})


@pytest.mark.parametrize(
    ("found", "site", "told"),
    [
        (apart(), "mars", r"--only mars: the cluster has no such site; its sites: global, eu, us"),
        (apart(global_server=Address()), "eu", r"--only eu: the server of 'global' needs a fixed port"),
        (apart(regions=cluster().regions), "eu", r"--only eu: the server of 'eu' needs a fixed port"),
        (apart(emulate_links=True), "eu", r"--only eu: emulated links need the whole run in one launcher"),
    ],
)
def test_a_site_that_cannot_be_started_by_itself(found: ClusterConfig, site: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        launcher._with_sites_here(found, (site,))


@pytest.mark.parametrize(
    ("found", "place", "told"),
    [
        (apart(), "mars=a", r"--at mars=a: write SITE=HOST,HOST…, with one of the cluster's sites: global, eu, us"),
        (apart(), "eu=,", r"--at eu=,: write SITE=HOST"),
        (
            load_cluster(CONFIGS / "clusters/slurm.json"),
            "here=a",
            r"--at here=a: region 'here' has 2 workers of 8 hosts; name as many",
        ),
    ],
)
def test_a_place_that_no_site_has(found: ClusterConfig, place: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        launcher.placed(found, (place,))


def test_sites_get_the_hosts_that_are_known_only_now() -> None:
    found = launcher.placed(apart(global_shards=(Address(port=7100),)), ("global=g,h", "eu=a,b,c"))
    assert [str(found.global_server), *map(str, found.global_shards)] == ["g:7000", "g:7100"]
    eu, us = found.regions
    assert str(eu.server) == "a:7001" and us == apart().regions[1]
    (worker,) = eu.workers
    assert [(host.host, host.slots) for host in worker.hosts] == [(name, 2) for name in "abc"]


def test_a_site_that_is_started_by_itself_is_here() -> None:
    assert [r.ssh for r in launcher._with_sites_here(apart(), ("global", "eu")).regions] == [None, "far"]


def test_one_launcher_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        with pytest.raises(ConfigError, match="this run is running already"), locked(tmp_path / "run"):
            pass
        with locked(tmp_path / "run", ("eu",)):  # a far site's, on a shared file system
            pass
    with locked(tmp_path / "run"):
        pass


def test_words_survive_ssh() -> None:
    command = over_ssh("host", "/a folder", ["prog", "two words", "$HOME"])
    assert command[-2:] == ("host", "cd -- '/a folder' && exec prog 'two words' '$HOME'")
    assert json.dumps(command).count("BatchMode=yes") == 1


def test_a_flat_run_has_no_region_servers(tmp_path: Path) -> None:
    run = quickstart()
    flat = run.model_copy(update={"outer": run.outer.model_copy(update={"levels": 1})})
    order = LaunchRequest(flat, cluster(), ("global", "eu"), resume=False)
    assert [p.name for p in local_processes(order, tmp_path, HostMachine(8))] == ["global", "eu-0"]


def test_processes_of_a_local_run(tmp_path: Path) -> None:
    order = LaunchRequest(quickstart(), cluster(), ("global", "eu", "us"), resume=True, launch="1")
    order.write_files(tmp_path)
    started = {p.name: p for p in local_processes(order, tmp_path, HostMachine(8), {"eu": 77})}
    assert list(started) == ["global", "eu", "us", "eu-0", "us-0"]
    assert {p.name for p in started.values() if p.role == "server"} == {"global", "eu", "us"}
    words = {name: " ".join(p.command) for name, p in started.items()}
    assert words["eu"].endswith(f"serve region eu --run {tmp_path}/run.json --resume --launch-id 1")
    assert words["us-0"].endswith(f"--run {tmp_path}/run.json --region us --worker us-0 --resume")
    for name in ("eu", "eu-0"):
        assert "nsenter --net=/proc/self/fd/77 " in words[name]
        assert started[name].inherited_fds == (77,)
    assert "nsenter" not in words["us-0"]
    assert started["eu-0"].env["OMP_NUM_THREADS"] == "2"
    assert (tmp_path / "hosts/us-0").read_text() == "localhost slots=2\n"
    assert load_run(tmp_path / "run.json") == order.run
    assert load_cluster(tmp_path / "cluster.json") == order.cluster
