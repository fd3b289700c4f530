"""Train a byte model by data parallelism and by ours, side by side in virtual time, each worker's model a row of a
stack on the GPU: HALoS's environment, the production outer loop, Muon, 2 bits.

The rates are those of `benchmarks.studies.confirm`'s beginning, not searched: a gap says what these rates make of it.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.rows import Tell
from benchmarks.studies.claims.methods import OURS_2BIT, SYNCHRONOUS, muon
from benchmarks.studies.claims.runs import Job, run
from benchmarks.studies.claims.search import settings_found
from benchmarks.studies.learner.training import Point, Study

LENGTH = 256
# By name: the model, sequences of a worker's step, bytes of text of each method.
SIZES: dict[str, tuple[dict[str, int], int, float]] = {
    "tiny": ({"hidden": 16, "layers": 1, "heads": 2, "ffn": 32}, 1, 128 * LENGTH),
    "10m": ({"hidden": 384, "layers": 6, "heads": 6, "ffn": 1024}, 16, 12e6),
    "25m": ({"hidden": 512, "layers": 8, "heads": 8, "ffn": 1408}, 16, 10e6),
    "50m": ({"hidden": 640, "layers": 10, "heads": 10, "ffn": 1728}, 8, 6e6),
}
POINTS = 12
WARMUP = 0.1  # of the tokens: runs are short


def job(name: str, method: str) -> Job:
    model, batch, tokens = SIZES[name]
    found = settings_found((method,))[method]
    rate = found["lr"] * Study.hidden / model["hidden"]
    size = {**model, "batch": batch, "length": LENGTH}
    steps = max(1, round(tokens / (batch * LENGTH)))
    return Job(method, {**found, "lr": rate}, 0, steps, size, POINTS, warmup_share=WARMUP)


def compare(name: str, device: str, tell: Tell) -> None:
    """Tell both methods' losses as they fall, by share of the tokens, their last ones, and the gap. Products are in
    TF32 on a GPU. Raises RuntimeError when a method comes to nothing."""
    torch.set_float32_matmul_precision("high")
    last: dict[str, float] = {}
    for short, method in (("data_parallel", muon(SYNCHRONOUS)), ("ours", muon(OURS_2BIT))):

        def told(point: Point, short: str = short) -> None:
            tell(f"learning.{name}.{short}.at_{100 * point.committed_share:.0f}", point.test)

        row = run(job(name, method), told, device=device)
        if row.get("failed"):
            raise RuntimeError(f"{name}, {method}: {row['failed']}")
        last[short] = row["final"]
        for metric, value in final_of(row).items():
            tell(f"learning.{name}.{short}.{metric}", value)
    tell(f"learning.{name}.gap", last["ours"] / last["data_parallel"] - 1)


def final_of(row: dict[str, Any]) -> dict[str, float]:
    return {"final": row["final"], "virtual_s": row["seconds"], "wall_s": row["wall_s"]}


def flops(name: str) -> dict[str, float]:
    """Count the arithmetic of both methods' runs: 6 a parameter and byte, attention, and Newton–Schulz's products for
    each step of each optimizer: of ours one a worker's step, of data parallelism one a step of all sixteen."""
    model, batch, _ = SIZES[name]
    hidden, ffn, layers = model["hidden"], model["ffn"], model["layers"]
    steps = job(name, muon(SYNCHRONOUS)).steps
    parameters = layers * (4 * hidden**2 + 3 * hidden * ffn) + 256 * hidden
    trained = steps * batch * LENGTH * (6 * parameters + 12 * layers * hidden * LENGTH)

    def orthogonal(rows: int, columns: int) -> float:
        return 5 * (4 * rows**2 * columns + 2 * rows**3)

    one = layers * (4 * orthogonal(hidden, hidden) + 3 * orthogonal(hidden, ffn))
    return {"parameters": parameters, "data_parallel": trained + steps / 16 * one, "ours": trained + steps * one}
