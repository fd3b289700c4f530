"""One worker of `streaming.py`, given to the deepspeed launcher: trains one run after another, so that importing the
libraries is paid once. What it is told, and what it answers, goes over a Unix socket beside the run file (network
namespaces do not divide those)."""

from __future__ import annotations

import argparse
import gc
import time
from contextlib import closing
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from benchmarks.overhead import engine_and_data
from geotrain.config import load_cluster, load_run
from geotrain.inner.runtime import parallel
from geotrain.net.transport.operator_client import ask_status
from geotrain.net.transport.worker_client import WorkerClient
from geotrain.outer.identity import identity_of
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.worker.loop import RunMember
from geotrain.worker.trainer import Trainer

SOCKET = "control"
STATUS_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--run", "--region", "--worker"):
        parser.add_argument(name, required=True)
    parser.add_argument("--local_rank")
    args = parser.parse_args()
    trained: Trained | None = None
    with closing(Client(str(Path(args.run).with_name(SOCKET)), "AF_UNIX")) as control:
        control.send(args.region)
        while order := control.recv():
            match order:
                case ("run", path):
                    if trained:
                        trained.close()
                        trained = None
                        gc.collect()  # an engine is a cycle, and holds its process groups' threads
                    trained = Trained(Path(path), args.region, args.worker, control)
                    control.send(("done",))
                case ("alone", seconds):
                    assert trained is not None
                    control.send(("alone", trained.alone(seconds)))


class Trained:
    """A run, trained by the product's own loop; its engine stays, to be timed without communication."""

    def __init__(self, path: Path, region: str, worker: str, control: Connection) -> None:
        run, cluster = load_run(path / "run.json"), load_cluster(path / "cluster.json")
        self.engine, self.loader = engine_and_data(run)
        self.samples = run.samples_per_step
        parameter_map, workers = parameter_map_of(run), len(cluster.regions)
        server = str(cluster.region(region).server)

        round_samples = len(cluster.regions) * run.outer.local_steps * run.samples_per_step
        last_job = run.data.train_samples // round_samples

        def report(numbers: dict[str, Any]) -> None:
            """Bytes are asked for outside of the time that is measured. processor_s: that this process has used so
            far, all threads counted."""
            job = {name: numbers[name] for name in ("steps", "tokens", "waited_s", "communication_s", "waiting_s")}
            job["processor_s"] = time.process_time()
            links = link_bytes(server) if numbers["job"] == 1 else {}
            now_s = time.monotonic()
            links = link_bytes(server) if numbers["job"] == last_job else links
            control.send(("job", now_s, job, links))

        with closing(WorkerClient(server)) as client:
            identity = identity_of(run, parameter_map)
            member = RunMember(run, worker, identity, parameter_map, client, workers=workers, report=report)
            Trainer(member, self.engine, self.loader).train(resume=False)

    def alone(self, seconds: float) -> dict[str, float]:
        """Without communication: tokens a second, and processor seconds of a step."""
        steps = self.loader.steps(0, self.samples << 16)
        self.engine.train_step(next(steps), 0)
        begin, used_s, tokens, count = time.perf_counter(), time.process_time(), 0, 0
        while (elapsed := time.perf_counter() - begin) < seconds:
            tokens += self.engine.train_step(next(steps), 0).tokens
            count += 1
        return {"tokens_per_s": tokens / elapsed, "processor_s": (time.process_time() - used_s) / count}

    def close(self) -> None:
        self.engine.close()
        parallel.shut_down(leave_world=False)


def link_bytes(server: str) -> dict[str, Any]:
    status = ask_status(server, STATUS_S)
    if status is None:
        raise SystemExit(f"the server at {server} does not say how it goes")
    links: dict[str, Any] = status["links"]
    return links


if __name__ == "__main__":
    main()
