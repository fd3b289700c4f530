"""ACCO's forms against DeepSpeed's ZeRO-1: time, bytes, memory, and what the prediction costs in loss.

Two data-parallel ranks in network namespaces joined by an emulated link (needs root), set so that communication takes
about as long as compute. Variants alternate in short blocks. Losses are of runs without the link, over several seeds.
In the part `time` compute and communication share the processor. In `held` a micro-batch takes twice as long as
it computes and waits for the rest, layer by layer, as where an accelerator leaves the host's cores to the
communication. `share_of_bound` is the least time that a form's step can take over this link, were communication to
cost no compute, over the time that it took.

    python -m benchmarks.acco [--quick] [--hold 2] [--record]             within ten minutes
    python -m benchmarks.acco --only time --ratio 0.5                     a link twice as fast
    python -m benchmarks.acco --only loss --steps 1200 --seeds 3          for the loss
    python -m benchmarks.acco --only loss --loss-size long --steps 2441   of a larger model: 20 M tokens
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.acco.ranks import HEAVY, LONG, SMALL, Job
from benchmarks.common import command_line, hardware, ratio, report, spread, units_by_ending, versions
from geotrain.config import AccoConfig, LinkConfig
from geotrain.emulate.wan import cannot_emulate, emulated
from geotrain.kernels.devices import processor_has_bf16
from geotrain.launch.check import free_ports
from geotrain.launch.site_processes import pump_process
from geotrain.launch.supervisor import ProcessSpec, Supervisor, guarded
from geotrain.parallelism.acco_forms import FORMS, first_part

DEFAULT = AccoConfig().prediction
ZEROS = ("zero1", "zero1-overlap")  # the plain engine's, and DeepSpeed's with its own overlap
PARTS = ("time", "held", "memory", "unequal", "loss")
SIZES = {"heavy": HEAVY, "small": SMALL, "long": LONG}
FASTEST = "stale"  # that predicts
SLOWER = 4
UNIT = units_by_ending(
    {"_per_s_over_zero1": "", "_s": "s", "_gbps": "Gbit/s", "_bytes": "bytes", "_per_parameter": "bytes"}
)


def main() -> None:
    parser = command_line(__doc__, quick={"size": "small", "rounds": 1, "steps": 40, "seeds": 1})
    parser.add_argument(
        "--hold", type=float, default=2.0, help="times as long as it computes a held micro-batch takes"
    )
    parser.add_argument("--size", choices=SIZES, default="heavy", help="of the model that is timed")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each variant")
    parser.add_argument("--steps", type=int, default=120, help="of the runs that loss is taken from")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--loss-size", choices=SIZES, default="small", help="of the model that loss is taken from")
    parser.add_argument("--ratio", type=float, default=1.0, help="communication over compute, in the part `time`")
    parser.add_argument("--only", choices=PARTS, action="append")
    args = parser.parse_args()
    parts = args.only or PARTS
    linked = set(parts) - {"loss", "memory"}
    if reason := cannot_emulate() if linked else "":
        sys.exit(f"the link cannot be emulated here: {reason}; --only loss and --only memory work without")
    result: dict[str, Any] = {"default": DEFAULT, "forms": {form: {} for form in FORMS}}
    link = calibrated(args) if linked - {"held"} else None
    if "time" in parts:
        times(args, link, result)
        print(f"time: {result['zero1']}, {result['forms']}", flush=True)
    if "held" in parts:
        result["held"] = held(args)
        print(f"held: {result['held']}", flush=True)
    if "memory" in parts:
        memory(args, result)
    if "unequal" in parts:
        result["heterogeneous"] = unequal(args, link)
    if "loss" in parts:
        losses(args, result)
    result.update(result["forms"][DEFAULT])
    result["setting"] = {**vars(args), "hardware": hardware(), "versions": versions("deepspeed", "megatron-core")}
    report("acco", result, args, UNIT, left_out=("setting",))


# ------------------------------------------------------------------------------------------------- two processes


def run(job: Job, link: LinkConfig | None = None) -> Any:
    """Run the job on two ranks and return what rank 0 measures."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        answer = Path(folder) / "answer.json"
        supervisor = stack.enter_context(Supervisor(Path(folder)))
        hosts: list[tuple[str, int | None]] = [("127.0.0.1", None), ("127.0.0.1", None)]
        if link is not None:
            wan = stack.enter_context(emulated({"there": link}))
            supervisor.start(pump_process(wan))
            hosts = [(wan.global_address, None), (wan.addresses["there"], wan.namespaces["there"])]
        port = free_ports(1)[0]
        for rank, (address, namespace) in enumerate(hosts):
            order = [job.to_json(), str(rank), address, f"{hosts[0][0]}:{port}", str(answer)]
            command = guarded([sys.executable, "-m", "benchmarks.acco.ranks", *order], namespace)
            keeps = () if namespace is None else (namespace,)
            env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            supervisor.start(ProcessSpec(f"rank-{rank}", command, env, inherited_fds=keeps))
        outcome = supervisor.wait()
        if outcome.code:
            sys.exit(outcome.reason)
        return json.loads(answer.read_text())


