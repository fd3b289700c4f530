"""`geotrain probe`: measures a cluster's links, and how fast its accelerators train, for the cluster file."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from geotrain.config import (
    Address,
    ClusterConfig,
    ConfigError,
    HostConfig,
    RegionConfig,
    RunConfig,
    WorkerConfig,
    load_cluster,
    load_run,
)
from geotrain.files import whole_file
from geotrain.launch import wan
from geotrain.launch.check import link_to_global, links_between
from geotrain.launch.jsontext import put
from geotrain.launch.probe_site import Place, Site
from geotrain.launch.site import over_ssh, python_there
from geotrain.launch.supervise import Supervisor
from geotrain.net.certs import Role
from geotrain.net.probe import Limits, ProbeError, Way
from geotrain.outer.messages import GLOBAL

SITE = ("-m", "geotrain", "probe-site")
MAX_HOSTS = 5  # of a region, whose links are measured: one end is always the first
HERE = ("localhost", "127.0.0.1", "::1")
Pair = tuple[str, str]
Tell = Callable[[str], None]


def probe(path: Path, run_path: Path | None, limits: Limits, tell: Tell) -> None:
    """Measure the cluster of this file, and write the figures into it; the rest of its text stays as it is.

    run_path: measure also how fast each kind of accelerator trains this run's model. limits: of one direction of one
    link. tell: is called with what was found, line by line.
    Raises ConfigError, ProbeError, LaunchError, CertificateError; then the file is as it was.
    """
    cluster, text = load_cluster(path), path.read_text()
    run = None if run_path is None else load_run(run_path)
    with contextlib.ExitStack() as stack:
        namespaces = stack.enter_context(_emulation(cluster))
        sites: dict[str, Site] = {}
        for place in _places(cluster, namespaces):
            sites[place.name] = stack.enter_context(Site(place))
        for site in sites.values():
            site.start()
        ways = {pair: _between(sites, pair, limits, tell) for pair in _pairs(cluster, namespaces)}
        for region in cluster.regions if not namespaces else ():
            way = _inside(cluster, region, limits, tell)
            if way is not None:
                ways[region.name, region.name] = way
        efficiencies = {} if run is None else _efficiencies(cluster, run, sites, limits.seconds, tell)
    if path.read_text() != text:
        raise ConfigError(f"{path} was changed while its links were measured; nothing was written: probe again")
    with whole_file(path) as file:
        file.write(updated(text, cluster, ways, efficiencies))


def updated(text: str, cluster: ClusterConfig, ways: dict[Pair, Way], efficiencies: dict[str, float]) -> str:
    """The cluster file's text with these figures. A link has one rate for both directions: the lower."""
    if ways and '"links"' not in text:
        text = put(text, ("links",), [])
    known = [set(link.regions) for link in cluster.links]
    for pair, way in ways.items():
        figures = {"gbps": _rounded(min(way.up_gbps, way.down_gbps)), "rtt_ms": _rounded(way.rtt_ms)}
        if set(pair) in known:
            for key, value in figures.items():
                text = put(text, ("links", known.index(set(pair)), key), value)
        else:
            text = put(text, ("links", len(known)), {"regions": list(pair), **figures})
            known.append(set(pair))
    for kind, efficiency in efficiencies.items():
        text = put(text, ("devices", kind, "efficiency"), _rounded(efficiency))
    return text


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


@contextlib.contextmanager
def _emulation(cluster: ClusterConfig) -> Iterator[dict[str, tuple[int, str]]]:
    """Of a cluster whose links are emulated: region (and "global") → network namespace (-1: this one), address."""
    if not cluster.emulate_links:
        yield {}
        return
    if reason := wan.cannot_emulate():
        raise ConfigError(f"the links of cluster {cluster.name!r} are emulated, which cannot be here: {reason}")
    star = {region.name: link_to_global(cluster, region.name) for region in cluster.regions}
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(wan.emulated(star, between=links_between(cluster)))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(Supervisor(logs)).start(made.process)
        inside = {name: (fd, made.addresses[name]) for name, fd in made.namespaces.items()}
        yield {GLOBAL: (-1, made.global_address), **inside}


def _places(cluster: ClusterConfig, namespaces: dict[str, tuple[int, str]]) -> list[Place]:
    """Of the global server and each region's."""
    servers: list[tuple[str, Role, Address, str | None, str | None]] = [
        (GLOBAL, "global", cluster.global_server, cluster.global_ssh, cluster.global_folder)
    ]
    servers += [(r.name, "region", r.server, r.ssh, r.folder) for r in cluster.regions]
    security = cluster.security.folder if cluster.security else None
    far = next((ssh for *_, ssh, _ in servers if ssh), None)
    places = []
    for name, role, address, ssh, folder in servers:
        if far and address.host in (*HERE, "0.0.0.0"):
            raise ConfigError(
                f"the server of {name!r} has the address {address}, but {far} is another machine: set a host "
                "that the others reach"
            )
        netns, host = namespaces.get(name, (-1, address.host))
        command = (sys.executable, *SITE) if ssh is None else over_ssh(ssh, folder, (python_there(folder), *SITE))
        at = Address(host=host, port=0 if namespaces else address.port)
        places.append(Place(name, role, command, at, security, None if netns < 0 else netns, ssh or "this machine"))
    return places


