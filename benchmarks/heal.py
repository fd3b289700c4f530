"""Measure how a worker heals that loses a host, and what looking for faults costs.

lost_host_s: seconds from the loss of one of two hosts (this machine by two names, behind a real sshd; two ranks each)
until the next job is trained: the most of what is played. Told apart: until the launcher notices, until the worker is
formed of the other host, until it has trained a job. jobs_lost: jobs that were begun again. loss_over_undisturbed:
mean loss of the last tenth of its jobs, over that of the same run which loses nothing; of all that is played.

overhead_…: shares of a worker's time, each timed by turns with steps. Verifying: of one rank with the quickstart's
model, as often as by default. Copies: of two ranks without a common folder, of 31 M parameters, how much longer
steps take beside a checkpoint that is copied than beside one that is only saved; each `checkpoint.every_jobs`.
Watching: of the same ranks, their words, products, and readings of their devices; without a GPU, of a library
with NVML's symbols.

ettr: effective training time over wall time, in virtual time, of one worker of 16,384 accelerators that is
interrupted each three hours, by the production's state machines, parallel layouts and cost model. A spare host takes
the place of a lost one, after the worker has stood still for --healed-s; without spare hosts it is slower, too, until
the host is back. `whole_restarts`: it stands still for --restarted-s, from fault to recovery. What a job had trained
is lost each time.

    python -m benchmarks.heal [--record]
"""

from __future__ import annotations

import random
import signal
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch.distributed as dist

from benchmarks import ROOT
from benchmarks.common import alternate, command_line, report, spread, units_by_ending
from benchmarks.overhead import files, only_rank
from benchmarks.small_runs import deepspeed_block, llama
from geotrain.checkpoint.copies import CheckpointCopies
from geotrain.checkpoint.saving import Checkpoints
from geotrain.common.nvml import read_state
from geotrain.config import CheckpointConfig, ClusterConfig, RunConfig, load_run, parse
from geotrain.data.loader import LeasedLoader, open_training
from geotrain.inner.build import build_engine
from geotrain.launch.check import free_ports
from geotrain.parallelism.checks import micro_batches_between
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.plan.predict import predict
from geotrain.plan.reforming import reform
from geotrain.simulate.spec import world_of_cluster
from geotrain.simulate.world import VirtualWorld, timing_task
from geotrain.worker import device_watch, rank_watch
from geotrain.worker.rank_watch import RankWatch, product_s
from tests.support.healing import BUSY_S, HOSTS, Launched, hosts_by_ssh
from tests.support.inner_worlds import run_world
from tests.support.nvml import Nvml
from tests.support.small_runs import BATCH

DAY_S = 86_400.0
MIDDLE = llama(512, 9, 8, 1536, 264, 256)  # 31 M parameters
STEPS = 2  # of a block that is timed: a checkpoint is saved and copied beside
# Hugging Face's config of a model of 409 B parameters, laid over the shipped one of 70 B.
LARGE = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 128, "num_attention_heads": 128}
# Muon's shards hold whole matrices, of which there are too few for 128 replicas.
ADAMW = ('deepspeed.optimizer={"type": "AdamW", "params": {"lr": 1e-4}}',)
H100 = {"memory_gb": 76.0, "tflops": 989.0, "efficiency": 0.4, "host_gbps": 3600.0}  # as shipped
LOST = {"lost_host_s": "sum_s", "jobs_lost": "jobs_lost"}
SHARES = "ettr", "hosts", "300_s", "restarts", "slower", "ing", "copies", "disturbed", "low", "high", "share"
UNITS = {**dict.fromkeys(SHARES, "ratio"), "_s": "s", "loss": "nats"}


