"""The run that is disturbed: two regions of two workers each, linked by TLS over emulated links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.small_runs import cluster_file, run_file, write_files
from geotrain.config import ClusterConfig
from geotrain.net.transport.authority import make_certificates

CHUNK_ELEMENTS = 4096  # a tenth of the model


def make_world(
    folder: Path, pace_s: float, samples: int = 4_000_000, shards: int = 0, **outer: Any
) -> tuple[Path, Path]:
    """Data, run file and cluster file in the folder. One worker has two ranks: its updates come in halves.

    pace_s: least seconds of an inner step. shards: of each server, in processes of their own; fragments are
    cut into as many pieces. outer: keys of the run's outer block in place of those here.
    """
    fragments = {"layers_per_fragment": 1, "chunk_elements": CHUNK_ELEMENTS, "pieces": max(1, shards)}
    run = run_file(folder, "faults", samples, (4, 2), (50, 20000))
    run["outer"] = {
        "rule": {"name": "halos", "updates_per_send": 3, "region": {"lr_per_update": 0.2, "beta": 0.5, "buffer": 2}},
        "down": {"name": "int8"}, "local_steps": 6, "lease_reserve": 12, "fragments": fragments,
        "overlap": {"steps": 3, "late": "continue", "adopt": "rebase"}, **outer,
    }  # fmt: skip
    run["checkpoint"] = {"every_jobs": 8, "every_minutes": 0.05}
    ranks = {"eu": (2, 1), "us": (1, 1)}
    cluster = cluster_file(
        "faults",
        {region: {f"{region}-{i}": (n, pace_s) for i, n in enumerate(each)} for region, each in ranks.items()},
        {"eu": (0.2, 30.0), "us": (0.1, 100.0)},
        restart={"limit": 1000, "first_s": 0.5, "longest_s": 4.0},
    )
    cluster["global_shards"] = [{}] * shards
    for region in cluster["regions"]:
        region["shards"] = [{}] * shards
    make_certificates(ClusterConfig.model_validate_json(json.dumps(cluster)), folder / "certificates")
    cluster["security"] = {"folder": str(folder / "certificates")}
    return write_files(folder, run, cluster)
