"""SkyPilot tasks of a run: one for the global server, one for each region. Plain data; `geotrain up` starts them."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.config import (
    Address,
    ClusterConfig,
    ConfigError,
    HostConfig,
    RegionConfig,
    RunConfig,
    WorkerConfig,
    parse,
)
from geotrain.config.block import with_paths
from geotrain.config.cluster import SecurityConfig
from geotrain.plan.offers import LONGEST, Offer, region_name

SHAPE = re.compile(
    r"(?P<cloud>[a-z]\w*):((?P<nodes>\d{1,3})(?P<by>[x*]))?(?P<slots>\d{1,3})x(?P<kind>[a-z][\w-]*)(@(?P<place>[\w./-]+))?",
    re.I,
)
FORM = (
    "write CLOUD:[HOSTSx]COUNTxKIND[@REGION], as aws:8xh100@us-east-2 or slurm:2x4xcpu@cluster; HOSTS* in place of "
    "HOSTSx makes each host a region of its own"
)
# SkyPilot opens no ports there, asks for no spot machines, stops no idle ones, and often does not know their memory.
QUEUES = ("slurm",)
PORT = 7070
IDLE_MINUTES = 60  # of the global server's machine after its job, so that a run that failed can be looked at
GRACE_S = 900  # from the time to stop until regions are ended that have not stopped
HERE = "geotrain-run"  # folder of the run's files in a machine's home
INPUTS = (
    *("data.train", "data.train.*.prefix", "data.validation", "data.tokenizer"),
    *("model.init_from", "monitor.token_file"),
)
OWN_FOLDERS = ("checkpoint.folder", "data.cache_folder", "monitor.tensorboard")
# SkyPilot puts uv there. Its own Python may be older than 3.11.
INSTALL = (
    'export PATH="$HOME/.local/bin:$PATH"; uv python install --quiet 3.12 && '
    "PYTHON=$(uv python find 3.12) bash launch/install.sh .venv"
)
FOUND = 'export PATH="$HOME/sky_workdir/.venv/bin:$PATH"; cd "$HOME/' + HERE + '"\n'


@dataclass(frozen=True)
class Machines:
    """Equal machines of one region. kind: of accelerators, "cpu": none. slots: accelerators or CPU ranks a host.
    place: the provider's region, or region/zone; empty: any. number: among the regions of one host each there."""

    cloud: str
    kind: str
    place: str
    hosts: int
    slots: int
    spot: bool = False
    number: int | None = None

    @property
    def region(self) -> str:
        """Name of the region in the cluster file. With "-w9" behind it, it is a worker's name."""
        ending = "" if self.number is None else f"-{self.number}"
        return region_name(self.cloud, self.place)[: LONGEST - len(ending)].strip("-") + ending

    @property
    def infra(self) -> str:
        return f"{self.cloud}/{self.place}" if self.place else self.cloud


@dataclass(frozen=True)
class Wanted:
    """What a person asks for. gpu: see `machines_of`. image: a container with GeoTrain, as docker:NAME; None: the
    checkout is installed. setup: command in place of that installation. results: where the export goes, hf://OWNER/NAME
    or s3://BUCKET/PATH. budget: dollars."""

    gpu: str = ""
    spot: bool = False
    image: str | None = None
    setup: str | None = None
    results: str | None = None
    budget: float | None = None


@dataclass(frozen=True)
class Shipment:
    """What goes to the machines. folder: here, with run.json, cluster.json and certs/. copies: see `shipped`.
    launch_id: the launch's name, which a machine that is brought back gives again. memory_gb: of the global server's
    machine. ends_s: Unix time of the run's `ends_at`."""

    folder: Path
    copies: Mapping[str, str]
    launch_id: str
    memory_gb: int
    checkout: Path | None = None
    ends_s: int | None = None


def machines_of(said: str, spot: bool = False) -> tuple[Machines, ...]:
    """Read --gpu: entries as `FORM` says, with commas between. Raises ConfigError."""
    found = []
    for entry in said.split(","):
        match = SHAPE.fullmatch(entry.strip())
        if match is None or 0 in (int(match["slots"]), int(match["nodes"] or 1)):
            raise ConfigError(f"--gpu {entry.strip()!r}: {FORM}")
        cloud = match["cloud"].lower()
        if spot and cloud in QUEUES:
            raise ConfigError(f"--gpu {entry.strip()!r}: {cloud} has no spot machines; leave --spot out")
        kind = "cpu" if match["kind"].lower() == "cpu" else match["kind"].upper()
        hosts, apart = int(match["nodes"] or 1), match["by"] == "*"
        each = Machines(cloud, kind, match["place"] or "", 1 if apart else hosts, int(match["slots"]), spot)
        found += [replace(each, number=n) for n in range(hosts)] if apart else [each]
    names = [each.region for each in found]
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise ConfigError(f"--gpu names {', '.join(twice)} twice; a region is one entry: HOSTSx says how many hosts")
    return tuple(found)


