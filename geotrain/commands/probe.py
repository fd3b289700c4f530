"""Measures a cluster's links, and how fast its accelerators train, for the cluster file."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from geotrain.commands.probe_site import START_S, ProbeSite
from geotrain.common.files import write_whole
from geotrain.common.names import GLOBAL
from geotrain.config import (
    THIS_MACHINE,
    Address,
    ClusterConfig,
    ConfigError,
    HostConfig,
    RegionConfig,
    RunConfig,
    WorkerConfig,
    WorkerSetup,
    load_cluster,
    load_run,
)
from geotrain.emulate import wan
from geotrain.launch.check import link_to_global, links_between
from geotrain.launch.launchers.ssh import over_ssh
from geotrain.launch.site_processes import path_there, pump_process, remote_python
from geotrain.launch.supervisor import Supervisor
from geotrain.net.transport.certs import Role
from geotrain.net.transport.link_probe import Limits, ProbeError, Way

SITE = ("-P", "-m", "geotrain", "probe-site")
MAX_HOSTS = 5  # of a region, whose links are measured: one end is always the first
Pair = tuple[str, str]


def probe(path: Path, run_path: Path | None, limits: Limits, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the cluster of this file, and write the figures into it; the rest of its text stays as it is.

    run_path: measure also how fast each kind of accelerator trains this run's model. limits: of one direction of one
    link. say: is called with what was found, line by line.
    Raises ConfigError, ProbeError, LaunchError, EmulationError, CertificateError; then the file is as it was.
    """
    cluster, text = load_cluster(path), path.read_text()
    run = None if run_path is None else load_run(run_path)
    names = [region.name for region in cluster.regions]
    with contextlib.ExitStack() as stack:
        links = None
        if cluster.emulate_links:
            if reason := wan.cannot_emulate():
                raise ConfigError(
                    f"the links of cluster {cluster.name!r} are emulated, which cannot be here: {reason}"
                )
            star = {name: link_to_global(cluster, name) for name in names}
            links = stack.enter_context(wan.emulated(star, between=links_between(cluster)))
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(Supervisor(logs)).start(pump_process(links))
        measurement = Measurement(cluster, limits, say, _start_sites(cluster, links, stack))
        if links:  # those that there are
            ends = [link.regions for link in cluster.links if len(set(link.regions)) == 2]
            ways = {(one, other): measurement.between(one, other) for one, other in ends}
        else:
            pairs = [*((name, GLOBAL) for name in names), *combinations(names, 2)]
            ways = {pair: measurement.between(*pair) for pair in pairs}
            inside = {(region.name, region.name): measurement.inside(region) for region in cluster.regions}
            ways |= {pair: way for pair, way in inside.items() if way is not None}
        efficiencies = {} if run is None else measurement.efficiencies(run)
    if path.read_text() != text:
        raise ConfigError(f"{path} was changed while its links were measured; nothing was written: probe again")
    write_whole(path, updated(text, cluster, ways, efficiencies))
    return {"links": [{"regions": pair, **asdict(way)} for pair, way in ways.items()], "efficiencies": efficiencies}


def updated(text: str, cluster: ClusterConfig, ways: dict[Pair, Way], efficiencies: dict[str, float]) -> str:
    """The cluster file's text with these figures. A link has one rate for both directions: the lower."""
    raw = json.loads(text)

    def rounded(value: float) -> float:
        return float(f"{value:.4g}")

    links = {frozenset(link["regions"]): link for link in raw.get("links", ())}
    for pair, way in ways.items():
        link = links.setdefault(frozenset(pair), {"regions": list(pair)})
        link |= {"gbps": rounded(min(way.up_gbps, way.down_gbps)), "rtt_ms": rounded(way.rtt_ms)}
    for kind, efficiency in efficiencies.items():
        raw["devices"][kind]["efficiency"] = rounded(efficiency)
    return json.dumps({**raw, "links": list(links.values())}, indent=2, ensure_ascii=False) + "\n"


def _start_sites(cluster: ClusterConfig, links: wan.Wan | None, stack: contextlib.ExitStack) -> dict[str, ProbeSite]:
    """Start a probe beside the global server and each region's. links: the emulated ones, if they are."""
    remote = next((site.ssh for site in cluster.sites.values() if site.ssh), None)
    for name, site in cluster.sites.items():
        if remote and site.server.host in THIS_MACHINE:
            raise ConfigError(
                f"the server of {name!r} has the address {site.server}, but {remote} is another machine: set a host "
                "that the others reach"
            )
    probes = {}
    for name, site in cluster.sites.items():
        role: Role = "global" if name == GLOBAL else "region"
        command: tuple[str, ...] = (sys.executable, *SITE)
        if site.ssh is not None:
            command = over_ssh(site.ssh, site.folder, (remote_python(site.folder), *SITE))
        address, netns = site.server, None
        if links:
            address = Address(host=links.addresses.get(name, links.global_address), port=0)
            netns = links.namespaces.get(name)
        security = _security(cluster, site.ssh, site.folder)
        probe = ProbeSite(name, role, command, address, security, site.ssh or "this machine", netns)
        probes[name] = stack.enter_context(probe)
    for probe in probes.values():  # all of them are importing Python's modules meanwhile
        probe.start()
    return probes


