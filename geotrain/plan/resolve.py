"""A plan's decisions as the two files that `geotrain launch` takes."""

from __future__ import annotations

from collections.abc import Mapping

from geotrain.config import (
    Address,
    ClusterConfig,
    LinkConfig,
    OuterConfig,
    RegionConfig,
    RunConfig,
    WorkerConfig,
    parse,
)
from geotrain.outer.rules import momentum_decay
from geotrain.plan.grouping import Worker, Workers
from geotrain.plan.inventory import Task, hosts_of
from geotrain.plan.layouts import home_of
from geotrain.plan.network import GLOBAL
from geotrain.plan.settings import line_to

GLOBAL_PORT = 7070
LONGEST_NAME = 28


def name_workers(task: Task, workers: Workers) -> dict[str, Worker]:
    """`<region>-<number>` by the region that most of a worker's hosts stand in."""
    named: dict[str, Worker] = {}
    for region in task.cluster.regions:
        mine = [w for w in workers if home_of(w.layout.spots) == region.name]
        named.update({f"{region.name[:LONGEST_NAME]}-{i}": worker for i, worker in enumerate(mine)})
    return named


def resolve(
    task: Task, workers: Mapping[str, Worker], place: str, outer: OuterConfig, tokens: float
) -> tuple[RunConfig, ClusterConfig]:
    """The run and the cluster as planned: regions that neither have a worker nor lend a host to one are left out."""
    return _run(task, workers, outer, tokens), _cluster(task, workers, place)


def _run(task: Task, workers: Mapping[str, Worker], outer: OuterConfig, tokens: float) -> RunConfig:
    layouts = [worker.layout for worker in workers.values()]
    raw = task.run.model_dump(by_alias=True, mode="json")
    raw["parallel"] = layouts[0].parallel.model_dump()
    raw["outer"] = outer.model_dump(by_alias=True, mode="json")
    raw["deepspeed"]["train_micro_batch_size_per_gpu"] = layouts[0].micro_batch
    a_round = task.batch * (len(layouts) * outer.local_steps if outer.rule == "sync" else 1)
    wanted = tokens / task.run.data.sequence_length
    before, samples = raw["data"]["train_samples"], a_round * max(1, round(wanted / a_round))
    raw["data"]["train_samples"] = samples
    if outer.rule == "region_momentum" and "momentum_decay" not in task.pins.outer:
        regions = len({home_of(layout.spots) for layout in layouts})
        raw["outer"]["momentum_decay"] = momentum_decay(samples / task.batch / outer.local_steps / regions)
    schedule = raw["deepspeed"].get("scheduler", {}).get("params", {})
    if schedule.get("total_num_steps") == before // task.batch:  # the schedule ends with the data
        schedule["total_num_steps"] = samples // task.batch
    return parse(RunConfig, raw, "the planned run")


def _cluster(task: Task, workers: Mapping[str, Worker], place: str) -> ClusterConfig:
    given = task.cluster
    regions, homes = [], []
    used = {(spot.region, spot.host) for worker in workers.values() for spot in worker.layout.spots}
    for region in given.regions:
        at_home = {name: w for name, w in workers.items() if home_of(w.layout.spots) == region.name}
        mine = tuple(_worker(name, worker, region, given) for name, worker in at_home.items())
        lent = tuple(h for h in hosts_of(region) if (region.name, h.host) in used)
        if mine:
            homes.append(region.name)
            regions.append(region.model_copy(update={"workers": mine, "hosts": ()}))
        elif lent:
            regions.append(region.model_copy(update={"workers": (), "hosts": lent}))
    kept = {region.name for region in regions}
    links = [link for link in given.links if set(link.regions) <= kept]
    for home in homes:
        line = line_to(task, home, place)
        price = line.usd_per_gb or None
        links.append(
            LinkConfig(regions=(home, GLOBAL), gbps=line.gbps, rtt_ms=2000 * line.latency_s, usd_per_gb=price)
        )
    update = {"regions": tuple(regions), "links": tuple(links), **_global_server(given, place)}
    raw = given.model_copy(update=update).model_dump(by_alias=True, mode="json")
    return parse(ClusterConfig, raw, "the planned cluster")


def _worker(name: str, worker: Worker, region: RegionConfig, given: ClusterConfig) -> WorkerConfig:
    """Started by DeepSpeed's launcher on each host: over ssh, or here if its hosts are (or stand for) this machine.
    A worker that has all these hosts already keeps its launcher."""
    config = worker.layout.worker(name)
    local = given.emulate_links or all(host.host in ("localhost", "127.0.0.1") for host in config.hosts)
    like = next((w for w in region.workers if {h.host for h in w.hosts} >= {h.host for h in config.hosts}), None)
    kept = {} if like is None else {"launcher": like.launcher, "launcher_args": like.launcher_args, "env": like.env}
    return config.model_copy(update={"launcher": "local" if local else "ssh", **kept})


def _global_server(given: ClusterConfig, place: str) -> dict[str, Address | str | None]:
    if place == GLOBAL:
        return {}
    region = given.region(place)
    if region.ssh is None:
        return {"global_ssh": None, "global_folder": None}
    port = given.global_server.port or GLOBAL_PORT
    port += port == region.server.port
    return {
        "global_server": Address(host=region.server.host, port=port),
        "global_ssh": region.ssh,
        "global_folder": region.folder,
    }