def _pairs(cluster: ClusterConfig, namespaces: dict[str, tuple[int, str]]) -> list[Pair]:
    """All of them; of emulated links, those that there are."""
    names = [region.name for region in cluster.regions]
    if namespaces:
        return [(link.regions[0], link.regions[1]) for link in cluster.links if len(set(link.regions)) == 2]
    return [(name, GLOBAL) for name in names] + list(combinations(names, 2))


def _between(sites: dict[str, Site], pair: Pair, limits: Limits, tell: Tell) -> Way:
    """Either may call the other; a region always calls the global server. Raises ProbeError."""
    one, other = (pair[1], pair[0]) if pair[0] == GLOBAL else pair
    try:
        way = sites[one].measure(sites[other], limits)
    except ProbeError as error:
        if other == GLOBAL:
            raise
        try:
            way = sites[other].measure(sites[one], limits)
        except ProbeError as second:
            raise ProbeError(f"neither end reaches the other: {error}; {second}") from None
    tell(f"{pair[0]} – {pair[1]}: {describe(way)}")
    return way


def describe(way: Way) -> str:
    return f"{1e3 * way.up_gbps:.4g} and {1e3 * way.down_gbps:.4g} Mbit/s, round trip {way.rtt_ms:.4g} ms"


# --------------------------------------------------------------------------------------------- inside a region


def _hosts(cluster: ClusterConfig, region: RegionConfig) -> dict[str, tuple[HostConfig, WorkerConfig | None]]:
    """The hosts that stand in a region, with a worker that uses each."""
    found: dict[str, tuple[HostConfig, WorkerConfig | None]] = {}
    for home in cluster.regions:
        for worker in home.workers:
            for host in worker.hosts:
                if (host.region or home.name) == region.name:
                    found.setdefault(host.host, (host, worker))
    for host in region.hosts:
        found.setdefault(host.host, (host, None))
    return found


def _is_regions_machine(host: HostConfig, worker: WorkerConfig | None) -> bool:
    return host.host in HERE or (worker is not None and worker.launcher == "local")


def _inside(cluster: ClusterConfig, region: RegionConfig, limits: Limits, tell: Tell) -> Way | None:
    """From a region's first host to some others, the slowest of them; None: it has only one."""
    far = [(h, w) for h, w in _hosts(cluster, region).values() if not _is_regions_machine(h, w)][:MAX_HOSTS]
    if len(far) < 2:
        return None
    security = cluster.security.folder if cluster.security else None
    with contextlib.ExitStack() as stack:
        sites = []
        for host, worker in far:
            role: Role = "worker" if worker else "region"
            name = worker.name if worker else region.name
            command: tuple[str, ...] = over_ssh(host.host, region.folder, (python_there(region.folder), *SITE))
            if region.ssh is not None:
                command = over_ssh(region.ssh, region.folder, command)
            place = Place(name, role, command, Address(host=host.host), security, None, host.host)
            sites.append(stack.enter_context(Site(place)))
            sites[-1].start()
        ways = []
        for site, (host, _) in zip(sites[1:], far[1:], strict=True):
            ways.append(sites[0].measure(site, limits))
            tell(f"{region.name}: {far[0][0].host} – {host.host}: {describe(ways[-1])}")
    return Way(max(w.rtt_ms for w in ways), min(w.up_gbps for w in ways), min(w.down_gbps for w in ways))


# ------------------------------------------------------------------------------------------------ accelerators


def _efficiencies(
    cluster: ClusterConfig, run: RunConfig, sites: dict[str, Site], seconds: float, tell: Tell
) -> dict[str, float]:
    """Kind of accelerator → share of its peak that it reaches, on one host of the kind. Raises ProbeError."""
    found: dict[str, float] = {}
    for region in cluster.regions:
        for host, worker in _hosts(cluster, region).values():
            if host.device is None or host.device in found:
                continue
            kind = cluster.devices[host.device]
            laid_over = {**run.deepspeed, **(worker.deepspeed if worker else {})}
            there = run.model_copy(update={"deepspeed": laid_over})
            if worker and worker.parallel:
                there = there.model_copy(update={"parallel": worker.parallel})
            order: dict[str, Any] = {
                "run": there.model_dump(by_alias=True, mode="json"),
                "slots": host.slots,
                "memory_bytes": 1e9 * kind.memory_gb,
                "seconds": seconds,
                "env": worker.env if worker else {},
                "host": None if _is_regions_machine(host, worker) else host.host,
            }
            said = sites[region.name].ask({"step": order}, 900.0)
            share = said["flops"] / (said["step_s"] * host.slots * kind.tflops * 1e12)
            tell(
                f"{host.device}: a step of {said['flops']:.3g} operations ({said['layers']} layers, {host.slots} "
                f"ranks on {host.host}) takes {said['step_s']:.4g} s: {share:.1%} of {kind.tflops:g} Tflop/s a rank; "
                f"at its peak {said['memory_bytes'] / 1e9:.3g} of {kind.memory_gb:g} GB a rank"
            )
            if share > 1:
                raise ConfigError(
                    f"devices.{host.device}.tflops = {kind.tflops:g}, but {share * kind.tflops:.4g} were measured; "
                    "correct it"
                )
            found[host.device] = share
    return found
