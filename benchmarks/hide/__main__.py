"""Ways to hide a region's own communication behind compute, each beside its own bound.

A micro-batch is a wait of a stated length, layer by layer, as on an accelerator: what it really computes is a part of
that, and takes less than a third of the processors. Collectives run over loopback, and each is done no sooner than
its bytes have crossed an ideal link of its rank, one after the other. What is left are the engine's own schedules.
Every way is compared with the plain engine's overlapped ZeRO-1 and with DeepSpeed's own, which always steps AdamW.

    python -m benchmarks.hide [--quick] [--record]                              two ranks, ten minutes
    python -m benchmarks.hide --ranks 4 --step-s 2 --steps 3 --ratios 1 2 --ways zero1 delayed_8_4
    python -m benchmarks.hide --ratios 1 --step-s 1.2 --steps 3  --gloo   over real gloo between namespaces
    python -m benchmarks.hide.loss                                              what each way costs in loss
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import command_line, hardware, ratio, report, spread, units_by_ending, versions
from benchmarks.hide.loss import RESULTS, over_zero1
from benchmarks.hide.ranks import DEEPSPEED, DEFAULT, WAYS, ZERO, Job, Size, Way, model_config
from geotrain.config import LinkConfig, architecture_from_hf
from geotrain.emulate.wan import cannot_emulate, emulated
from geotrain.kernels.devices import processor_has_bf16
from geotrain.launch.check import free_ports
from geotrain.launch.site_processes import pump_process
from geotrain.launch.supervisor import ProcessSpec, Supervisor, guarded
from geotrain.parallelism.acco_forms import least_step_s
from geotrain.parallelism.checks import code_bytes
from geotrain.parameters.parameter_map import parameter_count

# 0.5 M parameters, of which a bucket is an eighth; few tokens and small matrices: it computes little.
MODEL = Size(96, 4, 256, 16, 1, 8)
UNIT = units_by_ending({"_s": "s", "_bytes": "bytes"})


def main() -> None:
    quick = {"ranks": [2], "ratios": [1.0], "rounds": 1, "steps": 1, "ways": [ZERO, "exact", DEFAULT], "step_s": 2.0}
    parser = command_line(__doc__, quick=quick)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0], help="sending / compute"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[ZERO, DEEPSPEED, DEFAULT])
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each way")
    parser.add_argument("--steps", type=int, default=1, help="of a block")
    parser.add_argument("--step-s", type=float, default=0.8, help="seconds of a step's compute: 2 for four ranks")
    parser.add_argument("--gloo", action="store_true", help="over gloo and an emulated link instead (needs root)")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    args = parser.parse_args()
    if args.gloo and (args.ranks != [2] or (reason := cannot_emulate())):
        sys.exit(f"--gloo: {'it takes --ranks 2' if args.ranks != [2] else reason}")
    result: dict[str, Any] = {"default": DEFAULT, "ranks": {}}
    for ranks in args.ranks:
        result["ranks"][ranks] = {each: compared(args, ranks, each) for each in args.ratios}
    cells = [(each, cell) for of_ranks in result["ranks"].values() for each, cell in of_ranks.items()]
    ours = [(each, cell["ways"][DEFAULT]) for each, cell in cells if DEFAULT in cell["ways"]]
    result["processor_share"] = max(cell["processor_share"] for _, cell in cells)
    result["loss_over_zero1"] = over_zero1(RESULTS)
    if ours:
        result["share_of_bound"] = min(way["share_of_bound"] for _, way in ours)
        result["bytes_over_least"] = max(way["bytes_over_least"] for _, way in ours)
        result["speedup_over_overlapped_zero1"] = {
            f"at_{each:g}": min(way["speedup_over_overlapped_zero1"] for at, way in ours if at == each)
            for each in args.ratios
        }
    result["setting"] = {**vars(args), "hardware": hardware(), "versions": versions("deepspeed", "megatron-core")}
    report("hide", result, args, UNIT, left_out=("setting",))


def compared(args: Any, ranks: int, sending: float) -> dict[str, Any]:
    """Figures of every way, where values take `sending` times as long to send as a step to compute."""
    bf16, size = processor_has_bf16(), MODEL
    commit_bytes = 2 * (ranks - 1) / ranks * parameters() * weight_bytes()
    shared: dict[str, Any] = {"hold_s": args.step_s / size.micro_batches, "bf16": bf16, "ranks": ranks}
    ways = tuple(dict.fromkeys((ZERO, *args.ways)))
    rate = commit_bytes / (sending * args.step_s)
    job = Job("time", size, ways, args.rounds, args.steps, optimizer=args.optimizer, bytes_per_s=rate, **shared)
    link = None
    if args.gloo:
        link = LinkConfig(regions=("here", "there"), gbps=8e-9 * job.bytes_per_s, rtt_ms=1.0)
    seen = run(job if link is None else replace(job, bytes_per_s=math.inf), link)
    if seen["processor_share"] > 1 / 3:
        sys.exit(f"compute takes {seen['processor_share']:.0%} of the processors, over a third; raise --step-s")
    commit_s, found = commit_bytes / job.bytes_per_s, {}
    for name in ways:
        steps_s, own = seen[name]["step_s"], WAYS[name]
        least_s = way_bound_s(own, args.step_s, commit_s, size.micro_batches)
        found[name] = {
            "step_s": statistics.median(steps_s),
            "bound_s": least_s,
            **spread("share_of_bound", [least_s / step_s for step_s in steps_s]),
            **ratio("speedup_over_overlapped_zero1", seen[ZERO]["step_s"], steps_s),
            "bytes_over_least": seen[name]["sent_bytes"]
            / ((1 + (own.form == "exact")) * sum(shares(own)) / 2 * commit_bytes),
        }
        if DEEPSPEED in seen:
            found[name] |= ratio("speedup_over_deepspeed", seen[DEEPSPEED]["step_s"], steps_s)
    cell = {"compute_over_wait": seen["compute_s"] / args.step_s, "processor_share": seen["processor_share"]}
    cell |= {"ways": found}
    print(f"{ranks} ranks, sending {sending:g} of compute: {json.dumps(cell)}", flush=True)
    return cell


def shares(way: Way) -> tuple[float, float]:
    """Bytes of gradients, and of weights, as the way sends them, over those of values."""
    if way.bits is None:
        return 1.0, 1.0
    count = parameters()
    gradients, weights = (code_bytes(count, bits) / (count * weight_bytes()) for bits in way.bits)
    return gradients, weights


def way_bound_s(way: Way, compute_s: float, commit_s: float, micro_batches: int) -> float:
    """The least seconds of a step whose link is never idle where it may be busy. commit_s: sending of values.

    DeepSpeed's ZeRO-1 hides gradients as the plain engine's does, and sends weights in the open.
    """
    gradients_s, weights_s = (share * commit_s / 2 for share in shares(way))
    if way.by_deepspeed:
        return weights_s + least_step_s(None, micro_batches, compute_s, gradients_s, 0.0)
    return least_step_s(way.form, micro_batches, compute_s, gradients_s, weights_s)


def run(job: Job, link: LinkConfig | None = None) -> Any:
    """Run the job on its ranks, with a link the second beyond it, and return what rank 0 measures."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        answer = Path(folder) / "answer.json"
        supervisor = stack.enter_context(Supervisor(Path(folder)))
        hosts: list[tuple[str, int | None]] = [("127.0.0.1", None)] * job.ranks
        if link is not None:
            wan = stack.enter_context(emulated({"there": link}))
            supervisor.start(pump_process(wan))
            hosts = [(wan.global_address, None), (wan.addresses["there"], wan.namespaces["there"])]
        port = free_ports(1)[0]
        for rank, (address, namespace) in enumerate(hosts):
            order = [job.to_json(), str(rank), address, f"{hosts[0][0]}:{port}", str(answer)]
            command = guarded([sys.executable, "-m", "benchmarks.hide.ranks", *order], namespace)
            keeps = () if namespace is None else (namespace,)
            env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            supervisor.start(ProcessSpec(f"rank-{rank}", command, env, inherited_fds=keeps))
        outcome = supervisor.wait()
        if outcome.code:
            sys.exit(outcome.reason)
        return json.loads(answer.read_text())


def parameters() -> int:
    return parameter_count(architecture_from_hf(model_config(MODEL)))


def weight_bytes() -> int:
    """Bytes of a weight, or of its gradient, on the link."""
    return 2 if processor_has_bf16() else 4


if __name__ == "__main__":
    main()
