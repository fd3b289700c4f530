"""A worker that is formed anew of some of its hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from geotrain.config import HostConfig, WorkerSetup, load_cluster, load_run
from geotrain.plan.inventory import PlanError
from geotrain.plan.reforming import reform, without
from tests.support.small_runs import BATCH, write_files


def hosts(*names: str, device: str | None = None) -> tuple[HostConfig, ...]:
    return tuple(HostConfig(host=name, slots=2, device=device) for name in names)


def formed(folder: Path, *left: HostConfig, of: tuple[HostConfig, ...], memory_gb: float = 1.0) -> WorkerSetup:
    worker = {"launcher": "ssh", "hosts": [host.model_dump() for host in of]}
    files = write_files(folder, "run", 64, {"eu": [2]}, {"rule": {"name": "halos"}}, first=worker)
    raw = json.loads(files[1].read_text())
    raw["devices"] = {"gpu": {"memory_gb": memory_gb, "tflops": 100.0}}
    files[1].write_text(json.dumps(raw))
    run, cluster = load_run(files[0]), load_cluster(files[1])
    (_, configured), *_ = cluster.workers
    gone = {host.host for host in of} - {host.host for host in left}
    found = reform(run, cluster, "eu", configured, left)
    if {host.host for host in left} <= {host.host for host in of}:
        assert without(run, cluster, gone, lambda *_: True).workers == [("eu", found)]
    return WorkerSetup.of(run, found)


def test_a_step_has_as_many_samples_on_fewer_hosts(tmp_path: Path) -> None:
    every = hosts("a", "b", "c", "d")
    for left, ranks in ((every[:1], 2), (every[1:], 4), (every[2:], 4), ([HostConfig(host="e", slots=3)], 2)):
        setup = formed(tmp_path, *left, of=every)
        replicas = setup.config.ranks // setup.parallel.replica_ranks
        assert {host.host for host in setup.config.hosts} <= {host.host for host in left}
        assert setup.config.ranks == ranks, "the fastest of those that fit"
        assert BATCH % (replicas * setup.deepspeed["train_micro_batch_size_per_gpu"]) == 0


def test_like_hosts_take_the_places_of_those_that_left(tmp_path: Path) -> None:
    setup = formed(tmp_path, *hosts("s", "d", "t", "a"), of=hosts("a", "b", "c", "d"))
    assert [host.host for host in setup.config.hosts] == ["a", "s", "t", "d"] and setup.config.parallel is None


def test_a_worker_that_fits_nowhere_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    every = hosts("a", "b", device="gpu")
    with pytest.raises(PlanError, match=r"fits on no hosts .* is short of [\d,]+ bytes a rank"):
        formed(tmp_path, every[0], of=every, memory_gb=1e-6)
