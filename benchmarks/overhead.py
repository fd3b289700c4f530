"""Measure what the outer loop costs a worker: tokens/s with it over tokens/s without it.

One rank (this process) trains the quickstart's model; a real region server and global server run beside it, joined by
real sockets. Jobs with and without exchange alternate; the figure is the median of the pairs' ratios.

    python -m benchmarks.overhead [--pairs 12] [--record]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import ROOT
from benchmarks.common import command_line, report, spread, units_by_ending
from benchmarks.processes import be_only_rank
from benchmarks.small_runs import write_files
from geotrain.config import ClusterConfig, RunConfig, load_cluster, load_run
from geotrain.kernels.devices import cuda_devices, processor_has_bf16
from geotrain.launch.check import free_ports
from geotrain.outer.identity import identity_of
from geotrain.outer.messages import Lease
from geotrain.parameters.parameter_map import parameter_map_of

if TYPE_CHECKING:  # they take seconds to import, and the environment must be set before
    from geotrain.data.loader import LeasedLoader
    from geotrain.inner.engine.engine import GeoEngine
    from geotrain.worker.trainer import Trainer

TEXT_BYTES = 1_500_000

RATIO = dict.fromkeys(("ratio", "_low", "_high"), "ratio")


def main() -> None:
    parser = command_line(__doc__, quick={"pairs": 1, "local_steps": 1})
    parser.add_argument("--pairs", type=int, default=12, help="jobs timed with and without the outer loop")
    parser.add_argument("--local-steps", type=int, default=8, help="H")
    parser.add_argument("--own-loop", action="store_true", help="of a plain torch loop with geotrain.OuterLoop")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder), args.local_steps) as (run, cluster):
        result = (measure_own_loop if args.own_loop else measure)(run, cluster, args.pairs)
    report(
        "overhead_own_loop" if args.own_loop else "overhead",
        result,
        args,
        units_by_ending({**dict.fromkeys(("_with", "_without"), "tokens/s"), **RATIO}, "count"),
    )


def files(folder: Path, local_steps: int, regions: Sequence[str] = ("eu",), **run_keys: Any) -> tuple[Path, Path]:
    """Write a prepared data set, a run file and a cluster file, with a worker of one rank in each region. run_keys:
    laid over the run file's blocks."""
    from geotrain.data.corpus import documents
    from geotrain.data.prepare import prepare
    from geotrain.data.tokenizer import byte_tokenizer

    texts = (json.dumps({"text": text}) + "\n" for text in documents(TEXT_BYTES))
    (folder / "text.jsonl").write_text("".join(texts))
    prepare([folder / "text.jsonl"], folder / "data", byte_tokenizer())
    raw = json.loads((ROOT / "configs/runs/quickstart.json").read_text())
    raw["model"]["config"] = json.loads((ROOT / "configs/models/llama-tiny.json").read_text())
    raw["deepspeed"]["bf16"]["enabled"] = cuda_devices() > 0 or processor_has_bf16()
    raw["folder"] = str(folder / "run")
    raw["data"].update(train=str(folder / "data/train"), validation=None, tokenizer=None, train_samples=1 << 20)
    raw["outer"]["local_steps"] = local_steps
    raw["checkpoint"] = {"every_jobs": 1 << 20}  # saving is no part of what is measured
    del raw["monitor"]["validate_every_samples"]
    for block, keys in run_keys.items():
        raw[block] = {**raw.get(block, {}), **keys}
    ports = free_ports(1 + len(regions))
    cluster = {
        "name": "bench",
        "global_server": {"port": ports[0]},
        "regions": [
            {
                "name": name,
                "server": {"port": port},
                "workers": [{"name": f"{name}-0", "hosts": [{"host": "localhost", "slots": 1}]}],
            }
            for name, port in zip(regions, ports[1:], strict=True)
        ],
    }
    return write_files(folder, raw, cluster)


@contextmanager
def servers(folder: Path, local_steps: int, **run_keys: Any) -> Iterator[tuple[RunConfig, ClusterConfig]]:
    """Two running servers of what `files` writes."""
    run, cluster = files(folder, local_steps, **run_keys)
    command = [sys.executable, "-m", "geotrain", "serve"]
    named = ["--run", str(run), "--cluster", str(cluster)]
    with (folder / "log").open("w") as log:
        started = [
            subprocess.Popen([*command, "global", *named], stdout=log, stderr=log),
            subprocess.Popen([*command, "region", "eu", *named], stdout=log, stderr=log),
        ]
        try:
            yield load_run(run), load_cluster(cluster)
        finally:
            for process in started:
                process.kill()
                process.wait(10)


@contextmanager
def only_rank(run: RunConfig, **deepspeed: Any) -> Iterator[tuple[GeoEngine, LeasedLoader]]:
    """This process as the only rank of a worker: its engine and its data. deepspeed: laid over the run's block."""
    be_only_rank()
    engine, loader = engine_and_data(run, **deepspeed)
    with closing(engine):
        yield engine, loader


