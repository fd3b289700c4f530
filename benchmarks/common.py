"""Shared by the benchmarks: what machine this is, alternating timings, and rows of results.csv."""

from __future__ import annotations

import csv
import io
import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch

RESULTS = Path(__file__).parent / "results.csv"
COLUMNS = ("date", "benchmark", "metric", "value", "unit", "hardware", "versions", "note")


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


def alternate(functions: dict[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each function, once a round: what loads the machine meanwhile loads all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_index in range(warmup + rounds):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if round_index >= warmup:
                times[name].append(time.perf_counter() - begin)
    return times


def ratio(slower_is_less: Sequence[float], times: Sequence[float]) -> float:
    """Median over the rounds of reference time / time: 1 is as fast as the reference, more is faster."""
    return median(reference / own for reference, own in zip(slower_is_less, times, strict=True))


def flat(results: dict, prefix: str = "") -> list[tuple[str, float]]:
    """Nested results as (dotted metric, number)."""
    found = []
    for key, value in results.items():
        if isinstance(value, dict):
            found += flat(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            found.append((f"{prefix}{key}", value))
    return found


def record(benchmark: str, results: dict, units: Callable[[str], str], note: str = "") -> None:
    """Append one row for each number to results.csv; the file is replaced in one step."""
    kept = RESULTS.read_text() if RESULTS.exists() else ",".join(COLUMNS) + "\n"
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
    for metric, value in flat(results):
        writer.writerow([now, benchmark, metric, f"{value:.6g}", units(metric), hardware(), versions(), note])
    temporary = RESULTS.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(kept + rows.getvalue())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(RESULTS)
