"""Shards on hosts: where a plan puts them, and what the hosts' memory does not hold."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.servers.rates import run_of as large
from geotrain.commands import dry_run
from geotrain.commands.plan import default_run
from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, FragmentConfig, RunConfig, parse
from geotrain.launch.run_rules import misfits
from geotrain.parameters.chunks import deal
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.plan.inventory import Pins, PlanError
from geotrain.plan.model.server_hosts import PER_HOST, host_bytes, servers, shard_bytes, spread, too_small_hosts
from geotrain.plan.model.servers import place_of, server_needs
from geotrain.plan.settings import SERVER_BUSY
from tests.support.outer_world import FakeWorker, World, config, random_deltas, start_vector, whole
from tests.support.outer_world import parameter_map as small_map
from tests.support.plan_cases import changed, holds, inventory, planned, small_run


def with_hosts(cluster: ClusterConfig, **hosts: list[tuple[str, float]]) -> ClusterConfig:
    """hosts: region → name and memory_gb of each."""

    def change(raw: dict[str, Any]) -> None:
        for region in raw["regions"]:
            region["server_hosts"] = [{"host": host, "memory_gb": gb} for host, gb in hosts.get(region["name"], ())]

    return changed(cluster, change)


def small(gb: float, count: int = 4, **keys: Any) -> tuple[RunConfig, ClusterConfig]:
    regions = {"a": [(8, "d")] * 2, "b": [(8, "d")] * 2}
    named = {name: [(f"{name}-mem[1-{count}]", gb)] for name in regions}
    return small_run(**keys), with_hosts(inventory(regions, 100.0), **named)


def test_a_shards_share_is_what_it_holds_at_most() -> None:
    """Of 1 to 4 shards, each one's live vectors and payloads lie below what is planned for the fullest."""
    layout = small_map(1, 4)
    settings = config("region_momentum", updates_per_send=2)
    fakes = {"eu": [FakeWorker(name, layout, whole(layout)) for name in "ab"]}
    world = World(settings, fakes, [start_vector()[: f.numel].clone() for f in layout.fragments], layout)
    for worker in world.workers:
        world.weights(worker, dict.fromkeys(range(len(layout.fragments)), 0))
        for fragment, delta in random_deltas(world, 0).items():
            world.push(worker, {fragment: delta})
    for number in (1, 2, 3, 4):
        dealt = deal(layout.fragments, number)
        for role, server in (("region", world.regions["eu"]), ("global", world.top)):
            members = 2 if role == "region" else 1
            needs = server_needs(place_of(role, settings, members), settings, layout, 1)  # type: ignore[arg-type]
            live = [0] * number
            for name, tensor in server.state()[0].items():
                chunk = int(name.split(".")[1 if name.startswith("chunk.") else -1])
                fragment = layout.chunks[chunk].fragment
                live[next(i for i, own in enumerate(dealt) if fragment in own)] += tensor.nbytes
            assert sum(live) > needs.kept["vectors"] / 2
            beside = sum(needs.passing[part] for part in ("process", "computing"))
            assert max(live) <= shard_bytes(needs, layout, number) - beside


