"""Servers whose shards are processes of their own: real sockets, TLS, disks and kills."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from geotrain.config import ClusterConfig, ConfigError, OverlapConfig, codec_config, parse, shards_of
from geotrain.net.server.server_host import TRAFFIC
from geotrain.net.server.server_process import part_of
from geotrain.net.storage.snapshots import StoreError, read_weights
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.authority import make_certificates
from geotrain.net.transport.certs import open_channel, trust_between
from geotrain.outer.messages import Facts
from tests.support.nat import translated
from tests.support.net_worlds import BUSY_S, side_by_side, wait_for
from tests.support.server_processes import Server, Site

ROLES = ("global", "eu", "global.shard-0", "eu.shard-1")


def trained(site: Site, upset: Callable[[dict[str, Server]], None] = lambda servers: None) -> dict[str, Tensor]:
    """The final weights of a whole run of two workers."""
    servers = {name: site.serve(name) for name in site.processes}
    with side_by_side([site.worker(name) for name in ("a", "b")]):
        upset(servers)
    for name, server in servers.items():
        assert server.ended()[0] == 0, (name, server.ended())
    return dict(read_weights(site.folder / "global", site.parameter_map))


def folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def test_a_run_with_shards_ends_with_the_same_bits(tmp_path: Path) -> None:
    """In synchronous rounds, where nothing depends on time: also when each role is killed on the way, with mirrors on
    the disk."""
    settings: dict[str, Any] = {"up": codec_config("int4"), "down": codec_config("int4")}
    wanted = trained(Site(folder(tmp_path, "one"), "sync", 24, pieces=2, **settings))
    settings |= {"shards": 2, "mirrors": "disk", "certs": tmp_path / "certs", "host": "::1"}
    site = Site(folder(tmp_path, "two"), "sync", 24, **settings)
    make_certificates(site.cluster, tmp_path / "certs")
    dice = random.Random(1)

    def kill(servers: dict[str, Server]) -> None:
        for name in ROLES:
            enough = site.updates() + dice.randint(1, 3)
            wait_for(lambda n=enough: site.updates() >= n)
            servers[name].send(signal.SIGKILL)
            servers[name].process.join(BUSY_S)
            servers[name] = site.serve(name, resume=True)

    found = trained(site, kill)
    top, region = (json.loads((site.folder / name / "status.json").read_text()) for name in ("global", "eu"))
    assert {"loss", "staleness"} <= top["members"]["eu"].keys() and region["global_versions"] == top["versions"]
    assert any(shard["rss_bytes"] > 1e7 for shard in top["shards"])
    sent_by_ledger = json.loads((site.folder / "eu" / TRAFFIC).read_text())["links"][0]
    assert region["links"]["up_bytes"] > sent_by_ledger > 0, "those of its shards are counted, too"
    deltas = region["members"]["a"]["updates"] * 4 * site.parameter_map.numel / len(site.parameter_map.fragments)
    assert region["peers"]["a"]["received_bytes"] > deltas, "so are those that its members bring to shards"
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    (site.folder / "global.shard-1").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="holds 0 snapshots, 1 are wanted"):
        dict(read_weights(site.folder / "global", site.parameter_map))


@pytest.mark.parametrize(("rule", "kind"), [("sync", "round"), ("region_momentum", "delta")])
def test_who_is_waited_for_in_shards_is_named(tmp_path: Path, rule: str, kind: str) -> None:
    waiting: Any = {"answers": "wait", "overlap": OverlapConfig(steps=1, adopt="rebase"), "updates_per_send": 4}
    answers = waiting if kind == "delta" else {}
    site = Site(folder(tmp_path, "one"), rule, 24, shards=2, **answers)
    for name in site.processes:
        site.serve(name)
    try:
        trains, waits = site.worker("a"), site.worker("b")
        for worker in (trains, waits):
            worker.join()
        lease, _ = trains.lease(), waits.lease()
        parts = [part for f in range(len(site.parameter_map.fragments)) for part in trains.parts(lease, f)]
        for part in parts:
            trains.clients[part.part].push(replace(part, need_s=BUSY_S))
        wait_for(lambda: (kind, "b") in {(w["what"], w["whom"]) for w in site.status("eu")["waits"]})
        for worker in (trains, waits):
            worker.close()
    finally:
        site.kill()


def test_servers_listen_on_other_addresses_than_they_are_reached_by(tmp_path: Path) -> None:
    """All of them stand behind a machine that translates addresses, ports, and IPv6 to IPv4."""
    site = Site(tmp_path, "sync", 24, shards=1, certs=tmp_path / "certs", host="::1", behind_nat=True)
    make_certificates(site.cluster, tmp_path / "certs")
    addresses = [a for place in site.cluster.sites.values() for a in (place.server, *place.shards)]
    with translated(addresses):
        trained(site)


def test_nobody_else_speaks_as_a_shard(tmp_path: Path) -> None:
    """Nor do members ask a shard for what its ledger says."""
    site = Site(tmp_path, "sync", 24, shards=1, certs=tmp_path / "certs")
    make_certificates(site.cluster, tmp_path / "certs")
    server = site.serve("eu")
    site.status("eu")  # it listens
    said = []
    hello = wire.pack(rpc.ShardHello(0, 0, (0,) * 4, 0, "", True, 0, 0.0, False, 0, 0, "x"))
    facts = wire.pack(Facts(0, 0, (), (0,) * 4, (0,) * 4))
    for role, name in (("worker", "a"), ("shard", "global"), ("region", "eu")):
        trust = trust_between(site.cluster, role, name, "region", "eu")  # type: ignore[arg-type]
        channel = open_channel(grpc, site.address("eu"), trust, rpc.OPTIONS)
        for call, message in (("standing", hello), ("facts", facts)):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(f"/geotrain.Outer/{call}")(message, timeout=BUSY_S)
            said.append(str(rpc.refusal_of(refused.value)))
        channel.close()
    assert all("does not speak for shard 'eu'" in each for each in said), said
    shard, address = site.serve("eu.shard-0"), str(shards_of(site.cluster, "eu")[0])
    channel = open_channel(grpc, address, trust_between(site.cluster, "worker", "a", "shard", "eu"), rpc.OPTIONS)
    grpc.channel_ready_future(channel).result(BUSY_S)
    for call in ("lease", "leave", "release", "standing", "facts", "validated", "takeback"):
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            channel.unary_unary(f"/geotrain.Outer/{call}")(b"", timeout=BUSY_S)
    assert json.loads(channel.unary_unary("/geotrain.Outer/status")(b"", timeout=BUSY_S))["finished"] is False
    channel.close()
    for each in (server, shard):
        each.send(signal.SIGKILL)


def test_a_region_has_no_shards_or_as_many_as_the_global_server(tmp_path: Path) -> None:
    site = Site(tmp_path, shards=2)
    cluster = json.loads((tmp_path / "cluster.json").read_text())
    assert len(shards_of(site.cluster, "eu")) == len(shards_of(site.cluster, "global")) == 2
    cluster["regions"][0]["shards"].pop()
    with pytest.raises(ConfigError, match="region 'eu' has 1 shards, the global server 2"):
        parse(ClusterConfig, cluster, "cluster")
    del cluster["regions"][0]["shards"]
    assert shards_of(parse(ClusterConfig, cluster, "cluster"), "eu") == ()


def test_a_shard_has_a_fragment_at_least(tmp_path: Path) -> None:
    site = Site(tmp_path, shards=9, pieces=1)
    with pytest.raises(ConfigError, match=r"has 9 shards, but the model has [1-8] fragments"):
        part_of(site.run, site.cluster, "eu", 0)
