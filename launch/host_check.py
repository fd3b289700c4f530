"""Looks at every host of a run before a launch: what is wrong there, and what to do, in one table.

Hosts are asked as a launch itself would start processes there, by each worker's launcher, each region's from the
region's machine (`python -m geotrain.launch.host_check` there, with a LaunchRequest on standard input).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape

from geotrain.common.names import SHARE_DEVICES
from geotrain.config import ClusterConfig, ConfigError, RunConfig, WorkerSetup
from geotrain.launch.host_facts import MARK, HostFacts, read_host
from geotrain.launch.host_rules import Finding, HostNeeds, Look, findings
from geotrain.launch.launchers.base import HostLauncher, Inquiry, WorldLauncher, regions_of
from geotrain.launch.launchers.registry import launcher_of
from geotrain.launch.launchers.ssh import over_ssh
from geotrain.launch.one_host import ask
from geotrain.launch.site_processes import LaunchRequest, fixed_master_port, remote_python
from geotrain.launch.terminal import size, table_of

HERE = "this machine"
ASK_S = 60.0  # for one command to answer: ssh, Python's imports there, torch's where there are GPUs
SITE_S = 150.0  # for a region's machine, which asks its hosts
AT_ONCE = 64  # commands
NO_FACTS = "it reported nothing of itself"  # though the command went well


def hosts_of(
    run: RunConfig, cluster: ClusterConfig, sites: tuple[str, ...]
) -> dict[tuple[str, str], list[HostNeeds]]:
    """Collect (launcher's name, host) → the needs of each worker there, for all hosts on which these sites start
    ranks. The host of `local` workers is `HERE`."""
    from geotrain.parallelism.transformer_engine import asked_by
    from geotrain.plan.model.memory import stage_memory

    found: dict[tuple[str, str], list[HostNeeds]] = {}
    for number, (region, worker) in enumerate(cluster.workers):
        setup = WorkerSetup.of(run, worker)
        asks = asked_by(setup.precision, setup.parallel) or ("", (0, 0))
        stages = setup.parallel.pipeline
        memory = stage_memory(run, run.architecture, setup, worker.ranks, range(stages))
        ranks = iter(range(worker.ranks))
        launcher = launcher_of(worker)
        for position, host in enumerate(worker.hosts):
            here = [memory[rank * stages // worker.ranks] for rank in islice(ranks, host.slots)]
            starter = region if isinstance(launcher, WorldLauncher) else host.region or region
            if starter not in sites:
                continue
            # Only where several machines must agree on a port is it known before they start.
            fixed = position == 0 and not (launcher.on_this_machine and len(regions_of(region, worker)) == 1)
            needs = HostNeeds(
                worker.name,
                host.slots,
                max(sum(parts.values()) for parts in here),
                sum(parts["optimizer"] for parts in here),
                host.device,
                (fixed_master_port(worker, number),) if fixed else (),
                worker.env.get("DS_ACCELERATOR") == "cpu",
                *asks,
                SHARE_DEVICES in worker.env or (launcher.on_this_machine and SHARE_DEVICES in os.environ),
                worker.hosts[0].host if worker.hosts[1:] and not launcher.on_this_machine else "",
            )
            where = HERE if launcher.on_this_machine else host.host
            found.setdefault((launcher.name, where), []).append(needs)
    return found


def inquiries(
    cluster: ClusterConfig, hosts: Mapping[tuple[str, str], list[HostNeeds]], folder: Path
) -> list[Inquiry]:
    """The commands that ask these hosts; none for `HERE`. Pure but for this process's Python and working directory.

    A `HostLauncher` asks each host by itself, another one all hosts of a worker at once.
    """
    workers = {worker.name: worker for _, worker in cluster.workers}
    together: dict[tuple[str, ...], list[str]] = {}  # hosts that are asked by one command
    for (_, host), needs in hosts.items():
        worker = needs[0].worker
        alone = isinstance(launcher_of(workers[worker]), HostLauncher)
        together.setdefault((worker, host) if alone else (worker,), []).append(host)
    found = []
    for (name, *_), names in together.items():
        launcher = launcher_of(workers[name])
        if not launcher.on_this_machine:
            ports = [port for host in names for each in hosts[launcher.name, host] for port in each.ports]
            masters = [each.master for host in names for each in hosts[launcher.name, host] if each.master]
            command = facts_command(folder, ports, next(iter(masters), ""))
            found.append(launcher.inquiry(workers[name], names, command))
    return [inquiry for inquiry in found if inquiry is not None]


def facts_command(folder: Path, ports: list[int], master: str = "") -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "geotrain.launch.host_facts", str(folder), master or "-", *map(str, ports))


def check_hosts(
    run: RunConfig, cluster: ClusterConfig, sites: tuple[str, ...], resume: bool = False, ask: bool = True
) -> list[Finding]:
    """Look for what is wrong with this machine and, if ask, with all other hosts on which these sites start ranks.

    For each AT_ONCE of them it takes ASK_S and the launcher's `queue_s` at most; a moment if all is on this machine.
    """
    folder = run.run_folder.absolute()
    hosts = hosts_of(run, cluster, sites)
    looks: dict[str, Look] = {}
    found: list[Finding] = []
    if local := [needs for (_, host), each in hosts.items() if host == HERE for needs in each]:
        begin = time.time()
        facts = read_host(folder, [port for needs in local for port in needs.ports])
        looks[HERE] = Look(facts, tuple(local), begin, time.time())
    asked = inquiries(cluster, hosts, folder) if ask else []
    if asked:
        with ThreadPoolExecutor(min(AT_ONCE, len(asked))) as pool:
            for inquiry, (answers, lost) in zip(asked, pool.map(_ask, asked), strict=True):
                for host, look in answers.items():
                    before = looks[host].needs if host in looks else ()
                    looks[host] = replace(look, needs=(*before, *hosts[inquiry.launcher.name, host]))
                found += lost
    return [*found, *findings(looks, resume), *_short_of_memory(run, cluster, sites)]


def _short_of_memory(run: RunConfig, cluster: ClusterConfig, sites: tuple[str, ...]) -> Iterator[Finding]:
    """Compare this machine's memory with what the servers of these sites need, where the cluster file states none."""
    from geotrain.plan.model.server_hosts import host_bytes

    needed = host_bytes(run, cluster)
    here = {cluster.sites[site].server.host for site in sites} - cluster.server_memory.keys()
    total = sum(count for host in here for site, count in needed.get(host, {}).items() if site in sites)
    if total > (has := psutil.virtual_memory().total):
        what = f"its servers need up to {size(total)} of memory, it has {size(has)}"
        yield Finding(HERE, what, "shards on more hosts (`geotrain plan`, server_hosts), or another machine", False)


def _ask(inquiry: Inquiry) -> tuple[dict[str, Look], list[Finding]]:
    """The hosts that answered, and a finding for each other."""
    begin = time.time()
    within_s = ASK_S + inquiry.launcher.queue_s
    said, why = ask(inquiry.command, within_s, env={**os.environ, **inquiry.env})
    answers = {
        host: Look(facts, (), begin, time.time())
        for host, facts in parse_answers(inquiry, said).items()
        if host in inquiry.hosts
    }
    lost = [host for host in inquiry.hosts if host not in answers]
    if inquiry.launcher.queue_s:  # a queue is no obstacle: the run's own job waits in it, too
        what, remedy = (
            f"{inquiry.command[0]} did not look at it: {why or NO_FACTS}",
            "none, if it is in use until the launch",
        )
        return answers, [Finding(host, what, remedy, False) for host in lost]
    return answers, [_unreached(host, why, inquiry.launcher.name) for host in lost]


def parse_answers(inquiry: Inquiry, said: str) -> dict[str, HostFacts]:
    """Read the facts that the inquiry's command printed; by host."""
    found = {}
    for line in said.splitlines():
        if MARK in line:
            facts = HostFacts.from_line(line)
            found[inquiry.launcher.host_of(inquiry, line, facts.name)] = facts
    return found


def _unreached(host: str, why: str, by: str = "ssh") -> Finding:
    if "geotrain" in why or "No such file" in why:
        remedy = f"GeoTrain must be there under the same paths as here ({Path(sys.executable)})"
    else:
        remedy = f"`ssh {host} true` must work here, without a password"
    return Finding(host, f"cannot be looked at by {by}: {why or NO_FACTS}", remedy)


# ------------------------------------------------------------------------------------------------ regions behind ssh


def check_far_sites(run: RunConfig, cluster: ClusterConfig) -> list[Finding]:
    """Look for what is wrong with the machines of the sites behind ssh, and with their hosts; asks all at once."""
    request = LaunchRequest(run, cluster, (), False)

    def look_at(site: str, host: str) -> list[Finding]:
        folder = cluster.sites[site].folder
        there = replace(request.seen_from(folder), sites=(site,))
        command = over_ssh(host, folder, (remote_python(folder), "-P", "-m", "geotrain.launch.host_check"))
        said, why = ask(command, SITE_S, input=there.to_line())
        for line in said.splitlines():
            if MARK in line:
                theirs = [Finding(**each) for each in json.loads(line.partition(MARK)[2])]
                return [replace(each, host=host if each.host == HERE else f"{host} → {each.host}") for each in theirs]
        return [_unreached(host, why)]

    far = [(name, site.ssh) for name, site in cluster.sites.items() if site.ssh is not None]
    if not far:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(far))) as pool:
        listed = [found for each in pool.map(lambda pair: look_at(*pair), far) for found in each]
    return list(dict.fromkeys(listed))  # a machine may keep two sites


