"""Runs servers as processes, with their state in the run's folder: `geotrain serve`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from geotrain.common.names import ENDLESS_SAMPLES, GLOBAL
from geotrain.config import (
    Address,
    ClusterConfig,
    ConfigError,
    RunConfig,
    changed_run,
    host_port,
    load_cluster,
    load_run,
    shard_name,
)
from geotrain.config.agreement import config_changes
from geotrain.config.cluster import EVERY_ADDRESS
from geotrain.launch.site_processes import LaunchRequest
from geotrain.net.server.enrollment_server import CERTIFICATES, WEIGHTS, EnrollmentServer
from geotrain.net.server.server_process import serve
from geotrain.net.server.server_setup import ServerSetup
from geotrain.net.storage.snapshots import alone_in
from geotrain.net.transport import rpc
from geotrain.net.transport.enrollment import TOKEN

# Takes (canonical name, fp32 tensor) pairs, and a function that says whether to go on; gives the loss.
FinalValidation = Callable[[Iterable[tuple[str, Tensor]], Callable[[], bool]], float]


def run_server(
    site: str, run_path: Path, cluster_path: Path | None, resume: bool, shard: int | None = None, launch: str = ""
) -> int:
    """Run the server of a site, GLOBAL or a region, or one of its shards. Returns the exit code. Raises ConfigError.

    launch: name of the launch, by which a server that had ended in it stays ended. A shard needs none, since it ends
    when its ledger says so.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run, cluster = load_run(run_path), load_cluster(cluster_path or run_path.parent / "cluster.json")
    if not (run.run_folder / "run.json").exists():  # `geotrain status`, `export` and the like look for them there
        LaunchRequest(run, cluster, (), resume).write_files(run.run_folder)
    if site != GLOBAL:
        cluster.region(site)  # raises ConfigError, which names the regions there are
    folder = run.run_folder / "servers" / (site if shard is None else shard_name(site, shard))
    evaluate = final_validation(run) if site == GLOBAL else None
    newest = regions_added(run.run_folder / "cluster.json") if site == GLOBAL else None  # its shards grow, too
    return serve(ServerSetup(run, cluster, site, folder, shard, evaluate, launch, newest), resume)


def regions_added(path: Path) -> Callable[[ClusterConfig], ClusterConfig]:
    """Return what gives the cluster of a run's folder where regions were added to it, and else the one that is
    served."""
    looked_at = 0

    def newest(served: ClusterConfig) -> ClusterConfig:
        nonlocal looked_at
        with suppress(OSError, ConfigError):
            if (now := path.stat().st_mtime_ns) != looked_at:
                looked_at, cluster = now, load_cluster(path)
                before, after = ({r.name: [w.name for w in r.workers] for r in c.regions} for c in (served, cluster))
                if before != after and after == {**after, **before}:
                    return cluster
        return served

    return newest


# Names under which rules are asked for where one server is all: its workers speak to the global one.
RULES: dict[str, dict[str, Any]] = {
    "async": {"name": "region_momentum"},  # without regions: each delta is averaged in as it comes
    "halos": {"name": "halos"},
    "diloco": {"name": "sync"},
    "local-sgd": {"name": "sync", "lr": 1.0, "momentum": 0.0},
}


def run_alone(
    folder: Path, rule: str, port: int, bind: str, steps: int | None, workers: int | None, resume: bool,
    changes: tuple[str, ...] = (),
) -> int:  # fmt: skip
    """Serve a run that no file describes, whose workers join by address and token. Returns the exit code.

    rule: of RULES. steps: of the run, over all workers; None: it goes on until all have left. workers: so many must
    join before it begins, 1 if not given. resume: the folder holds such a run, or none; it may have been moved.
    changes: keys to set, as `geotrain.config.load_run` takes them.
    Raises ConfigError, CertificateError, OSError.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    folder, kind = folder.absolute(), RULES[rule]
    everywhere = bind in EVERY_ADDRESS
    address = Address(port=port, bind=bind) if everywhere else Address(host=bind, port=port)
    others_say = host_port(own_address() if everywhere else bind, port)
    if (folder / CERTIFICATES).exists() and not resume:
        raise ConfigError(f"{folder}: holds a run already; give --resume to go on with it, or another --folder")

    began = folder / "run.json"
    name = load_run(began).name if began.exists() else folder.name  # the folder may have been renamed

    def make_run(every: int, samples_per_step: int) -> RunConfig:
        raw: Any = {
            "name": name,
            "folder": str(folder),
            "model": {"weights": str(folder / WEIGHTS)},
            "data": {
                "train_samples": (steps or ENDLESS_SAMPLES) * samples_per_step,
                "samples_per_step": samples_per_step,
            },
            "outer": {"levels": 1, "local_steps": every, "rule": kind},
        }
        return changed_run(raw, changes, "geotrain serve")

    first = make_run(1, 1)  # what is wrong with the command line is said before anybody joins
    if first.outer.rule.synchronous and None in (steps, workers):
        raise ConfigError(f"--rule {rule}: its rounds need every worker, to the end: state --steps and --workers")
    if not first.outer.flat:
        raise ConfigError("--set outer.levels: whoever joins speaks to this server itself; regions need a run file")
    rpc.check_free(address)
    with alone_in(folder):  # one that waits for its first workers would begin the run of another anew
        enrollments = EnrollmentServer(folder, make_run, address, workers or 1)
        if enrollments.run is not None:
            again = make_run(enrollments.run.outer.local_steps, enrollments.run.samples_per_step)
            if differ := config_changes(enrollments.run, again):
                raise ConfigError(f"{folder}: began otherwise ({'; '.join(differ)}); resume with the same options")
            enrollments.run = again
        print(
            f"geotrain serve: {name} listens at {others_say}. In each worker:\n  export {TOKEN}={enrollments.token}\n"
            f'  geotrain.OuterLoop.join("{others_say}", "NAME", model, every=64)',
            flush=True,
        )
        run, cluster = asyncio.run(enrollments.first_members())
        state, newest, enroll = folder / "servers" / GLOBAL, enrollments.newest, enrollments.enroll
        return serve(ServerSetup(run, cluster, GLOBAL, state, newest=newest, enroll=enroll), resume=True)


def own_address() -> str:
    """Find the address by which other machines reach this one; its name, where it has no way to others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # of a network for examples; nothing is sent
        return str(probe.getsockname()[0])
    return socket.gethostname()


def final_validation(run: RunConfig) -> FinalValidation | None:
    """Return how the global server validates the run's final weights; None: it does not, as for a model of the
    user's own, of which only the weights are known here: its loop validates it."""
    wanted = run.monitor.validate_every_samples is not None and run.data.validation
    return partial(_loss, run) if wanted and run.model.weights is None else None


def _loss(run: RunConfig, weights: Iterable[tuple[str, Tensor]], go_on: Callable[[], bool]) -> float:
    from geotrain.commands.evaluate import loss_of_weights  # imports transformers, at a run's end only

    return loss_of_weights(run, weights, go_on)
