"""ACCO's forms against DeepSpeed's ZeRO-1: time, bytes, memory, and what the prediction costs in loss.

Two data-parallel ranks in network namespaces joined by an emulated link (needs root), set so that communication takes
about as long as compute. Variants alternate in short blocks. Losses are of runs without the link, over several seeds.
In the part `time` compute and communication share the processor. In `held` a micro-batch takes twice as long as
it computes and waits for the rest, layer by layer, as where an accelerator leaves the host's cores to the
communication. `share_of_bound` is the least time that a form's step can take over this link, were communication to
cost no compute, over the time that it took.

    python -m benchmarks.acco [--quick] [--hold 2] [--record]             within ten minutes
    python -m benchmarks.acco --only sweep                                over links of five rates, as long again
    python -m benchmarks.acco --only loss --steps 1200 --seeds 3          for the loss
    python -m benchmarks.acco --long 20000000           the default form and ZeRO-1 on a larger model, for curves
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.acco.ranks import HEAVY, LONG, SMALL, Job
from benchmarks.common import command_line, hardware, report, spread, units_by_ending, versions
from geotrain.common.files import whole_file
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
BY_HAND = ("sweep",)
SIZES = {"heavy": HEAVY, "small": SMALL}
FASTEST = "stale"  # that predicts
SWEPT = (DEFAULT, FASTEST, "exact")  # the last is the published one
RATIOS = (0.25, 0.5, 1.0, 1.5, 2.0)
SLOWER = 4
UNIT = units_by_ending(
    {"_per_s_over_zero1": "", "_s": "s", "_gbps": "Gbit/s", "_bytes": "bytes", "_per_parameter": "bytes"}
)
LOSS_GOAL = 1.005  # the default form's loss over ZeRO-1's, at most


def main() -> None:
    parser = command_line(__doc__, quick={"size": "small", "rounds": 1, "steps": 40, "seeds": 1})
    parser.add_argument(
        "--hold", type=float, default=2.0, help="times as long as it computes a held micro-batch takes"
    )
    parser.add_argument("--size", choices=SIZES, default="heavy", help="of the model that is timed")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each variant")
    parser.add_argument("--steps", type=int, default=120, help="of the runs that loss is taken from")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", choices=PARTS + BY_HAND, action="append")
    parser.add_argument("--long", type=int, metavar="TOKENS", help="only the longer run: writes its curves to docs/")
    parser.add_argument("--variants", nargs="+", default=["zero1", DEFAULT], choices=("zero1", *FORMS), help="of it")
    args = parser.parse_args()
    if args.long:
        found = long_run(args.long, args.seeds, tuple(args.variants))
        report("acco", {"long": found}, args, UNIT, f"{args.long / 1e6:g} M tokens, {args.seeds} seeds")
        return
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
    if "sweep" in parts:
        result["sweep"] = sweep(args, link)
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
            **spread("speedup_over_zero1", speedups(seen[zero], seen[form])),
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


def speedups(zero: dict[str, Any], form: dict[str, Any]) -> list[float]:
    return [a / b for a, b in zip(zero["step_s"], form["step_s"], strict=True)]


def sweep(args: argparse.Namespace, link: LinkConfig | None) -> dict[str, Any]:
    """Measure where communication takes 0.25 to 2 times as long as compute."""
    assert link is not None
    found: dict[str, Any] = {}
    for ratio in RATIOS:
        job = Job(
            "time", SIZES[args.size], (*ZEROS, *SWEPT), rounds=max(2, args.rounds // 2), bf16=processor_has_bf16()
        )
        seen = run(job, link.model_copy(update={"gbps": link.gbps / ratio}))
        zero = min((seen[name] for name in ZEROS), key=lambda zero: statistics.median(zero["step_s"]))
        found[str(ratio)] = {
            "communication_over_compute": statistics.median(zero["step_s"]) / seen["compute_s"] - 1,
            **{form: statistics.median(speedups(zero, seen[form])) for form in SWEPT},
        }
        print(f"ratio {ratio}: {found[str(ratio)]}", flush=True)
    plot_sweep(found)
    return found


def plot_sweep(found: dict[str, Any]) -> None:
    pyplot = plotting()
    figure, axes = pyplot.subplots(figsize=(6, 4))
    x = [row["communication_over_compute"] for row in found.values()]
    grid = [0.02 * i for i in range(5, 121)]
    for name in SWEPT:
        form = FORMS[name]
        a, s = form.first_share, form.prediction_traffic(weight_bytes())
        bound = [(1 + m) / (max(a, m) + max(1 - a, s * m)) for m in grid]
        [line] = axes.plot(x, [row[name] for row in found.values()], "o-", label=f"{name}, measured")
        axes.plot(grid, bound, "--", linewidth=0.8, color=line.get_color(), label=f"{name}, bound")
    axes.set(xlabel="communication / compute", ylabel="speed-up over ZeRO-1")
    axes.legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "acco_sweep.svg")
    pyplot.close(figure)


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
        by_seed.append(run(Job("loss", SMALL, variants=variants, steps=args.steps, seed=seed, bf16=bf16)))
        print(f"loss after {args.steps} steps, seed {seed}: {by_seed[-1]}", flush=True)
    result["loss_in_bf16"], result["zero1_loss"] = bf16, statistics.mean(seen["zero1"] for seen in by_seed)
    for form in FORMS:
        ratios = [seen[form] / seen["zero1"] for seen in by_seed]
        result["forms"][form].update(loss_vs_zero1=statistics.mean(ratios), loss_vs_zero1_by_seed=ratios)


def long_run(tokens: int, seeds: int, variants: tuple[str, ...]) -> dict[str, Any]:
    """Curves of these variants, each written to docs/acco_long.json as soon as it is whole; whole ones are kept.

    What is not yet whole has its checkpoint and the points so far in runs/acco_long/, and goes on from there.
    """
    path, kept = ROOT / "docs" / "acco_long.json", ROOT / "runs" / "acco_long"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for seed in range(seeds):
        for variant in variants:
            name = f"{variant}-{seed}"
            if name in found and found[name]["tokens"] == tokens:
                continue
            folder = kept / f"{name}-{tokens}"
            folder.mkdir(parents=True, exist_ok=True)
            print(f"{name}: see {folder / 'points.json'}", flush=True)
            bf16 = processor_has_bf16()
            curve = run(Job("curves", LONG, (variant,), tokens=tokens, seed=seed, bf16=bf16, folder=str(folder)))
            found[name] = {"tokens": tokens, "curve": curve[variant], "bf16": bf16, "hardware": hardware()}
            found[name]["versions"] = versions("deepspeed", "megatron-core")
            with whole_file(path) as file:
                file.write(json.dumps(found))
            shutil.rmtree(folder)
    plot_long(found)
    seen: dict[str, Any] = {"losses": {name: long["curve"][-1][1] for name, long in found.items()}}
    pairs = {name: ratios(long, zero) for name, long, zero in beside_zero1(found)}
    if pairs:
        seen["loss_vs_zero1_by_run"] = {name: of[-1][1] for name, of in pairs.items()}
        seen["loss_vs_zero1"] = statistics.mean(seen["loss_vs_zero1_by_run"].values())
    return seen


def beside_zero1(found: dict[str, Any]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, run, ZeRO-1's run of the same seed, tokens and arithmetic)."""
    pairs = [(name, long, found.get(f"zero1-{name.split('-')[-1]}")) for name, long in found.items()]
    return [
        (name, long, zero)
        for name, long, zero in pairs
        if zero and zero is not long and all(long[key] == zero[key] for key in ("tokens", "bf16"))
    ]


