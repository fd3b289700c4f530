"""Shared by the benchmarks: command lines, alternating timings, what machine this is, and rows of results.csv."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import ROOT
from geotrain.files import whole_file

RESULTS = ROOT / "benchmarks" / "results.csv"
COLUMNS = ("date", "benchmark", "metric", "value", "unit", "hardware", "versions", "note")


def command_line(doc: str | None, recorded: bool = True) -> argparse.ArgumentParser:
    """A parser that shows the module's docstring. recorded: with the options that `report` reads."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
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
) -> None:
    """Record the results if the command line asks for it, all but the keys in left_out, and print them as JSON.

    note: what the rows say in any case, before the --note of the command line.
    """
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

    device: what the functions compute on; calls to a GPU return before it is done, so that it is waited for.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_index in range(warmup + rounds):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if device != "cpu":
                torch.cuda.synchronize()
            if round_index >= warmup:
                times[name].append(time.perf_counter() - begin)
    return times


def ratio(slower_is_less: Sequence[float], times: Sequence[float]) -> float:
    """Median over the rounds of reference time / time: 1 is as fast as the reference, more is faster."""
    return median(reference / own for reference, own in zip(slower_is_less, times, strict=True))


def triton_resources(call: Callable[[], object]) -> dict[str, dict[str, int]]:
    """Of the one Triton kernel that `call` launches: registers and spilled bytes a thread, by target that it is
    compiled for ahead of time."""
    from benchmarks import triton_aot

    (launch,) = triton_aot.launches(call)
    found = {target: triton_aot.compile_launch(launch, target) for target in triton_aot.TARGETS}
    return {target: {"registers": r.registers, "spilled": r.spilled} for target, r in found.items()}
