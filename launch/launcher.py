"""`geotrain launch`: launches a whole run. It checks the configuration, starts the servers and workers of every site,
shows how the run goes, and ends with the run's exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from geotrain.common.files import OutputError, read_object, try_lock, write_whole
from geotrain.common.names import GLOBAL
from geotrain.config import Address, ClusterConfig, ConfigError, RunConfig, load_cluster, load_run
from geotrain.config.agreement import config_changes
from geotrain.emulate import wan
from geotrain.launch.branches import REQUEST, where_it_goes_on
from geotrain.launch.check import (
    check_port_is_free,
    check_together,
    free_ports,
    link_to_global,
    links_between,
    server_addresses,
    with_data_digest,
)
from geotrain.launch.far_hosts import prepare_far_hosts
from geotrain.launch.forming import without_cordoned
from geotrain.launch.host_check import check_hosts, refuse, show
from geotrain.launch.machine import this_machine
from geotrain.launch.preflight import cautions, obstacles, port_obstacles, sites_here
from geotrain.launch.run_rules import misfits
from geotrain.launch.site_processes import LaunchRequest, local_processes, proxied_links, pump_process, remote_site
from geotrain.launch.spikes import SpikeWatch
from geotrain.launch.supervisor import RunOutcome, Supervisor, exit_code, tail
from geotrain.launch.terminal import RunDisplay, last_status, new_console, share_of, size
from geotrain.monitor.events import EventLog, Follower, ProcessDied, Trouble, WorkerFormed
from geotrain.monitor.monitor import LAUNCHER, Monitor
from geotrain.outer.events import Event

OUTCOME = "outcome.json"  # in the run's folder, once its launcher has ended: exit code and reason
DRAIN_S = 900.0  # after the workers' end servers may take so long to send, and write their last snapshot
_FINISHED = (
    "is finished: all its data is trained. `geotrain export {folder} OUTPUT` writes its weights; to train more, "
    "raise data.train_samples and launch with --resume."
)
HOLDER_BYTES = 300  # length of a lock's file, which names the host and process id of its holder
WAN_CONTROL = "wan.control"  # in the run's folder: commands to the pump of emulated links


class RunsAlready(ConfigError):
    """Another launcher runs this run, or this site of it."""


def launch(
    run_path: Path, cluster_path: Path, resume: bool = False, only: tuple[str, ...] = (),
    changes: tuple[str, ...] = (), launch_id: str = "", places: tuple[str, ...] = (), added: bool = False,
    without_checkpoints: bool = False,
) -> int:  # fmt: skip
    """Launch the run and wait until it is finished, fails, or is stopped by a signal. Returns the exit code.

    only: start only these sites ("global" or regions), on this machine; the others are started by hand or by jobs of
    their own, before or after. Then `resume` also begins sites that have no state yet. changes: of the run file, see
    `load_run`. launch_id: names the launch, where that is to outlive this launcher. added: the sites of `only` join a
    run that is on, with the cluster that it has then, and stand here or behind ssh.
    places: see `placed`. without_checkpoints: go on also where a worker's own state is lost.
    Raises ConfigError, DataError, UnsupportedModelError, CertificateError, EmulationError and LaunchError.
    """
    console = new_console()
    run, cluster = load_run(run_path, changes), placed(load_cluster(cluster_path), places)
    check_together(run, cluster)
    for misfit in misfits(run, cluster):
        raise misfit
    before = _launched_before(run.run_folder.absolute()) if resume else None
    if before:  # else a change of the run file would be reported as another fault of its files
        check_changes(run, before[0], run.run_folder)
    run = with_data_digest(run, before[0] if before else None)
    if only and not added:
        cluster = _with_sites_here(cluster, only)
    hosts = {name: site.ssh for name, site in cluster.sites.items() if not only or name in only}
    here = tuple(site for site, host in hosts.items() if host is None)
    for obstacle in obstacles(run, cluster, here, not resume, GLOBAL in hosts, without_checkpoints):
        raise obstacle
    for caution in cautions(run, cluster):
        console.print(caution, style="yellow", highlight=False)
    folder = run.run_folder.absolute()
    run = run.model_copy(update={"folder": str(folder)})  # the default follows the working directory of this process
    with locked(folder, only), contextlib.ExitStack() as stack:
        _check_folder(run, folder, resume, only)
        if resume and GLOBAL in hosts and _is_finished(run, folder):
            console.print(f"{run.name}: {_FINISHED.format(folder=folder)}", highlight=False, soft_wrap=True)
            return 0
        for obstacle in port_obstacles(run, cluster, here):  # else found when the folder holds a run already
            raise obstacle
        used = without_cordoned(run, cluster, folder)
        wrong = check_hosts(run, used, here, resume)  # sites behind ssh look at their own
        show(wrong, console)
        refuse(wrong)
        links = None
        if cluster.emulate_links and not wan.cannot_emulate():
            star = {region.name: link_to_global(cluster, region.name) for region in cluster.regions}
            between = links_between(cluster)
            links = stack.enter_context(wan.emulated(star, between=between, control=folder / WAN_CONTROL))
        cluster = resolve(cluster, links, here, before[1] if before else None)
        request = LaunchRequest(run, cluster, here, resume, uuid.uuid4().hex, launch_id, without_checkpoints)
        request.write_files(folder)
        if GLOBAL in hosts:
            (folder / OUTCOME).unlink(missing_ok=True)
        starting, options = [pump_process(links)] if links else [], dict[str, tuple[str, ...]]()
        if cluster.emulate_links and not links and not run.outer.flat:
            shaping, options = proxied_links(request, folder)
            starting.append(shaping)
        shaped, namespaces = bool(starting), links.namespaces if links else {}
        starting += local_processes(request, folder, this_machine(), namespaces, options)
        prepare_far_hosts(dataclasses.replace(request, cluster=used), folder, added)
        starting += [remote_site(request, site, host) for site, host in hosts.items() if host]
        events = stack.enter_context(event_log(run, folder, only))
        if GLOBAL in hosts:
            stack.enter_context(Monitor(run, cluster, LAUNCHER, events))
        say = partial(console.print, style="yellow", highlight=False, soft_wrap=True)
        supervisor = stack.enter_context(supervisor_of(request, folder, events, say))
        for process in starting:
            supervisor.start(process)
        console.print(f"{run.name}: {len(starting)} processes started; logs in {supervisor.logs}", highlight=False)
        display = stack.enter_context(RunDisplay(run, cluster, console, folder)) if GLOBAL in hosts else None
        troubles = troubles_of(request, folder, say)
        spikes = SpikeWatch(run, cluster, folder, not only, lambda what: supervisor.on_event(Trouble(what)))

        def tick() -> None:
            troubles()
            if display:
                display.show()
                spikes.look(display.latest.get(GLOBAL, {}))

        outcome = supervisor.wait(tick, run.monitor.every_s)
        troubles()
        if display:
            display.finish()
            try:
                write_whole(folder / OUTCOME, json.dumps(dataclasses.asdict(outcome)))
            except OutputError as error:  # the exit code and the reason say the same
                print(f"geotrain: {error}", file=sys.stderr)
    if shaped:
        with contextlib.suppress(IndexError, ValueError, KeyError):  # the pump's last line reports what it did
            said = json.loads(tail(supervisor.log("wan"))[-1])
            share, carried = said["cpu_s"] / said["wall_s"], size(said["carried_bytes"])
            console.print(f"emulated links carried {carried} with {share:.1%} of a core", highlight=False)
    # Some workers were given up while the others finished: is everything trained?
    if outcome.code == 0 and outcome.reason:
        top = last_status(folder)
        left = int(top.get("train_samples", 0)) - int(top.get("committed_samples", 0))
        if left > 0:
            outcome = RunOutcome(1, f"{left} samples are not trained: continue with --resume; {outcome.reason}")
    if display and (how := how_to_go_on(folder, run_path, cluster_path, changes)):
        console.print(how, style="yellow", highlight=False, soft_wrap=True)
    return exit_code(outcome)


def where_to_go_on(folder: Path) -> Path:
    """Follow a run whose launcher took it back, or was to and was killed before, to its present folder. Raises
    ConfigError, StoreError."""
    folder = where_it_goes_on(folder)
    if not (folder / REQUEST).exists():
        return folder
    from geotrain.launch.rollback import take_back  # which imports torch

    with locked(folder):
        return take_back(folder) or where_it_goes_on(folder)


def how_to_go_on(folder: Path, run_path: Path, cluster_path: Path, changes: tuple[str, ...] = ()) -> str:
    """Describe how to continue a run that has ended before its data did; empty if all is trained, or its global
    server's last status is on another machine."""
    top = last_status(folder)
    if not top or top.get("complete"):
        return ""
    words = ("geotrain", "launch", str(run_path), str(cluster_path), "--resume")
    again = shlex.join((*words, *(word for change in changes for word in ("--set", change))))
    return f"{share_of(top):.1%} of the data is trained, and kept; the run goes on with: {again}"