def main() -> None:
    parser = command_line(__doc__, quick={"losses": [], "rounds": 1, "days": 0.5})
    parser.add_argument("--losses", nargs="+", default=["kill", "freeze"], choices=["kill", "freeze"])
    parser.add_argument("--seeds", type=int, default=1, help="runs that lose a host in each way, or none")
    parser.add_argument("--rounds", type=int, default=10, help="verifications timed")
    parser.add_argument("--days", type=float, default=4.0, help="of virtual time")
    parser.add_argument("--healed-s", type=float, default=41.0, help="noticing 25, forming 1, training again 15")
    parser.add_argument("--restarted-s", type=float, default=948.0, help="as torchft's issue 329 reports of 8 B")
    parser.add_argument("--away-s", type=float, default=3600.0, help="until a lost host is back")
    args = parser.parse_args()
    found = {how: [run_of_two_hosts(how, seed) for seed in range(args.seeds)] for how in args.losses}
    parts = {how: {part: max(each[part] for each in runs) for part in runs[0]} for how, runs in found.items()}
    results: dict[str, Any] = {
        figure: max(each[part] for each in parts.values()) for figure, part in LOST.items() if found
    }
    if found:
        alone = [run_of_two_hosts(None, seed)["loss"] for seed in range(args.seeds)]
        shares = [run["loss"] / loss - 1 for runs in found.values() for run, loss in zip(runs, alone, strict=True)]
        results |= spread("loss_over_undisturbed", shares)
    results |= {
        **verifying(args.rounds),
        **copying_and_watching(args.rounds),
        **effective_time(args.days, args.healed_s, args.restarted_s, args.away_s),
        **parts,
    }
    report("heal", results, args, units_by_ending(UNITS, "count"))


# ------------------------------------------------------------------------------------------------ a host is lost


