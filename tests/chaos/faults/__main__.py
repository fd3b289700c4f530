"""Disturb a run of real processes over emulated links: at random processes are killed, links cut and packets
corrupted; then its accounts.

Two regions of two workers each, linked by TLS. Nothing that was acknowledged may be missing or counted twice, no
sample may be skipped, and every recovered state must be, bit for bit, what an uninterrupted replay of the whole
journal gives. With shards, so is each of these, and their ledger must have taken what they did, each fact once.

    python -m tests.chaos.faults [--profile short|minutes|hour] [--seed 1] [--pace 0.3]
    python -m tests.chaos.faults --shards 2            # each server's shards are that many processes, killed as well
    python -m tests.chaos.faults --seconds 600 --every 20
    python -m tests.chaos.faults --kills-at-end 60     # so long after `stop`, servers and shards are killed every 3 s
    python -m tests.chaos.faults --again FOLDER        # the accounts of a run that was kept with --folder FOLDER

short: one of each burden and kills of servers, in 12 s; minutes, the default: 5 minutes; hour: also the growth
of memory and of open files.
Needs root, for the network namespaces and for a small disk that can be filled. `--pace` is the least time of an inner
step: others get the processor.

The last line printed is one JSON object. Zero must be: lost_acknowledged, applied_twice, replay_mismatches,
samples_skipped, samples_twice_uncounted, hung (workers that train nothing any more when the faults are over),
servers_ended (that ended by themselves) and ended_badly (1: not in time after `stop`, or with an exit code).
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import command_line, report, units_by_ending
from geotrain.common.names import GLOBAL
from geotrain.emulate import wan
from geotrain.launch.launcher import WAN_CONTROL
from tests.chaos.faults.audit import accounts
from tests.chaos.faults.runner import FaultyRun, Samples, kinds_done
from tests.chaos.faults.scenario import kills_at_the_end, random_faults, short_faults
from tests.chaos.faults.world import make_world
from tests.support.disks import small_disk

# Seconds of faults, mean seconds between two of processes and links, size of the disk.
PROFILES = {"short": (12.0, 0.0, "1g"), "minutes": (300.0, 20.0, "2g"), "hour": (3600.0, 60.0, "6g")}
COUNTED = {
    "kill": "kills", "stop": "stops", "cut": "partitions", "slow": "slows", "drop": "drops", "corrupt": "corrupts",
    "delay": "delays", "reorder": "reorders", "duplicate": "duplicates",
    "starve": "starved", "files": "out_of_files", "fill": "full_disks",
}  # fmt: skip
START_S = 240.0  # until every worker has trained a job
HUNG_S = 180.0  # after the faults, for every worker to train a job
END_EVERY_S = 3.0  # between two kills at the end
WARM_UP_S = 120.0  # of a process, before its growth is measured
LEAST_LIFE_S = 600.0  # measured, for a growth that is told


def main() -> int:
    parser = command_line(__doc__, quick={"profile": "short"})
    parser.add_argument("--profile", choices=PROFILES, default="minutes")
    parser.add_argument("--seconds", type=float, help="from when every worker trains, in place of the profile's")
    parser.add_argument("--seed", type=int, default=1)
    every = "mean seconds between faults of processes and links, and between those of packets; default: the profile's"
    parser.add_argument("--every", type=float, help=every)
    parser.add_argument("--shards", type=int, default=0, help="of each server, in processes of their own")
    parser.add_argument("--kills-at-end", type=float, default=0.0, help="seconds after the run was told to stop")
    parser.add_argument("--pace", type=float, default=0.3, help="least seconds of an inner step")
    parser.add_argument(
        "--folder", type=Path, help="where to work, and to leave everything; default: a temporary one"
    )
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="no run: count once more what one has left")
    args = parser.parse_args()
    if why_not := wan.cannot_emulate():
        print(f"faults: {why_not}", file=sys.stderr)
        return 2
    folder = args.again or args.folder or Path(tempfile.mkdtemp(prefix="geotrain-faults-"))
    seconds, every_s, size = PROFILES[args.profile]
    seconds, every_s = args.seconds or seconds, args.every or every_s
    with small_disk(folder / "disk", size) as disk:
        if args.again:
            shutil.copytree(folder / "left", disk, dirs_exist_ok=True)
        else:
            files = make_world(disk, args.pace, shards=args.shards)
            faulty(files, disk, args.seed, seconds, every_s, args.kills_at_end)
            if args.folder is not None:  # before anything is counted, which may fail
                ignored = shutil.ignore_patterns(WAN_CONTROL)
                shutil.copytree(disk, folder / "left", ignore=ignored, dirs_exist_ok=True)
        print("the run has ended; its journals are replayed", flush=True)
        result = counted(FaultyRun.kept(disk))
        seconds, shards = result["seconds"], "shards" in result
    if args.folder is None and args.again is None:
        shutil.rmtree(folder)
    note = f"{args.profile}, {seconds:g} s; seed {args.seed}; pace {args.pace:g} s"
    note += f"; kills for {args.kills_at_end:g} s at the end" if args.kills_at_end else ""
    report(
        "faults_shards" if shards else "faults",
        result,
        args,
        units_by_ending({"_s": "s", "_tokens": "tokens"}),
        note,
        ("kinds", "mismatches"),
        timed=False,
    )
    return 0


def faulty(
    files: tuple[Path, Path],
    disk: Path,
    seed: int,
    seconds: float,
    every_s: float,
    end_kills_s: float,
) -> None:
    """Launch the run, do to it what the seed says, end it, and leave on the disk what `counted` needs.

    end_kills_s: for so long servers are killed while it ends."""
    with FaultyRun(*files, disk / "archive") as run:
        workers = [worker for names in run.regions.values() for worker in names]
        if not run.wait_for(lambda: all(run.jobs_of(worker) for worker in workers), START_S):
            raise RuntimeError(f"the workers do not train: {run.log.read_text()[-3000:]}")
        print(f"every worker trains; faults for {seconds:g} s, seed {seed}", flush=True)
        them = run.regions, len(run.shards[GLOBAL])
        faults = random_faults(seed, seconds, every_s, *them) if every_s else short_faults(*them)
        run.play(faults, seconds, lambda text: print(text, flush=True))
        before = {worker: run.jobs_of(worker) for names in run.regions.values() for worker in names}
        run.wait_for(lambda: all(run.jobs_of(worker) > n for worker, n in before.items()), HUNG_S)
        hung = sum(run.jobs_of(worker) <= n for worker, n in before.items())
        run.finish(kills_at_the_end(seed, end_kills_s, END_EVERY_S, *them), lambda text: print(text, flush=True))
    run.keep(seconds=seconds, hung=hung, ended_badly=int(run.exit_code != 0))


def counted(run: FaultyRun) -> dict[str, Any]:
    """The accounts of a run that has ended."""
    found = accounts(run)
    return {
        **{name: sum(fault.what == what for _, fault in run.done) for what, name in COUNTED.items()},
        **{f"packets_{kind}": count for kind, count in sorted(run.impaired_packets().items())},
        **{key: value for key, value in found.items() if key != "committed_samples"},
        "seconds": run.noted["seconds"],
        "hung": run.noted["hung"],
        "ended_badly": run.noted["ended_badly"],
        "servers_ended": sum(
            e["event"] == "ProcessDied"
            and e["group"] in run.servers
            and "exit code" in e["how"]
            and not e["how"].endswith(" 137")  # its guard says so of one that was killed
            for e in run.events("launcher")
        ),
        "kinds": kinds_done(run),
        "restarts": sum(e["event"] == "ProcessDied" for e in run.events("launcher")),
        "given_up": sum(e["event"] == "ProcessDied" and e["pause_s"] is None for e in run.events("launcher")),
        "growth": growth(list(run.samples.values())),
    }


def growth(samples: list[Samples]) -> dict[str, dict[str, float]]:
    """By kind of process: the steepest growth of any that lived long enough, by a line through its samples after the
    warm-up; mib_per_h and files_per_h. `measured` counts those."""
    found: dict[str, dict[str, float]] = {}
    for one in samples:
        begin_s = one.points[0][0]
        points = [point for point in one.points if point[0] - begin_s > WARM_UP_S]
        if not points or points[-1][0] - points[0][0] < LEAST_LIFE_S:
            continue
        hours = [(t - begin_s) / 3600 for t, _, _ in points]
        mib = statistics.linear_regression(hours, [rss / 2**20 for _, rss, _ in points]).slope
        files = statistics.linear_regression(hours, [count for _, _, count in points]).slope
        kind = found.setdefault(one.found.kind, {"measured": 0, "mib_per_h": -1e9, "files_per_h": -1e9})
        kind["measured"] += 1
        kind["mib_per_h"] = max(kind["mib_per_h"], round(mib, 2))
        kind["files_per_h"] = max(kind["files_per_h"], round(files, 2))
    return found


if __name__ == "__main__":
    sys.exit(main())
