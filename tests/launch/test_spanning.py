"""A worker whose ranks stand in several regions."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.config import Address, ClusterConfig, ConfigError, load_run, parse
from geotrain.launch.check import check_together, links_between, open_links
from geotrain.launch.machine import HostMachine
from geotrain.launch.run_rules import misfits
from geotrain.launch.site_processes import LaunchRequest, local_processes
from tests.support.small_runs import launched, losses, prepare_text, status, weights, write_files

LINK = {"gbps": 0.02, "rtt_ms": 20.0}


def spanning(
    folder: Path, launcher: str = "local", lender: bool = True, slots: int = 1, **parallel: int
) -> ClusterConfig:
    """Stage 0 in "far", which has no worker of its own; stage 1 in "home". parallel: another layout."""
    hosts = [{"host": "there", "slots": slots, "region": "far"}, {"host": "here", "slots": slots}]
    worker: dict[str, Any] = {"name": "wide", "hosts": hosts if lender else hosts[1:], "launcher": launcher}
    worker["deepspeed"] = {"train_micro_batch_size_per_gpu": 1}
    raw: dict[str, Any] = {
        "name": "two-regions",
        "regions": [
            {"name": "home", "workers": [{**worker, "parallel": parallel or {"pipeline": 2 if lender else 1}}]},
            {"name": "far", "hosts": [{"host": "there", "slots": slots}]},
        ],
        "links": [{"regions": pair, **LINK} for pair in (["home", "global"], ["far", "global"], ["home", "far"])],
        "emulate_links": True,
    }
    (folder / "cluster.json").write_text(json.dumps(raw))
    return parse(ClusterConfig, raw, "test")


def small(folder: Path, name: str) -> tuple[Path, Path]:
    return write_files(folder, name, 32, {"home": [2]}, {"rule": {"name": "sync"}}, parallel={"pipeline": 2})


def order(folder: Path, cluster: ClusterConfig, *sites: str) -> LaunchRequest:
    return LaunchRequest(load_run(small(folder, "run")[0]), cluster, sites, False)


def test_each_host_starts_in_its_own_region(tmp_path: Path) -> None:
    inside = {"home": 71, "far": 72}
    shards = Address(port=7001), Address(port=7002)
    cluster = spanning(tmp_path).model_copy(update={"global_shards": shards})
    started = local_processes(order(tmp_path, cluster, "global", "home", "far"), tmp_path, HostMachine(2), inside)
    assert [(p.name, p.inherited_fds) for p in started] == [
        ("global", ()),
        ("global.shard-0", ()),
        ("global.shard-1", ()),
        ("home", (71,)),
        ("wide.0", (72,)),
        ("wide.1", (71,)),
    ]
    assert (tmp_path / "hosts/wide").read_text() == "there slots=1\nhere slots=1\n"
    for number, shard in enumerate(started[1:3]):
        assert f" serve shard global {number} --run " in " ".join(shard.command)
    for rank, process in enumerate(started[4:]):
        words = " ".join(process.command)
        assert f"--node_rank {rank}" in words
        assert f"--master_addr {cluster.region('far').server.host}" in words
        assert process.env["GLOO_SOCKET_IFNAME"] == "geo"


def test_over_ssh_each_regions_machine_starts_its_hosts(tmp_path: Path) -> None:
    cluster = spanning(tmp_path, "ssh")
    for site, rank, host in (("far", 0, "there"), ("home", 1, "here")):
        *_, process = local_processes(order(tmp_path, cluster, site), tmp_path, HostMachine(2))
        assert process.name == f"wide.{rank}"
        assert process.command[process.command.index("--") + 1] == host
        assert f"--node_rank {rank}" in process.command[-1]
        assert "--master_addr there" in process.command[-1]
        assert "--master_port 29500" in process.command[-1]
    (region, other), port = cluster.regions, {"master_port": 4123}
    regions = region.model_copy(update={"workers": (region.workers[0].model_copy(update=port),)}), other
    *_, process = local_processes(
        order(tmp_path, cluster.model_copy(update={"regions": regions}), "home"), tmp_path, HostMachine(2)
    )
    assert "--master_port 4123" in process.command[-1]


def test_devices_are_split_among_the_hosts_that_stand_here(tmp_path: Path) -> None:
    started = local_processes(order(tmp_path, spanning(tmp_path), "home", "far"), tmp_path, HostMachine(4, (4, 6)))
    worlds = [w for p in started if p.name.startswith("wide") for w in p.command if w.startswith("--world_info=")]
    devices = {"there": [4], "here": [6]}
    assert [json.loads(base64.urlsafe_b64decode(w.partition("=")[2])) for w in worlds] == [devices, devices]


def test_what_is_refused(tmp_path: Path) -> None:
    run = load_run(small(tmp_path, "run")[0])
    cluster = spanning(tmp_path)
    check_together(run, cluster)
    with pytest.raises(ConfigError, match=r"'wide' spans 'home' and 'far', but `links` has no link between them"):
        links_between(cluster.model_copy(update={"links": cluster.links[:2]}))
    with pytest.raises(ConfigError, match="no workers in far"):
        check_together(run, spanning(tmp_path, lender=False))
    mixed = next(misfits(run, spanning(tmp_path, slots=3, sites=3)))
    assert "'wide': parallel.sites = 3, but a site's ranks lie in far and home" in str(mixed)
    with pytest.raises(ConfigError, match="Slurm numbers hosts in its own order"):
        local_processes(order(tmp_path, spanning(tmp_path, "slurm"), "home"), tmp_path, HostMachine(2))


def test_open_links_are_told(tmp_path: Path) -> None:
    (told,) = open_links(spanning(tmp_path))
    assert re.search("'wide' spans far and home: .* neither encrypted nor authenticated, and unpickles", told)
    assert "WireGuard" in told
    assert open_links(spanning(tmp_path, lender=False)) == []


@pytest.mark.long("geotrain/emulate", "geotrain/inner/runtime", "launch")
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("cut", ["pipeline", "sites"])
def test_a_worker_across_regions_trains_like_one_host(tmp_path: Path, cut: str) -> None:
    prepare_text(tmp_path)
    alone, wide = small(tmp_path, "alone"), small(tmp_path, "wide")
    spanning(tmp_path, slots=1 if cut == "pipeline" else 2, **{cut: 2})
    launched(alone)
    launched((wide[0], tmp_path / "cluster.json"))
    folder = tmp_path / "wide"
    said = {rank: (folder / f"logs/wide.{rank}.log").read_text() for rank in (0, 1)}
    address = json.loads((folder / "cluster.json").read_text())["regions"][0]["server"]["host"]
    carried = json.loads((folder / "logs/wan.log").read_text().splitlines()[-1])["carried_bytes"]
    size_bytes = 4 * sum(w.numel() for w in weights(wide[0]).values())
    assert "rank 0 at 198.18." in said[0] and f"at {address}:" not in said[0]
    if cut == "pipeline":
        assert f"at {address}: stage 1," in said[1] and "stage 0," in said[0]  # "home"
        activations = 32 * 2 * 32 * 32 * 4  # samples, both ways, sequence, hidden, fp32
        assert carried > activations + size_bytes
    else:  # gradients and weights of eight steps; deltas and weights of four jobs, headers. In one level: 6.0e6
        assert 8 * 2 * size_bytes < carried < 5.0e6
    expected = weights(alone[0])
    assert status(wide[0], "global")["committed_samples"] == 32
    for name, tensor in weights(wide[0]).items():
        assert torch.allclose(tensor, expected[name], atol=1e-4, rtol=0), name
    told = losses(alone[0])
    for (_, job), loss in losses(wide[0]).items():
        assert loss == pytest.approx(told["home-0", job], abs=1e-4)
