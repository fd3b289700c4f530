"""The whole plan: workers, global server, outer settings; what it predicts, what came next, and how good it can be.

Decisions are taken one after the other, each by complete search where its module says so: first the workers (most
steps a second, or what the wish pays for), then the place of the global server, then the outer settings that the
links between them bear. A later decision never revises an earlier one. Of the whole only the distance from two
bounds is proven, `RunPrediction.bound_tokens_per_s` and `Plan.inventory_tokens_per_s`: no plan on these accelerators
trains more tokens a second than all of them would without any waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.config import (
    THIS_MACHINE,
    Address,
    ClusterConfig,
    FragmentConfig,
    LinkConfig,
    OuterConfig,
    RegionConfig,
    RunConfig,
    WorkerConfig,
    parse,
)
from geotrain.parameters.parameter_map import parameter_count
from geotrain.plan.choice import choose, expected_gap, tokens_of
from geotrain.plan.grouping import Find, Worker, Workers, form_workers, speed
from geotrain.plan.inventory import MOST_WORKERS, Host, PlanError, PlanTask, Wish, hosts_of
from geotrain.plan.layouts import Refusals, home_of, nothing_fits, worker_of
from geotrain.plan.model.server_hosts import spread, too_small_hosts
from geotrain.plan.model.work import useful_flops
from geotrain.plan.predict import RunPrediction, predict
from geotrain.plan.settings import (
    BUSY,
    SERVER_BUSY,
    TRAFFIC,
    ServerPlace,
    Setting,
    cut,
    line_to,
    places,
    settings,
    shard_hosts,
)
from geotrain.plan.spanning import found_layouts

GLOBAL_PORT = 7070
# Keys of `outer` that take less of servers' memory, the gentlest first, and how a plan's notes name them.
ROOM: tuple[tuple[str, Any, str], ...] = (
    ("fragments", FragmentConfig(layers_per_fragment=2), "fragments of two layers"),
    ("mirrors", "disk", 'outer.mirrors = "disk"'),
    ("server_state", "bf16", 'outer.server_state = "bf16"'),
)
LONGEST_NAME = 28  # of a region, in the names of its workers


@dataclass(frozen=True)
class Plan:
    """A plan and what it predicts. run, cluster: to be launched as they are. idle: accelerators left out, (host, how
    many, why)."""

    task: PlanTask
    wish: Wish
    run: RunConfig
    cluster: ClusterConfig
    prediction: RunPrediction
    workers: dict[str, Worker]
    place: ServerPlace
    setting: Setting
    places: tuple[ServerPlace, ...]
    settings: tuple[Setting, ...]
    idle: tuple[tuple[Host, int, str], ...]
    inventory_tokens_per_s: float
    notes: tuple[str, ...] = field(default=())

    @property
    def available(self) -> float:
        """Share of the predicted tokens that is trained in spite of preemptions."""
        return speed(self.workers.values()) / sum(1 / w.layout.step.step_s for w in self.workers.values())

    @property
    def expected_gap(self) -> float:
        """Final loss over data parallelism's of as many tokens, less 1."""
        return expected_gap(self.task, self.wish, tuple(self.workers.values()))


@dataclass(frozen=True)
class Decided:
    """Decisions, the best of each first. every: workers of all hosts, of which the wish takes some. places and
    settings: of the global server and the outer loop."""

    task: PlanTask
    every: Workers
    workers: Workers
    places: Sequence[ServerPlace]
    settings: Sequence[Setting]


