"""A step of every shipped run on "meta": kernels launched, bytes moved, host waits, beside the roofline's formulas.

Nothing is computed and no GPU is needed: the real engine (Megatron-core, DeepSpeed, the optimizer) of one rank of
each pipeline stage that differs runs forward, backward and the optimizer with torch's fake process group. Layers are
alike, and so are micro-batches: one and two of each are traced, and what the second adds is a layer's, or a
micro-batch's.

layer, rest   of a micro-batch, forward and backward, of each layer and of what is no layer: launches, waits (host
              for device), bytes given to collectives; FLOPs and bytes by kind, and over the roofline's (`_ratio`)
optimizer     of a step: launches, waits; FLOPs and bytes over the roofline's
not_linear    figures of three layers and micro-batches that differ from what one and two tell; of the first run

    python -m benchmarks.trace [--quick] [--run RUN.json …]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import command_line, report, units_by_ending
from benchmarks.trace.step import Traced, on_meta, sized, stage_rank, traced_step
from geotrain.config import RunConfig, load_run
from geotrain.plan.model.roofline import Operation, micro_batch, optimizer_operations
from geotrain.plan.model.work import Work

RUNS = ROOT / "configs" / "runs"
KINDS = ("products", "attention", "memory")


def trace(run: RunConfig) -> dict[str, Any]:
    """Trace each pipeline stage that differs."""
    stages = run.parallel.pipeline
    return {f"stage_{stage}": of_stage(run, stage) for stage in sorted({0, min(1, stages - 1), stages - 1})}


def of_stage(run: RunConfig, stage: int) -> dict[str, Any]:
    parallel, experts = run.parallel, run.architecture.experts
    # As few replicas as send anything: Muon refuses more than there are matrices for.
    replicas = max(2, parallel.expert)
    ranks = replicas * parallel.replica_ranks
    fewest = 1 + (experts.dense_layers if experts else 0)
    traced = {
        (layers, count): traced_step(
            sized(run, fewest + layers, count, replicas), stage_rank(parallel, stage, ranks), ranks
        )
        for layers in (0, 1)
        for count in (1, 2)
    }
    fewer, more = (traced[layers, 2].combined(traced[layers, 1], 1, -1) for layers in (0, 1))
    layer = more.combined(fewer, 1, -1)
    waited = [waits(traced[layers, 2]) - waits(traced[layers, 1]) for layers in (0, 1)]
    work = Work(run.architecture, run.data.sequence_length, run.model.recompute, parallel, run.deepspeed, None)
    layers_of = [
        replace(work, architecture=sized(run, fewest + layers, 1, replicas).architecture) for layers in (0, 1)
    ]
    counted = [summed(list(micro_batch(each, stage))) for each in layers_of]
    each = {key: counted[1][key] - counted[0][key] for key in counted[0]}
    rest = {key: counted[0][key] - each[key] for key in each}  # with the layers that have no experts, if others have
    # Matrices of one layer do not divide evenly among many owners.
    ranks = parallel.expert * parallel.replica_ranks
    alone = sized(run, fewest, 1, parallel.expert)
    once = traced_step(alone, stage_rank(parallel, stage, ranks), ranks)
    step = summed(list(optimizer_operations(layers_of[0], stage, parallel.expert * parallel.context)))
    found = once.total("optimizer")
    return {
        "layer": figures(layer, each) | {"waits": waited[1] - waited[0]},
        "rest": figures(fewer.combined(layer, 1, -1), rest) | {"waits": waited[0] - (waited[1] - waited[0])},
        "optimizer": {
            "waits": waits(once, "optimizer"),
            "launches": found.launches,
            "flops_ratio": found.flops / step["products", "flops"] if step["products", "flops"] else 1.0,
            "bytes_ratio": found.bytes / sum(step[kind, "bytes"] for kind in KINDS),
        },
    }


def not_linear(run: RunConfig) -> int:
    """Count the figures of three layers and three micro-batches that differ from what one and two of each tell."""
    replicas = max(2, run.parallel.expert)
    ranks = replicas * run.parallel.replica_ranks

    def step(layers: int, count: int) -> Traced:
        return traced_step(sized(run, layers, count, replicas), 0, ranks)

    one, two = (step(2, count).combined(step(1, count), 2, -1) for count in (1, 2))  # of three layers
    told, found = two.combined(one, 2, -1), step(3, 3)
    keys = {key for key in told.tallies.keys() | found.tallies.keys() if key[0] == "compute"}
    return sum(told.tallies.get(key) != found.tallies.get(key) for key in keys)


def waits(traced: Traced, phase: str = "compute") -> int:
    return sum(of == phase for of, _ in traced.waits)


def summed(operations: Sequence[Operation]) -> dict[tuple[str, str], float]:
    """(kind, flops or bytes) → the sum."""
    return {
        (kind, what): sum(getattr(operation, what) for operation in operations if operation.name == kind)
        for kind in KINDS
        for what in ("flops", "bytes")
    }


def figures(traced: Traced, formula: dict[tuple[str, str], float]) -> dict[str, float]:
    every = traced.total("compute")
    found: dict[str, float] = {"launches": every.launches, "collective_bytes": every.sent}
    for kind in KINDS:
        of_kind = traced.total("compute", kind)
        for what, value in (("flops", of_kind.flops), ("bytes", of_kind.bytes)):
            found[f"{kind}_{what}"] = value
            if formula[kind, what]:
                found[f"{kind}_{what}_ratio"] = value / formula[kind, what]
    return found


def main() -> int:
    parser = command_line(__doc__, quick={"run": [RUNS / "125m.json"]})
    parser.add_argument("--run", type=Path, nargs="+", default=sorted(RUNS.glob("*.json")), help="run files")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with on_meta():
        for path in options.run:
            run = load_run(path)
            results[run.name] = trace(run)
            for stage, parts in results[run.name].items():
                layer, rest = parts["layer"], parts["rest"]
                print(
                    f"{run.name:16}{stage}: a layer {layer['launches']:.0f} launches, {layer['waits']} waits, "
                    f"{layer['memory_bytes'] / 1e9:.3g} GB beside products; the rest {rest['launches']:.0f}; "
                    f"the optimizer {parts['optimizer']['launches']}, {parts['optimizer']['waits']} waits",
                    flush=True,
                )
        found = not_linear(load_run(options.run[0]))
    ratios = [
        value
        for stages in results.values()
        for parts in stages.values()
        for name, value in parts["layer"].items()
        if name.endswith("_ratio")
    ]
    results["not_linear"] = found
    results["largest_difference"] = max(abs(1 - ratio) for ratio in ratios)
    units = units_by_ending({"_bytes": "bytes", "_flops": "flop", "_ratio": "ratio"}, "count")
    report("trace", results, options, units, timed=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
