"""`geotrain launch`: a whole run. Checks the configuration, starts every site's servers and workers, shows how it
goes, and ends with the run's exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from geotrain.config import (
    EXIT_FOR_GOOD,
    Address,
    ClusterConfig,
    ConfigError,
    RunConfig,
    config_digest,
    load_cluster,
    load_run,
)
from geotrain.files import whole_file
from geotrain.launch import wan
from geotrain.launch.check import (
    check_data,
    check_ports_are_free,
    check_together,
    free_ports,
    link_to_global,
    links_between,
)
from geotrain.launch.progress import Display, last_words, new_console, size
from geotrain.launch.site import Order, far_site, processes, sites_of, write_files
from geotrain.launch.started import tail
from geotrain.launch.supervise import STOP_DEADLINE_S, Death, Outcome, Supervisor
from geotrain.launch.watching import event_log, writer
from geotrain.launch.world import this_machine
from geotrain.monitor.events import EventLog, ProcessDied
from geotrain.monitor.monitor import LAUNCHER, Monitor
from geotrain.outer.messages import GLOBAL

OUTCOME = "outcome.json"  # in the run's folder, once its launcher has ended: exit code and reason
DRAIN_S = 900.0  # servers flush and write their last snapshot
HOLDER_BYTES = 300  # of a lock's file: host and process id of its holder
WAN_CONTROL = "wan.control"  # in the run's folder: commands to the pump of emulated links


def launch(run_path: Path, cluster_path: Path, resume: bool = False, only: tuple[str, ...] = ()) -> int:
    """Run it until it is finished, fails, or is stopped by a signal. Gives the exit code.

    only: of its sites ("global", regions) start these alone, and here: the others are started by hand, or by jobs of
    their own, before or after. Then `resume` also begins what is not there yet.
    Raises ConfigError, DataError, UnsupportedModelError, CertificateError, LaunchError before anything is started.
    """
    console = new_console()
    run, cluster = load_run(run_path), load_cluster(cluster_path)
    check_together(run, cluster)
    if only:
        cluster = _brought_here(cluster, only)
    hosts = {site: host for site, host in sites_of(cluster).items() if not only or site in only}
    if any(host is None for site, host in hosts.items() if site != GLOBAL):
        check_data(run)  # far regions check theirs
    folder = run.run_folder.absolute()
    with locked(folder, only), contextlib.ExitStack() as stack:
        _check_folder(run, folder, resume, only)
        emulated = _emulate(cluster, console)
        links = (
            stack.enter_context(wan.emulated(emulated, between=links_between(cluster), control=folder / WAN_CONTROL))
            if emulated
            else None
        )
        cluster = resolve(cluster, links, tuple(site for site, host in hosts.items() if host is None))
        order = Order(run, cluster, tuple(site for site, host in hosts.items() if host is None), resume)
        write_files(order, folder)
        inside = links.namespaces if links else {}
        if GLOBAL in hosts:
            (folder / OUTCOME).unlink(missing_ok=True)
        starting = [links.process] if links else []
        starting += processes(order, folder, this_machine(), inside)
        starting += [far_site(order, site, host) for site, host in hosts.items() if host]
        events = stack.enter_context(event_log(run, folder, only))
        if GLOBAL in hosts:
            stack.enter_context(Monitor(run, cluster, LAUNCHER, events))
        supervisor = stack.enter_context(_supervisor(order, folder, events, console))
        for process in starting:
            supervisor.start(process)
        console.print(f"{run.name}: {len(starting)} processes started; logs in {supervisor.logs}", highlight=False)
        display = stack.enter_context(Display(run, cluster, console)) if GLOBAL in hosts else None
        outcome = supervisor.wait(display.show if display else lambda: None, run.monitor.every_s)
        if display:
            display.finish(folder)
            _write_outcome(folder, outcome)
    if links:
        _tell_pump(folder / "logs" / f"{links.process.name}.log", console)
    if outcome.code == 0 and outcome.reason:
        outcome = _with_what_is_left(outcome, last_words(folder, (GLOBAL,)).get(GLOBAL, {}))
    _tell(outcome)
    return outcome.code


def launch_site() -> int:
    """On another machine: start what the line on standard input says, until it ends. Gives the exit code."""
    order = Order.from_line(_read_line(0))
    folder = order.run.run_folder.absolute()
    if set(order.sites) - {GLOBAL}:
        check_data(order.run)
    with (
        locked(folder, order.sites, take_over=True),
        event_log(order.run, folder, order.sites) as events,
        _supervisor(order, folder, events, new_console()) as supervisor,
    ):
        write_files(order, folder)
        supervisor.stop_on_end_of(0)
        for process in processes(order, folder, this_machine()):
            supervisor.start(process)
        outcome = supervisor.wait()
    _tell(outcome)
    return EXIT_FOR_GOOD if 0 < outcome.code < 128 else outcome.code  # what could be tried again was


def _supervisor(order: Order, folder: Path, events: EventLog, console: Console) -> Supervisor:
    """With its deaths written down."""

    def tell(death: Death) -> None:
        events.write(ProcessDied(death.unit, death.how, death.pause_s, death.restarts))
        then = "given up" if death.pause_s is None else f"started again in {death.pause_s:.3g} s"
        console.print(f"{death.unit} {death.how}; {then} (restarts so far: {death.restarts})", style="yellow")

    sync = order.run.outer.rule == "sync"  # every worker takes part in every round
    return Supervisor(folder / "logs", DRAIN_S, order.cluster.restart, sync, tell, writer(events))


def _with_what_is_left(outcome: Outcome, top: Mapping[str, Any]) -> Outcome:
    """Some were given up while others finished: has the run trained all it was to train?"""
    left = int(top.get("train_samples", 0)) - int(top.get("committed_samples", 0))
    if left <= 0:
        return outcome
    return Outcome(1, f"{left} samples are not trained: continue with --resume; {outcome.reason}")


def _brought_here(cluster: ClusterConfig, only: tuple[str, ...]) -> ClusterConfig:
    """With these sites on this machine. Raises ConfigError."""
    known = {GLOBAL: cluster.global_server, **{region.name: region.server for region in cluster.regions}}
    for site in only:
        if site not in known:
            raise ConfigError(f"--only {site}: the cluster has no such site; its sites: {', '.join(known)}")
        for name in {site, GLOBAL}:
            if known[name].port == 0:
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
    cluster: ClusterConfig, links: wan.Wan | None = None, here: tuple[str, ...] | None = None
) -> ClusterConfig:
    """The cluster with every address known: free ports for 0, addresses of emulated links. Raises ConfigError.

    here: sites whose servers are started on this machine; None: those without `ssh`.
    """
    ports = free_ports(1 + len(cluster.regions))

    def at(address: Address, emulated_host: str | None, port: int) -> Address:
        return Address(host=emulated_host or address.host, port=address.port or port)

    regions = tuple(
        region.model_copy(
            update={"server": at(region.server, links.addresses[region.name] if links else None, ports[i])}
        )
        for i, region in enumerate(cluster.regions)
    )
    global_server = at(cluster.global_server, links.global_address if links else None, ports[-1])
    if here is None:
        here = tuple(site for site, host in sites_of(cluster).items() if host is None)
    local = [global_server] if GLOBAL in here else []
    if links is None:
        local += [region.server for region in regions if region.name in here]
    check_ports_are_free(local)
    return cluster.model_copy(update={"global_server": global_server, "regions": regions})


def _emulate(cluster: ClusterConfig, console: Console) -> dict[str, wan.LinkConfig]:
    """The links to emulate, by region; none when the cluster does not ask for it, or this machine cannot."""
    if not cluster.emulate_links:
        return {}
    why_not = wan.cannot_emulate()
    if why_not:
        console.print(f"links are not emulated: {why_not}; regions use the plain loopback interface", style="yellow")
        return {}
    return {region.name: link_to_global(cluster, region.name) for region in cluster.regions}


def _check_folder(run: RunConfig, folder: Path, resume: bool, only: tuple[str, ...] = ()) -> None:
    servers = folder / "servers"
    begun = any((servers / site).exists() for site in only) if only else servers.exists()
    if begun and not resume:
        raise ConfigError(
            f"{folder} holds a run already: continue it with --resume, or give this one another name or folder"
        )
    if not begun and resume and not only:
        raise ConfigError(f"{folder} holds no run to resume; start without --resume")
    if servers.exists() and (folder / "run.json").exists():
        before = load_run(folder / "run.json")
        if config_digest(before) != config_digest(run):
            raise ConfigError(
                f"{folder} was begun with another model, data or outer block (see its run.json); resume with the "
                "same, or give this run another name or folder"
            )


@contextlib.contextmanager
def locked(folder: Path, sites: tuple[str, ...] = (), take_over: bool = False) -> Iterator[None]:
    """One launcher at a time, and one for each site started apart (whose folder may be this one, on a shared file
    system). The kernel lets go of the lock however this process ends.

    take_over: stop the launcher on this machine that holds it: one behind a connection that broke, which it does not
    know yet. Raises ConfigError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / "-".join((".lock", *sites)), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        if not _lock(fd) and not (take_over and _take_over(fd)):
            raise ConfigError(f"{folder}: this run is running already")
        os.pwrite(fd, f"{socket.gethostname()} {os.getpid()}\n".encode().ljust(HOLDER_BYTES), 0)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _take_over(fd: int) -> bool:
    """Whether the lock is ours, its holder having been stopped."""
    host, pid = os.pread(fd, HOLDER_BYTES, 0).decode().split() or ("", "")
    if host != socket.gethostname():
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid), signal.SIGTERM)
    deadline = time.monotonic() + STOP_DEADLINE_S + 10.0
    while not _lock(fd):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _read_line(fd: int) -> bytes:
    """Unbuffered, so that what follows the line stays to be noticed."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    return line


def _tell_pump(log: Path, console: Console) -> None:
    """What emulating the links cost, from the pump's last words."""
    with contextlib.suppress(IndexError, ValueError, KeyError):
        said = json.loads(tail(log)[-1])
        share, carried = said["cpu_s"] / said["wall_s"], size(said["carried_bytes"])
        console.print(f"emulated links carried {carried} with {share:.1%} of a core", highlight=False)


def _write_outcome(folder: Path, outcome: Outcome) -> None:
    with whole_file(folder / OUTCOME) as file:
        json.dump(dataclasses.asdict(outcome), file)


def _tell(outcome: Outcome) -> None:
    if outcome.reason:
        print(f"geotrain: {outcome.reason}", file=sys.stderr, flush=True)