def _security(cluster: ClusterConfig, ssh: str | None, folder: str | None) -> str | None:
    """Where certificates lie: here, or on a region's machine (ssh: its name; folder: as the cluster file has it)."""
    if cluster.security is None:
        return None
    return path_there(cluster.security.folder, folder) if ssh else cluster.security.folder


@dataclass(frozen=True)
class Measurement:
    """Measures a cluster. sites: by region, and the global server's; they have started."""

    cluster: ClusterConfig
    limits: Limits
    say: Callable[[str], None]
    sites: dict[str, ProbeSite]

    def between(self, first: str, second: str) -> Way:
        """Measure the link between two places. Either may call the other; a region always calls the global server.
        Raises ProbeError."""
        one, other = (second, first) if first == GLOBAL else (first, second)
        try:
            way = self.sites[one].measure(self.sites[other], self.limits)
        except ProbeError as error:
            if other == GLOBAL:
                raise
            try:
                way = self.sites[other].measure(self.sites[one], self.limits)
            except ProbeError as reverse:
                raise ProbeError(f"neither end reaches the other: {error}; {reverse}") from None
        self.say(f"{first} – {second}: {_words(way)}")
        return way

    def inside(self, region: RegionConfig) -> Way | None:
        """Measure from a region's first host to some others; returns the slowest link. None: it has only one host."""
        hosts = _hosts(self.cluster, region).values()
        remote = [(h, w) for h, w in hosts if not _is_regions_machine(h, w)][:MAX_HOSTS]
        if len(remote) < 2:
            return None
        sites, ways = [], []
        with contextlib.ExitStack() as stack:
            for host, worker in remote:
                who: tuple[str, Role] = (worker.name, "worker") if worker else (region.name, "region")
                command = over_ssh(host.host, region.folder, (remote_python(region.folder), *SITE))
                if region.ssh is not None:  # its hosts are reached from the region's machine
                    command = over_ssh(region.ssh, region.folder, command)
                certificates = _security(self.cluster, host.host, region.folder)
                site = ProbeSite(*who, command, Address(host=host.host), certificates, host.host)
                sites.append(stack.enter_context(site))
                site.start()
            for site, (_, worker) in zip(sites, remote, strict=True):
                asked = {"master": remote[0][0].host, "env": worker.env if worker else {}}
                self.say(f"{region.name}: {site.where}: {site.ask(asked, START_S)['said']}")
            for site in sites[1:]:
                ways.append(sites[0].measure(site, self.limits))
                self.say(f"{region.name}: {sites[0].where} – {site.where}: {_words(ways[-1])}")
        return Way(max(w.rtt_ms for w in ways), min(w.up_gbps for w in ways), min(w.down_gbps for w in ways))

    def efficiencies(self, run: RunConfig) -> dict[str, float]:
        """Kind of accelerator → share of its peak that it reaches, on one host of the kind. Raises ProbeError."""
        found: dict[str, float] = {}
        for region in self.cluster.regions:
            for host, worker in _hosts(self.cluster, region).values():
                if host.device is None or host.device in found:
                    continue
                kind = self.cluster.devices[host.device]
                there = run
                if worker is not None:
                    setup = WorkerSetup.of(run, worker)
                    there = run.model_copy(update={"parallel": setup.parallel, "deepspeed": setup.deepspeed})
                request = {
                    "run": there.model_dump(by_alias=True, mode="json"),
                    "slots": host.slots,
                    "memory_bytes": 1e9 * kind.memory_gb,
                    "seconds": self.limits.seconds,
                    "env": worker.env if worker else {},
                    "host": None if _is_regions_machine(host, worker) else host.host,
                }
                said = self.sites[region.name].ask({"step": request}, 900.0)
                share = said["flops"] / (said["step_s"] * host.slots * kind.tflops * 1e12)
                self.say(
                    f"{host.device}: a step of {said['flops']:.3g} operations ({said['layers']} layers, {host.slots} "
                    f"ranks on {host.host}) takes {said['step_s']:.4g} s: {share:.1%} of {kind.tflops:g} Tflop/s a "
                    f"rank; at its peak {said['memory_bytes'] / 1e9:.3g} of {kind.memory_gb:g} GB a rank"
                )
                if share > 1:
                    raise ConfigError(
                        f"devices.{host.device}.tflops = {kind.tflops:g}, but {share * kind.tflops:.4g} were "
                        "measured; correct it"
                    )
                found[host.device] = share
        return found


def _hosts(cluster: ClusterConfig, region: RegionConfig) -> dict[str, tuple[HostConfig, WorkerConfig | None]]:
    """The hosts that stand in a region, with a worker that uses each."""
    found: dict[str, tuple[HostConfig, WorkerConfig | None]] = {}
    for home, worker in cluster.workers:
        for host in worker.hosts:
            if (host.region or home) == region.name:
                found.setdefault(host.host, (host, worker))
    for host in region.hosts:
        found.setdefault(host.host, (host, None))
    return found


def _is_regions_machine(host: HostConfig, worker: WorkerConfig | None) -> bool:
    return host.host in THIS_MACHINE or (worker is not None and worker.launcher == "local")


def _words(way: Way) -> str:
    return f"{1e3 * way.up_gbps:.4g} and {1e3 * way.down_gbps:.4g} Mbit/s, round trip {way.rtt_ms:.4g} ms"
