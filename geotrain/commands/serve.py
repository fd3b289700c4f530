"""Runs one server as a process, with its state in the run's folder: `geotrain serve`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import RunConfig, load_cluster, load_run, shard_name
from geotrain.launch.site_processes import LaunchRequest
from geotrain.net.server.server_process import serve
from geotrain.net.server.server_setup import ServerSetup

# Takes (canonical name, fp32 tensor) pairs, and a function that says whether to go on; gives the loss.
FinalValidation = Callable[[Iterable[tuple[str, Tensor]], Callable[[], bool]], float]


def run_server(
    site: str, run_path: Path, cluster_path: Path | None, resume: bool, shard: int | None = None, launch: str = ""
) -> int:
    """Run the server of a site, GLOBAL or a region, or one of its shards. Returns the exit code. Raises ConfigError.

    launch: name of the launch, by which a server that had ended in it stays ended. A shard needs none, since it ends
    when its coordinator says so.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run, cluster = load_run(run_path), load_cluster(cluster_path or run_path.parent / "cluster.json")
    if not (run.run_folder / "run.json").exists():  # `geotrain status`, `export` and the like look for them there
        LaunchRequest(run, cluster, (), resume).write_files(run.run_folder)
    if site != GLOBAL:
        cluster.region(site)  # raises ConfigError, which names the regions there are
    folder = run.run_folder / "servers" / (site if shard is None else shard_name(site, shard))
    evaluate = final_validation(run) if site == GLOBAL else None
    return serve(ServerSetup(run, cluster, site, folder, shard, evaluate, launch), resume)


def final_validation(run: RunConfig) -> FinalValidation | None:
    """Return how the global server validates the run's final weights; None: it does not, as for a model of the
    user's own, of which only the weights are known here: its loop validates it."""
    wanted = run.monitor.validate_every_samples is not None and run.data.validation
    return partial(_loss, run) if wanted and run.model.weights is None else None


def _loss(run: RunConfig, weights: Iterable[tuple[str, Tensor]], go_on: Callable[[], bool]) -> float:
    from geotrain.commands.evaluate import loss_of_weights  # imports transformers, at a run's end only

    return loss_of_weights(run, weights, go_on)