def event_log(run: RunConfig, folder: Path, sites: tuple[str, ...] = ()) -> EventLog:
    """Open the event log of a launcher, in the run's folder on this machine.

    sites: those of a launcher that starts only these. They are part of the file's name, because on a shared file
    system several launchers may have the same folder.
    """
    name = "-".join((LAUNCHER, *sites))
    return EventLog(folder / "events" / f"{name}.jsonl", source=name, enabled=run.monitor.enabled)


def supervisor_of(request: LaunchRequest, folder: Path, events: EventLog, say: Callable[[str], object]) -> Supervisor:
    """Make the supervisor of a launcher's processes. say: called with what a person should know of them."""

    def on_event(event: Event) -> None:
        events.write(event)
        if isinstance(event, ProcessDied):
            then = "given up" if event.pause_s is None else f"started again in {event.pause_s:.3g} s"
            say(f"{event.group} {event.how}; {then} (restarts so far: {event.restarts})")
        elif isinstance(event, WorkerFormed):
            of = f"formed of {', '.join(event.hosts)}: {event.layout}"
            say(f"{event.worker} is {of}{'; ' * bool(event.why)}{event.why}")
        elif isinstance(event, Trouble):
            say(event.what)

    sync = request.run.outer.rule.synchronous  # then every worker takes part in every round, and none can be given up
    return Supervisor(folder / "logs", DRAIN_S, request.cluster.restart, sync, on_event)


