"""Shared by the benchmarks: command lines, alternating timings with their intervals, what machine this is and who
else uses it, and rows of results.csv."""

from __future__ import annotations

import argparse
import csv
import ctypes
import io
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks import ROOT
from geotrain.common.files import whole_file

RESULTS = ROOT / "benchmarks" / "results.csv"
COLUMNS = ("date", "benchmark", "metric", "value", "unit", "hardware", "versions", "note")


BUSY = 0.1  # the share of the processors that others may take while something is timed
PR_SET_CHILD_SUBREAPER = 36


class CommandLine(argparse.ArgumentParser):
    """With `--quick`, the defaults are those of `quick`: what is stated beside it holds. A program's own command line
    also makes it the parent of all orphans below it."""

    quick: dict[str, Any] | None = None

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        if args is None:
            adopt_orphans()
        if self.quick is not None and "--quick" in (sys.argv[1:] if args is None else args):
            self.set_defaults(**self.quick)
        found = super().parse_args(args, namespace)
        if self.quick is not None and found.quick and getattr(found, "record", False):
            self.error("--quick gives no figures to --record")
        return found


def command_line(doc: str | None, recorded: bool = True, quick: dict[str, Any] | None = None) -> CommandLine:
    """A parser that shows the module's docstring. recorded: with the options that `report` reads. quick: with the
    option `--quick`, and these defaults then, by which the program ends within a minute."""
    parser = CommandLine(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.quick = quick
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help="within a minute, to see that everything works")
    if recorded:
        parser.add_argument("--record", action="store_true", help="append the figures to benchmarks/results.csv")
        parser.add_argument("--note", default="", help="goes into the recorded rows")
    return parser


def report(
    benchmark: str,
    results: dict[str, Any],
    options: argparse.Namespace,
    units: Callable[[str], str],
    note: str = "",
    left_out: Sequence[str] = (),
    timed: bool = True,
) -> None:
    """Record the results if the command line asks for it, all but the keys in left_out, and print them as JSON.

    note: what the rows say in any case, before the --note of the command line. `others_share` goes with the results.
    timed: others' use of the processors spoils the figures; where they took too much nothing is recorded, and
    SystemExit raised.
    """
    results = {**results, "others_share": others_share()}
    if options.record and timed and (share := results["others_share"] or 0.0) > BUSY:
        print(json.dumps(results), flush=True)
        sys.exit(f"{benchmark}: not recorded: other processes took {share:.0%} of the processors; at most {BUSY:.0%}")
    if options.record:
        kept = {key: value for key, value in results.items() if key not in left_out}
        record(benchmark, kept, units, "; ".join(filter(None, (note, options.note))))
    print(json.dumps(results), flush=True)


def record(benchmark: str, results: dict[str, Any], units: Callable[[str], str], note: str = "") -> None:
    """Append one row for each number to results.csv; the file is replaced in one step."""
    kept = RESULTS.read_text() if RESULTS.exists() else ",".join(COLUMNS) + "\n"
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
    for metric, value in flat(results):
        writer.writerow([now, benchmark, metric, f"{value:.6g}", units(metric), hardware(), versions(), note])
    with whole_file(RESULTS) as file:
        file.write(kept + rows.getvalue())


def flat(results: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Nested results as (dotted metric, number)."""
    found = []
    for key, value in results.items():
        if isinstance(value, dict):
            found += flat(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            found.append((f"{prefix}{key}", value))
    return found


def units_by_ending(endings: dict[str, str], otherwise: str = "") -> Callable[[str], str]:
    """The unit of a metric from how its name ends; the first ending that fits counts."""
    return lambda metric: next((unit for ending, unit in endings.items() if metric.endswith(ending)), otherwise)


def hardware() -> str:
    """One line: processor, cores that this process may use, memory, GPU."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, {cores} cores, {memory_gib:.0f} GiB, {gpu}"


def versions(*packages: str) -> str:
    found = [f"python {platform.python_version()}"]
    for package in ("torch", "triton", *packages):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def alternate(
    functions: dict[str, Callable[[], object]], rounds: int, device: str = "cpu", warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each function, once a round: what loads the machine meanwhile loads all of them alike.

    device: what the functions compute on. Of a GPU the time is by its own events: the host's part is none of it.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    clock = _host_s if device == "cpu" else _device_s
    for round_index in range(warmup + rounds):
        for name, function in functions.items():
            seconds = clock(function)
            if round_index >= warmup:
                times[name].append(seconds)
    return times


def _host_s(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _device_s(function: Callable[[], object]) -> float:
    """Seconds on the GPU. It is kept busy for a millisecond first, so that it never waits for the host's launch."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def ratio(name: str, reference: Sequence[float], times: Sequence[float]) -> dict[str, float]:
    """Spread of reference time / time in each round: 1 is as fast as the reference, more is faster."""
    return spread(name, [theirs / own for theirs, own in zip(reference, times, strict=True)])


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and, as `name`_low and `name`_high, its 95 % interval from order statistics: as wide as there is where
    values are too few for it."""
    ordered, n, k, tail = sorted(values), len(values), 0, 0.0
    while (tail := tail + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    k = max(k - 1, 0)
    return {name: median(values), f"{name}_low": ordered[k], f"{name}_high": ordered[n - 1 - k]}


def adopt_orphans() -> None:
    """Processes below this one whose parents end become its children, not the init process's, so that `processor_s`
    finds all that was ever started here: killed ones too, and what killed ones had started."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def processor_s(pid: int) -> dict[int, float]:
    """Processor time of a process and all below it, nearest first: process id → seconds of processor time, its own
    and those of children that it has waited for. What has ended and was not waited for is among them."""
    used_s: dict[int, float] = {}
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        for each in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it was waited for meanwhile
                used_s[each.pid] = sum(each.cpu_times()[:4])
    return used_s


def others_share() -> float | None:
    """The share of all processors' time since this program began that other programs, and the machine's host, took:
    neither this one nor what it has started, whether that runs, has ended or was killed. None where the system does
    not say."""
    if _BEGAN is None or (now := _all_s()) is None:
        return None
    busy_s, own_s, at_s = (after - before for after, before in zip(now, _BEGAN, strict=True))
    return round(max(0.0, busy_s - own_s) / (max(at_s, 1e-3) * (os.cpu_count() or 1)), 4)


def _all_s() -> tuple[float, float, float] | None:
    """Seconds of processor time that were used on this machine, those of this program and of all that it has started,
    and the time. A process that is waited for during a look is in none: of two looks, the greater counts."""
    try:
        counts = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, counts)
    used = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    own = max(sum(processor_s(os.getpid()).values()) for _ in range(2))
    return used, own, time.monotonic()


_BEGAN = _all_s()


def triton_resources(call: Callable[[], object], targets: int | None = None) -> dict[str, dict[str, int]]:
    """Compile the one Triton kernel that `call` launches: registers and spilled bytes a thread, by target that it is
    compiled for ahead of time. targets: how many of them; None: all."""
    from benchmarks import triton_aot

    (launch,) = triton_aot.launches(call)
    found = {
        target: triton_aot.compile_launch(launch, target).resources for target in [*triton_aot.TARGETS][:targets]
    }
    return {target: {"registers": r.registers, "spilled": r.spilled} for target, r in found.items()}
