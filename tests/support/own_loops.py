"""Runs whose workers are the loops of `examples/`, or GeoTrain's own trainer: servers and ranks as processes."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from geotrain.commands.serve import run_alone, run_server
from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, load_cluster, load_run, parse, shard_name
from geotrain.inner.runtime import platform
from geotrain.launch.check import free_ports
from geotrain.launch.pretrain import train
from geotrain.net.transport.authority import make_certificates
from geotrain.net.transport.certs import OPERATOR, trust_between
from geotrain.net.transport.enrollment import TOKEN
from geotrain.net.transport.operator_client import ask_status
from tests.support.forks import FORKS, preload
from tests.support.process_trees import until

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINER = "geotrain"  # in place of an example: GeoTrain's own trainer
REGIONS = ("eu", "us")
SITES = ("global", *REGIONS)
BUSY_S = 500.0  # for a whole run, on a busy machine
EVERY_BIT = {"up": {"name": "fp32"}, "down": {"name": "fp32"}}

preload("geotrain.inner.build", "geotrain.net.server.server_process", "torch._inductor", __name__)
preload("geotrain.own_loop.hf_trainer", "transformers.trainer", "transformers.models.llama.modeling_llama")


def _process(said: Path, environment: dict[str, str], which: tuple[Any, ...]) -> None:
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environment)
    os.chdir(said.parent)
    torch.set_num_threads(1)
    try:
        match which:
            case ("serve", site, run, resume, shard):
                sys.exit(run_server(site, run, None, resume, shard))
            case ("alone", folder, rule, port, *more):
                sys.exit(run_alone(folder, rule, port, "127.0.0.1", *more))
            case (str(example), run, region, *more) if example != TRAINER:
                platform.compile_no_ops()  # that DeepSpeed would otherwise compile for a CPU, which takes a minute
                sys.argv = [example, str(run), region, *more]
                runpy.run_path(str(EXAMPLES / example), run_name="__main__")
            case (_, run, region, *resume):
                train(load_run(run), load_cluster(run.parent / "cluster.json"), region, None, bool(resume))
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


class Processes:
    """Processes of one run, whose words go into a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.processes: list[Any] = []
        self.stores: list[TCPStore] = []  # in which workers' ranks meet

    def _start(self, name: str, environment: dict[str, str], *which: Any) -> Any:
        process = FORKS.Process(target=_process, args=(self.folder / f"{name}.log", environment, which), daemon=True)
        process.start()
        self.processes.append(process)
        return process

    def said(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def ended(self, *processes: Any, within_s: float = BUSY_S) -> None:
        """Wait until they have ended well."""
        for process in list(processes or self.processes):
            process.join(within_s)
            assert process.exitcode == 0, f"{process.exitcode}\n{self.said()}"
            self.processes.remove(process)

    def until(self, what: Any, timeout_s: float = BUSY_S) -> None:
        assert until(what, timeout_s), self.said()

    def kill(self, *processes: Any) -> None:
        """Kill processes that live: all ranks of a worker, as its host's death would."""
        for process in processes:
            assert process.exitcode is None, self.said()
            process.kill()
        for process in processes:
            process.join()
            self.processes.remove(process)


class AloneRun(Processes):
    """A run without files: `geotrain serve` alone, and loops that join by its address."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_ports(1)[0]
        self.run = folder / "runs/out"  # as the workers would call it

    def serve(
        self,
        rule: str = "async",
        steps: int | None = None,
        workers: int | None = None,
        resume: bool = False,
        changes: tuple[str, ...] = (),
    ) -> Any:
        process = self._start("serve", {}, "alone", self.run, rule, self.port, steps, workers, resume, changes)
        self.until(lambda: self.token or process.exitcode is not None)
        return process

    def move(self) -> None:
        """Serve it from another folder, of another name, at another port, from now on."""
        self.run, self.port = self.run.rename(self.folder / "moved"), free_ports(1)[0]

    def status(self) -> dict[str, Any]:
        """Ask the server as the run's operator; empty: it does not answer."""
        cluster = load_cluster(self.run / "cluster.json")
        trust = trust_between(cluster, "operator", OPERATOR, "global", GLOBAL)
        return ask_status(f"127.0.0.1:{self.port}", 10, trust) or {}

    @property
    def token(self) -> str:
        said = (self.folder / "serve.log").read_text() if (self.folder / "serve.log").exists() else ""
        return said.rpartition(f"{TOKEN}=")[2].split()[0] if TOKEN in said else ""

    def join(self, name: str, *more: Any, example: str = "one_line.py", token: str = "") -> Any:
        environment = {TOKEN: token or self.token}
        return self._start(name, environment, example, f"127.0.0.1:{self.port}", name, *map(str, more))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Read the server's events of that kind."""
        log = self.run / "servers/global/events.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]


class OwnRun(Processes):
    """A run in a folder of its own, in two regions of one worker each.

    run: its file's content. workers: region → further keys of its worker in the cluster file. shards: of each server,
    in processes of their own; they and the servers then trust each other by certificates only.
    """

    def __init__(
        self, folder: Path, run: dict[str, Any], workers: dict[str, Any] | None = None, shards: int = 0
    ) -> None:
        super().__init__(folder)
        self.file, self.shards = folder / "run.json", shards
        ports = iter(free_ports(3 * (1 + shards)))
        of_server = {site: {"port": next(ports)} for site in SITES}
        of_shards = {site: [{"port": next(ports)} for _ in range(shards)] for site in SITES}
        self.ports = {site: address["port"] for site, address in of_server.items()}
        regions = [
            {
                "name": region, "server": of_server[region], "shards": of_shards[region],
                "workers": [{"name": f"{region}-0", **(workers or {}).get(region, {})}],
            }
            for region in REGIONS
        ]  # fmt: skip
        first = {"name": "here", "global_server": of_server["global"], "global_shards": of_shards["global"]}
        cluster: dict[str, Any] = {**first, "regions": regions}
        parsed = parse(ClusterConfig, cluster, "cluster")
        if shards:
            make_certificates(parsed, folder / "certificates")
            cluster["security"] = {"folder": str(folder / "certificates")}
        (folder / "cluster.json").write_text(json.dumps(cluster))
        self.file.write_text(json.dumps({**run, "folder": str(folder / "out")}))

    def serve(self, site: str, resume: bool = False, shard: int | None = None) -> Any:
        name = site if shard is None else shard_name(site, shard)
        return self._start(name, {}, "serve", site, self.file, resume, shard)

    def serve_all(self, resume: bool = False) -> dict[str, Any]:
        """Start all servers and their shards; returns the processes by name."""
        shards = {shard_name(s, i): self.serve(s, resume, i) for s in SITES for i in range(self.shards)}
        return {site: self.serve(site, resume) for site in SITES} | shards

    def work(self, region: str, example: str, *more: str, ranks: int = 1) -> list[Any]:
        """Start a worker: an example's name, or TRAINER, which resumes if there is any word more."""
        started = []
        # It has its port from the start: one that was free before may be taken when rank 0 has imported torch.
        self.stores.append(store := TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        meet = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port, TORCHELASTIC_USE_AGENT_STORE="True")
        for rank in range(ranks):
            place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, TORCHELASTIC_RESTART_COUNT=0, **meet)
            environment = {key: str(value) for key, value in place.items()} if ranks > 1 or example != HF else {}
            started.append(self._start(f"{region}-0.{rank}", environment, example, self.file, region, *more))
        return started

    def status(self, site: str) -> dict[str, Any]:
        with suppress(Exception):
            return ask_status(f"127.0.0.1:{self.ports[site]}", 2) or {}
        return {}


@contextmanager
def own_runs(folder: Path, kind: type[Processes] | None = None) -> Iterator[Callable[..., Any]]:
    """Give what makes an `OwnRun`, or a run of that kind, in a folder by its name; at the block's end all that they
    started is killed."""
    runs: list[Processes] = []

    def made(name: str, *content: Any) -> Processes:
        runs.append((kind or OwnRun)(folder / name, *content))
        return runs[-1]

    try:
        yield made
    finally:
        for process in (process for run in runs for process in run.processes):
            process.kill()
            process.join()


HF = "hf_trainer.py"