def troubles_of(request: LaunchRequest, folder: Path, say: Callable[[str], object]) -> Callable[[], None]:
    """Make a function that says what workers of the sites here have reported as trouble since it was last called."""
    names = [worker.name for region, worker in request.cluster.workers if region in request.sites]
    logs = {name: Follower(folder / "events" / f"{name}.jsonl") for name in names}

    def report(say: Callable[[str], object] = say) -> None:
        for name, log in logs.items():
            for record in log.read():
                if isinstance(record.event, Trouble):
                    say(f"{name}: {record.event.what}")

    report(lambda line: None)  # earlier launches have printed it
    return report


def placed(cluster: ClusterConfig, places: tuple[str, ...]) -> ClusterConfig:
    """Put sites on hosts that are known only now. places: each "SITE=HOST[,HOST…]"; the first host gets the site's
    server and shards. A region's only worker gets them all, with the slots of its first host in the file; of several
    each as many as it has there. Raises ConfigError."""
    for place in places:
        site, _, said = place.partition("=")
        hosts = [host for host in said.split(",") if host]
        if site not in cluster.sites or not hosts:
            known = ", ".join(cluster.sites)
            raise ConfigError(f"--at {place}: write SITE=HOST,HOST…, with one of the cluster's sites: {known}")

        def there(*addresses: Address, host: str = hosts[0]) -> tuple[Address, ...]:
            return tuple(address.model_copy(update={"host": host}) for address in addresses)

        if site == GLOBAL:
            (server,), shards = there(cluster.global_server), there(*cluster.global_shards)
            cluster = cluster.model_copy(update={"global_server": server, "global_shards": shards})
            continue
        region = cluster.region(site)
        counts, (server,) = [len(worker.hosts) for worker in region.workers], there(region.server)
        if len(counts) != 1 and sum(counts) != len(hosts):
            raise ConfigError(
                f"--at {place}: region {site!r} has {len(counts)} workers of {sum(counts)} hosts; name as many"
            )
        left = iter(hosts)
        workers = tuple(
            worker.model_copy(
                update={
                    "hosts": tuple(
                        worker.hosts[0].model_copy(update={"host": host})
                        for host in islice(left, count if len(counts) > 1 else None)
                    )
                }
            )
            for worker, count in zip(region.workers, counts, strict=True)
        )
        region = region.model_copy(update={"server": server, "shards": there(*region.shards), "workers": workers})
        regions = tuple(region if old.name == site else old for old in cluster.regions)
        cluster = cluster.model_copy(update={"regions": regions})
    return cluster


def _with_sites_here(cluster: ClusterConfig, only: tuple[str, ...]) -> ClusterConfig:
    """Put these sites on this machine instead of behind ssh. Raises ConfigError."""
    sites = cluster.sites
    for site in only:
        if site not in sites:
            raise ConfigError(f"--only {site}: the cluster has no such site; its sites: {', '.join(sites)}")
        for name in {site, GLOBAL}:
            if sites[name].server.port == 0:
                raise ConfigError(
                    f"--only {site}: the server of {name!r} needs a fixed port in the cluster file, which those find "
                    "who are started apart"
                )
    if cluster.emulate_links:
        raise ConfigError(f"--only {only[0]}: emulated links need the whole run in one launcher")
    regions = tuple(r.model_copy(update={"ssh": None}) if r.name in only else r for r in cluster.regions)
    return cluster.model_copy(
        update={"regions": regions, "global_ssh": None if GLOBAL in only else cluster.global_ssh}
    )