def decide(task: PlanTask, wish: Wish, find: Find = found_layouts) -> Decided:
    """Take the decisions, one after the other. find: as of `form_workers`. Raises PlanError."""
    refused = Refusals()
    # The fastest workers, without recomputation where that makes no difference.
    choices = [task.pins.recompute] if task.pins.recompute is not None else ["none", "full"]
    formed = [
        (tasked, form_workers(tasked, refused, wish.partial, wish.most_workers or MOST_WORKERS, find))
        for tasked in map(task.with_recompute, choices)
    ]
    task, divided = max(formed, key=lambda entry: speed(w for group in next(iter(entry[1]), []) for w in group[0]))
    if not divided:
        raise nothing_fits(task, refused)
    every = tuple(w for group in divided[0] for w in group[0])
    workers = choose(task, wish, divided)
    homes = list(dict.fromkeys(home_of(w.layout.hosts) for w in workers))
    model_bytes = 2 * parameter_count(task.architecture)  # bf16: which codec is chosen does not change the order
    where = places(task, homes, model_bytes)
    return Decided(task, every, workers, where, _settings(task, workers, where[0], wish))


def _settings(task: PlanTask, workers: Workers, place: ServerPlace, wish: Wish) -> list[Setting]:
    prices = [w.layout.usd_per_hour for w in workers]
    hourly = None if None in prices else sum(p for p in prices if p is not None)
    steps = tokens_of(task, wish, workers) / task.tokens_per_step / len(workers)
    return settings(task, workers, place.region, wish.utilization, hourly, steps)


def plan(task: PlanTask, wish: Wish) -> Plan:
    """Make the plan. Raises PlanError when the model fits nowhere, a figure is missing, or what is pinned cannot be
    had."""
    decided = decide(task, wish)
    task, workers, place = decided.task, decided.workers, decided.places[0]
    named = name_workers(task, workers)
    ranked, wish, run, cluster, notes = _that_fits(decided, named, wish)
    setting = ranked[0]
    prediction = predict(run, cluster, task.imbalance)
    busiest = max(prediction.server_busy.values())
    setting = replace(setting, shards=max(1, len(cluster.global_shards)), server_busy=busiest)
    if setting.misses > 0:
        notes.append(
            f"no outer setting keeps every limit (utilization ≥ {wish.utilization:.0%}, links ≤ {BUSY:.0%} busy, "
            f"servers ≤ {SERVER_BUSY:.0%}, traffic ≤ {TRAFFIC:.0%} of the accelerators' price): utilization "
            f"{setting.utilization:.0%}, fullest link {setting.busy:.0%}, busiest server {setting.server_busy:.0%}"
        )
    everything = sum(h.slots * h.device.tflops * h.device.efficiency for hosts in task.hosts.values() for h in hosts)
    return Plan(
        task=task,
        wish=wish,
        run=run,
        cluster=cluster,
        prediction=prediction,
        workers=named,
        place=place,
        setting=setting,
        places=tuple(decided.places),
        settings=tuple(ranked),
        idle=tuple(idle_hosts(task, workers, decided.every)),
        inventory_tokens_per_s=1e12 * everything / useful_flops(task.architecture, task.run.data.sequence_length),
        notes=tuple(notes),
    )


def _that_fits(
    decided: Decided, named: Mapping[str, Worker], wish: Wish
) -> tuple[list[Setting], Wish, RunConfig, ClusterConfig, list[str]]:
    """Choose the best setting whose servers fit the memory of their hosts: with other codecs and fewer shards, then
    with ROOM, as far as that is free. Returns all settings, that one first, the wish, the two files and notes. Raises
    PlanError."""
    task, place, small = decided.task, decided.places[0], ""
    room = [each for each in ROOM if each[0] not in task.pins.outer and not task.run.outer.flat]
    for taken in (room[:number] for number in range(len(room) + 1)):
        tasked = task.with_outer({key: value for key, value, _ in taken})
        ranked = _settings(tasked, decided.workers, place, wish) if taken else decided.settings
        unlike = {(s.outer.up.name, s.outer.down.name, s.outer.local.name, s.shards): s for s in reversed(ranked)}
        for setting in sorted(unlike.values(), key=lambda setting: setting.order):
            if setting.misses > ranked[0].misses:
                break
            if wish.objective == "tokens":
                tokens = speed(decided.workers) * task.tokens_per_step * setting.utilization * wish.seconds
                wish = replace(wish, tokens=tokens)
            run, cluster = resolve(tasked, named, place.region, setting.outer, wish.tokens, setting.shards)
            if not (found := list(too_small_hosts(run, cluster))):
                measures = ", ".join(words for *_, words in taken) or "codecs and shards"
                notes = [f"chosen for the servers' memory: {measures}; else {small}"] if small else []
                return [setting, *(s for s in ranked if s is not setting)], wish, run, cluster, notes
            small = small or str(found[0]).partition(";")[0]
    raise PlanError(str(found[0]))


