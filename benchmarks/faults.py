"""A run of real processes over emulated links, while at random processes are killed, links cut and packets corrupted;
then its accounts.

Two regions of two workers each, linked by TLS. Nothing that was acknowledged may be missing or counted twice, no
sample may be skipped, and every recovered state must be, bit for bit, what an uninterrupted replay of the whole
journal gives.

    python benchmarks/faults.py [--seconds 300] [--seed 1] [--every 20] [--pace 0.3]
    python benchmarks/faults.py --seconds 3600       a soak: also the growth of memory and of open files

Needs root, for the network namespaces. `--pace` is the least time of an inner step: others get the processor.
The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import record
from faults_audit import accounts
from faults_goodput import goodput
from faults_runner import FaultyRun, Samples, kinds_done
from faults_scenario import random_faults

from geotrain.config import ClusterConfig
from geotrain.launch import wan
from geotrain.net.certs import make_certificates

MODEL = {
    "model_type": "qwen3", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip
COUNTED = {
    "kill": "kills", "stop": "stops", "cut": "partitions", "slow": "slows", "drop": "drops", "corrupt": "corrupts",
    "delay": "delays", "reorder": "reorders", "duplicate": "duplicates",
}  # fmt: skip
START_S = 240.0  # until every worker has trained a job
SOAK_S = 1800.0  # from here on, faults are rarer: growth is measured within the life of a process
WARM_UP_S = 120.0  # of a process, before its growth is measured
LEAST_LIFE_S = 600.0  # measured, for a growth that is told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="from when every worker trains")
    parser.add_argument("--seed", type=int, default=1)
    every = (
        "mean seconds between faults of processes and links, and between those of packets; default 20, in a soak 180"
    )
    parser.add_argument("--every", type=float, help=every)
    parser.add_argument("--pace", type=float, default=0.3, help="least seconds of an inner step")
    parser.add_argument(
        "--folder", type=Path, help="where to work, and to leave everything; default: a temporary one"
    )
    parser.add_argument("--record", action="store_true", help="append to results.csv")
    args = parser.parse_args()
    why_not = wan.cannot_emulate()
    if why_not:
        print(f"faults: {why_not}", file=sys.stderr)
        return 2
    folder = args.folder or Path(tempfile.mkdtemp(prefix="geotrain-faults-"))
    files = make_world(folder, args.pace)
    every_s = args.every or (180.0 if args.seconds >= SOAK_S else 20.0)
    result = faulty(files, folder, args.seed, args.seconds, every_s)
    if args.folder is None:
        shutil.rmtree(folder)
    if args.record:
        note = f"--seconds {args.seconds:g}; seed {args.seed}; pace {args.pace:g} s; two faults each {every_s:g} s"
        record("faults", {k: v for k, v in result.items() if k not in ("kinds", "mismatches")}, units, note)
    print(json.dumps(result))
    return 0


def make_world(folder: Path, pace_s: float, samples: int = 4_000_000, **outer: Any) -> tuple[Path, Path]:
    """Data, run file and cluster file in the folder. One worker has two ranks: its updates come in halves."""
    from geotrain.data.prepare import prepare
    from geotrain.data.tokenizer import byte_tokenizer
    from geotrain.inner.dataset import TokenWriter

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(Path(np.__file__).read_text() * 4)
    prepare([folder / "text.txt"], folder / "data", byte_tokenizer(), TokenWriter)
    momentum = {"lr_per_update": 0.2, "beta": 0.5, "buffer": 2}
    run = {
        "name": "faults", "folder": str(folder / "run"), "model": {"config": MODEL},
        "data": {"train": str(folder / "data/train"), "sequence_length": 32, "train_samples": samples},
        "deepspeed": {
            "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 20000, "warmup_num_steps": 50}},
        },
        "outer": {
            "rule": "halos", "local_steps": 6, "updates_per_send": 3, "lease_reserve": 12, "region": momentum,
            "fragments": {"layers_per_fragment": 1},
            "overlap": {"steps": 3, "late": "continue", "adopt": "rebase"}, **outer,
        },
        "checkpoint": {"every_jobs": 8, "every_updates": 24},
    }  # fmt: skip

    def region(name: str, ranks: tuple[int, ...]) -> dict[str, Any]:
        workers = [
            {"name": f"{name}-{i}", "hosts": [{"host": "localhost", "slots": n}], "min_step_s": pace_s}
            for i, n in enumerate(ranks)
        ]
        return {"name": name, "workers": workers}

    cluster = {
        "name": "faults",
        "regions": [region("eu", (2, 1)), region("us", (1, 1))],
        "links": [
            {"regions": ["eu", "global"], "gbps": 0.2, "rtt_ms": 30.0},
            {"regions": ["us", "global"], "gbps": 0.1, "rtt_ms": 100.0},
        ],
        "emulate_links": True,
        "restart": {"limit": 1000, "first_s": 0.5, "longest_s": 4.0},
    }
    make_certificates(ClusterConfig.model_validate_json(json.dumps(cluster)), folder / "certificates")
    cluster["security"] = {"folder": str(folder / "certificates")}
    for name, content in (("run", run), ("cluster", cluster)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "run.json", folder / "cluster.json"


def faulty(files: tuple[Path, Path], folder: Path, seed: int, seconds: float, every_s: float) -> dict[str, Any]:
    with FaultyRun(*files, folder / "archive") as run:
        workers = [worker for names in run.regions.values() for worker in names]
        if not run.wait_for(lambda: all(jobs_of(run, worker) for worker in workers), START_S):
            raise RuntimeError(f"the workers do not train: {run.log.read_text()[-3000:]}")
        print(f"every worker trains; faults for {seconds:g} s, about two each {every_s:g} s, seed {seed}", flush=True)
        run.play(random_faults(seed, seconds, every_s, run.regions), seconds, lambda text: print(text, flush=True))
        end_s = time.time()
    print("the run has ended; its journals are replayed", flush=True)
    found = accounts(run)
    return {
        **{name: sum(fault.what == what for _, fault in run.done) for what, name in COUNTED.items()},
        **{f"packets_{kind}": count for kind, count in sorted(run.impaired_packets().items())},
        **{key: value for key, value in found.items() if key != "committed_samples"},
        **goodput(run, found["committed_samples"], end_s),
        "seconds": seconds,
        "kinds": kinds_done(run),
        "restarts": sum(e["event"] == "ProcessDied" for e in run.events("launcher")),
        "given_up": sum(e["event"] == "ProcessDied" and e["pause_s"] is None for e in run.events("launcher")),
        "growth": growth(list(run.samples.values())),
    }


def jobs_of(run: FaultyRun, worker: str) -> int:
    return sum(event["event"] == "JobTrained" for event in run.events(worker))


def growth(samples: list[Samples]) -> dict[str, dict[str, float]]:
    """By kind of process: the steepest growth of any that lived long enough, by a line through its samples after the
    warm-up; mib_per_h and files_per_h. `measured` counts those."""
    found: dict[str, dict[str, float]] = {}
    for one in samples:
        begin_s = one.points[0][0]
        points = [point for point in one.points if point[0] - begin_s > WARM_UP_S]
        if not points or points[-1][0] - points[0][0] < LEAST_LIFE_S:
            continue
        hours = [(t - begin_s) / 3600 for t, _, _ in points]
        mib = statistics.linear_regression(hours, [rss / 2**20 for _, rss, _ in points]).slope
        files = statistics.linear_regression(hours, [count for _, _, count in points]).slope
        kind = found.setdefault(one.found.kind, {"measured": 0, "mib_per_h": -1e9, "files_per_h": -1e9})
        kind["measured"] += 1
        kind["mib_per_h"] = max(kind["mib_per_h"], round(mib, 2))
        kind["files_per_h"] = max(kind["files_per_h"], round(files, 2))
    return found


def units(metric: str) -> str:
    return "s" if metric.endswith("_s") else "tokens" if metric.endswith("_tokens") else ""


if __name__ == "__main__":
    sys.exit(main())
