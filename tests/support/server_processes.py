"""A small run's servers as processes of their own."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, OuterConfig, RunConfig, load_cluster, load_run, parse
from geotrain.launch.check import free_ports
from geotrain.net.server.server_process import serve as serve_process
from geotrain.net.server.server_setup import Evaluate, ServerSetup
from geotrain.net.transport.certs import OPERATOR, trust_between
from geotrain.net.transport.fragment_links import shards_above
from geotrain.net.transport.operator_client import ask_status
from geotrain.outer.identity import identity_of
from geotrain.parameters.parameter_map import parameter_map_of
from tests.support.forks import FORKS, preload
from tests.support.net_worlds import BUSY_S, TINY, FakeWorker, halves, outer, whole

preload("geotrain.net.server.server_process", __name__)


def dies_at(place: str, after: bool = False, given: type = object) -> None:
    """Let this process be killed (SIGKILL) when it calls that coroutine function, or when the call has returned.

    place: "module:class.method". given: what its first argument must be for that.
    """
    module, _, names = place.partition(":")
    owner, name = getattr(importlib.import_module(module), names.partition(".")[0]), names.partition(".")[2]
    real = getattr(owner, name)

    async def dying(own: Any, *args: Any, **named: Any) -> Any:
        dies = isinstance(next(iter(args), None), given)
        if after or not dies:
            result = await real(own, *args, **named)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


def serve(
    folder: Path, which: str, resume: bool, said: Path, environment: dict[str, str],
    files: tuple[int, int] | None = None, evaluate: Evaluate | None = None, launch: str = "",
    first: Callable[[], None] = int,
) -> None:  # fmt: skip
    """Run a server's whole process. environment: what it has besides that of these tests. files: how many it may
    have open, and how many it may ask for. first: called before all else."""
    os.environ.update(environment)
    first()
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    torch.set_num_threads(1)
    run, cluster = load_run(folder / "run.json"), load_cluster(folder / "cluster.json")
    server, _, number = which.partition(".shard-")
    shard = int(number) if number else None
    sys.exit(serve_process(ServerSetup(run, cluster, server, folder / which, shard, evaluate, launch), resume))


class Server:
    def __init__(self, site: Site, which: str, resume: bool, **how: Any) -> None:
        """how: as `serve` takes it."""
        self.said = site.folder / f"stderr-{len(site.servers)}"
        place = site.folder, which, resume, self.said, site.environment
        self.process = FORKS.Process(target=serve, args=place, kwargs=how)
        self.process.start()

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(BUSY_S)

    def ended(self, within_s: float = BUSY_S) -> tuple[int | None, str]:
        """Exit code, and from where on stderr speaks of trouble (libraries may warn before)."""
        self.process.join(within_s)
        said = self.said.read_text()
        begins = [at for word in ("geotrain serve:", "Traceback") if (at := said.find(word)) >= 0]
        return self.process.exitcode, said[min(begins) :] if begins else ""


class Site:
    """A run's folder on this machine and the processes that serve it."""

    def __init__(
        self,
        folder: Path,
        rule: str | OuterConfig = "halos",
        train_samples: int = 48,
        regions: dict[str, tuple[str, ...]] | None = None,
        every_minutes: float = 0.01,
        validates: bool = False,
        shards: int = 0,
        pieces: int = 0,
        certs: Path | None = None,
        snapshots: str | None = None,
        environment: dict[str, str] | None = None,
        host: str = "127.0.0.1",
        behind_nat: bool = False,
        **outer_settings: Any,
    ) -> None:
        self.folder, self.environment = folder, environment or {}
        block = outer(rule, **outer_settings) if isinstance(rule, str) else rule
        cut = block.fragments.model_copy(update={"pieces": pieces or max(1, shards)})
        block = block.model_copy(update={"fragments": cut})
        regions = regions or {"eu": ("a", "b")}
        servers = 1 + len(regions)
        ports = iter(free_ports(2 * servers * (1 + shards)))
        run = {
            "name": "tiny",
            "model": {"config": TINY},
            "data": {"train": "none", "sequence_length": 8, "train_samples": train_samples},
            "deepspeed": {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2},
            "outer": block.model_dump(by_alias=True, mode="json"),
            "checkpoint": {"every_minutes": every_minutes, "snapshots": snapshots},
        }
        if validates:  # at its end only
            run["data"] = {**run["data"], "validation": "none", "validation_samples": 1}  # type: ignore[dict-item]
            run["monitor"] = {"validate_every_samples": 1000}

        def address() -> dict[str, Any]:
            inside = {"bind": "127.0.0.1", "bind_port": next(ports)} if behind_nat else {}
            return {"host": host, "port": next(ports), **inside}

        def listeners(name: str) -> dict[str, Any]:
            return {name: [address() for _ in range(shards)]} if shards else {}

        cluster = {
            "name": "here",
            "global_server": address(),
            **listeners("global_shards"),
            "regions": [
                {
                    "name": region,
                    "server": address(),
                    **listeners("shards"),
                    "workers": [{"name": n, "hosts": [{"host": "localhost", "slots": 1}]} for n in workers],
                }
                for region, workers in regions.items()
            ],
        }
        self.certs = certs
        if certs is not None:
            cluster["security"] = {"folder": str(certs)}
        names = (GLOBAL, *regions)
        self.processes = [*names, *(f"{name}.shard-{i}" for name in names for i in range(shards))]
        (folder / "run.json").write_text(json.dumps(run))
        (folder / "cluster.json").write_text(json.dumps(cluster))
        self.run, self.cluster = parse(RunConfig, run, "run"), parse(ClusterConfig, cluster, "cluster")
        self.parameter_map = parameter_map_of(self.run)
        self.servers: list[Server] = []

    def serve(self, which: str, resume: bool = False, **how: Any) -> Server:
        """Start a server's process. how: as `serve` takes it."""
        self.servers.append(Server(self, which, resume, **how))
        return self.servers[-1]

    def kill(self) -> None:
        """Kill all servers that were ever started."""
        for server in self.servers:
            server.kill()

    def address(self, which: str) -> str:
        return str(self.cluster.global_server if which == "global" else self.cluster.region(which).server)

    def worker(self, name: str, incarnation: str = "life-1", at: str = "eu") -> FakeWorker:
        cut = (halves if name == "a" else whole)(self.parameter_map)
        identity = identity_of(self.run, self.parameter_map)
        trust = trust_between(self.cluster, "worker", name, "region", "eu")
        shards = shards_above(self.cluster, self.parameter_map, "worker", name, "eu")
        there = self.address(at), self.parameter_map, self.run.outer, cut, identity, trust, shards
        return FakeWorker(name, incarnation, *there)

    def status(self, which: str) -> dict[str, Any]:
        deadline_s = time.monotonic() + BUSY_S
        role: Any = "global" if which == "global" else "region"
        trust = trust_between(self.cluster, "operator", OPERATOR, role, which)
        while (status := ask_status(self.address(which), 5, trust)) is None:
            assert time.monotonic() < deadline_s, f"the server {which} does not answer"
            time.sleep(0.05)
        return status

    def events(self, which: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / which / "events.jsonl").read_text().splitlines()]

    def updates(self) -> int:
        """Count the updates that the region's server has taken."""
        members = self.status("eu")["members"]
        return sum(members[name]["updates"] for name in ("a", "b"))
