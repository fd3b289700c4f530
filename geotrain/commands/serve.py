"""`geotrain serve`: one server as a process, its state in the run's folder."""

from __future__ import annotations

import logging
from pathlib import Path

from geotrain.config import load_cluster, load_run
from geotrain.launch.site_processes import LaunchRequest
from geotrain.net.server_process import serve_global, serve_region
from geotrain.outer.messages import GLOBAL


def run_server(region: str | None, run_path: Path, cluster_path: Path | None, resume: bool) -> int:
    """The server of a region, or the global one (None). Gives the exit code. Raises ConfigError."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run, cluster = load_run(run_path), load_cluster(cluster_path or run_path.parent / "cluster.json")
    if not (run.run_folder / "run.json").exists():  # `geotrain status`, `export` and the like look for them there
        LaunchRequest(run, cluster, (), resume).write_files(run.run_folder)
    servers = run.run_folder / "servers"
    if region is None:
        return serve_global(run, cluster, servers / GLOBAL, resume)
    cluster.region(region)
    return serve_region(run, cluster, region, servers / region, resume)
