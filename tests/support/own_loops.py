"""Runs whose workers are the loops of `examples/`, or GeoTrain's own trainer: servers and ranks as processes."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from geotrain.commands.serve import run_server
from geotrain.config import ClusterConfig, load_cluster, load_run, parse
from geotrain.inner.runtime import platform
from geotrain.launch.check import free_ports
from geotrain.launch.pretrain import train
from geotrain.net.transport.operator_client import ask_status
from tests.support.forks import FORKS, preload
from tests.support.process_trees import until

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINER = "geotrain"  # in place of an example: GeoTrain's own trainer
REGIONS = ("eu", "us")
EVERY_BIT = {"up": {"name": "fp32"}, "down": {"name": "fp32"}}

preload("geotrain.inner.build", "geotrain.net.server.server_process", "geotrain.own_loop.hf_trainer")
preload("transformers.trainer", "transformers.models.llama.modeling_llama")


def _process(said: Path, environment: dict[str, str], which: tuple[Any, ...]) -> None:
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        match which:
            case ("serve", site, run, resume):
                sys.exit(run_server(site, run, None, resume))
            case (str(example), run, region, *more) if example != TRAINER:
                platform.compile_no_ops()  # that DeepSpeed would otherwise compile for a CPU, which takes a minute
                sys.argv = [example, str(run), region, *more]
                runpy.run_path(str(EXAMPLES / example), run_name="__main__")
            case (_, run, region, *_):
                train(load_run(run), load_cluster(run.parent / "cluster.json"), region, None, False)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


class OwnRun:
    """A run in a folder of its own, in two regions of one worker each. run: its file's content."""

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / "run.json"
        self.ports = free_ports(3)
        regions = [
            {"name": region, "server": {"port": port}, "workers": [{"name": f"{region}-0"}]}
            for region, port in zip(REGIONS, self.ports[1:], strict=True)
        ]
        cluster = {"name": "here", "global_server": {"port": self.ports[0]}, "regions": regions}
        parse(ClusterConfig, cluster, "cluster")
        (folder / "cluster.json").write_text(json.dumps(cluster))
        self.file.write_text(json.dumps({**run, "folder": str(folder / "out")}))
        self.processes: list[Any] = []

    def _start(self, name: str, environment: dict[str, str], *which: Any) -> Any:
        process = FORKS.Process(target=_process, args=(self.folder / f"{name}.log", environment, which), daemon=True)
        process.start()
        self.processes.append(process)
        return process

    def serve(self, site: str, resume: bool = False) -> Any:
        return self._start(site, {}, "serve", site, self.file, resume)

    def serve_all(self) -> dict[str, Any]:
        return {site: self.serve(site) for site in ("global", *REGIONS)}

    def work(self, region: str, example: str, *more: str, ranks: int = 1) -> list[Any]:
        """Start a worker: an example's name, or TRAINER."""
        port, started = free_ports(1)[0], []
        for rank in range(ranks):
            place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            environment = {key: str(value) for key, value in place.items()} if ranks > 1 or example != HF else {}
            started.append(self._start(f"{region}-0.{rank}", environment, example, self.file, region, *more))
        return started

    def said(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def ended(self, *processes: Any, within_s: float = 120.0) -> None:
        """Wait until they have ended well."""
        for process in processes or self.processes:
            process.join(within_s)
            assert process.exitcode == 0, f"{process.exitcode}\n{self.said()}"

    def status(self, site: str) -> dict[str, Any]:
        port = self.ports[("global", *REGIONS).index(site)]
        with suppress(Exception):
            return ask_status(f"127.0.0.1:{port}", 5) or {}
        return {}

    def status_file(self, site: str) -> dict[str, Any]:
        """What the server last wrote of itself."""
        found: dict[str, Any] = json.loads((self.folder / "out/servers" / site / "status.json").read_text())
        return found

    def until(self, what: Any, timeout_s: float = 120.0) -> None:
        assert until(what, timeout_s), self.said()

    def losses(self) -> dict[tuple[str, int], float]:
        """(worker, job) → mean loss of the job, as its events say."""
        events = [
            json.loads(line)
            for path in sorted((self.folder / "out" / "events").glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        return {(e["worker"], e["job"]): e["loss"] for e in events if e["event"] == "JobTrained"}

    def kill_all(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


HF = "hf_trainer.py"