def idle_hosts(task: PlanTask, workers: Workers, every: Workers) -> list[tuple[Host, int, str]]:
    """List the accelerators that no worker uses: (host, how many, why)."""
    used = {(s.region, s.host): w.layout.slots for w in workers for s in w.layout.hosts}
    dear = {(s.region, s.host) for w in every for s in w.layout.hosts}
    found = []
    for host in (host for hosts in task.hosts.values() for host in hosts):
        place = (host.region, host.host)
        if place not in used:
            other = "would not make any worker faster, or cannot hold the model"
            cost = "dearer a token, or costs more in loss than its tokens gain"
            found.append((host, host.slots, cost if place in dear else other))
        elif used[place] < host.slots:
            found.append((host, host.slots - used[place], "no parallel layout of its worker gains from them"))
    return found + [(host, host.slots, "beyond the quota of its region's offers") for host in task.beyond_quota]


# ----------------------------------------------------- the decisions as the two files that `geotrain launch` takes


def name_workers(task: PlanTask, workers: Workers) -> dict[str, Worker]:
    """Name workers `<region>-<number>`, by the region that most of a worker's hosts stand in."""
    named: dict[str, Worker] = {}
    for region in task.cluster.regions:
        mine = [w for w in workers if home_of(w.layout.hosts) == region.name]
        named.update({f"{region.name[:LONGEST_NAME]}-{i}": worker for i, worker in enumerate(mine)})
    return named


def resolve(
    task: PlanTask, workers: Mapping[str, Worker], place: str, outer: OuterConfig, tokens: float, shards: int = 1
) -> tuple[RunConfig, ClusterConfig]:
    """Write the plan into run and cluster: regions that neither have a worker nor lend a host to one are left out.
    shards: of each server, at least; 1: in its process. More where hosts' memory asks for it."""
    cluster = _cluster(task, workers, place)

    def run_of(shards: int) -> RunConfig:
        return _run(task, workers, cut(task, outer, shards), tokens)

    if not cluster.global_shards and (shards > 1 or cluster.server_memory):
        homes = {region.name: region.name for region in cluster.serving}
        hosts = {name: shard_hosts(task.cluster, home) for name, home in {GLOBAL: place, **homes}.items()}
        cluster = _with_shards(cluster, spread(cache(run_of), cluster, hosts, shards))
    return run_of(max(1, len(cluster.global_shards))), cluster


def _run(task: PlanTask, workers: Mapping[str, Worker], outer: OuterConfig, tokens: float) -> RunConfig:
    layouts = [worker.layout for worker in workers.values()]
    raw = task.run.model_dump(by_alias=True, mode="json")
    raw["parallel"] = layouts[0].parallel.model_dump()
    raw["outer"] = outer.model_dump(by_alias=True, mode="json")
    raw["deepspeed"]["train_micro_batch_size_per_gpu"] = layouts[0].micro_batch
    a_round = task.batch * (len(layouts) * outer.local_steps if outer.rule.synchronous else 1)
    wanted = tokens / task.run.data.sequence_length
    before, samples = raw["data"]["train_samples"], a_round * max(1, round(wanted / a_round))
    raw["data"]["train_samples"] = samples
    schedule = raw["deepspeed"].get("scheduler", {}).get("params", {})
    if schedule.get("total_num_steps") == before // task.batch:  # the schedule ends with the data
        schedule["total_num_steps"] = samples // task.batch
    return parse(RunConfig, raw, "the planned run")