def ratios(long: dict[str, Any], zero: dict[str, Any]) -> list[tuple[int, float]]:
    """(tokens, loss over ZeRO-1's) at every point."""
    return [(tokens, loss / other) for (tokens, loss), (_, other) in zip(long["curve"], zero["curve"], strict=True)]


def weight_bytes() -> int:
    """Bytes of a weight, or of its gradient, on the link."""
    return 2 if processor_has_bf16() else 4


def plot_long(found: dict[str, Any]) -> None:
    """Left the curves, right what ACCO's are over ZeRO-1's, with the goal."""
    pyplot = plotting()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for name, long in found.items():
        tokens, loss = zip(*long["curve"], strict=True)
        left.plot([t / 1e6 for t in tokens], loss, linewidth=1, label=name)
    for name, long, zero in beside_zero1(found):
        tokens, ratio = zip(*ratios(long, zero), strict=True)
        right.plot([t / 1e6 for t in tokens], ratio, linewidth=1, label=name)
    right.axhline(LOSS_GOAL, linestyle="--", linewidth=1, color="grey", label=f"goal: {LOSS_GOAL}")
    left.set(xlabel="million tokens", ylabel="held-out loss, nats a byte", yscale="log")
    right.set(xlabel="million tokens", ylabel="loss over ZeRO-1's")
    for axes in (left, right):
        axes.legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "acco_long.svg")
    pyplot.close(figure)


def plotting() -> Any:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    return pyplot


if __name__ == "__main__":
    main()
