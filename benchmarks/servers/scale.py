"""Plan and simulate runs that no test can hold: `python -m benchmarks.servers.scale [MODEL …]`.

Each world is an inventory of like hosts (8 accelerators with 989 TFLOP/s and 76 GB), its regions joined by links of
1 Gbit/s. `geotrain plan` makes workers, settings and the servers' shards of it, its forecast plays that. H is given
for 8 B, with one worker a host. One line of JSON a model: utilization, hours, workers, H, K, shards a server, the
busiest server's share of the time, and hosts and memory of each kind of server.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from math import ceil

from benchmarks.servers.rates import HOST_BYTES, LARGE
from benchmarks.small_runs import llama
from geotrain.commands.plan import TOKENS_PER_PARAMETER, default_run
from geotrain.config import ClusterConfig, RunConfig, parse
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.plan.inventory import Pins, Wish, task_of
from geotrain.plan.model.servers import place_of, server_needs
from geotrain.plan.planner import plan
from geotrain.simulate.forecast import forecast_run

DEVICE = {"memory_gb": 76.0, "tflops": 989.0, "efficiency": 0.4, "host_gbps": 3600.0}


@dataclass(frozen=True)
class World:
    """An inventory: its regions, the hosts of each, Gbit/s between two of them and between two regions. local_steps:
    H, where it is given."""

    regions: int
    hosts: int
    inside_gbps: float
    local_steps: int | None = None
    gbps: float = 1.0

    def cluster(self) -> ClusterConfig:
        names = [f"r{i}" for i in range(self.regions)]
        regions = [
            {
                "name": name,
                "server": {"host": f"{name}.example.org", "port": 7077},
                "hosts": [{"host": f"{name}-{i}", "slots": 8, "device": "d"} for i in range(self.hosts)],
            }
            for name in names
        ]
        far, near = {"gbps": self.gbps, "rtt_ms": 80.0}, {"gbps": self.inside_gbps, "rtt_ms": 0.05}
        links = [{"regions": [a, b], **(near if a == b else far)} for i, a in enumerate(names) for b in names[i:]]
        raw = {
            "name": "scale", "global_server": {"host": "r0.example.org", "port": 7070},
            "regions": regions, "links": links, "devices": {"d": DEVICE},
        }  # fmt: skip
        return parse(ClusterConfig, raw, "scale")


WORLDS = {"8 B": World(8, 4, 10.0, 32), "70 B": World(4, 16, 400.0), "405 B": World(4, 128, 400.0)}


def figures(model: str) -> dict[str, object]:
    world = WORLDS[model]
    config = llama(*LARGE[model], 128256, 4096, num_key_value_heads=8, tie_word_embeddings=False)
    raw = default_run(f"scale-{model}", config, None)
    pins = Pins()
    if world.local_steps:
        raw["outer"] = {"local_steps": world.local_steps}
        pins = Pins(outer=frozenset({"local_steps"}))
    run = parse(RunConfig, raw, model)
    parameter_map = parameter_map_of(run)
    wish = Wish(float(TOKENS_PER_PARAMETER * parameter_map.numel), most_workers=world.regions * world.hosts)
    found = plan(task_of(run, pins, world.cluster(), 1.0), wish)
    told = forecast_run(found.run, found.cluster, found.prediction)
    outer = found.run.outer
    servers = {}
    for role, members in (("region", ceil(len(found.workers) / world.regions)), ("global", world.regions)):
        place = place_of(role, outer, members)  # type: ignore[arg-type]
        needs = server_needs(place, outer, parameter_map, found.run.checkpoint.keep)
        servers[role] = {"gb": round(needs.memory_bytes / 1e9), "hosts": ceil(needs.memory_bytes / HOST_BYTES)}
    return {
        "model": model, "utilization": round(told["utilization"], 3), "hours": round(told["hours"], 1),
        "workers": len(found.workers), "accelerators": sum(w.ranks for w in found.prediction.workers.values()),
        "H": outer.local_steps, "K": outer.rule.updates_per_send, "codec": outer.up.name,
        "shards": max(1, len(found.cluster.global_shards)),
        "busiest_server": round(max(server["busy"] for server in told["servers"].values()), 3), "servers": servers,
    }  # fmt: skip


if __name__ == "__main__":
    for name in sys.argv[1:] or WORLDS:
        print(json.dumps(figures(name)), flush=True)
