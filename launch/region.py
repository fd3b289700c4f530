"""`geotrain launch`: a whole run. Checks the configuration, starts every site's servers and workers, shows how it
goes, and ends with the run's exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from geotrain.config import Address, ClusterConfig, ConfigError, RunConfig, config_digest, load_cluster, load_run
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
from geotrain.launch.progress import Display, new_console, size
from geotrain.launch.site import Order, far_site, processes, sites_of, write_files
from geotrain.launch.supervise import Outcome, Supervisor, tail
from geotrain.launch.world import this_machine
from geotrain.outer.messages import GLOBAL

OUTCOME = "outcome.json"  # in the run's folder, once its launcher has ended: exit code and reason
DRAIN_S = 900.0  # servers flush and write their last snapshot


def launch(run_path: Path, cluster_path: Path, resume: bool = False) -> int:
    """Run it until it is finished, fails, or is stopped by a signal. Gives the exit code.

    Raises ConfigError, DataError, UnsupportedModelError, CertificateError, LaunchError before anything is started.
    """
    console = new_console()
    run, cluster = load_run(run_path), load_cluster(cluster_path)
    check_together(run, cluster)
    if any(region.ssh is None for region in cluster.regions):
        check_data(run)  # far regions check theirs
    folder = run.run_folder.absolute()
    with locked(folder), contextlib.ExitStack() as stack:
        _check_folder(run, folder, resume)
        emulated = _emulate(cluster, console)
        links = stack.enter_context(wan.emulated(emulated, between=links_between(cluster))) if emulated else None
        cluster = resolve(cluster, links)
        display = Display(run, cluster, console)
        order = Order(run, cluster, tuple(s for s, host in sites_of(run, cluster).items() if host is None), resume)
        write_files(order, folder)
        inside = links.namespaces if links else {}
        (folder / OUTCOME).unlink(missing_ok=True)
        starting = [links.process] if links else []
        starting += processes(order, folder, this_machine(), inside)
        starting += [far_site(order, site, host) for site, host in sites_of(run, cluster).items() if host]
        supervisor = stack.enter_context(Supervisor(folder / "logs", DRAIN_S))
        for process in starting:
            supervisor.start(process)
        console.print(f"{run.name}: {len(starting)} processes started; logs in {supervisor.logs}", highlight=False)
        stack.enter_context(display)
        outcome = supervisor.wait(display.show, run.monitor.every_s)
        display.finish(folder)
        _write_outcome(folder, outcome)
    if links:
        _tell_pump(folder / "logs" / f"{links.process.name}.log", console)
    _tell(outcome)
    return outcome.code


def launch_site() -> int:
    """On another machine: start what the line on standard input says, until it ends. Gives the exit code."""
    order = Order.from_line(_read_line(0))
    folder = order.run.run_folder.absolute()
    if set(order.sites) - {GLOBAL}:
        check_data(order.run)
    with locked(folder, order.sites), Supervisor(folder / "logs", DRAIN_S) as supervisor:
        write_files(order, folder)
        supervisor.stop_on_end_of(0)
        for process in processes(order, folder, this_machine()):
            supervisor.start(process)
        outcome = supervisor.wait()
    _tell(outcome)
    return outcome.code


def resolve(cluster: ClusterConfig, links: wan.Wan | None = None) -> ClusterConfig:
    """The cluster with every address known: free ports for 0, addresses of emulated links. Raises ConfigError."""
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
    local = [] if cluster.global_ssh else [global_server]
    if links is None:
        local += [region.server for region in regions if region.ssh is None]
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


def _check_folder(run: RunConfig, folder: Path, resume: bool) -> None:
    begun = (folder / "servers").exists()
    if begun and not resume:
        raise ConfigError(
            f"{folder} holds a run already: continue it with --resume, or give this one another name or folder"
        )
    if not begun and resume:
        raise ConfigError(f"{folder} holds no run to resume; start without --resume")
    if begun and (folder / "run.json").exists():
        before = load_run(folder / "run.json")
        if config_digest(before) != config_digest(run):
            raise ConfigError(
                f"{folder} was begun with another model, data or outer block (see its run.json); resume with the "
                "same, or give this run another name or folder"
            )


@contextlib.contextmanager
def locked(folder: Path, sites: tuple[str, ...] = ()) -> Iterator[None]:
    """One launcher at a time, and one for each far site (whose folder may be this one, on a shared file system).

    The kernel lets go of the lock however this process ends. Raises ConfigError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / "-".join((".lock", *sites)), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"{folder}: this run is running already") from None
    finally:
        os.close(fd)


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