def calibrated(args: argparse.Namespace, zeros: tuple[str, ...] = ZEROS, hold_s: float = 0.0) -> LinkConfig:
    """A link over which the communication of a ZeRO-1 step takes as long as its compute, found over a first guess."""
    bf16 = processor_has_bf16()
    seen = run(Job("compute", SIZES[args.size], hold_s=hold_s, bf16=bf16))
    commit_bytes = seen["parameters"] * weight_bytes()  # of each rank: half the gradients and half the weights
    guess = LinkConfig(regions=("here", "there"), gbps=8 * commit_bytes / seen["compute_s"] / 1e9, rtt_ms=1.0)
    seen = run(Job("time", SIZES[args.size], zeros, rounds=min(2, args.rounds), hold_s=hold_s, bf16=bf16), guess)
    step_s = min(statistics.median(seen[name]["step_s"]) for name in zeros)
    communication = max(0.1, step_s / seen["compute_s"] - 1)  # beside others, compute alone may take as long
    link = guess.model_copy(update={"gbps": guess.gbps * communication})
    print(f"compute {seen['compute_s']:.3f} s a step; link {1000 * link.gbps:.1f} Mbit/s", flush=True)
    return link


def times(args: argparse.Namespace, link: LinkConfig | None, result: dict[str, Any]) -> None:
    """Speed and bytes of every form; the fastest of ZeRO-1's settings is what they are compared with."""
    assert link is not None
    link = link.model_copy(update={"gbps": link.gbps / args.ratio})
    job = Job("time", SIZES[args.size], (*ZEROS, *FORMS), rounds=args.rounds, bf16=processor_has_bf16())
    seen = run(job, link)
    best = min(ZEROS, key=lambda name: statistics.median(seen[name]["step_s"]))
    result["zero1"] = {name: statistics.median(seen[name]["step_s"]) for name in ZEROS} | {"fastest": best}
    result["compute_s"], result["link_gbps"] = seen["compute_s"], link.gbps
    result["communication_over_compute"] = result["zero1"][best] / seen["compute_s"] - 1
    for form, figures in compared(args, link, seen, best, tuple(FORMS)).items():
        result["forms"][form].update(figures)


def held(args: argparse.Namespace) -> dict[str, Any]:
    """The same where a micro-batch takes `--hold` times as long and computes no more than before. ZeRO-1 is the plain
    engine's, which hides what it sends behind layers."""
    size, bf16 = SIZES[args.size], processor_has_bf16()
    seen = run(Job("compute", size, bf16=bf16))
    hold_s = args.hold * seen["compute_s"] / size.micro_batches
    link = calibrated(args, ZEROS[:1], hold_s)
    forms = (DEFAULT, FASTEST)
    seen = run(Job("time", size, (ZEROS[0], *forms), rounds=args.rounds, hold_s=hold_s, bf16=bf16), link)
    over_compute = statistics.median(seen[ZEROS[0]]["step_s"]) / seen["compute_s"] - 1
    found = compared(args, link, seen, ZEROS[0], forms)
    return {"communication_over_compute": over_compute, "link_gbps": link.gbps, "forms": found, **found[DEFAULT]}


