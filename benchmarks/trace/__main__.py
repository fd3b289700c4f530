"""A step of every shipped run on "meta": kernels launched, host waits, products beside the cost model's.

Nothing is computed and no GPU is needed: the real engine (Megatron-core, DeepSpeed, the optimizer) of one rank of
each pipeline stage that differs runs forward, backward and the optimizer with torch's fake process group. Layers are
alike, and so are micro-batches: one and two of each are traced, and what the second adds is a layer's, or a
micro-batch's.

layer, rest   of a micro-batch, forward and backward, of each layer and of what is no layer: launches, waits (host
              for device), FLOPs of products; of a layer `product_flops_ratio`: over those of `plan.model.work`
optimizer     of a step: the same
not_linear    launches of three layers and micro-batches that differ from what one and two tell; of the first run

    python -m benchmarks.trace [--quick] [--run RUN.json …]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import command_line, report, units_by_ending
from benchmarks.trace.step import on_meta, sized, stage_rank, traced_step
from geotrain.config import RunConfig, load_run
from geotrain.plan.model.work import BACKWARD, active_weights

RUNS = ROOT / "configs" / "runs"


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
    fewer, more = (traced[layers, 2].total().less(traced[layers, 1].total()) for layers in (0, 1))
    layer = more.less(fewer)
    # Matrices of one layer do not divide evenly among many owners.
    ranks = parallel.expert * parallel.replica_ranks
    once = traced_step(sized(run, fewest, 1, parallel.expert), stage_rank(parallel, stage, ranks), ranks)
    a, micro = run.architecture, int(run.deepspeed["train_micro_batch_size_per_gpu"])
    tokens = micro * run.data.sequence_length / parallel.context / parallel.tensor
    products = 2 * sum(active_weights(a, a.layers - 1)) * (1 + BACKWARD + (run.model.recompute == "full"))
    return {
        "layer": layer._asdict() | {"product_flops_ratio": layer.product_flops / (tokens * products)},
        "rest": fewer.less(layer)._asdict(),
        "optimizer": once.total("optimizer")._asdict(),
    }


def not_linear(run: RunConfig) -> int:
    """Count the launches of three layers and three micro-batches that differ from what one and two of each tell."""
    replicas = max(2, run.parallel.expert)
    ranks = replicas * run.parallel.replica_ranks
    traced = {
        (layers, count): traced_step(sized(run, layers, count, replicas), 0, ranks).launches
        for layers, count in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 3))
    }
    found = traced[3, 3]

    def told(key: tuple[str, str]) -> int:
        one, two = (2 * traced[2, count][key] - traced[1, count][key] for count in (1, 2))  # of three layers
        return 2 * two - one

    keys = {key for launches in traced.values() for key in launches if key[0] == "compute"}
    return sum(told(key) != found[key] for key in keys)


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
                    f"{run.name:16}{stage}: a layer {layer['launches']} launches, {layer['waits']} waits; "
                    f"the rest {rest['launches']}; "
                    f"the optimizer {parts['optimizer']['launches']}, {parts['optimizer']['waits']} waits",
                    flush=True,
                )
        found = not_linear(load_run(options.run[0]))
    ratios = [parts["layer"]["product_flops_ratio"] for stages in results.values() for parts in stages.values()]
    results["not_linear"] = found
    results["largest_difference"] = max(abs(1 - ratio) for ratio in ratios)
    units = units_by_ending({"_flops": "flop", "_ratio": "ratio"}, "count")
    report("trace", results, options, units, timed=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
