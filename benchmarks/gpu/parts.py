"""The parts of `make gpu`, in the order of their worth. Each runs as a process of its own, which may be killed at any
time, and tells each figure as soon as it is known.

    python -m benchmarks.gpu.parts NAME ROWS.jsonl [small]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import ROOT, codec, kernels, overhead
from benchmarks.gpu import engines, learning, step
from benchmarks.gpu.rows import Tell, told_to
from benchmarks.processes import be_only_rank
from geotrain.common.names import SHARE_DEVICES
from geotrain.kernels.devices import cuda_devices
from geotrain.monitor.registry import time_shares
from geotrain.outer.codec import make_codec

MARK = "pytest.mark.gpu"
TESTS_AT_ONCE = 12  # most of a test's time is Triton's compiler, on a core of the host
MODELS = ROOT / "configs" / "models"
REGIONS, LINK = ("eu", "us"), {"gbps": 1.0, "rtt_ms": 50.0}
LEARNERS = ("10m", "25m", "50m")


@dataclass(frozen=True)
class Sizes:
    """test_files: the most that are run. cases: the most that are compared. numel: elements that a kernel is timed
    on. step: model, tokens of a sample, samples of a micro-batch, micro-batches of a replica's step. outer_loop: the
    same; local_steps: H. pairs: of jobs with and without the outer loop; two regions: a job more each. learners:
    sizes of the learning study."""

    test_files: int
    cases: int
    numel: int
    rounds: int
    step: tuple[str, int, int, int]
    steps: int
    outer_loop: tuple[str, int, int, int]
    local_steps: int
    pairs: int
    learners: tuple[str, ...]


FULL = Sizes(1000, 1000, 1 << 27, 15, ("llama-1b", 2048, 2, 8), 8, ("llama-125m", 1024, 8, 4), 16, 5, LEARNERS)
SMALL = Sizes(1, 2, 1 << 12, 2, ("llama-tiny", 32, 1, 2), 2, ("llama-tiny", 32, 2, 1), 2, 1, ("tiny",))


def tests(sizes: Sizes, rows: Path, tell: Tell) -> None:
    """Outcomes of the tests marked `gpu`; only their files are collected."""
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text())
    options = ["-m", "gpu", "-p", "no:cacheprovider", "-n", str(min(TESTS_AT_ONCE, len(files))), "--dist", "load"]
    command = [sys.executable, "-m", "pytest", *options, *files[-sizes.test_files :]]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout[-4000:], flush=True)
    counted = {kind: re.search(rf"\b(\d+) {kind}", done.stdout) for kind in ("passed", "failed", "skipped", "error")}
    found = {kind: float(match.group(1)) if match else 0.0 for kind, match in counted.items()}
    found["failed"] += found.pop("error")
    for kind, count in found.items():
        tell(f"tests.{kind}", count)


def compared_engines(sizes: Sizes, rows: Path, tell: Tell) -> None:
    engines.compare([*engines.CASES][: sizes.cases] + [*engines.PAIRED][: sizes.cases], tell)


def timed_kernels(sizes: Sizes, rows: Path, tell: Tell) -> None:
    device = "cuda" if cuda_devices() else "cpu"
    for name in kernels.OPS:
        if device == "cpu" or name not in kernels.ON_HOSTS:
            tell(f"kernels.{name}", kernels.speed(name, sizes.numel, sizes.rounds, device)[over_copy(device)])
    for name, config in codec.CONFIGS.items():
        for part, ratio in codec.speed(make_codec(config), sizes.numel, sizes.rounds, device).items():
            if part.endswith(over_copy(device)):
                tell(f"codecs.{name}.{part}", ratio)


def over_copy(device: str) -> str:
    return "vs_memcpy" if device == "cpu" else "vs_copy_bandwidth"


def one_step(sizes: Sizes, rows: Path, tell: Tell) -> None:
    """Over all GPUs, each in a process of its own; where there is one or none, in this one."""
    from geotrain.config import load_run

    gpus = cuda_devices()
    model, *shape = sizes.step
    with tempfile.TemporaryDirectory() as folder:
        run = step.run_file(Path(folder), MODELS / f"{model}.json", *shape, max(1, gpus))  # type: ignore[call-arg]
        if gpus > 1:
            step.over(run, gpus, sizes.steps, rows)
        else:
            be_only_rank()
            step.measure(load_run(run), sizes.steps, tell)


def outer_loop(sizes: Sizes, rows: Path, tell: Tell) -> None:
    """Overhead of a worker of one rank, beside a region server and a global server on this machine."""
    with (
        tempfile.TemporaryDirectory() as folder,
        overhead.servers(Path(folder), sizes.local_steps, **_blocks(sizes)) as (run, cluster),
    ):
        found = overhead.measure(run, cluster, sizes.pairs)
    tell("outer_loop.exposed", 1 - found["throughput_ratio"])
    tell("outer_loop.tokens_per_s", found["tokens_per_s_with"])


def two_regions(sizes: Sizes, rows: Path, tell: Tell) -> None:
    """Launch a worker in each of two regions, which share a GPU where there is one, over shaped links: both last
    jobs' speed, and the share of their time that went to what they waited for."""
    blocks, jobs = _blocks(sizes), 2 * (sizes.pairs + 1)
    blocks["data"]["train_samples"] = jobs * sizes.local_steps * blocks["deepspeed"]["train_batch_size"]
    with tempfile.TemporaryDirectory() as folder:
        run, cluster = overhead.files(Path(folder), sizes.local_steps, REGIONS, **blocks)
        links = [{"regions": [region, "global"], **LINK} for region in REGIONS]
        cluster.write_text(json.dumps({**json.loads(cluster.read_text()), "emulate_links": True, "links": links}))
        shared = {SHARE_DEVICES: "1"} if cuda_devices() == 1 else {}
        command = [sys.executable, "-m", "geotrain", "launch", str(run), str(cluster)]
        subprocess.run(command, check=True, env={**os.environ, **shared})
        ended = [Path(folder) / "run" / "servers" / region / "status.json" for region in REGIONS]
        members = [json.loads(path.read_text())["members"] for path in ended]
    trained = [shares for each in members for seen in each.values() if (shares := time_shares(seen))]
    tell("two_regions.workers", len(trained))
    tell("two_regions.exposed", 1 - fmean(shares["compute"] for shares in trained))
    tell("two_regions.tokens_per_s", sum(seen.get("tokens_per_s", 0.0) for each in members for seen in each.values()))


