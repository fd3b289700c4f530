"""Disks of servers with shards in processes of their own are lost, and their state comes back from S3 over HTTP."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.net.server.server_setup import ServerSetup
from geotrain.net.storage.remote_snapshots import Copies
from geotrain.net.storage.snapshots import read_weights
from geotrain.net.transport import rpc
from geotrain.net.transport.operator_client import command
from tests.support.net_worlds import BUSY_S, FakeWorker, wait_for
from tests.support.object_storage import make_bucket, s3_server
from tests.support.server_processes import Server, Site

SAMPLES = 160  # 40 jobs


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@dataclass
class Ended:
    weights: dict[str, Tensor]
    status: dict[str, Any]
    committed: list[int]  # samples after each part of the run
    versions: list[list[int]]


@dataclass
class Story:
    """A run that is trained in steps, so that nothing depends on time: each worker one job, in turn."""

    site: Site
    servers: dict[str, Server] = field(default_factory=dict)
    workers: list[FakeWorker] = field(default_factory=list)
    lives: int = 0

    def copies(self, server: str) -> Copies:
        copies = ServerSetup(self.site.run, self.site.cluster, server, self.site.folder).copies()
        assert copies is not None
        return copies

    def serve(self, *names: str, resume: bool = False) -> None:
        self.servers.update({name: self.site.serve(name, resume) for name in names})

    def join(self) -> None:
        for worker in self.workers:
            worker.close()
        self.lives += 1
        self.workers = [self.site.worker(name, f"life-{self.lives}") for name in ("a", "b")]
        for worker in self.workers:
            worker.join()

    def train(self, rounds: int) -> None:
        for _ in range(rounds):
            for worker in self.workers:
                lease = worker.lease()
                assert lease is not None
                worker.train(lease)
            self.rest()

    def rest(self) -> None:
        """Until what is on its way has arrived."""

        def quiet() -> bool:
            region = self.site.status("eu")
            return bool(region["connected"] and region["versions"] and not (region["in_flight"] or region["pending"]))

        wait_for(quiet)

    def copy(self) -> None:
        """Have a checkpoint of each server in the store."""
        for server in (GLOBAL, "eu"):
            before = self.copies(server).whole()
            command(self.site.address(server), rpc.Control("snapshot"), BUSY_S)
            wait_for(lambda s=server, n=before: self.copies(s).whole()[-1:] > n[-1:])

    def lose(self, *names: str) -> None:
        """The disks of these."""
        for name in names:
            self.servers[name].send(signal.SIGKILL)
            self.servers[name].process.join(BUSY_S)
            shutil.rmtree(self.site.folder / name)
        self.serve(*names, resume=True)

    def committed(self) -> int:
        samples: int = self.site.status(GLOBAL)["committed_samples"]
        return samples

    def end(self) -> Ended:
        while (leases := [worker.lease() for worker in self.workers])[0] is not None:
            for worker, lease in zip(self.workers, leases, strict=True):
                if lease is not None:
                    worker.train(lease)
            self.rest()
        for worker in self.workers:
            worker.leave()
            worker.close()
        for name, server in self.servers.items():
            assert server.ended()[0] == 0, (name, server.ended())
        status = json.loads((self.site.folder / GLOBAL / "status.json").read_text())
        return Ended(dict(read_weights(self.site.folder / GLOBAL, self.site.parameter_map)), status, [], [])


def told(folder: Path, s3: dict[str, str], shards: int, of_top: tuple[str, ...], of_region: tuple[str, ...]) -> Ended:
    """The run in which those disks are lost, and then all. of_top, of_region: whose."""
    folder.mkdir()
    url = make_bucket(f"bucket-{abs(hash(folder))}", s3) + "/copies"
    settings: dict[str, Any] = dict(snapshots=url, environment=s3, every_minutes=1000.0, lease_reserve=0)
    story = Story(Site(folder, "halos", SAMPLES, shards=shards, **settings))
    committed, versions = [], []

    def note() -> None:
        committed.append(story.committed())
        versions.append(story.site.status(GLOBAL)["versions"])

    story.serve(*story.site.processes)
    story.join()
    story.train(2)
    story.copy()
    note()
    story.train(1)
    note()
    story.lose(*of_top)
    wait_for(lambda: story.committed() < committed[-1])
    story.rest()
    note()
    story.train(2)
    note()
    story.lose(*of_region)
    story.join()
    story.rest()
    story.train(1)
    story.copy()
    note()
    story.train(1)
    note()
    story.lose(*story.site.processes)
    wait_for(lambda: story.committed() < committed[-1])
    story.join()
    story.rest()
    note()
    ended = story.end()
    ended.committed, ended.versions = committed, versions
    return ended


@pytest.mark.long("geotrain/net", "geotrain/outer")
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_disks_are_lost_and_the_run_goes_on_as_that_of_servers_in_one_process(
    tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard's, its coordinator's, then all. What was lost is trained again, and the weights are bit for bit those
    of a run whose servers, of one process each, lost their disks at the same times."""
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    wanted = told(tmp_path / "one", s3, 0, (GLOBAL,), ("eu",))
    assert wanted.committed[2] == wanted.committed[0] < wanted.committed[1], "the newest checkpoint was taken"
    assert wanted.status["committed_samples"] == SAMPLES and wanted.status["open_leases"] == 0
    cases: dict[str, Callable[[], Ended]] = {
        "shards": lambda: told(tmp_path / "shards", s3, 2, ("global.shard-0",), ("eu.shard-1",)),
        "coordinators": lambda: told(tmp_path / "coordinators", s3, 2, (GLOBAL,), ("eu",)),
    }
    for which, run in cases.items():
        found = run()
        assert (found.committed, found.versions) == (wanted.committed, wanted.versions), which
        assert found.status["committed_samples"] == SAMPLES and found.status["open_leases"] == 0, which
        for name, tensor in wanted.weights.items():
            assert torch.equal(found.weights[name], tensor), (which, name)
