"""`geotrain serve`: one server as a process, its state in the run's folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from torch import Tensor

from geotrain.config import RunConfig, load_cluster, load_run, shard_name
from geotrain.launch.site_processes import LaunchRequest
from geotrain.net.server.server_process import serve
from geotrain.net.server.server_setup import ServerSetup
from geotrain.outer.messages import GLOBAL

# Takes (canonical name, fp32 tensor) pairs, and a function that says whether to go on; gives the loss.
FinalValidation = Callable[[Iterable[tuple[str, Tensor]], Callable[[], bool]], float]


def run_server(
    region: str | None, run_path: Path, cluster_path: Path | None, resume: bool, shard: int | None = None,
    launch: str = "",
) -> int:  # fmt: skip
    """The server of a region, or the global one (None); or one of its shards. Gives the exit code. Raises
    ConfigError.

    launch: as `geotrain.net.storage.recovery.recover` takes it; a shard, which ends when its coordinator says so,
    needs none."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run, cluster = load_run(run_path), load_cluster(cluster_path or run_path.parent / "cluster.json")
    if not (run.run_folder / "run.json").exists():  # `geotrain status`, `export` and the like look for them there
        LaunchRequest(run, cluster, (), resume).write_files(run.run_folder)
    server = region or GLOBAL
    folder = run.run_folder / "servers" / (server if shard is None else shard_name(server, shard))
    evaluate = final_validation(run) if region is None else None
    return serve(ServerSetup(run, cluster, server, folder, shard, evaluate, launch), resume)


def final_validation(run: RunConfig) -> FinalValidation | None:
    """How the global server validates the run's final weights; None: it does not. Of a model of the user's own, only
    the weights are known here: its loop validates it."""
    wanted = run.monitor.validate_every_samples is not None and run.data.validation
    return partial(_loss, run) if wanted and run.model.weights is None else None


def _loss(run: RunConfig, weights: Iterable[tuple[str, Tensor]], go_on: Callable[[], bool]) -> float:
    from geotrain.commands.evaluate import loss_of_weights  # imports transformers, at a run's end only

    return loss_of_weights(run, weights, go_on)
