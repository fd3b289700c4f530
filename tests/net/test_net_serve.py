"""Servers as processes: from a run file and a cluster file to exit codes."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.config import ClusterConfig, RunConfig, load_cluster, load_run, parse
from geotrain.initial import initial_tensor
from geotrain.launch.check import free_ports
from geotrain.net.client import MemberClient
from geotrain.net.link import Link
from geotrain.net.serve import serve_global, serve_region
from geotrain.net.store import SNAPSHOTS, Store, read_weights
from geotrain.outer.layout import layout_of
from geotrain.outer.server import identity_of
from tests.net.net_worlds import TINY, FakeWorker, halves, outer, wait_for, whole

# Servers fork from a process that has imported everything: that takes seconds, and there are many of them.
SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(["geotrain.net.serve"])


def serve(folder: Path, which: str, resume: bool, said: Path) -> None:
    """A server's whole process."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    torch.set_num_threads(1)
    run, cluster = load_run(folder / "run.json"), load_cluster(folder / "cluster.json")
    if which == "global":
        sys.exit(serve_global(run, cluster, folder / which, resume))
    sys.exit(serve_region(run, cluster, which, folder / which, resume))


class Server:
    def __init__(self, folder: Path, which: str, resume: bool, number: int) -> None:
        self.said = folder / f"stderr-{number}"
        self.process = SPAWN.Process(target=serve, args=(folder, which, resume, self.said))
        self.process.start()

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ended(self, within_s: float = 30) -> tuple[int | None, str]:
        """Exit code, and from where on stderr speaks of trouble (libraries may warn before)."""
        self.process.join(within_s)
        said = self.said.read_text()
        begins = [at for word in ("geotrain serve:", "Traceback") if (at := said.find(word)) >= 0]
        return self.process.exitcode, said[min(begins) :] if begins else ""