def _cluster(task: PlanTask, workers: Mapping[str, Worker], place: str) -> ClusterConfig:
    given = task.cluster
    regions, homes = [], []
    used = {(host.region, host.host) for worker in workers.values() for host in worker.layout.hosts}
    for region in given.regions:
        at_home = {name: w for name, w in workers.items() if home_of(w.layout.hosts) == region.name}
        mine = tuple(_worker(name, worker, region, given) for name, worker in at_home.items())
        borrowed_hosts = tuple(h for h in hosts_of(region) if (region.name, h.host) in used)
        if mine:
            homes.append(region.name)
            regions.append(region.model_copy(update={"workers": mine, "hosts": ()}))
        elif borrowed_hosts:
            regions.append(region.model_copy(update={"workers": (), "hosts": borrowed_hosts}))
    kept = {region.name for region in regions}
    links = [link for link in given.links if set(link.regions) <= kept]
    for home in homes:
        line = line_to(task, home, place)
        price = line.usd_per_gb or None
        links.append(
            LinkConfig(regions=(home, GLOBAL), gbps=line.gbps, rtt_ms=2000 * line.latency_s, usd_per_gb=price)
        )
    update: dict[str, Any] = {"regions": tuple(regions), "links": tuple(links)}
    if place != GLOBAL:
        there = given.region(place)
        update |= {"global_ssh": there.ssh, "global_folder": None, "global_hosts": there.server_hosts}
        if there.ssh is not None:
            port = given.global_server.port or GLOBAL_PORT
            port += port == there.server.port  # both servers listen on one machine
            beside = there.server.model_copy(update={"port": port, "bind_port": None})
            update |= {"global_server": beside, "global_folder": there.folder}
    raw = given.model_copy(update=update).model_dump(by_alias=True, mode="json")
    return parse(ClusterConfig, raw, "the planned cluster")


def _with_shards(cluster: ClusterConfig, hosts: Mapping[str, Sequence[str]]) -> ClusterConfig:
    """Place each server's shards at the next ports that nobody has; on the server's own host, where it has none yet,
    they have none. hosts: of each server's shards."""
    taken = {(site.server.host, site.server.port) for site in cluster.sites.values()}

    def at(name: str) -> tuple[Address, ...]:
        server, found = cluster.sites[name].server, list[Address]()
        for host in hosts.get(name, ()):
            far = host != server.host
            port = server.port or far * GLOBAL_PORT
            while port and (host, port) in taken:
                port += 1
            taken.add((host, port))
            bind = None if far else server.bind
            found.append(Address(host=host, port=port, bind=bind))
        return tuple(found)

    if all(tuple(mine) == (cluster.sites[name].server.host,) for name, mine in hosts.items()):
        return cluster  # in the servers' own processes
    top = at(GLOBAL)
    regions = tuple(r.model_copy(update={"shards": at(r.name)}) for r in cluster.regions)
    raw = cluster.model_copy(update={"global_shards": top, "regions": regions})
    return parse(ClusterConfig, raw.model_dump(by_alias=True, mode="json"), "the planned cluster")


def _worker(name: str, worker: Worker, region: RegionConfig, given: ClusterConfig) -> WorkerConfig:
    """Build a worker's entry of the cluster file. It is started by DeepSpeed's launcher on each host: over ssh, or
    here if its hosts are (or stand for) this machine. A worker that has all these hosts already keeps its
    launcher."""
    own = worker.layout
    config = worker_of(name, own.hosts, own.slots, own.parallel, own.micro_batch)
    local = given.emulate_links or all(host.host in THIS_MACHINE for host in config.hosts)
    like = next((w for w in region.workers if {h.host for h in w.hosts} >= {h.host for h in config.hosts}), None)
    kept = {} if like is None else {"launcher": like.launcher, "launcher_args": like.launcher_args, "env": like.env}
    return config.model_copy(update={"launcher": "local" if local else "ssh", **kept})