def engine_and_data(run: RunConfig, **deepspeed: Any) -> tuple[GeoEngine, LeasedLoader]:
    """Build the engine and the loader of a worker's only rank, whose environment is set."""
    from geotrain.data.loader import LeasedLoader, open_training
    from geotrain.inner.build import build_engine

    engine = build_engine(run, run.parallel, {**run.deepspeed, **deepspeed})
    source = open_training(run.data, engine.architecture.vocab_size, run.seed)
    return engine, LeasedLoader(source, run.samples_per_step, run.deepspeed["train_micro_batch_size_per_gpu"], 0, 1)


@contextmanager
def joined(
    run: RunConfig,
    cluster: ClusterConfig,
    engine: GeoEngine,
    loader: LeasedLoader,
    report: Callable[[dict[str, Any]], None] = lambda numbers: None,
) -> Iterator[tuple[Trainer, Iterator[Lease]]]:
    """The product's training loop, joined to the region server, and its leases. report: called with the figures of
    each job."""
    from geotrain.net.transport.worker_client import WorkerClient
    from geotrain.worker.loop import RunMember
    from geotrain.worker.trainer import Trainer

    layout = parameter_map_of(run)
    with closing(WorkerClient(str(cluster.region("eu").server))) as client:
        member = RunMember(run, "eu-0", identity_of(run, layout), layout, client, report=report)
        trainer = Trainer(member, engine, loader)
        trainer.loop.start()
        yield trainer, trainer.loop.leases()


def by_turns(pairs: int) -> Iterator[bool]:
    """On off, off on, …: what drifts meanwhile cancels. One pair more than are counted, for warming up."""
    return (bool(turn % 2) ^ bool(turn // 2 % 2) for turn in range(2 * (pairs + 1)))


def timed_by_turns(pairs: int, job: Callable[[bool], None], what: str) -> dict[bool, list[float]]:
    """Seconds of each job with (True) and without `what`."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for on in by_turns(pairs):
        begin = time.perf_counter()
        job(on)
        seconds[on].append(time.perf_counter() - begin)
        print(f"{'with' if on else 'without'} {what}: {seconds[on][-1]:.3f} s a job", flush=True)
    return seconds


def measure(run: RunConfig, cluster: ClusterConfig, pairs: int) -> dict[str, float]:
    with only_rank(run) as (engine, loader), joined(run, cluster, engine, loader) as (trainer, leases):
        lease = next(leases)
        trainer.train_job(lease)  # for warming up; without the outer loop its samples are trained again

        def job(exchanging: bool) -> None:
            nonlocal lease
            if exchanging:
                lease = next(leases)
                trainer.train_job(lease)
            else:
                for step, batches in enumerate(loader.steps(lease.start, lease.samples)):
                    engine.train_step(batches, step)

        return figures(timed_by_turns(pairs, job, "the outer loop"), run, pairs)


def measure_own_loop(run: RunConfig, cluster: ClusterConfig, pairs: int) -> dict[str, float]:
    """Measure the same model from transformers, in a loop of one process; data is read between its steps in both
    cases."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, AutoModelForCausalLM

    from geotrain import OuterLoop
    from geotrain.data.loader import RunSamples

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**run.model.config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with OuterLoop(run, "eu", model, cluster=cluster, state={"adam": optimizer}) as outer:
        leased = outer.batches()
        alone = iter(DataLoader(RunSamples(run), batch_size=run.samples_per_step))  # type: ignore[arg-type]

        def job(exchanging: bool) -> None:
            for tokens in islice(leased if exchanging else alone, run.outer.local_steps):
                loss = step(tokens)
                if exchanging:
                    outer.after_step(loss)

        return figures(timed_by_turns(pairs, job, "the outer loop"), run, pairs)


def figures(
    seconds: dict[bool, list[float]], run: RunConfig, pairs: int, name: str = "throughput_ratio"
) -> dict[str, float]:
    """Figures of jobs that took so many seconds with (True) and without what was measured; the first of each does not
    count. name: of the ratio of their speeds."""
    tokens = run.outer.local_steps * run.samples_per_step * run.data.sequence_length
    ratios = [off / on for on, off in zip(seconds[True][1:], seconds[False][1:], strict=True)]
    return {
        **{key: round(value, 4) for key, value in spread(name, ratios).items()},
        "tokens_per_s_with": round(tokens / statistics.median(seconds[True][1:]), 1),
        "tokens_per_s_without": round(tokens / statistics.median(seconds[False][1:]), 1),
        "local_steps": run.outer.local_steps,
        "parameters": parameter_map_of(run).numel,
        "pairs": pairs,
    }


if __name__ == "__main__":
    main()
