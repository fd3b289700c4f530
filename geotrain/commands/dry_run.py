"""Computes what a run would need from its two files, without any weight: `geotrain dry-run`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from rich.console import Console

from geotrain.commands.simulate import report_text
from geotrain.config import ClusterConfig, ConfigError, ParallelConfig, RunConfig, WorkerSetup
from geotrain.launch.check import check_together
from geotrain.launch.host_check import check_far_sites, check_hosts, hosts_of
from geotrain.launch.host_check import show as show_hosts
from geotrain.launch.preflight import cautions, obstacles, port_obstacles, sites_here
from geotrain.launch.run_rules import misfits
from geotrain.launch.terminal import size, table_of
from geotrain.parallelism.checks import accumulation_steps, micro_batches_between, zero_stage
from geotrain.parameters.parameter_map import ParameterMap, parameter_map_of
from geotrain.plan.model.answering import settled_outer, updates_per_send
from geotrain.plan.model.memory import host_memory, tightest_rank
from geotrain.plan.model.server_hosts import host_bytes, servers
from geotrain.plan.model.server_rates import MEASURED
from geotrain.plan.model.servers import ServerNeeds
from geotrain.plan.model.sizes import Sizes
from geotrain.plan.predict import predict
from geotrain.plan.settings import SERVER_BUSY, SHARDS
from geotrain.simulate.forecast import forecast_run


@dataclass(frozen=True)
class WorkerNeeds:
    """One worker. delta_bytes, answer_bytes: of one exchange with its server, over all its ranks (without the
    padding of ranks' last blocks). memory: of the rank that has least left; device: that rank's. host_memory: of the
    fullest rank. verified_jobs: between two verifications of its results; None: there are none. saved_bytes: what a
    host with most ranks saves, at most."""

    name: str
    region: str
    layout: str  # parallel: TP × PP × DP, ZeRO stage
    ranks: int
    parameters_per_rank: int
    memory: dict[str, int]
    host_memory: dict[str, int]
    delta_bytes: int
    answer_bytes: int
    device: str
    verified_jobs: float | None
    saved_bytes: int


@dataclass(frozen=True)
class LinkNeeds:
    """A region's link. up_s, down_s: how long one exchange occupies it; None: the cluster does not say its rate."""

    region: str
    up_bytes: int
    down_bytes: int
    steps_between: int
    up_s: float | None
    down_s: float | None


@dataclass(frozen=True)
class Needs:
    """The needs of a run. servers: by name, the global one's first. on_disk: the same with mirrors on the disk
    (`outer.mirrors`). hosts: memory of servers by host and server, in bytes. room: of hosts, where it is known.
    verified_share: `monitor.verified_share`."""

    parameters: int
    fragments: tuple[tuple[str, int], ...]
    servers: dict[str, ServerNeeds]
    on_disk: dict[str, ServerNeeds]
    workers: tuple[WorkerNeeds, ...]
    links: tuple[LinkNeeds, ...]
    hosts: dict[str, dict[str, int]]
    room: dict[str, float]
    verified_share: float


def needs(run: RunConfig, cluster: ClusterConfig) -> Needs:
    """Compute what the run needs. Raises ConfigError, UnsupportedModelError, ParameterMapError when the run cannot
    be trained on this cluster."""
    check_together(run, cluster)
    parameter_map, outer = parameter_map_of(run), settled_outer(run, len(cluster.workers))
    sizes = Sizes(outer, parameter_map.group_numel)
    wide = sum(sizes.wide.up), sum(sizes.wide.down)
    to_server = wide if outer.flat else (sum(sizes.local.up), sum(sizes.local.down))
    workers = []
    fullest: dict[ParallelConfig, int] = {}  # by layout: a large model's takes seconds
    for home, worker in cluster.workers:
        setup = WorkerSetup.of(run, worker)
        parallel, zero = setup.parallel, zero_stage(setup.deepspeed)
        fullest[parallel] = fullest.get(parallel) or check_shards(parameter_map, run, parallel)
        memory, room, kind = tightest_rank(run, cluster, worker)
        between = micro_batches_between(run.monitor.verified_share, parallel.pipeline)
        a_step = accumulation_steps(setup.deepspeed, worker.ranks // parallel.replica_ranks)
        on_host = host_memory(run, run.architecture, worker)
        workers.append(
            WorkerNeeds(
                worker.name,
                home,
                f"{parallel.text(worker.ranks)}, ZeRO {zero}",
                worker.ranks,
                fullest[parallel],
                memory,
                on_host,
                *to_server,
                "–" if kind is None else f"{size(room)} ({kind})",
                between / (a_step * outer.local_steps) if between < inf else None,
                max(host.slots for host in worker.hosts) * on_host["checkpoint"],
            )
        )
    links = []
    for region in cluster.serving:
        count = len(region.workers)
        exchanges = count if outer.flat else 1  # flat: every worker exchanges over the wide area
        up, down = (exchanges * count_bytes for count_bytes in wide)
        updates = count if outer.flat else updates_per_send(outer) or count
        steps = max(outer.local_steps * updates // count, outer.local_steps)
        gbps = next((link.gbps for link in cluster.links if set(link.regions) == {region.name, "global"}), None)
        seconds = [None if gbps is None else 8 * size_bytes / gbps / 1e9 for size_bytes in (up, down)]
        links.append(LinkNeeds(region.name, up, down, steps, *seconds))
    fragments = tuple((f.name, f.numel) for f in parameter_map.fragments)
    beside = run.model_copy(update={"outer": outer.model_copy(update={"mirrors": "disk"})})
    of_servers = servers(run, cluster, parameter_map), servers(beside, cluster, parameter_map)
    of_hosts = host_bytes(run, cluster), cluster.server_memory
    share = run.monitor.verified_share
    return Needs(parameter_map.numel, fragments, *of_servers, tuple(workers), tuple(links), *of_hosts, share)


def report(run: RunConfig, cluster: ClusterConfig, console: Console, ask_hosts: bool = False) -> bool:
    """Print what `launch` would refuse here, and what is seldom meant. Returns whether nothing would be refused.

    ask_hosts: also look at all other hosts, as a launch would reach them.
    """
    here = sites_here(cluster)
    found = *misfits(run, cluster), *obstacles(run, cluster, here), *port_obstacles(run, cluster, here)
    refused = [str(obstacle) for obstacle in found]
    hosts = {site.ssh for site in cluster.sites.values() if site.ssh is not None}
    hosts |= {host for launcher, host in hosts_of(run, cluster, here) if launcher != "local"}
    notes = cautions(run, cluster)
    if hosts and not ask_hosts:
        notes.append(f"not asked: {', '.join(sorted(hosts))}; --ask-hosts looks at them")
    wrong = check_hosts(run, cluster, here, ask=ask_hosts)
    if ask_hosts:
        wrong += check_far_sites(run, cluster)
    if (run.run_folder / "servers").exists():
        notes.append(f"{run.run_folder} holds a run already: only --resume goes on from it")
    for title, lines, style in (("note", notes, "yellow"), ("geotrain launch would refuse", refused, "red")):
        if lines:
            console.print(f"\n{title}", style=f"bold {style}")
            for line in dict.fromkeys(lines):
                console.print(f"  {line}", style=style, highlight=False, markup=False, soft_wrap=True)
    show_hosts(wrong, console)
    return not refused and not any(each.refuses for each in wrong)


def check_shards(parameter_map: ParameterMap, run: RunConfig, parallel: ParallelConfig) -> int:
    """Count the parameters of the fullest rank. Raises ParameterMapError unless the ranks' shards lie in the
    parameter map and send each of its elements exactly once (counted, not located: the large models' elements do not
    fit here)."""
    from geotrain.parallelism.local_parameters import local_parameters

    architecture, spoken_for, fullest = run.architecture, 0, 0
    for stage in range(parallel.pipeline):
        for rank in range(parallel.tensor):
            for part in range(parallel.expert):
                local = local_parameters(architecture, parallel, rank, stage, part)
                for parameter in local:
                    for run_ in parameter.runs:
                        parameter_map.slices((run_,), parameter_map.fragment_of(run_.parameter))
                spoken_for += sum(p.numel - p.padding for p in local if p.pushes and (p.expert or part == 0))
                fullest = max(fullest, sum(p.numel for p in local))
    if spoken_for != parameter_map.numel:
        raise AssertionError(f"the ranks speak for {spoken_for} of {parameter_map.numel} elements")
    return fullest


def show(found: Needs, console: Console) -> None:
    console.print(f"{found.parameters:,} parameters in {len(found.fragments)} fragment(s)")
    show_servers(found, console)
    memory = [
        {"worker": w.name, "region": w.region, "ranks": str(w.ranks), "layout": w.layout}
        | {"parameters/rank": f"{w.parameters_per_rank:,}"}
        | {part: size(count) for part, count in (*w.memory.items(), ("sum", sum(w.memory.values())))}
        | {"of": w.device}
        for w in found.workers
    ]
    text = ("worker", "region", "ranks", "layout", "parameters/rank", "of")
    console.print("\nmemory of the fullest rank", table_of(memory, left=text), sep="\n")
    hosts = [{"worker": w.name} | {part: size(count) for part, count in w.host_memory.items()} for w in found.workers]
    console.print("\nhost memory of that rank", table_of(hosts, left=("worker",)), sep="\n")
    links = [
        {"region": link.region, "up": size(link.up_bytes), "down": size(link.down_bytes)}
        | {"inner steps between": str(link.steps_between)}
        | {k: "–" if s is None else f"{s:.3g} s" for k, s in (("up takes", link.up_s), ("down takes", link.down_s))}
        for link in found.links
    ]
    console.print("\none exchange with the global server", table_of(links), sep="\n")
    first = found.workers[0]
    console.print(f"\none exchange inside a region: {size(first.delta_bytes)} up, {size(first.answer_bytes)} down")
    saved = ", ".join(f"{w.name} {size(w.saved_bytes)}" for w in found.workers)
    console.print(f"a host's checkpoint, also on the next host where none is shared: {saved}", highlight=False)
    jobs = ", ".join(f"{w.name} {w.verified_jobs:.3g}" for w in found.workers if w.verified_jobs is not None)
    share = f"monitor.verified_share: {found.verified_share:.2%} of their compute"
    console.print(f"jobs between two verifications of results: {jobs or '–'} ({share})", highlight=False)


def show_servers(found: Needs, console: Console) -> None:
    rows = [
        {"server": name, "holds": size(sum(n.kept.values())), "comes and goes": size(sum(n.passing.values()))}
        | {"bytes/parameter": f"{n.memory_bytes / found.parameters:.1f}"}
        | {"snapshot": size(n.snapshot_bytes), "disk": size(n.disk_bytes)}
        | {"an update": seconds(n.update_s), "sending up": seconds(n.send_s) if n.send_s else "–"}
        | {"recovery": seconds(n.recovery_s), "with its journal": seconds(n.recovery_s + n.replay_s)}
        for name, n in found.servers.items()
    ]
    console.print("\nservers, at most; times of one update after another", table_of(rows, left=("server",)), sep="\n")
    hosts = [
        {"host": host, "servers": ", ".join(parts), "memory": size(sum(parts.values()))}
        | {"of": size(found.room[host]) if host in found.room else "–"}
        for host, parts in found.hosts.items()
    ]
    console.print("\ntheir hosts", table_of(hosts, left=("host", "servers")), sep="\n")
    for name, n in found.servers.items():
        other = found.on_disk[name]
        if (saved := n.memory_bytes - other.memory_bytes) > 0:
            more_s = other.update_s + other.send_s - n.update_s - n.send_s
            said = f"takes {size(saved)} out of the memory of {name}; an update of all takes {seconds(more_s)} more"
            console.print(f'outer.mirrors = "disk" {said}', highlight=False)
    console.print(f"rates: {MEASURED.hardware}; {MEASURED.note}")


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.3g} min"


def show_forecast(run: RunConfig, cluster: ClusterConfig, console: Console) -> dict[str, Any] | None:
    """Print the run's forecast, that of `geotrain plan` and `simulate`; or what is missing for one. Returns it."""
    console.print("\nthe whole run")
    try:
        forecast = forecast_run(run, cluster, predict(run, cluster))
    except ConfigError as error:
        console.print(f"not foretold: {error}", highlight=False)
        return None
    console.print(report_text(forecast), highlight=False)
    busy, name = max((server["busy"], name) for name, server in forecast["servers"].items())
    shards = max(1, len(cluster.global_shards))
    if busy > SERVER_BUSY and (more := [number for number in SHARDS if number >= shards * busy / SERVER_BUSY]):
        console.print(
            f"{name} works {busy:.0%} of the time: at least {more[0]} shards a server (global_shards, and each "
            "region's shards; as many outer.fragments.pieces) would let it rest for half of it; `geotrain plan` "
            "places them",
            style="yellow",
            highlight=False,
        )
    return forecast