@pytest.mark.parametrize("seed", range(6))
def test_shards_are_spread_by_memory(seed: int) -> None:
    """All have room, on hosts of their own region, and where fewer and larger ones had none."""
    rng = np.random.default_rng(seed)
    run = large("8 B")
    cluster = inventory({"a": [(8, "d")], "b": [(8, "d")]})
    room = {name: [(f"{name}-m{i}", float(gb)) for i, gb in enumerate(rng.uniform(30, 200, 8))] for name in "ab"}
    cluster = planned(small_run(), with_hosts(cluster, **room)).cluster
    hosts = {name: [host for host, _ in room["a" if name == GLOBAL else name]] for name in (GLOBAL, "a", "b")}

    def cut(shards: int) -> RunConfig:
        fragments = run.outer.fragments.model_copy(update={"pieces": shards})
        return run.model_copy(update={"outer": run.outer.model_copy(update={"fragments": fragments})})

    found = spread(cut, cluster, hosts, 1)
    assert len({len(mine) for mine in found.values()}) == 1
    assert all(set(mine) <= set(hosts[name]) for name, mine in found.items())
    number = len(found["a"])
    parameter_map = parameter_map_of(cut(number))
    needs = servers(run, cluster, parameter_map)
    used = Counter[str]()
    for name, mine in found.items():
        for host in mine:
            used[host] += shard_bytes(needs[name], parameter_map, number)
    memory = cluster.server_memory
    over = [host for host, count in used.items() if count > memory[host]]
    total = sum(memory[host] for host in hosts["a"])
    if over:  # no more shards could be made, or all of them need more than there is
        assert 2 * number > PER_HOST * 8 or sum(used.values()) > total
    elif number > 1:
        assert max(shard_bytes(needs[n], parameter_map, number // 2) for n in found) > min(memory.values()) / 3


def test_a_plan_puts_shards_where_there_is_memory() -> None:
    run, cluster = small(20.0)
    plan = planned(run, cluster)
    holds(plan)
    top = plan.place.region
    assert plan.setting.shards == len(plan.cluster.global_shards) > 1 and plan.setting.server_busy <= SERVER_BUSY
    for region in plan.cluster.regions:
        assert {shard.host for shard in region.shards} <= {host.host for host in region.server_hosts}
        assert plan.cluster.sites[region.name].far_hosts
    assert {host.host for host in plan.cluster.global_hosts} == {f"{top}-mem{i}" for i in range(1, 5)}
    everyone = [str(a) for site in plan.cluster.sites.values() for a in (site.server, *site.shards)]
    assert len(set(everyone)) == len(everyone)
    taken = {host: sum(parts.values()) for host, parts in host_bytes(plan.run, plan.cluster).items()}
    assert all(taken[host] <= room for host, room in plan.cluster.server_memory.items() if host in taken)
    assert list(misfits(plan.run, plan.cluster)) == []
    assert plan.run.outer.fragments.pieces == plan.setting.shards
    whole_model = plan.run.outer.model_copy(update={"fragments": FragmentConfig()})
    refused = next(misfits(plan.run.model_copy(update={"outer": whole_model}), plan.cluster))
    assert "the model has 1 fragments" in str(refused) and "set outer.fragments.pieces" in str(refused)
    output = StringIO()
    dry_run.show(dry_run.needs(plan.run, plan.cluster), Console(file=output, width=250))
    assert f"{top}-mem1" in output.getvalue() and "20.0 GB" in output.getvalue()


@pytest.mark.parametrize(
    ("name", "hosts", "gb", "told"),
    [("small", 4, 14.0, "codecs and shards"), ("70 B", 2, 1000.0, "fragments of two layers")],
)
def test_a_plan_takes_by_itself_what_the_servers_memory_asks_for(name: str, hosts: int, gb: float, told: str) -> None:
    """As docs/choosing.md says of 70 B; what is pinned is kept."""
    if name == "small":
        run, cluster = small(gb)
    else:
        regions = {each: [(8, "h")] * 16 for each in "abcd"}
        run = parse(RunConfig, default_run("large", large(name).model.config, None), "large")
        kind = {"memory_gb": 76.0, "tflops": 989.0}
        named = {each: [(f"{each}-mem[1-{hosts}]", gb)] for each in regions}
        cluster = with_hosts(inventory(regions, 10.0, h=kind), **named)
    plan = planned(run, cluster)
    assert len(plan.notes) == 1 and plan.notes[0].startswith(f"chosen for the servers' memory: {told}")
    assert "its memory_gb is" in plan.notes[0] and list(too_small_hosts(plan.run, plan.cluster)) == []
    if name != "small":
        assert (plan.run.outer.mirrors, plan.run.outer.server_state) == ("disk", "bf16")
        with pytest.raises(PlanError, match="servers need"):
            planned(run, cluster, Pins(outer=frozenset({"mirrors", "server_state"})))


def test_what_no_host_holds_is_refused_with_the_numbers() -> None:
    told = r"host 'a-mem\d': servers need [\d.]+ GB of memory \(global [\d.]+, a [\d.]+\), its memory_gb is 4; "
    with pytest.raises(PlanError, match=told + "list more hosts in server_hosts") as refused:
        planned(*small(4.0))
    assert "or take" not in str(refused.value), "it has taken what there is"
    plan = planned(*small(20.0))
    smaller = changed(
        plan.cluster, lambda raw: [host.update(memory_gb=4) for r in raw["regions"] for host in r["server_hosts"]]
    )
    smaller = smaller.model_copy(update={"global_hosts": ()})
    assert len([each for each in misfits(plan.run, smaller) if "memory_gb is 4" in str(each)]) == 8
    assert list(too_small_hosts(plan.run, smaller.model_copy(update={"regions": ()}))) == []
