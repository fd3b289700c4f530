"""Forms a worker anew from the hosts that are left: the planner's own search, for one worker.

The run, its global batch and all that members agreed on stay as they are, so that fewer hosts accumulate more
micro-batches in a step. Any parallel layout loads any checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import combinations_with_replacement

from geotrain.config import ClusterConfig, DeviceConfig, HostConfig, RunConfig, WorkerConfig, WorkerSetup
from geotrain.config.cluster import LinkConfig, RegionConfig
from geotrain.plan.inventory import Host, Pins, PlanError, PlanTask
from geotrain.plan.layouts import ParallelLayout, Refusals, nothing_fits
from geotrain.plan.model.network import LinkTable
from geotrain.plan.spanning import found_layouts

MOST_TRIED = 2  # numbers of hosts, from all of them down, of which a layout was found
# What is searched with where the cluster file states no device or link: then no layout is too large.
UNKNOWN, UNKNOWN_DEVICE, UNKNOWN_GBPS = "unknown", DeviceConfig(memory_gb=1e6, tflops=1.0), 100.0


def reform(
    run: RunConfig, cluster: ClusterConfig, region: str, worker: WorkerConfig, hosts: Sequence[HostConfig]
) -> WorkerConfig:
    """Form the worker of these hosts: as the cluster file has it on hosts that are as many and alike, else by the
    fastest parallel layout under the cost model.

    region: the worker's. worker: as in the cluster file. hosts: in the order in which they are wanted; some may stay
    unused. Raises PlanError, which says what is short, where no layout fits.
    """

    def kinds(hosts: Sequence[HostConfig]) -> Counter[tuple[str | None, int, str | None]]:
        return Counter((host.device, host.slots, host.region) for host in hosts)

    if kinds(hosts) == kinds(worker.hosts):
        return worker.model_copy(update={"hosts": in_place(worker.hosts, hosts)})
    task = task_of(run, cluster, region, worker, hosts)
    placed = [host for of in task.hosts.values() for host in of]
    refused, found = Refusals(), list[ParallelLayout]()
    tried = 0
    for count in range(len(placed), 0, -1):
        best = found_layouts(task, placed[:count], refused, 1)
        found += best
        tried += bool(best)
        if tried == MOST_TRIED:
            break
    if not found:
        raise nothing_fits(task, refused)
    layout = min(found, key=lambda layout: layout.order)
    known = {host.host: host for host in hosts}
    return worker.model_copy(
        update={
            "hosts": tuple(known[host.host].model_copy(update={"slots": layout.slots}) for host in layout.hosts),
            "parallel": layout.parallel,
            "deepspeed": {**worker.deepspeed, "train_micro_batch_size_per_gpu": layout.micro_batch},
        }
    )


def in_place(before: Sequence[HostConfig], hosts: Sequence[HostConfig]) -> tuple[HostConfig, ...]:
    """Order hosts as those before were: each that stays keeps its place, so that ranks keep theirs; each new one
    takes that of one alike."""
    new = [host for host in hosts if host not in before]
    found = []
    for old in before:
        like = old if old in hosts else next(host for host in new if alike(host, old))
        new = [host for host in new if host is not like]
        found.append(like)
    return tuple(found)


def alike(one: HostConfig, other: HostConfig) -> bool:
    return (one.device, one.slots, one.region) == (other.device, other.slots, other.region)


def task_of(
    run: RunConfig, cluster: ClusterConfig, region: str, worker: WorkerConfig, hosts: Sequence[HostConfig]
) -> PlanTask:
    """Build the planner's inputs for one worker on these hosts."""
    setup = WorkerSetup.of(run, worker)
    parallel = setup.parallel.model_copy(update={"stage_layers": None, "sites": 1})
    own = {"parallel": parallel, "deepspeed": setup.deepspeed, "precision": setup.precision}
    run = run.model_copy(update=own)
    places = dict.fromkeys(host.region or region for host in hosts)
    given = {frozenset(link.regions) for link in cluster.links}
    missing = [
        LinkConfig(regions=pair, gbps=UNKNOWN_GBPS)
        for pair in combinations_with_replacement(places, 2)
        if frozenset(pair) not in given
    ]
    devices = {**cluster.devices, UNKNOWN: UNKNOWN_DEVICE}
    cluster = cluster.model_copy(update={"devices": devices, "links": (*cluster.links, *missing)})
    by_place: dict[str, list[Host]] = {place: [] for place in places}
    for host in hosts:
        place, kind = host.region or region, host.device or UNKNOWN
        by_place[place].append(Host(place, host.host, host.slots, kind, devices[kind]))
    pins = Pins(recompute=run.model.recompute, outer=frozenset(type(run.outer).model_fields))
    return PlanTask(run, pins, cluster, run.architecture, LinkTable(cluster), by_place)


def without(
    run: RunConfig, cluster: ClusterConfig, hosts: Collection[str],
    may_form: Callable[[RegionConfig, WorkerConfig], bool],
) -> ClusterConfig:  # fmt: skip
    """Form the workers anew that have one of these hosts and may be formed, of those that they have besides, and of
    spare ones. Raises PlanError where no layout fits, or no host is left."""

    def formed(region: RegionConfig) -> RegionConfig:
        spare, workers = [host for host in region.spare_hosts if host.host not in hosts], list[WorkerConfig]()
        for worker in region.workers:
            mine = [host for host in worker.hosts if host.host not in hosts]
            if (lacks := len(worker.hosts) - len(mine)) and may_form(region, worker):
                if not (mine := [*mine, *spare[:lacks]]):
                    raise PlanError(f"worker {worker.name!r}: all its hosts are cordoned; `geotrain uncordon` one")
                spare, worker = spare[lacks:], reform(run, cluster, region.name, worker, mine)
            workers.append(worker)
        return region.model_copy(update={"workers": tuple(workers)})

    return cluster.model_copy(update={"regions": tuple(map(formed, cluster.regions))})