def run_of_two_hosts(lost: str | None, seed: int) -> dict[str, float]:
    """Train a worker of two hosts to its data's end. lost: how it loses one, which nobody reaches then: its processes
    are killed, or stopped; None: it loses none."""
    with tempfile.TemporaryDirectory() as name, hosts_by_ssh(folder := Path(name), free_ports(1)[0]):
        keys: dict[str, Any] = {"checkpoint": {"every_jobs": 1}, "seed": seed}
        run = Launched(folder, 200 * BATCH, {"rule": {"name": "halos"}}, HOSTS, **keys)
        with run.running() as launcher:
            if lost:
                run.happens(lambda: run.jobs() > 2)
                lost_s = time.time()
                run.lose(HOSTS[1], signal.SIGKILL if lost == "kill" else signal.SIGSTOP)
            assert launcher.wait(BUSY_S) == 0, run.said
        for process in run.processes(f"eu-0@{HOSTS[1]}"):
            process.kill()
        trained = run.events("JobTrained", "eu-0")
        loss = statistics.fmean(event["loss"] for event in trained[-len(trained) // 10 :])
        if not lost:
            return {"loss": loss}
        died_s, formed_s = (run.events(kind)[0]["time_s"] for kind in ("ProcessDied", "WorkerFormed"))
        begun = [event["start"] for event in run.events("LeaseBegun", "eu-0")]
    first_s = min(event["time_s"] for event in trained if event["time_s"] > formed_s)
    assert len({event["job"] for event in trained}) == len(trained), "a job was trained twice"
    parts = {"noticing_s": died_s - lost_s, "forming_s": formed_s - died_s, "training_s": first_s - formed_s}
    parts = {part: round(seconds, 1) for part, seconds in (parts | {"sum_s": first_s - lost_s}).items()}
    return {**parts, "jobs_lost": len(begun) - len(set(begun)), "loss": loss}


# ------------------------------------------------------------------------------------------ what looking costs


def verifying(rounds: int) -> dict[str, float]:
    """Time steps and verifications of the quickstart's model by turns, on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        run = load_run(files(Path(folder), 1)[0])
        with only_rank(run) as (engine, loader):
            from geotrain.worker.verification import figures_of

            (batch,) = loader.steps(0, run.samples_per_step)
            works = {
                "step": lambda: engine.train_step(batch, 0).loss,
                "verification": lambda: figures_of(engine, batch.micro_batch(0)),
            }
            times = alternate(works, rounds, warmup=1)
            micro_batches = engine.gradient_accumulation_steps()
    step_s, verification_s = (sorted(times[name])[rounds // 2] for name in works)
    between = micro_batches_between(run.monitor.verified_share, 1)
    return {
        "overhead_verifying": round(verification_s / (between / micro_batches * step_s), 5),
        "verification_s": verification_s,
    }


def copying_and_watching(rounds: int) -> dict[str, float]:
    """Time what a worker of two ranks does, by turns; the first rank's medians count."""
    with tempfile.TemporaryDirectory() as name:
        keys = {"model": {"config": MIDDLE}, "data": {"sequence_length": 64}}
        run = load_run(files(Path(name), 32, deepspeed=deepspeed_block(4, 2, 1e-3), **keys)[0])
        run = run.model_copy(update={"checkpoint": CheckpointConfig()})
        found = run_world(2, rank_of_two, run, Path(name), rounds)[0]
    took = {work: sorted(seconds)[rounds // 2] for work, seconds in found.items()}
    between_s = run.checkpoint.every_jobs * run.outer.local_steps * took["steps"] / STEPS
    often = {"words": rank_watch.BEAT_S, "product": rank_watch.EVERY_S, "reading": device_watch.EVERY_S}
    longer = (copied - saved for copied, saved in zip(found["copying"], found["saving"], strict=True))
    copies = spread("overhead_copies", [seconds / between_s for seconds in longer])
    return {
        **{name: round(share, 6) for name, share in copies.items()},
        "overhead_watching": round(sum(took[work] / seconds for work, seconds in often.items()), 5),
        **{f"{work}_s": round(seconds, 5) for work, seconds in took.items()},
        "parameters": parameter_map_of(run).numel,
    }


def rank_of_two(run: RunConfig, folder: Path, rounds: int) -> dict[str, list[float]]:
    engine = build_engine(run, run.parallel, run.deepspeed)
    rank, device = dist.get_rank(), engine.device
    loader = LeasedLoader(open_training(run.data, engine.architecture.vocab_size, run.seed), 4, 2, rank, 2)
    (batches,) = loader.steps(0, 4)
    checkpoints, tags = Checkpoints(engine, folder / f"host-{rank}", 1), map(str, count())
    CheckpointCopies(checkpoints.files, run, "eu-0", lambda event: None)
    copies = checkpoints.files.written

    def steps(written: Callable[..., None] | None = None) -> None:
        if written is not None:
            checkpoints.files.written = written
            checkpoints.save(next(tags), {})
        for step in range(STEPS):
            engine.train_step(batches, step)
        checkpoints.wait()

    watch = RankWatch(device, print)
    with pytest.MonkeyPatch.context() as patch:
        if device.type != "cuda":
            (folder / f"nvml-{rank}").mkdir()
            Nvml(folder / f"nvml-{rank}", patch)
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        works = {
            "steps": steps,
            "saving": lambda: steps(lambda *given: None),
            "copying": lambda: steps(copies),
            "words": lambda: (watch.speak(), watch.judge()),
            "product": lambda: product_s(device),
            "reading": lambda: read_state(handle),
        }
        times = alternate(works, rounds, warmup=1)
    checkpoints.close()
    return times


# ------------------------------------------------------------------------------------- effective training time


def large_run(hosts: int) -> tuple[RunConfig, ClusterConfig]:
    """A worker of so many hosts of eight accelerators, in one region."""
    run = load_run(
        ROOT / "configs/runs/70b.json",
        [
            *("parallel.pipeline=16", f"deepspeed.train_batch_size={hosts}", "outer.local_steps=8", *ADAMW),
            *(f"model.config.{key}={value}" for key, value in LARGE.items()),
        ],
    )
    ranks = [{"host": f"gpu{number:04}", "slots": 8, "device": "h100"} for number in range(hosts)]
    links = [
        {"regions": pair, "gbps": gbps, "rtt_ms": 1.0} for pair, gbps in ((("a", "a"), 3200), (("a", "global"), 400))
    ]
    cluster = {
        "name": "large",
        "devices": {"h100": H100},
        "regions": [{"name": "a", "workers": [{"name": "a-0", "launcher": "slurm", "hosts": ranks}]}],
        "links": links,
    }
    return run, parse(ClusterConfig, cluster, "large")


def effective_time(days: float, healed_s: float, restarted_s: float, away_s: float) -> dict[str, float]:
    """Play a run with and without faults, one each three hours on average; both ways have the same."""
    run, cluster = large_run(2048)
    step_s = predict(run, cluster).workers["a-0"].step_s
    worker = cluster.workers[0][1]
    smaller = reform(run, cluster, "a", worker, worker.hosts[1:])
    without = cluster.model_copy(update={"regions": (cluster.regions[0].model_copy(update={"workers": (smaller,)}),)})
    slower = predict(run, without).workers["a-0"].step_s / step_s
    draw = random.Random(1)
    at_s, faults_s = 0.0, []
    while (at_s := at_s + draw.expovariate(1 / 10_800)) < 2 * days * DAY_S:
        faults_s.append(at_s)

    def seconds(faults_s: Sequence[float], still_s: float, slower: float, away_s: float) -> float:
        life = Life(run, cluster, step_s, round(days * DAY_S / step_s), faults_s, still_s, slower, away_s)
        return float(life.world.run(after_event=life.after_event)["seconds"])

    whole_s = seconds((), 0.0, 1.0, 0.0)
    return {
        "ettr": round(whole_s / seconds(faults_s, healed_s, 1.0, 0.0), 4),
        "ettr_without_spare_hosts": round(whole_s / seconds(faults_s, healed_s, slower, away_s), 4),
        "ettr_standing_still_300_s": round(whole_s / seconds(faults_s, 300.0, 1.0, 0.0), 4),
        "whole_restarts": round(whole_s / seconds(faults_s, restarted_s, 1.0, 0.0), 4),
        "slower": round(slower, 4),
        "step_s": step_s,
    }


class Life:
    """A worker in virtual time, which is interrupted. still_s: for how long it stands still then. slower: its steps
    while a host is away. away_s: how long a host is; it is taken back at a job's end."""

    def __init__(
        self, run: RunConfig, cluster: ClusterConfig, step_s: float, steps: int, faults_s: Sequence[float],
        still_s: float, slower: float, away_s: float,
    ) -> None:  # fmt: skip
        task = timing_task(run.outer, parameter_map_of(run), steps, run.samples_per_step)
        spec = world_of_cluster(run, cluster, {"a-0": step_s}, predict(run, cluster))
        self.world = VirtualWorld(spec, task)
        self.worker, self.step_s = self.world.workers["a-0"], step_s
        self.still_s, self.slower, self.away_s = still_s, slower, away_s
        self.away, self.begins_s = deque[float](), 0.0  # when each host is back; when the worker begins again
        self.growing, self.worker.ends = False, self.grows
        for fault_s in faults_s:
            self.world.clock.at(fault_s, self.fault)

    def fault(self) -> None:
        if self.away_s:
            self.away.append(self.world.clock.now + self.away_s)
        self.stop()

    def stop(self) -> None:
        clock, self.growing = self.world.clock, False
        if clock.now >= self.begins_s:
            self.world._die("a-0")
        self.begins_s = clock.now + self.still_s
        clock.at(self.begins_s, self.begin)

    def begin(self) -> None:
        if self.world.clock.now == self.begins_s:  # else there was another fault meanwhile
            step_s = self.step_s * (self.slower if self.away else 1.0)
            self.worker.spec = self.worker.rank.spec = replace(self.worker.spec, step_s=step_s)
            self.world._begin_incarnation("a-0")

    def grows(self) -> bool:
        """Whether the worker ends its job to take back hosts."""
        self.growing = bool(self.away) and self.away[0] <= self.world.clock.now
        return self.growing

    def after_event(self) -> None:
        """Begin anew once the worker has ended its job, and sent all."""
        if self.growing and self.world._lives["a-0"][1].dead:
            self.away = deque(back_s for back_s in self.away if back_s > self.world.clock.now)
            self.stop()


if __name__ == "__main__":
    main()