def resolve(
    cluster: ClusterConfig,
    links: wan.Wan | None = None,
    here: tuple[str, ...] | None = None,
    before: ClusterConfig | None = None,
) -> ClusterConfig:
    """Fill in all addresses of the cluster: free ports in place of 0, addresses of emulated links.

    here: the sites whose servers are started on this machine; None: those without `ssh`. before: as resolved by an
    earlier launch of the run, whose ports are taken again where they are free: regions that still run know them.
    Raises ConfigError.
    """
    known = {} if before is None else server_addresses(before, before.sites)
    emulated = {} if links is None else {GLOBAL: links.global_address, **links.addresses}
    wanted = server_addresses(cluster, cluster.sites)
    free = iter(free_ports(len(wanted)))
    found: dict[str, list[Address]] = {}  # by site: its server's, then its shards'
    for what, (site, address) in wanted.items():
        new = Address(host=emulated[site], port=address.port) if site in emulated else address
        _, old = known.get(what, (site, address))
        if new.port == 0 and old.port and old.host == new.host:
            with contextlib.suppress(ConfigError):
                check_port_is_free(old)
                new = old
        found.setdefault(site, []).append(new.model_copy(update={"port": new.port or next(free)}))
    for site in sites_here(cluster) if here is None else here:
        if links is None or site == GLOBAL:  # inside a namespace every port is free
            for address in found[site]:
                if address.host not in cluster.sites[site].far_hosts:
                    check_port_is_free(address)
    regions = tuple(
        region.model_copy(update={"server": found[region.name][0], "shards": tuple(found[region.name][1:])})
        for region in cluster.regions
    )
    server, *shards = found[GLOBAL]
    return cluster.model_copy(update={"global_server": server, "global_shards": tuple(shards), "regions": regions})


def _is_finished(run: RunConfig, folder: Path) -> bool:
    """Whether the last launch of the run in this folder, from here, has trained all its data and ended well."""
    outcome = read_object(folder / OUTCOME)  # empty: it goes on, was killed, or was none of the whole run
    top = last_status(folder)
    trained = bool(top.get("complete")) and top["committed_samples"] >= run.data.train_samples
    return trained and outcome.get("code") == 0


def _launched_before(folder: Path) -> tuple[RunConfig, ClusterConfig] | None:
    """Read both files as the run's last launch resolved them; None if they are not there, or not readable."""
    try:
        return load_run(folder / "run.json"), load_cluster(folder / "cluster.json")
    except (ConfigError, OSError):
        return None


def _check_folder(run: RunConfig, folder: Path, resume: bool, only: tuple[str, ...] = ()) -> None:
    servers = folder / "servers"
    begun = any((servers / site).exists() for site in only) if only else servers.exists()
    if begun and not resume and _is_finished(run, folder):
        why = _FINISHED.format(folder=folder)
        raise ConfigError(f"{folder} holds a run that {why} Or use another name or folder")
    if begun and not resume:
        raise ConfigError(
            f"{folder} holds a run already: continue it with --resume, or give this one another name or folder"
        )
    if not begun and resume and not only:
        raise ConfigError(f"{folder} holds no run to resume; start without --resume")
    if servers.exists() and (folder / "run.json").exists():
        check_changes(run, load_run(folder / "run.json"), folder)


def check_changes(run: RunConfig, before: RunConfig, folder: Path) -> None:
    """Compare a run file with that of the run's last launch. Raises ConfigError."""
    known, changes = before.data.sha256, config_changes(before, run)
    if known and run.data.sha256 not in (None, known):
        changes.append(f"data.sha256: was {known}, is {run.data.sha256}")
    if changes:
        live = any(change.startswith("outer.local_steps") for change in changes)
        raise ConfigError(
            f"{folder} was begun with other settings ({'; '.join(changes)}); resume with the same, or give this "
            f"run another name or folder{'; `geotrain set` changes outer.local_steps in a live run' * live}"
        )


@contextlib.contextmanager
def locked(folder: Path, sites: tuple[str, ...] = ()) -> Iterator[None]:
    """Keep other launchers of the same run, or of the same sites, out of the folder during the block.

    The kernel releases the lock however this process ends. Raises RunsAlready.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / "-".join((".lock", *sites)), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        if not try_lock(fd):
            holder = os.pread(fd, HOLDER_BYTES, 0).decode().split()
            where = " (host {}, process {})".format(*holder) if len(holder) == 2 else ""
            raise RunsAlready(f"{folder}: this run is running already{where}")
        os.pwrite(fd, f"{socket.gethostname()} {os.getpid()}\n".encode().ljust(HOLDER_BYTES), 0)
        yield
    finally:
        os.close(fd)
