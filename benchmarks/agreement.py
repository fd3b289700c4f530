"""Is the simulator right? A real run of processes over emulated links beside its simulation.

Three workers in two regions, whose paces (`min_step_s`) and links set the order of all updates. They wait until the
last has joined, and begin together.

    python benchmarks/agreement.py [--record]

Needs root, for the network namespaces. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from common import record

from geotrain.config import load_cluster, load_run
from geotrain.launch import wan
from geotrain.launch.operate import Run
from geotrain.outer.layout import layout_of
from geotrain.simulate.agreement import Applied, least_gap_s, real, simulated

MODEL = {
    "model_type": "qwen3", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip
PACE_S = {"eu": {"eu-0": 0.7, "eu-1": 1.7}, "us": {"us-0": 1.3}}  # least seconds of an inner step
LINKS = {"eu": (0.01, 100.0), "us": (0.01, 300.0)}  # Gbit/s, round trip in ms
STEPS, BATCH, LOCAL_STEPS = 20, 4, 2  # STEPS: of all workers
START_S = 300.0  # until all have joined, on a busy machine
END_S = 120.0  # for a run of about eleven seconds
STOP_S = 30.0  # for an orderly end, before the run is killed
POLL_S = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="append to results.csv")
    args = parser.parse_args()
    why_not = wan.cannot_emulate()
    if why_not:
        print(f"agreement: {why_not}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="geotrain-agreement-") as folder:
        files = make_world(Path(folder))
        result = compared(expected(files), launched(files))
    if args.record:
        record("agreement", result, lambda metric: "s" if metric.endswith("_s") else "")
    print(json.dumps(result))
    return 0


def make_world(folder: Path) -> tuple[Path, Path]:
    """Data, run file and cluster file."""
    from geotrain.data.prepare import prepare
    from geotrain.data.tokenizer import byte_tokenizer
    from geotrain.inner.dataset import TokenWriter

    (folder / "text.txt").write_text(Path(np.__file__).read_text() * 4)
    prepare([folder / "text.txt"], folder / "data", byte_tokenizer(), TokenWriter)
    run = {
        "name": "agreement", "folder": str(folder / "run"), "model": {"config": MODEL},
        "data": {"train": str(folder / "data/train"), "sequence_length": 32, "train_samples": BATCH * STEPS},
        "deepspeed": {
            "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": STEPS, "warmup_num_steps": 4}},
        },
        "outer": {
            "rule": "halos", "local_steps": LOCAL_STEPS, "updates_per_send": 2, "scale_local_steps": False,
            "up": {"name": "int4"}, "down": {"name": "int4"},
        },
    }  # fmt: skip
    regions = [
        {
            "name": name,
            "workers": [
                {"name": worker, "hosts": [{"host": "localhost", "slots": 1}], "min_step_s": pace}
                for worker, pace in paces.items()
            ],
        }
        for name, paces in PACE_S.items()
    ]
    links = [{"regions": [name, "global"], "gbps": gbps, "rtt_ms": rtt_ms} for name, (gbps, rtt_ms) in LINKS.items()]
    cluster = {"name": "agreement", "regions": regions, "links": links, "emulate_links": True}
    for name, content in (("run", run), ("cluster", cluster)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "run.json", folder / "cluster.json"


def expected(files: tuple[Path, Path]) -> list[Applied]:
    run = load_run(files[0])
    return simulated(run, load_cluster(files[1]), layout_of(run))


def launched(files: tuple[Path, Path], env: dict[str, str] | None = None) -> list[Applied]:
    """What the real run applied, its seconds counted from when all may begin. Raises RuntimeError."""
    folder = load_run(files[0]).run_folder
    log = folder.with_suffix(".log")
    with log.open("w") as file:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "geotrain", "launch", *map(str, files)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait(what: str, condition: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline or (launcher.poll() is not None and not condition()):
                raise RuntimeError(f"the run was not {what} within {within_s:g} s: {log.read_text()[-3000:]}")
            time.sleep(POLL_S)

    everybody = {worker for paces in PACE_S.values() for worker in paces}
    try:
        wait("up", lambda: (folder / "servers/global/listening.json").exists(), START_S)
        live = Run(folder)
        live.steer("pause")
        wait("joined by all", lambda: everybody <= {a.member for a in real(folder, "Joined")}, START_S)
        if real(folder):
            raise RuntimeError("the run began before it was told to")
        begin_s = time.time()
        live.steer("resume")
        wait("over", lambda: launcher.poll() is not None, END_S)
        if launcher.returncode:
            raise RuntimeError(f"the run failed: {log.read_text()[-3000:]}")
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(STOP_S)
        launcher.kill()
        launcher.wait()
    return [Applied(a.seconds - begin_s, a.site, a.member, a.sequence) for a in real(folder)]


def order(applied: list[Applied], site: str) -> list[tuple[str, int]]:
    """(member, its update's number), as that server applied them."""
    return [(a.member, a.sequence) for a in applied if a.site == site]


def compared(simulation: list[Applied], reality: list[Applied]) -> dict[str, Any]:
    """wall_over_simulated: until the last update of the run."""
    real_s, simulated_s = max(a.seconds for a in reality), max(a.seconds for a in simulation)
    return {
        "same_order": all(order(simulation, site) == order(reality, site) for site in ("global", *PACE_S)),
        "updates": len(reality),
        "least_gap_s": least_gap_s(simulation),
        "simulated_s": simulated_s,
        "real_s": real_s,
        "wall_over_simulated": real_s / simulated_s,
    }


if __name__ == "__main__":
    sys.exit(main())