def compared(
    args: argparse.Namespace, link: LinkConfig, seen: dict[str, Any], zero: str, forms: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """Figures of the forms, beside ZeRO-1 and the bound."""
    found = {}
    for form in forms:
        commit_bytes = weight_bytes() * seen["parameters"]
        bound_s = least_step_s(form, args.size, seen["compute_s"], 8 * commit_bytes / 1e9 / link.gbps)
        found[form] = {
            "step_s": statistics.median(seen[form]["step_s"]),
            **ratio("speedup_over_zero1", seen[zero]["step_s"], seen[form]["step_s"]),
            **spread("share_of_bound", [bound_s / step_s for step_s in seen[form]["step_s"]]),
            "bytes_per_step_vs_zero1": seen[form]["sent_bytes"] / seen[zero]["sent_bytes"],
            "bytes_per_step_vs_bound": seen[form]["sent_bytes"] / commit_bytes,
        }
    return found


def least_step_s(form: str, size: str, compute_s: float, commit_s: float) -> float:
    """Seconds of a step whose link is never idle where it may be busy, and costs no compute: max(a·C, M) +
    max((1 − a)·C, s·M), of acco_forms."""
    count = SIZES[size].micro_batches
    share = first_part(AccoConfig(prediction=form), count) / count  # type: ignore[arg-type]
    ahead_s = FORMS[form].prediction_traffic(weight_bytes()) * commit_s
    return max(share * compute_s, commit_s) + max((1 - share) * compute_s, ahead_s)


def memory(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure what a rank keeps for each parameter, next to the scratch area of the exchange over gloo."""
    seen = run(Job("time", SIZES[args.size], (ZEROS[0], *FORMS)))
    for form in FORMS:
        kept = seen[form]["memory_bytes"] - seen[form]["scratch_bytes"]
        result["forms"][form].update(
            memory_bytes_per_parameter=kept / seen["parameters"], scratch_bytes=seen[form]["scratch_bytes"]
        )
    zero = result.setdefault("zero1", {})
    zero["memory_bytes_per_parameter"] = seen[ZEROS[0]]["memory_bytes"] / seen["parameters"]


def unequal(args: argparse.Namespace, link: LinkConfig | None) -> dict[str, float]:
    """One rank several times slower, the other takes more of each batch: tokens a second, loss at equal tokens."""
    variants = ("zero1", DEFAULT)
    shared = {"slower": SLOWER, "bf16": processor_has_bf16()}
    job = Job("unequal", SMALL, variants, steps=args.steps // 2, **shared)
    seen = run(job, link)
    zero, ours = seen["zero1"], seen[DEFAULT]
    return {
        "slower": SLOWER,
        "tokens_per_s_over_zero1": ours["tokens_per_s"] / zero["tokens_per_s"],
        "loss_vs_zero1": ours["loss"] / zero["loss"],
    }


def losses(args: argparse.Namespace, result: dict[str, Any]) -> None:
    variants, bf16 = ("zero1", *FORMS), processor_has_bf16()
    by_seed = []
    for seed in range(args.seeds):
        by_seed.append(run(Job("loss", SIZES[args.loss_size], variants, steps=args.steps, seed=seed, bf16=bf16)))
        print(f"loss after {args.steps} steps, seed {seed}: {by_seed[-1]}", flush=True)
    result["loss_in_bf16"], result["zero1_loss"] = bf16, statistics.mean(seen["zero1"] for seen in by_seed)
    for form in FORMS:
        ratios = [seen[form] / seen["zero1"] for seen in by_seed]
        result["forms"][form].update(loss_vs_zero1=statistics.mean(ratios), loss_vs_zero1_by_seed=ratios)


def weight_bytes() -> int:
    """Bytes of a weight, or of its gradient, on the link."""
    return 2 if processor_has_bf16() else 4


if __name__ == "__main__":
    main()
