"""What the outer loop costs a worker: tokens/s with it over tokens/s without it.

One rank (this process) trains the quickstart's model; a real region server and global server run beside it, joined by
real sockets. Jobs with and without exchange alternate; the figure is the median of the pairs' ratios.

    python benchmarks/overhead.py [--pairs 12]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from geotrain.config import ClusterConfig, RunConfig, load_cluster, load_run
from geotrain.launch.check import free_ports
from geotrain.outer.exchange import wait_for
from geotrain.outer.layout import layout_of
from geotrain.outer.messages import Lease, LeaseRequest
from geotrain.outer.server import identity_of

ROOT = Path(__file__).parent.parent
TEXT_BYTES = 1_500_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="jobs timed with and without the outer loop")
    parser.add_argument("--local-steps", type=int, default=8, help="H")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder), args.local_steps) as (run, cluster):
        result = measure(run, cluster, args.pairs)
    print(json.dumps(result))


@contextmanager
def servers(folder: Path, local_steps: int, **run_keys: dict[str, Any]) -> Iterator[tuple[RunConfig, ClusterConfig]]:
    """A prepared data set and two running servers. run_keys: laid over the run file's blocks."""
    from geotrain.data.corpus import write_jsonl
    from geotrain.data.prepare import prepare
    from geotrain.data.tokenizer import byte_tokenizer
    from geotrain.inner.dataset import TokenWriter

    write_jsonl(folder / "text.jsonl", TEXT_BYTES)
    prepare([folder / "text.jsonl"], folder / "data", byte_tokenizer(), TokenWriter)
    raw = json.loads((ROOT / "configs/runs/quickstart.json").read_text())
    raw["model"]["config"] = json.loads((ROOT / "configs/models/llama-tiny.json").read_text())
    raw["folder"] = str(folder / "run")
    raw["data"].update(train=str(folder / "data/train"), validation=None, train_samples=1 << 20)
    raw["outer"]["local_steps"] = local_steps
    del raw["monitor"]["validate_every_samples"]
    for block, keys in run_keys.items():
        raw[block] = {**raw.get(block, {}), **keys}
    ports = free_ports(2)
    cluster = {
        "name": "bench",
        "global_server": {"port": ports[0]},
        "regions": [
            {
                "name": "eu",
                "server": {"port": ports[1]},
                "workers": [{"name": "eu-0", "hosts": [{"host": "localhost", "slots": 1}]}],
            }
        ],
    }
    (folder / "run.json").write_text(json.dumps(raw))
    (folder / "cluster.json").write_text(json.dumps(cluster))
    command = [sys.executable, "-m", "geotrain", "serve"]
    files = ["--run", str(folder / "run.json"), "--cluster", str(folder / "cluster.json")]
    with (folder / "log").open("w") as log:
        started = [
            subprocess.Popen([*command, "global", *files], stdout=log, stderr=log),
            subprocess.Popen([*command, "region", "eu", *files], stdout=log, stderr=log),
        ]
        try:
            yield load_run(folder / "run.json"), load_cluster(folder / "cluster.json")
        finally:
            for process in started:
                process.kill()
                process.wait(10)


def measure(run: RunConfig, cluster: ClusterConfig, pairs: int) -> dict[str, float]:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(free_ports(1)[0])
    from geotrain.data.loader import LeasedLoader, open_source
    from geotrain.inner.dataset import open_tokens
    from geotrain.inner.engine import build_engine
    from geotrain.net.client import MemberClient
    from geotrain.trainer import Trainer

    engine = build_engine(run, run.parallel, run.deepspeed)
    vocab_size, length = engine.architecture.vocab_size, run.data.sequence_length
    source = open_source(Path(run.data.train), open_tokens, length, vocab_size, run.seed)
    loader = LeasedLoader(source, run.samples_per_step, run.deepspeed["train_micro_batch_size_per_gpu"], 0, 1)
    layout = layout_of(run)
    with closing(MemberClient(str(cluster.region("eu").server))) as client:
        folder = run.run_folder / "checkpoints"
        trainer = Trainer(run, "eu-0", identity_of(run, layout), layout, engine, loader, client, folder)
        job = wait_for(trainer.exchange.start(trainer.identity, f"eu-0-{time.time_ns():x}"))
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * (pairs + 1)):
            exchanging = bool(turn % 2) ^ bool(turn // 2 % 2)  # on off, off on, …: drift cancels
            lease = client.lease(LeaseRequest("eu-0", job)).result()
            assert isinstance(lease, Lease)
            begin = time.perf_counter()
            if exchanging:
                trainer.train_job(lease)
                job += 1
            else:
                for step, batches in enumerate(loader.steps(lease.start, lease.samples)):
                    engine.train_step(batches, step)
            seconds[exchanging].append(time.perf_counter() - begin)
            print(f"{'with' if exchanging else 'without'} the outer loop: {seconds[exchanging][-1]:.3f} s a job")
    engine.close()
    ratios = [off / on for on, off in zip(seconds[True][1:], seconds[False][1:], strict=True)]
    tokens = run.outer.local_steps * run.samples_per_step * length
    return {
        "throughput_ratio": round(statistics.median(ratios), 4),
        "tokens_per_s_with": round(tokens / statistics.median(seconds[True][1:]), 1),
        "tokens_per_s_without": round(tokens / statistics.median(seconds[False][1:]), 1),
        "local_steps": run.outer.local_steps,
        "parameters": layout.numel,
        "pairs": pairs,
    }


if __name__ == "__main__":
    main()