class Site:
    """A run's folder on this machine and the processes that serve it."""

    def __init__(
        self, folder: Path, rule: str = "halos", train_samples: int = 48, init_from: str | None = None
    ) -> None:
        self.folder = folder
        ports = free_ports(2)
        run = {
            "name": "tiny",
            "model": {"config": TINY},
            "data": {"train": "none", "sequence_length": 8, "train_samples": train_samples},
            "deepspeed": {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2},
            "outer": outer(rule).model_dump(by_alias=True, mode="json"),
            "checkpoint": {"every_updates": 10},
        }
        workers = [{"name": n, "hosts": [{"host": "localhost", "slots": 1}]} for n in ("a", "b")]
        cluster = {
            "name": "here",
            "global_server": {"port": ports[0]},
            "regions": [{"name": "eu", "server": {"port": ports[1]}, "workers": workers}],
        }
        (folder / "run.json").write_text(json.dumps(run))
        (folder / "cluster.json").write_text(json.dumps(cluster))
        self.run, self.cluster = parse(RunConfig, run, "run"), parse(ClusterConfig, cluster, "cluster")
        self.layout = layout_of(self.run)
        self.servers: list[Server] = []

    def serve(self, which: str, resume: bool = False) -> Server:
        self.servers.append(Server(self.folder, which, resume, len(self.servers)))
        return self.servers[-1]

    def address(self, which: str) -> str:
        return str(self.cluster.global_server if which == "global" else self.cluster.region(which).server)

    def worker(self, name: str, incarnation: str = "life-1") -> FakeWorker:
        cut = (halves if name == "a" else whole)(self.layout)
        identity = identity_of(self.run, self.layout)
        return FakeWorker(name, incarnation, self.address("eu"), self.layout, self.run.outer, cut, identity)

    def status(self, which: str) -> dict[str, Any]:
        client = MemberClient(self.address(which), connect_s=20)
        try:
            return client.status()
        finally:
            client.close()

    def events(self, which: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / which / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def site(tmp_path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    for server in made.servers:
        server.process.kill()
        server.process.join()


def work(site: Site, jobs: int, incarnation: str) -> list[int]:
    """Both workers train that many jobs each. Returns the samples' starts."""
    workers = [site.worker("a", incarnation), site.worker("b", incarnation)]
    for worker in workers:
        worker.join()
    starts = []
    for _ in range(jobs):
        for worker in workers:
            lease = worker.lease()
            assert lease is not None
            worker.train(lease)
            starts.append(lease.start)
    for worker in workers:
        worker.close()
    return starts


def test_a_run_from_start_to_end_with_a_pause(site):
    top, region = site.serve("global"), site.serve("eu")
    starts = work(site, 3, "life-1")
    links = site.status("eu")["links"]
    model_bytes = 4 * site.layout.numel
    assert links["up_bytes"] > 2 * model_bytes and links["down_bytes"] > 2 * model_bytes
    assert links["up_bytes"] >= links["peak_up_bytes_per_s"] > model_bytes / 4
    above = site.status("global")
    assert above["links"]["fragments"] == above["peers"]["eu"]["fragments"]
    for fragment in site.layout.fragments:
        moved = links["fragments"][fragment.name]
        each = 4 * fragment.numel + 4  # a payload and its checksum
        assert moved["up_bytes"] >= each and moved["up_bytes"] % each == 0
        assert moved["down_bytes"] >= 2 * each and moved["down_bytes"] % each == 0
        later = above["links"]["fragments"][fragment.name]  # an answer may have come between the two questions
        assert all(later[way] - moved[way] in (0, each) for way in moved)
    assert sum(f["up_bytes"] for f in links["fragments"].values()) < links["up_bytes"]
    assert abs(above["links"]["up_bytes"] - links["up_bytes"]) < 20_000
    assert above["peers"]["eu"]["received_bytes"] > 0.9 * links["up_bytes"]  # the rest: the one who asks
    assert above["peers"]["eu"]["sent_bytes"] > 0.9 * links["down_bytes"]

    region.send(signal.SIGTERM)  # a pause: region first, so that what is in flight is in its snapshot
    top.send(signal.SIGTERM)
    assert region.ended() == (0, "") and top.ended() == (0, "")
    traffic = [event for event in site.events("eu") if event["event"] == "LinkTraffic"]
    assert sum(event["up_bytes"] for event in traffic) >= links["up_bytes"]
    assert max(event["peak_up_bytes_per_s"] for event in traffic) >= links["peak_up_bytes_per_s"]
    assert not (site.folder / "global" / "listening.json").exists()

    top, region = site.serve("global", resume=True), site.serve("eu", resume=True)
    workers = [site.worker("a", "life-2"), site.worker("b", "life-2")]
    for worker in workers:
        worker.join()
    left = {worker.name: worker for worker in workers}
    while left:
        for name, worker in list(left.items()):
            lease = worker.lease()
            if lease is None:
                worker.leave()
                del left[name]
            else:
                worker.train(lease)
                starts.append(lease.start)
    for worker in workers:
        worker.close()
    assert region.ended() == (0, "") and top.ended() == (0, "")
    assert sorted(starts) == list(range(0, 48, 4))

    applied = [e for e in site.events("global") if e["event"] == "UpdateApplied"]
    assert sum(e["samples"] for e in applied) == 48
    kinds = {e["event"] for e in site.events("eu")}
    assert kinds >= {"Joined", "UpdateApplied", "SentUp", "Merged", "Left", "SnapshotWritten"}
    trained = [e for e in site.events("eu") if e["event"] == "UpdateApplied"]
    assert sum(e["samples"] for e in trained) == 48
    assert {e["payload_bytes"] for e in trained} == {4 * f.numel for f in site.layout.fragments}
    assert all(e["loss"] > 0 and e["staleness"] >= 0 for e in trained)

    weights = dict(read_weights(site.folder / "global", site.layout))
    first = {p.name: initial_tensor(p, site.run.seed) for p in site.layout.parameters}
    assert weights.keys() == first.keys()
    assert not any(torch.equal(weights[name], first[name]) for name in first)


def test_what_a_server_says_and_does_without_workers(site):
    """The first weights are on disk before any worker comes; control; a taken port; folders in use."""
    top = site.serve("global")
    wait_for(lambda: (site.folder / "global" / "listening.json").exists(), 30)
    for name, tensor in read_weights(site.folder / "global", site.layout):
        parameter = next(p for p in site.layout.parameters if p.name == name)
        assert torch.equal(tensor, initial_tensor(parameter, site.run.seed))

    code, said = site.serve("global", resume=True).ended()
    assert code == 1 and "another server is running in this folder" in said

    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", site.cluster.region("eu").server.port))
        squatter.listen()
        code, said = site.serve("eu").ended()
    assert code == 1 and said == (
        f"geotrain serve: cannot listen on {site.address('eu')}: Address already in use; "
        "stop what uses the port, or choose another in the cluster file\n"
    )

    async def control() -> None:
        link = Link(site.address("global"), "operator", "")
        assert (await link.control("snapshot")).endswith(f"{site.folder}/global/snapshots/00000002")
        await link.close()

    asyncio.run(control())
    top.send(signal.SIGTERM)
    assert top.ended() == (0, "")
    assert [e["event"] for e in site.events("global")].count("SnapshotWritten") == 3

    code, said = site.serve("global").ended()
    assert code == 1 and "holds the state of a run already; resume it, or choose another folder" in said


def test_servers_killed_at_any_time_leave_the_same_bits(tmp_path):
    """SIGKILL of the region server and the global server, in turns, during a synchronous run: every update is applied
    once, every sample trained once, and the weights are those of a run that nothing happened to. A region server also
    stops on SIGTERM while the global server is away."""
    ends = []
    for kills in (0, 4):
        (folder := tmp_path / str(kills)).mkdir()
        site = Site(folder, "sync", train_samples=96)
        servers = {which: site.serve(which) for which in ("global", "eu")}
        workers = [site.worker("a"), site.worker("b")]
        threads = [threading.Thread(target=w.run, daemon=True) for w in workers]
        for thread in threads:
            thread.start()
        for turn in range(kills):
            wait_for(lambda t=turn, trained=workers[0].trained: len(trained) > 2 * t, 60)
            which = ("eu", "global")[turn % 2]
            servers[which].send(signal.SIGKILL)
            servers[which].ended()
            servers[which] = site.serve(which, resume=True)
        for thread in threads:
            thread.join(90)
            assert not thread.is_alive()
        assert servers["eu"].ended() == (0, "") and servers["global"].ended() == (0, "")
        for worker in workers:
            worker.close()
        assert sorted(lease.start for w in workers for lease in w.trained) == list(range(0, 96, 4))
        recoveries = [e for which in ("eu", "global") for e in site.events(which) if e["event"] == "Recovery"]
        assert len(recoveries) == 2 + kills
        assert not kills or sum(e["replayed"] for e in recoveries) > 0
        ends.append(dict(read_weights(folder / "global", site.layout)))
        newest, _ = Store(folder / "eu" / SNAPSHOTS).load_newest(())
        assert newest is not None
        applied = [m["updates"] for m in newest.meta["state"]["members"].values()]
        assert applied == [12 * len(site.layout.fragments)] * 2
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())

    servers["eu"] = site.serve("eu", resume=True)
    wait_for(lambda: (site.folder / "eu" / "listening.json").exists(), 30)
    servers["eu"].send(signal.SIGTERM)
    assert servers["eu"].ended() == (0, "")