def answer_for_site() -> int:
    """Print what is wrong with this machine, a region's, and its hosts, as a line of JSON. Returns the exit code."""
    from geotrain.launch.preflight import obstacles, port_obstacles

    request = LaunchRequest.from_line(sys.stdin.buffer.readline())
    run, cluster = request.run, request.cluster
    missing = (*obstacles(run, cluster, request.sites, shows=False), *port_obstacles(run, cluster, request.sites))
    found = [Finding(HERE, str(obstacle), "") for obstacle in missing]
    found += check_hosts(run, cluster, request.sites, request.resume)
    print(MARK + json.dumps([asdict(each) for each in found]), flush=True)
    return 0


# ---------------------------------------------------------------------------------------------------------- reporting


def show(found: list[Finding], console: Console) -> None:
    """Print the findings as a table, refusals first."""
    if found:
        rows = [
            {"": "refused" if each.refuses else "note", "host": escape(each.host)}
            | {"what is wrong": escape(each.what), "what to do": escape(each.remedy)}
            for each in sorted(found, key=lambda each: not each.refuses)
        ]
        console.print("\nhosts", table_of(rows, left=tuple(rows[0])), sep="\n")


def refuse(found: list[Finding]) -> None:
    """Raise ConfigError for the first of the findings that refuse a run."""
    bad = [each for each in found if each.refuses]
    if bad:
        more = f" (and {len(bad) - 1} more, above)" if len(bad) > 1 else ""
        remedy = f"; {bad[0].remedy}" if bad[0].remedy else ""
        raise ConfigError(f"{bad[0].host}: {bad[0].what}{remedy}{more}")


if __name__ == "__main__":
    sys.exit(answer_for_site())
