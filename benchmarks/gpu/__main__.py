"""For the day a GPU is there: its tests, kernels against the bandwidth of a copy, the outer loop's exposed time, the
step with ZeRO-1 and ACCO, one GPU's against a plain PyTorch loop's, peak memory against the estimate. Writes a page,
and with --record rows of results.csv.

    python -m benchmarks.gpu --plan      # what is measured, and its goals
    make gpu                             # everything, recorded
    python -m benchmarks.gpu --small     # tiny sizes, on the CPU too: whether everything runs
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import ROOT, codec, kernels, overhead
from benchmarks.common import command_line, flat, hardware, report, versions
from benchmarks.gpu import step
from benchmarks.gpu.goals import page, plan, unit, verdict
from benchmarks.processes import be_only_rank
from geotrain.common.files import whole_file
from geotrain.kernels.devices import cuda_devices
from geotrain.outer.codec import make_codec

MARK = "pytest.mark.gpu"
TESTS_S = 1800.0
MODELS = ROOT / "configs" / "models"


@dataclass(frozen=True)
class Sizes:
    """test_files: the most that are run. numel: elements that a kernel is timed on. step: model, tokens of a sample,
    samples of a micro-batch, micro-batches of a replica's step. outer_loop: the same; local_steps: H. pairs: of jobs
    with and without the outer loop."""

    test_files: int
    numel: int
    rounds: int
    step: tuple[str, int, int, int]
    steps: int
    outer_loop: tuple[str, int, int, int]
    local_steps: int
    pairs: int


FULL = Sizes(1000, 1 << 27, 15, ("llama-1b", 2048, 2, 8), 20, ("llama-125m", 1024, 8, 4), 32, 12)
SMALL = Sizes(1, 1 << 12, 2, ("llama-tiny", 32, 1, 2), 2, ("llama-tiny", 32, 2, 1), 2, 1)


def tests(most: int) -> dict[str, float]:
    """Outcomes of the tests marked `gpu`; only their files are collected."""
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text())
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *files[-most:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_S)
    print(done.stdout[-4000:], flush=True)
    counted = {kind: re.search(rf"\b(\d+) {kind}", done.stdout) for kind in ("passed", "failed", "skipped", "error")}
    found = {kind: float(match.group(1)) if match else 0.0 for kind, match in counted.items()}
    found["failed"] += found.pop("error")
    return found


def outer_loop(sizes: Sizes) -> dict[str, float]:
    """Overhead of a worker of one rank, beside a region server and a global server on this machine."""
    model, sequence, micro, count = sizes.outer_loop
    blocks = {
        "model": {"config": str(MODELS / f"{model}.json")},
        "data": {"sequence_length": sequence},
        "deepspeed": {"train_batch_size": micro * count, "train_micro_batch_size_per_gpu": micro},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        overhead.servers(Path(folder), sizes.local_steps, **blocks) as (run, cluster),
    ):
        found = overhead.measure(run, cluster, sizes.pairs)
    return {"exposed": 1 - found["throughput_ratio"], "tokens_per_s": found["tokens_per_s_with"]}


def one_step(sizes: Sizes, gpus: int) -> dict[str, float]:
    """Over all GPUs, each in a process of its own; where there is one or none, in this one."""
    from geotrain.config import load_run

    model, *shape = sizes.step
    with tempfile.TemporaryDirectory() as folder:
        run = step.run_file(Path(folder), MODELS / f"{model}.json", *shape, max(1, gpus))
        if gpus > 1:
            return step.over(run, gpus, sizes.steps)
        be_only_rank()
        return step.measure(load_run(run), sizes.steps)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--plan", action="store_true", help="print what is measured and its goals, and end")
    parser.add_argument("--small", action="store_true", help="tiny sizes, also without a GPU; proves nothing")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks/out/gpu.md", help="where the page is written")
    options = parser.parse_args()
    if options.plan:
        print(plan())
        return 0
    gpus = cuda_devices()
    if gpus == 0 and not options.small:
        print("benchmarks.gpu: there is no GPU here; --small tries everything on the CPU", file=sys.stderr)
        return 2
    if gpus == 0 and options.record:
        print("benchmarks.gpu: --record is for figures of a GPU", file=sys.stderr)
        return 2
    sizes = SMALL if options.small else FULL
    device = "cuda" if gpus else "cpu"
    results: dict[str, dict] = {"tests": tests(sizes.test_files)}
    # Ranks of their own come before this process takes a GPU's memory, and the servers' machine is still idle.
    results["step"] = one_step(sizes, gpus)
    results["outer_loop"] = outer_loop(sizes)
    results["kernels"] = {
        name: kernels.speed(name, sizes.numel, sizes.rounds, device)[of_copy(device)]
        for name in kernels.OPS
        if gpus == 0 or name not in kernels.ON_HOSTS
    }
    results["codecs"] = {
        f"{name}.{part}": ratio
        for name, config in codec.CONFIGS.items()
        for part, ratio in codec.speed(make_codec(config), sizes.numel, sizes.rounds, device).items()
        if part.endswith(of_copy(device))
    }
    figures = dict(flat(results))
    options.page.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    with whole_file(options.page) as file:
        file.write(page(figures, gpus, f"{now}, {hardware()}, {versions('deepspeed', 'megatron-core')}"))
    missed = [metric for metric, value in figures.items() if verdict(metric, value, gpus) == "MISSED"]
    print(f"{options.page}: {len(figures)} figures; goals missed: {', '.join(missed) or 'none'}")
    report("gpu", results, options, unit, note=f"{gpus} GPUs")
    return 1 if results["tests"]["failed"] else 0


def of_copy(device: str) -> str:
    return "vs_memcpy" if device == "cpu" else "vs_copy_bandwidth"


if __name__ == "__main__":
    sys.exit(main())
