"""A run under Slurm itself: the sbatch template, DeepSpeed's launcher over srun, a job that queues again."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from geotrain.launch.check import free_ports
from geotrain.net.storage.snapshots import checked_meta
from tests.support.process_trees import marked, new_mark, until
from tests.support.slurm import slurm
from tests.support.small_runs import prepare_text, status, write_files

TEMPLATE = Path(__file__).parents[2] / "configs/slurm/region.sbatch"
START_S = 500.0  # until ranks have joined, on a busy machine


@pytest.mark.long("configs/slurm", "launch")
@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(900)
def test_a_job_that_is_told_to_end_queues_again_and_goes_on(tmp_path: Path) -> None:
    prepare_text(tmp_path)
    files = write_files(tmp_path, "run", 320, {"eu": [2]}, {"rule": {"name": "halos"}}, min_step_s=0.15)
    cluster, ports = json.loads(files[1].read_text()), free_ports(5)
    cluster["global_server"] = {"host": "127.0.0.1", "port": ports[0]}
    cluster["global_shards"] = [{"host": "127.0.0.1", "port": ports[3]}]
    (region,) = cluster["regions"]
    region["server"] = {"host": "elsewhere", "port": ports[1]}  # the template puts the job's first node here
    region["shards"] = [{"host": "elsewhere", "port": ports[4]}]
    region["workers"][0] |= {
        "launcher": "slurm",
        "launcher_args": "--overlap",
        "master_port": ports[2],
        "hosts": [{"host": "none", "slots": 2, "device": "h100"}],
    }
    region["workers"][0]["env"] = {"GLOO_SOCKET_IFNAME": "lo"}
    cluster["devices"] = {"h100": {"memory_gb": 80, "tflops": 989}}
    files[1].write_text(json.dumps(cluster))
    log, mark = tmp_path / "job.log", new_mark()

    def updates() -> int:
        events = tmp_path / "run/servers/eu/events.jsonl"
        return events.read_text().count('"UpdateApplied"') if events.exists() else 0

    with slurm(tmp_path / "slurm") as running:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        running.env |= {**mark, "PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        said, options = running.said, ("--parsable", "--ntasks=4", f"--output={log}")
        job = said("sbatch", *options, str(TEMPLATE), *map(str, files), "global", "eu").strip()

        def job_is(word: str) -> bool:
            return word in said("scontrol", "show", "job", job)

        assert until(lambda: updates() > 0 or job_is("JobState=FAILED"), START_S) and updates() > 0, log.read_text()
        before = updates()
        said("scancel", "--batch", "--signal=TERM", job)  # as Slurm does 180 s before a job's time is over
        assert until(lambda: job_is("Restarts=1 ") and job_is("JobState=PENDING"), START_S), log.read_text()
        # Slurm would wait for two minutes. In the second of its end, a job's new credential counts as revoked.
        said("scontrol", "update", f"JobId={job}", "StartTime=now+3")
        assert until(lambda: updates() > before, START_S), log.read_text()
        assert until(lambda: job_is("JobState=COMPLETED"), START_S), log.read_text()
        assert until(lambda: marked(mark) == [])
    last = status(files[0], "global")
    assert last["complete"] and last["committed_samples"] == 320
    resolved = json.loads((tmp_path / "run/cluster.json").read_text())["regions"][0]
    node = socket.gethostname().partition(".")[0]
    assert resolved["server"]["host"] == node and resolved["workers"][0]["hosts"][0]["host"] == node
    assert [(shard["host"], shard["port"]) for shard in resolved["shards"]] == [(node, ports[4])]
    assert "stopped by SIGTERM" in log.read_text()
    for server in ("global", "eu"):  # a job that is requeued is the same launch
        newest = max((tmp_path / "run/servers" / server / "snapshots").glob("*/meta.json"))
        ended = checked_meta(newest.read_bytes())["meta"]
        assert (ended["ended"], ended["launch"]) == (True, f"slurm-{job}")
    # srun was asked for the node before its ranks began, and has looked at it
    assert re.search(rf"note +{node} +no GPU is visible, the cluster file says h100", log.read_text()), (
        log.read_text()
    )
