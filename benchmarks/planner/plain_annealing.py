"""Plain annealing (`plain_annealing.c`), compiled on the spot, for a given processor time."""

from __future__ import annotations

import ctypes
import subprocess
import time
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks import ROOT
from geotrain.plan.placement.cost import Problem

SOURCE = Path(__file__).with_name("plain_annealing.c")
LIBRARY = ROOT / "build/bench/plain_annealing.so"
HOT, COLD = 0.05, 0.0015  # shares of a good cost
TRIAL_STEPS = 100_000


@cache
def library() -> ctypes.CDLL:
    """The same optimization as the product's kernels have."""
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-o", LIBRARY, SOURCE, "-lm"]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.plain_annealing.restype = ctypes.c_double
    pointer, number, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_double
    loaded.plain_annealing.argtypes = [
        *(number, number, number, pointer, pointer, pointer, pointer, pointer),
        *(ctypes.c_int64, real, real, ctypes.c_uint64),
    ]
    return loaded


def anneal_for(problem: Problem, seconds: float, about_s: float, seed: int) -> tuple[float, float]:
    """The cheapest cost met from random tables within at least that processor time, and the time it took.

    about_s: about what a good placement costs; temperatures are shares of it. A short run says how many moves fit
    into the time; one long run takes nearly all of it, and shorter ones what is left."""
    began, best, took, moves = time.process_time(), np.inf, 0.0, 0
    while took < seconds or not moves:
        steps = max(TRIAL_STEPS, int((seconds - took) * moves / took)) if moves else TRIAL_STEPS
        best = min(best, _run(problem, steps, about_s, seed + moves))
        moves, took = moves + steps, time.process_time() - began
    return best, took


def _run(problem: Problem, steps: int, about_s: float, seed: int) -> float:
    order = np.random.default_rng(seed).permutation(problem.devices).astype(np.int32)
    links = [np.ascontiguousarray(a) for a in (problem.gradient_s, problem.activation_s, problem.compute_s)]
    work = np.zeros(2 * problem.placed + 2 * problem.stages + 2 * problem.replicas)
    return float(
        library().plain_annealing(
            problem.stages,
            problem.replicas,
            problem.devices,
            *(a.ctypes.data for a in links),
            order.ctypes.data,
            work.ctypes.data,
            steps,
            HOT * about_s,
            COLD * about_s,
            seed,
        )
    )