def _blocks(sizes: Sizes) -> dict[str, Any]:
    model, sequence, micro, count = sizes.outer_loop
    return {
        "model": {"config": str(MODELS / f"{model}.json")},
        "data": {"sequence_length": sequence},
        "deepspeed": {"train_batch_size": micro * count, "train_micro_batch_size_per_gpu": micro},
    }


def learning_study(sizes: Sizes, rows: Path, tell: Tell) -> None:
    for name in sizes.learners:
        learning.compare(name, "cuda" if cuda_devices() else "cpu", tell)


# name: (seconds that it may take, what it does)
PARTS: dict[str, tuple[float, Callable[[Sizes, Path, Tell], None]]] = {
    "tests": (110.0, tests),
    "engines": (70.0, compared_engines),
    "kernels": (50.0, timed_kernels),
    "step": (110.0, one_step),
    "outer_loop": (60.0, outer_loop),
    "two_regions": (70.0, two_regions),
    "learning": (540.0, learning_study),
}
BY_NAME = ("learning",)  # parts that run only if they are asked for: they take as long as all others


def main() -> None:
    name, rows, *small = sys.argv[1:]
    PARTS[name][1](SMALL if small else FULL, Path(rows), told_to(Path(rows)))


if __name__ == "__main__":
    main()
