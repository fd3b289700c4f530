"""The delta path between two emulated regions (200 Mbit/s, 100 ms round trip): blocking, streaming, overlap, codecs.

Two deepspeed jobs of one rank each train the same model on the same tokens from the same seeds under five settings of
the outer loop; region servers and the global server run beside them, as `geotrain launch` starts them. All runs go on
from the same weights (as in DiLoCo's paper), which a short run made before. Between any two runs both workers train
without communication for a while: what their speed is compared with.

exposed_share                  of a job's time: training at rest for an answer or a lease, or busy with the exchange.
                               Both parts are of the same job, so that a slow machine slows both
exchange_ms                    the same, for each inner step
processor_ratio                processor time of a step, the worker's and its region's server's, over that of a step
                               without communication just before and after: what a throughput loses where processors
                               have nothing else to do than to train
utilization                    tokens/s from the end of a worker's first job to the end of its last, over its tokens/s
                               without communication just before and after: worth a tenth at best, since the two are
                               not measured at the same time
bytes_ratio_to_data_parallel   bytes that a bf16 ring all-reduce at every inner step moves over a region's link (2 N
                               bytes up, 2 N down for N parameters) over the bytes counted at the region server's
                               sockets, up and down, in the same time
peak_mbit_s                    the most within one second over a region's link, one direction
validation_loss                of the global weights at the end, by transformers; mean over the seeds
loss_gap                       its relative difference to blocking_fp32, of the same seeds
waiting_share                  of a job's time: training at rest, waiting for an answer

Each figure is the median over seeds, workers and, where it is of one, jobs but the first; _low and _high are its 95 %
interval by order statistics.

    python -m benchmarks.streaming [--seeds 2] [--rounds 3] [--record]     within ten minutes
    python -m benchmarks.streaming --all                                   what is in between, and 2 bits, too
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import ROOT
from benchmarks.common import command_line, report, spread
from benchmarks.streaming.runs import REGIONS, Seen, site
from geotrain.commands.evaluate import evaluate
from geotrain.commands.export import export_run
from geotrain.commands.prepare import prepare_files
from geotrain.config import load_run
from geotrain.data.corpus import documents
from geotrain.parameters.parameter_map import parameter_map_of

CORPUS_BYTES, PASSAGE_CHARACTERS, VALIDATION_SHARE = 2_000_000, 2000, 0.05
LOCAL_STEPS, BATCH, SEQUENCE_LENGTH = 128, 4, 64
LEARNING_RATE = 1e-3
FIRST_SEED, FIRST_LOCAL_STEPS, FIRST_ROUNDS, FIRST_LEARNING_RATE = 99, 32, 24, 3e-3  # of the run before all others
MODEL = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 48}
FRAGMENTS = {"layers_per_fragment": 1}
OVERLAP = {"steps": 10, "late": "continue", "adopt": "rebase"}
INT4 = {"name": "int4"}
TOPK2 = {"name": "topk2", "block": 2048, "density": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "blocking_fp32": {},
    "streaming_fp32": {"fragments": FRAGMENTS},
    "streaming_overlap_fp32": {"fragments": FRAGMENTS, "overlap": OVERLAP},
    "streaming_overlap_4bit": {"fragments": FRAGMENTS, "overlap": OVERLAP, "up": INT4, "down": INT4},
    "streaming_overlap_2bit": {"fragments": FRAGMENTS, "overlap": OVERLAP, "up": TOPK2, "down": TOPK2},
}
ASKED = ("blocking_fp32", "streaming_overlap_4bit")
OUTER = {
    "rule": {"name": "sync", "lr": 1.0, "momentum": 0.0},
    **{link: {"name": "fp32"} for link in ("up", "down", "local")},
}

QUICK = {
    "seeds": 1, "rounds": 2, "local_steps": 16, "first_rounds": 1, "alone_s": 1.0,
}  # fmt: skip


def main() -> None:
    parser = command_line(__doc__, quick=QUICK)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each worker; the first is not timed")
    parser.add_argument("--local-steps", type=int, default=LOCAL_STEPS, help="of a job")
    parser.add_argument("--first-rounds", type=int, default=FIRST_ROUNDS, help="of the run before all others")
    parser.add_argument("--alone-s", type=float, default=3.0, help="seconds without communication between runs")
    parser.add_argument("--all", action="store_true", help="all settings, not only those of which a figure is asked")
    options = parser.parse_args()
    options.settings = list(SETTINGS) if options.all else [*ASKED]
    with tempfile.TemporaryDirectory(prefix="geotrain-") as scratch:
        results = measure(Path(scratch), options)
    report("streaming", results, options, unit)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """folder: for the data and the runs."""
    prepare_text(folder)
    found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in options.settings}
    folders: dict[str, list[Path]] = {name: [] for name in options.settings}
    with site(folder) as place:
        first = run_file(
            folder, SETTINGS["streaming_overlap_4bit"], FIRST_SEED, options.first_rounds, FIRST_LOCAL_STEPS
        )
        place.prepare(folder / "first", first)
        place.end(folder / "first", place.train(folder / "first"))
        print(f"the first run's loss: {loss(folder / 'first'):.4f}", flush=True)
        runs = [(seed, name, folder / f"{name}-{seed}") for seed, name in order(options.settings, options.seeds)]
        files = [
            run_file(folder, SETTINGS[name], seed, options.rounds, options.local_steps) for seed, name, _ in runs
        ]
        place.prepare(runs[0][2], files[0])
        before = place.alone(options.alone_s)
        for i, (seed, name, own) in enumerate(runs):
            seen = place.train(own)
            if i + 1 < len(runs):  # while this run's servers linger
                place.prepare(runs[i + 1][2], files[i + 1])
            place.end(own, seen)
            after = place.alone(options.alone_s)
            result = figures(seen, before, after, parameters(own), options.local_steps)
            found[name].append(result)
            folders[name].append(own)
            print(f"{name} seed {seed}:", ", ".join(f"{k} {median(v):.4g}" for k, v in result.items()), flush=True)
            before = after
    return summary(found, {name: [loss(own) for own in runs] for name, runs in folders.items()})


def order(names: list[str], seeds: int) -> Iterator[tuple[int, str]]:
    """Order the runs: every setting once a seed, beginning with another one each time."""
    for seed in range(seeds):
        for i in range(len(names)):
            yield seed, names[(i + 2 * seed) % len(names)]


def prepare_text(folder: Path) -> None:
    corpus = folder / "corpus.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        for text in documents(CORPUS_BYTES):
            for start in range(0, len(text), PASSAGE_CHARACTERS):
                file.write(json.dumps({"text": text[start : start + PASSAGE_CHARACTERS]}) + "\n")
    prepare_files([str(corpus)], folder / "data", None, None, True, VALIDATION_SHARE)


def run_file(folder: Path, outer: dict[str, Any], seed: int, rounds: int, local_steps: int) -> dict[str, Any]:
    """The quickstart's run with this benchmark's model, sizes and outer loop."""
    run = json.loads((ROOT / "configs/runs/quickstart.json").read_text())
    config = json.loads((ROOT / "configs/models/llama-tiny.json").read_text()) | MODEL
    first = seed == FIRST_SEED
    model = {"config": config} if first else {"config": config, "init_from": str(folder / "first" / "export")}
    steps = len(REGIONS) * local_steps * rounds
    data = {name: str(folder / "data" / name) for name in ("train", "validation")}
    samples = {"sequence_length": SEQUENCE_LENGTH, "train_samples": steps * BATCH, "validation_samples": 512}
    deepspeed = run["deepspeed"] | {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH}
    deepspeed["optimizer"]["params"]["lr"] = FIRST_LEARNING_RATE if first else LEARNING_RATE
    deepspeed["scheduler"]["params"] |= {"total_num_steps": steps, "warmup_num_steps": steps // 10}
    del deepspeed["bf16"]  # fp32 is faster on this CPU
    return run | {
        "name": "streaming",
        "seed": seed,
        "model": model,
        "data": data | samples,
        "deepspeed": deepspeed | {"zero_optimization": {"stage": 0}},
        "outer": OUTER | outer | {"local_steps": local_steps},
        "checkpoint": {"every_jobs": 1 << 20, "every_minutes": 1e6},
        "monitor": {},  # no validation beside what is timed
    }


def parameters(folder: Path) -> int:
    return parameter_map_of(load_run(folder / "run.json")).numel


def figures(
    seen: dict[str, Seen], before: dict[str, Any], after: dict[str, Any], parameter_count: int, local_steps: int
) -> dict[str, list[float]]:
    """Values of one run: those of each figure. before, after: of the workers without communication."""
    parts = list(seen.values())
    jobs = len(parts[0].jobs) - 1
    all_reduce_bytes = jobs * local_steps * 4 * parameter_count
    alone = {r: {key: mean((before[r][key], after[r][key])) for key in before[r]} for r in seen}

    def exposed_s(job: dict[str, float]) -> float:
        return job["communication_s"] + job["waiting_s"]

    return {
        "exposed_share": [v for part in parts for v in part.each(lambda job, seconds: exposed_s(job) / seconds)],
        "exchange_ms": [v for part in parts for v in part.each(lambda job, _: 1e3 * exposed_s(job) / job["steps"])],
        "waiting_share": [v for part in parts for v in part.each(lambda job, seconds: job["waited_s"] / seconds)],
        "processor_ratio": [part.processor_s / alone[r]["processor_s"] for r, part in seen.items()],
        "utilization": [part.tokens_per_s / alone[r]["tokens_per_s"] for r, part in seen.items()],
        "bytes_ratio_to_data_parallel": [all_reduce_bytes / part.link_bytes for part in parts],
        "peak_mbit_s": [part.peak_bytes_per_s * 8 / 1e6 for part in parts],
        "tokens_per_s": [part.tokens_per_s for part in parts],
        "tokens_per_s_alone": [alone[r]["tokens_per_s"] for r in seen],
    }


def loss(folder: Path) -> float:
    """Validation loss of the weights that the global server ended with."""
    run = load_run(folder / "run.json")
    export_run(folder, folder / "export", "float32")
    assert run.data.validation is not None
    return evaluate(
        folder / "export", Path(run.data.validation), run.data.validation_samples, run.data.sequence_length, batch=64
    )


def summary(
    found: dict[str, list[dict[str, list[float]]]], losses: dict[str, list[float]]
) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for name, runs in found.items():
        results[name] = {}
        for key in runs[0]:
            of_all = spread(key, [value for run in runs for value in run[key]])
            results[name] |= {figure: round(value, 4) for figure, value in of_all.items()}
        results[name] |= {f"validation_loss_seed_{i}": round(value, 5) for i, value in enumerate(losses[name])}
        results[name]["validation_loss"] = round(mean(losses[name]), 5)
    if "blocking_fp32" in results:
        for name, result in results.items():
            result["loss_gap"] = round(mean(losses[name]) / mean(losses["blocking_fp32"]) - 1, 5)
    return results


def unit(metric: str) -> str:
    key = metric.partition(".")[2]
    if key.startswith("validation_loss"):
        return "nats/token"
    units = {"peak_mbit_s": "Mbit/s", "tokens_per_s": "tokens/s", "exchange_ms": "ms"}
    return next((unit for name, unit in units.items() if key.startswith(name)), "ratio")


if __name__ == "__main__":
    main()
