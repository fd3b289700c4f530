"""`geotrain serve`: one server as a process, its state in the run's folder."""

from __future__ import annotations

import logging
from pathlib import Path

from geotrain.config import ClusterConfig, RunConfig, load_cluster, load_run
from geotrain.net.serve import serve_global, serve_region
from geotrain.outer.messages import GLOBAL

SERVERS = "servers"  # within the run's folder: a folder for each server


def run_global(run_path: Path, cluster_path: Path | None, resume: bool) -> int:
    """The exit code. Raises ConfigError."""
    run, cluster = _load(run_path, cluster_path)
    return serve_global(run, cluster, run.run_folder / SERVERS / GLOBAL, resume)


def run_region(region: str, run_path: Path, cluster_path: Path | None, resume: bool) -> int:
    """The exit code. Raises ConfigError."""
    run, cluster = _load(run_path, cluster_path)
    cluster.region(region)
    return serve_region(run, cluster, region, run.run_folder / SERVERS / region, resume)


def _load(run_path: Path, cluster_path: Path | None) -> tuple[RunConfig, ClusterConfig]:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return load_run(run_path), load_cluster(cluster_path or run_path.parent / "cluster.json")
