"""Which host has how much of the servers' memory: the servers' own processes, and those of shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import ceil

from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, ConfigError, RunConfig
from geotrain.parameters.chunks import deal
from geotrain.parameters.parameter_map import ParameterMap, parameter_map_of
from geotrain.plan.model.server_rates import MEASURED
from geotrain.plan.model.servers import PROCESS_BYTES, ServerNeeds, place_of, server_needs

OF_EACH = ("computing", "mirrors in use", "process")  # parts of a server's memory that each shard has anew
PER_HOST = 16  # shards of a server: more share its processors and its disk


def servers(run: RunConfig, cluster: ClusterConfig, parameter_map: ParameterMap) -> dict[str, ServerNeeds]:
    """Compute what each server of the run needs, by name, the global one's first."""
    outer, validates = run.outer, run.monitor.validate_every_samples is not None
    members = cluster.workers if outer.flat else cluster.serving
    places = {GLOBAL: place_of("global", outer, len(members), validates)}
    for region in () if outer.flat else cluster.serving:
        places[region.name] = place_of("region", outer, len(region.workers), validates)
    about = outer, parameter_map, run.checkpoint.keep, MEASURED.over(cluster.security is not None)
    return {name: server_needs(place, *about) for name, place in places.items()}


@lru_cache(maxsize=8)  # as many maps as are kept
def fullest_share(parameter_map: ParameterMap, shards: int) -> float:
    """Compute the share of the model that the fullest of so many shards has: whole fragments are dealt."""
    dealt, every = deal(parameter_map.fragments, shards), parameter_map.fragments
    return max(sum(every[number].numel for number in own) for own in dealt) / parameter_map.numel


def shard_bytes(needs: ServerNeeds, parameter_map: ParameterMap, shards: int) -> int:
    """Compute the memory of the fullest of so many shards of a server, in bytes."""
    if shards == 1:
        return needs.memory_bytes
    own = sum(needs.passing[part] for part in OF_EACH)
    # A buffer for decoding holds a whole chunk, so a shard's may be one more than its share.
    return own + needs.passing["computing"] + ceil((needs.memory_bytes - own) * fullest_share(parameter_map, shards))


def host_bytes(run: RunConfig, cluster: ClusterConfig) -> dict[str, dict[str, int]]:
    """Compute what servers need of each host's memory at most, in bytes: host → server → bytes of its processes."""
    parameter_map = parameter_map_of(run)
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for name, needs in servers(run, cluster, parameter_map).items():
        site = cluster.sites[name]
        each = shard_bytes(needs, parameter_map, max(1, len(site.shards)))
        found[site.server.host][name] = PROCESS_BYTES if site.shards else each
        for shard in site.shards:
            found[shard.host][name] = found[shard.host].get(name, 0) + each
    return dict(found)


def too_small_hosts(run: RunConfig, cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Find the hosts whose `memory_gb` is less than their servers need."""
    memory, wanted = cluster.server_memory, {"mirrors": "disk", "server_state": "bf16"}
    free = [f'outer.{key} = "{value}"' for key, value in wanted.items() if getattr(run.outer, key) != value]
    for host, parts in host_bytes(run, cluster).items() if memory else ():
        needed, room = sum(parts.values()), memory.get(host)
        if room is not None and needed > room:
            listed = ", ".join(f"{name} {count / 1e9:,.1f}" for name, count in parts.items())
            yield ConfigError(
                f"host {host!r}: servers need {needed / 1e9:,.1f} GB of memory ({listed}), its memory_gb is "
                f"{room / 1e9:g}; list more hosts in server_hosts (`geotrain plan` spreads shards over them)"
                f"{', or take ' * bool(free)}{' or '.join(free)}"
            )


def spread(
    cut: Callable[[int], RunConfig], cluster: ClusterConfig, hosts: Mapping[str, Sequence[str]], least: int
) -> dict[str, tuple[str, ...]]:
    """Place each server's shards: server → host of each. cut: gives the run for so many shards. hosts: those of each
    server; the room left decides. least: number of shards of each, doubled until all have room; if they never have,
    the last placement is returned."""
    memory, number, parameter_map = cluster.server_memory, least, parameter_map_of(cut(least))
    wanted = servers(cut(least), cluster, parameter_map)
    most = PER_HOST * min(len(hosts[name]) for name in wanted)
    while True:
        left = dict(memory)
        for name in wanted:
            if (host := cluster.sites[name].server.host) in left:
                left[host] -= PROCESS_BYTES
        placed = {}
        for name, needs in wanted.items():
            each, mine = shard_bytes(needs, parameter_map, number), list[str]()
            for _ in range(number):
                mine.append(max(hosts[name], key=lambda host: left.get(host, 0.0)))
                if mine[-1] in left:
                    left[mine[-1]] -= each
            placed[name] = tuple(mine)
        parameter_map, room = parameter_map_of(cut(2 * number)), min(left.values(), default=0.0)
        if 2 * number > min(most, len(parameter_map.fragments)) or room >= 0:
            return placed
        number *= 2
