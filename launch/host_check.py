"""Looks at every host of a run before a launch: what is wrong there, and what to do, in one table.

Hosts are asked as a launch itself would start processes there: by ssh, by pdsh, by srun, each region's from the
region's machine (`python -m geotrain.launch.host_check` there, with a LaunchRequest on standard input).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from geotrain.config import ClusterConfig, ConfigError, RunConfig, WorkerSetup
from geotrain.launch.host_facts import MARK, HostFacts, read_host
from geotrain.launch.host_rules import Finding, HostNeeds, Look, findings
from geotrain.launch.site_processes import LaunchRequest, over_ssh, remote_python, ssh_hosts
from geotrain.launch.terminal import table_of
from geotrain.launch.worker_command import FIRST_MASTER_PORT, regions_of

HERE = "this machine"
ASK_S = 60.0  # for one command to answer: ssh, Python's imports there, torch's where there are GPUs
SITE_S = 150.0  # for a region's machine, which asks its hosts
QUEUE_S = 30  # for Slurm to give the nodes
AT_ONCE = 64  # commands
BY_COMMAND = ("ssh", "pdsh", "slurm")  # launchers whose hosts can be asked; MPIs start processes in ways of their own


@dataclass(frozen=True)
class Inquiry:
    """One command that asks some hosts. by: the launcher that it goes by."""

    by: str
    hosts: tuple[str, ...]
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def hosts_of(
    run: RunConfig, cluster: ClusterConfig, sites: tuple[str, ...]
) -> dict[tuple[str, str], list[HostNeeds]]:
    """(launcher, host) → what each worker wants of it, for all hosts on which these sites start ranks. Those of
    `local` workers are `HERE`."""
    from geotrain.parallelism.transformer_engine import asked_by
    from geotrain.plan.model.memory import rank_memory

    found: dict[tuple[str, str], list[HostNeeds]] = {}
    workers = [(region.name, worker) for region in cluster.regions for worker in region.workers]
    for number, (region, worker) in enumerate(workers):
        setup = WorkerSetup.of(run, worker)
        asks = asked_by(setup.precision, setup.parallel) or ("", (0, 0))
        memory = rank_memory(run, run.architecture, worker)
        for position, host in enumerate(worker.hosts):
            # DeepSpeed's multi-node launchers start all ranks from the worker's home region.
            starter = (host.region or region) if worker.launcher in ("local", "ssh") else region
            if starter not in sites:
                continue
            # Only where several machines must agree on a port is it known before they start.
            fixed = position == 0 and not (worker.launcher == "local" and len(regions_of(region, worker)) == 1)
            needs = HostNeeds(
                worker.name,
                host.slots,
                sum(memory.values()),
                host.slots * memory["optimizer"],
                host.device,
                (worker.master_port or FIRST_MASTER_PORT + number,) if fixed else (),
                worker.env.get("DS_ACCELERATOR") == "cpu",
                *asks,
            )
            where = HERE if worker.launcher == "local" else host.host
            found.setdefault((worker.launcher, where), []).append(needs)
    return found


def inquiries(
    cluster: ClusterConfig, hosts: Mapping[tuple[str, str], list[HostNeeds]], folder: Path
) -> list[Inquiry]:
    """The commands that ask these hosts; none for `HERE`. Pure but for this process's Python and working directory.

    ssh asks each host apart; pdsh and srun all of a worker's at once.
    """
    found = []
    workers = {worker.name: worker for region in cluster.regions for worker in region.workers}
    of_worker: dict[str, list[str]] = {}
    for (launcher, host), needs in hosts.items():
        command = facts_command(folder, [port for each in needs for port in each.ports])
        if launcher == "ssh":
            env = workers[needs[0].worker].env
            found.append(Inquiry("ssh", (host,), over_ssh(host, None, command, env)))
        elif launcher in BY_COMMAND:
            of_worker.setdefault(needs[0].worker, []).append(host)
    for name, names in of_worker.items():
        worker = workers[name]
        ports = [port for host in names for each in hosts[worker.launcher, host] for port in each.ports]
        command, listed = facts_command(folder, ports), ",".join(names)
        arguments = shlex.split(worker.launcher_args)
        if worker.launcher == "pdsh":  # as DeepSpeed calls it
            settings = [f"{key}={value}" for key, value in worker.env.items()]
            script = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(['exec', 'env', *settings, *command])}"
            line = ("pdsh", "-S", "-f", "1024", "-w", listed, *arguments, script)
            found.append(Inquiry("pdsh", tuple(names), line, {"PDSH_RCMD_TYPE": "ssh"}))
        else:
            size = (f"--nodes={len(names)}", "--ntasks-per-node=1", f"--nodelist={listed}")
            line = ("srun", *size, *arguments, f"--immediate={QUEUE_S}", *command)
            found.append(Inquiry("slurm", tuple(names), line, worker.env))
    return found


def facts_command(folder: Path, ports: list[int]) -> tuple[str, ...]:
    return (sys.executable, "-m", "geotrain.launch.host_facts", str(folder), *map(str, ports))


def check_hosts(
    run: RunConfig, cluster: ClusterConfig, sites: tuple[str, ...], resume: bool = False, ask: bool = True
) -> list[Finding]:
    """What is wrong with this machine and, if ask, with all other hosts on which these sites start ranks. For each
    AT_ONCE of them it takes ASK_S at most, by srun QUEUE_S more; a moment where everything is on this machine."""
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
                    looks[host] = replace(look, needs=(*before, *hosts[inquiry.by, host]))
                found += lost
    return [*found, *findings(looks, resume)]


def _ask(inquiry: Inquiry) -> tuple[dict[str, Look], list[Finding]]:
    """The hosts that answered, and a finding for each other."""
    begin, why = time.time(), ""
    within_s = ASK_S + (QUEUE_S if inquiry.by == "slurm" else 0)
    try:
        done = subprocess.run(
            inquiry.command,
            env={**os.environ, **inquiry.env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
        )
        said = done.stdout
    except OSError as error:
        said, why = "", str(error)
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        said, why = (
            out.decode(errors="replace") if isinstance(out, bytes) else out,
            f"no answer within {within_s:g} s",
        )
    else:
        # Where a program is missing or fails, its own words stand last; ssh itself says one line.
        lines = done.stderr.strip().splitlines()
        why = lines[-1].strip() if lines else f"exit code {done.returncode}"
    answers = {
        host: Look(facts, (), begin, time.time())
        for host, facts in parse_answers(inquiry, said).items()
        if host in inquiry.hosts
    }
    lost = [_lost(inquiry, host, why) for host in inquiry.hosts if host not in answers]
    return answers, lost


def parse_answers(inquiry: Inquiry, said: str) -> dict[str, HostFacts]:
    """Host → its facts, from what the command printed: pdsh puts a host's name before its lines, srun's hosts are
    known by the names that they give."""
    found = {}
    for line in said.splitlines():
        if MARK not in line:
            continue
        facts = HostFacts.from_line(line)
        host = {"ssh": inquiry.hosts[0], "pdsh": line.partition(":")[0].strip(), "slurm": facts.name}[inquiry.by]
        found[host] = facts
    return found


def _lost(inquiry: Inquiry, host: str, why: str) -> Finding:
    if inquiry.by == "slurm":  # a queue is no obstacle: the run's own job waits in it, too
        return Finding(
            host, f"srun did not look at it: {why}", "none, if its nodes are in use until the launch", False
        )
    if "geotrain" in why or "No such file" in why:
        remedy = f"GeoTrain must be there under the same paths as here ({Path(sys.executable)})"
    else:
        remedy = f"`ssh {host} true` must work here, without a password"
    return Finding(host, f"cannot be looked at by {inquiry.by}: {why}", remedy)


# ------------------------------------------------------------------------------------------------ regions behind ssh


def check_far_sites(run: RunConfig, cluster: ClusterConfig) -> list[Finding]:
    """What is wrong with the machines of the sites behind ssh, and with their hosts; all are asked at once."""
    folders = {"global": cluster.global_folder, **{region.name: region.folder for region in cluster.regions}}
    request = LaunchRequest(run, cluster, (), False)

    def ask(site: str, host: str) -> list[Finding]:
        there = replace(request.seen_from(folders[site]), sites=(site,))
        command = over_ssh(host, folders[site], (remote_python(folders[site]), "-m", "geotrain.launch.host_check"))
        try:
            done = subprocess.run(command, input=there.to_line(), capture_output=True, timeout=SITE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            late = isinstance(error, subprocess.TimeoutExpired)
            return [_lost(Inquiry("ssh", (host,), command), host, "no answer in time" if late else str(error))]
        for line in done.stdout.decode(errors="replace").splitlines():
            if MARK in line:
                told = [Finding(**each) for each in json.loads(line.partition(MARK)[2])]
                return [replace(each, host=host if each.host == HERE else f"{host} → {each.host}") for each in told]
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit code {done.returncode}"
        return [_lost(Inquiry("ssh", (host,), command), host, why)]

    far = [(site, host) for site, host in ssh_hosts(cluster).items() if host is not None]
    if not far:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(far))) as pool:
        told = [found for each in pool.map(lambda pair: ask(*pair), far) for found in each]
    return list(dict.fromkeys(told))  # a machine may keep two sites


def answer_for_site() -> int:
    """On a region's machine: print what is wrong with it and its hosts, as a line of JSON. Returns the exit code."""
    from geotrain.launch.preflight import obstacles, port_obstacles

    request = LaunchRequest.from_line(sys.stdin.buffer.readline())
    run, cluster = request.run, request.cluster
    missing = (*obstacles(run, cluster, request.sites, shows=False), *port_obstacles(run, cluster, request.sites))
    found = [Finding(HERE, str(obstacle), "") for obstacle in missing]
    found += check_hosts(run, cluster, request.sites, request.resume)
    print(MARK + json.dumps([asdict(each) for each in found]), flush=True)
    return 0


# ---------------------------------------------------------------------------------------------------------- telling


def show(found: list[Finding], console: Console) -> None:
    """The table: refusals first."""
    if found:
        rows = [
            {"": "refused" if each.refuses else "note", "host": escape(each.host)}
            | {"what is wrong": escape(each.what), "what to do": escape(each.remedy)}
            for each in sorted(found, key=lambda each: not each.refuses)
        ]
        console.print("\nhosts", table_of(rows, left=tuple(rows[0])), sep="\n")


def refuse(found: list[Finding]) -> None:
    """Raises ConfigError for the first of the findings that refuse."""
    bad = [each for each in found if each.refuses]
    if bad:
        more = f" (and {len(bad) - 1} more, above)" if len(bad) > 1 else ""
        remedy = f"; {bad[0].remedy}" if bad[0].remedy else ""
        raise ConfigError(f"{bad[0].host}: {bad[0].what}{remedy}{more}")


if __name__ == "__main__":
    sys.exit(answer_for_site())