def machines_of_plan(cluster: ClusterConfig, offered: Mapping[str, Offer] | None = None) -> tuple[Machines, ...]:
    """Read them from a cluster file that `geotrain plan` wrote, whose devices have SkyPilot's names. offered: what
    was planned with, by region; None: regions are called CLOUD-REGION. Raises ConfigError."""
    found = []
    for region in cluster.serving:
        cloud, _, place = region.name.partition("-")
        hosts = [host for worker in region.workers for host in worker.hosts]
        kinds = {(host.device, host.spot, host.region) for host in hosts}
        slots = {host.slots for host in hosts}
        if offered is not None:
            offer = offered[region.name]
            cloud, place, slots = offer.cloud, offer.place, {offer.count}
        if len(kinds) != 1 or len(slots) != 1 or hosts[0].region or hosts[0].device is None:
            raise ConfigError(
                f"cluster {cluster.name!r}, region {region.name!r}: `geotrain up` asks for hosts with one kind of "
                "device, as many of it each, all in that region; plan with fewer kinds"
            )
        found.append(Machines(cloud, hosts[0].device, place, len(hosts), slots.pop(), hosts[0].spot))
    return tuple(found)


def cluster_of(run: RunConfig, machines: tuple[Machines, ...], planned: ClusterConfig | None = None) -> ClusterConfig:
    """Make the run's cluster file. `launch --at` puts the hosts in, which are known only on them. planned: its
    workers, devices and numbers of shards are kept. Raises ConfigError, as of names that are taken."""
    ports = count(PORT)

    def address() -> Address:
        return Address(host="127.0.0.1", port=next(ports), bind="0.0.0.0")

    def made(each: Machines) -> RegionConfig:
        server, names = address(), (f"{each.region}-{n}" for n in count())
        hosts = (HostConfig(host="localhost", slots=each.slots),) * each.hosts
        old: tuple[WorkerConfig, ...] = (WorkerConfig(name="w", hosts=hosts),)
        shards: tuple[Address, ...] = ()
        if planned is not None:
            old, shards = planned.region(each.region).workers, planned.region(each.region).shards
        workers = [
            worker.model_copy(
                update={
                    "name": f"{each.region}-w{n}",
                    "hosts": tuple(
                        host.model_copy(update={"host": next(names), "spot": False}) for host in worker.hosts
                    ),
                    "launcher": "ssh" if each.hosts > 1 else "local",
                    "env": {"DS_ACCELERATOR": "cpu", **worker.env} if each.kind == "cpu" else worker.env,
                }
            )
            for n, worker in enumerate(old)
        ]
        return RegionConfig(
            name=each.region, server=server, shards=tuple(address() for _ in shards), workers=tuple(workers)
        )

    blocks: dict[str, Any] = {
        "global_server": address(),
        "global_shards": tuple(address() for _ in (planned.global_shards if planned else ())),
        "regions": tuple(map(made, machines)),
        "devices": planned.devices if planned else {},
        "security": SecurityConfig(folder="certs"),
    }
    content = ClusterConfig.model_construct(name=run.name, **blocks).model_dump(by_alias=True, mode="json")
    return parse(ClusterConfig, content, f"the cluster of {len(machines)} regions on machines of clouds")


