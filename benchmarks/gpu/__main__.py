"""For the day a GPU is there, within eight minutes: its tests; the engine there against itself on the processor;
kernels against the bandwidth of a copy; the step with ZeRO-1 and ACCO, one GPU's against a plain PyTorch loop's, peak
memory against the estimate; the outer loop's exposed time; two regions that share the GPU.

Each part is a process with a limit. One that fails or takes too long is told, what it had measured stays, and the
rest goes on. Figures are written as they come: rows to benchmarks/out/gpu.jsonl; after each part also the page and,
with --record, results.csv.

    python -m benchmarks.gpu --plan                   # what is measured, and its goals
    make gpu                                          # everything, recorded
    make gpu GPU_ARGS="tests:200 engines"             # only these parts, the first within 200 s
    make gpu GPU_ARGS=learning                        # a study: data parallelism beside ours
    python -m benchmarks.gpu --small                  # tiny sizes, on the CPU too: whether everything runs
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import ROOT
from benchmarks.common import command_line, hardware, record, report, versions
from benchmarks.gpu.goals import page, plan, unit, verdict
from benchmarks.gpu.parts import BY_NAME, PARTS
from benchmarks.gpu.rows import read_rows, told_to
from geotrain.common.files import whole_file
from geotrain.kernels.devices import cuda_devices


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument(
        "parts", nargs="*", help=f"NAME[:SECONDS] of {', '.join(PARTS)}; default: all but {', '.join(BY_NAME)}"
    )
    parser.add_argument("--plan", action="store_true", help="print what is measured and its goals, and end")
    parser.add_argument("--small", action="store_true", help="tiny sizes, also without a GPU; proves nothing")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks/out/gpu.md", help="where the page is written")
    parser.add_argument("--rows", type=Path, default=ROOT / "benchmarks/out/gpu.jsonl", help="where figures are")
    options = parser.parse_args()
    if options.plan:
        print(plan())
        return 0
    chosen = [part.partition(":") for part in options.parts or (name for name in PARTS if name not in BY_NAME)]
    if unknown := [name for name, _, _ in chosen if name not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    gpus = cuda_devices()
    if gpus == 0 and not options.small:
        print("benchmarks.gpu: there is no GPU here; --small tries everything on the CPU", file=sys.stderr)
        return 2
    if gpus == 0 and options.record:
        print("benchmarks.gpu: --record is for figures of a GPU", file=sys.stderr)
        return 2
    for path in (options.rows, options.page):
        path.parent.mkdir(parents=True, exist_ok=True)
    options.rows.unlink(missing_ok=True)
    tell, known = told_to(options.rows), dict[str, float]()
    for name, _, seconds in chosen:
        began = time.monotonic()
        code = run_part(name, options.rows, options.small, float(seconds) if seconds else PARTS[name][0])
        tell(f"parts.{name}.exit", code)
        tell(f"parts.{name}.seconds", time.monotonic() - began)
        figures = read_rows(options.rows)
        if options.record:
            new = {metric: value for metric, value in figures.items() if metric not in known}
            record("gpu", new, unit, "; ".join(filter(None, (f"{gpus} GPUs", options.note))))
        known = figures
        with whole_file(options.page) as file:
            now = datetime.now(UTC).strftime("%Y-%m-%d")
            file.write(page(figures, gpus, f"{now}, {hardware()}, {versions('deepspeed', 'megatron-core')}"))
    missed = [metric for metric, value in known.items() if verdict(metric, value, gpus) == "MISSED"]
    print(f"{options.page}: {len(known)} figures; goals missed: {', '.join(missed) or 'none'}")
    options.record = False  # that is done
    report("gpu", known, options, unit)
    return int(any(value for metric, value in known.items() if metric.endswith(".exit") or metric == "tests.failed"))


def run_part(name: str, rows: Path, small: bool, within_s: float) -> int:
    """Run a part to its end, or for so long: then it is killed with all that it has started. Returns its exit code;
    124: it took too long."""
    command = [sys.executable, "-m", "benchmarks.gpu.parts", name, str(rows), *(["small"] if small else [])]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        print(f"benchmarks.gpu: {name} took more than {within_s:g} s", file=sys.stderr, flush=True)
        return 124
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