def shipped(run: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Move a run file's content to the machines: returns it with paths there, and what to copy: path in `HERE` →
    file or folder here. URLs stay. Raises ConfigError where there is nothing to copy."""
    copies: dict[str, str] = {}

    def moved(key: str, path: str) -> str:
        if "://" in path:
            return path
        source = Path(path)
        found = [source] if source.exists() else sorted(source.parent.glob(f"{source.name}.*"))
        if not found:
            raise ConfigError(f"{key} = {path!r}: nothing is there to copy to the machines; make it, or name a URL")
        folder = f"files/{len({PurePosixPath(copy).parent for copy in copies})}"
        copies.update({f"{folder}/{each.name}": str(each) for each in found})
        return f"{folder}/{source.name}"

    run = {key: value for key, value in run.items() if key != "folder"}
    for key in INPUTS:
        run = with_paths(run, (key,), partial(moved, key))
    return with_paths(run, OWN_FOLDERS, lambda path: path if "://" in path else f"own/{Path(path).name}"), copies


def tasks_of(
    run: RunConfig, cluster: ClusterConfig, machines: tuple[Machines, ...], wanted: Wanted, shipment: Shipment
) -> dict[str, dict[str, Any]]:
    """Make the tasks by site, the global server's first: the content of SkyPilot's task files. Regions expect the
    address of the global server's machine as GEOTRAIN_GLOBAL. cluster: of `cluster_of`."""
    first, shards = machines[0], cluster.global_shards
    certs = ("global-global", "operator-operator", *["shard-global"] * bool(shards))
    tasks = {GLOBAL: _task(run, GLOBAL, first, wanted, shipment, certs)}
    task = tasks[GLOBAL]
    task["resources"]["cpus"] = "4+"
    if first.cloud not in QUEUES:
        task["resources"] |= {"memory": f"{shipment.memory_gb}+", "ports": [PORT, *(s.port for s in shards)]}
        task["resources"]["autostop"] = {"idle_minutes": IDLE_MINUTES, "down": True}
    lines = ["code=0", _launch(GLOBAL, shipment, "--at global=127.0.0.1 || code=$?")]
    if wanted.results is not None:
        output, bucket = wanted.results, re.fullmatch(r"(\w+://[^/]+)(?:/(.*))?", wanted.results)
        if bucket is not None and not output.startswith("hf://"):
            task["file_mounts"]["/geotrain-results"] = {"source": bucket[1], "mode": "MOUNT_CACHED"}
            output = str(PurePosixPath("/geotrain-results", bucket[2] or run.name))
        elif bucket is not None:
            task["secrets"] = {"HF_TOKEN": None}
        lines.append(f"geotrain export runs/{run.name} {shlex.quote(output)} || code=$?")
    task["run"] = FOUND + "\n".join((*lines, "exit $code"))
    for each, region in zip(machines, cluster.regions, strict=True):
        workers = [f"worker-{worker.name}" for worker in region.workers]
        certs = (f"region-{each.region}", *workers, *[f"shard-{each.region}"] * bool(region.shards))
        task = tasks[each.region] = _task(run, each.region, each, wanted, shipment, certs)
        if each.kind == "cpu":
            task["resources"]["cpus"] = f"{each.slots}+"
        else:
            task["resources"]["accelerators"] = {each.kind: each.slots}
        if each.spot:
            task["resources"] |= {"use_spot": True, "job_recovery": {"strategy": "FAILOVER"}}
        task["num_nodes"] = each.hosts
        # The first host starts the ranks of all. A region whose global server is gone for good ends a little later.
        lines = ['[ "$SKYPILOT_NODE_RANK" = 0 ] || exit 0', FOUND.rstrip()]
        if shipment.ends_s is not None:
            lines.append(f"left=$(({shipment.ends_s + GRACE_S} - $(date +%s))); [ $left -gt 0 ] || exit 0")
        hosts = f"--at global=$GEOTRAIN_GLOBAL --at {each.region}=$(echo $SKYPILOT_NODE_IPS | tr ' ' ,)"
        limit = "" if shipment.ends_s is None else "timeout -s TERM $left "
        task["run"] = "\n".join((*lines, limit + _launch(each.region, shipment, hosts)))
    return tasks


def task_name(run: RunConfig, site: str) -> str:
    return f"{run.name}-{site}"


def _launch(site: str, shipment: Shipment, places: str) -> str:
    return f"geotrain launch run.json cluster.json --only {site} --resume --launch-id {shipment.launch_id} {places}"


def _task(
    run: RunConfig,
    site: str,
    machines: Machines,
    wanted: Wanted,
    shipment: Shipment,
    certificates: tuple[str, ...],
) -> dict[str, Any]:
    """Make what a server's and a region's task have in common: files, setup, environment."""
    pairs = [f"certs/{name}.{ending}" for name in certificates for ending in ("pem", "key")]
    files = {path: str(shipment.folder / path) for path in ("run.json", "cluster.json", "certs/ca.pem", *pairs)} | {
        **shipment.copies
    }
    task: dict[str, Any] = {
        "name": task_name(run, site),
        "resources": {"infra": machines.infra},
        "envs": {"GEOTRAIN_GLOBAL": ""},
        "file_mounts": {f"~/{HERE}/{path}": source for path, source in files.items()},
    }
    if wanted.image is not None:
        task["resources"]["image_id"] = wanted.image
    elif wanted.setup is None:
        task["workdir"] = str(shipment.checkout)
    if wanted.setup is not None or wanted.image is None:
        task["setup"] = wanted.setup or INSTALL
    return task
