"""Compute how much of what the surviving workers could have trained was committed, and how long the healthy stood
still.

A worker survives from when its last rank has joined until it is killed, its death is seen, it leaves, or the run
ends. In that time it could have trained its own step rate: the tokens of its jobs over the seconds of those jobs,
less the seconds in which training waited. Waiting for servers or data, saving checkpoints, steps lost with a killed
worker and updates that never reached the global weights all count as loss; being dead and starting again do not
(`goodput_of_all` counts them, too: as if every worker had lived from its first step to the end).

`goodput_bound` is what would be left if nothing cost anything but the deaths themselves: with a worker dies the part
of a job that it is in, half of one on average, and the job before, if a fragment of it had not left yet. With F
fragments, which leave in turn, that is so for (F − 1)/F of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from geotrain.parameters.parameter_map import parameter_map_of
from tests.chaos.faults.runner import FaultyRun


@dataclass(frozen=True)
class Incarnation:
    worker: str
    begin_s: float
    end_s: float
    jobs: tuple[dict[str, Any], ...]  # JobTrained, in order
    died: bool

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def goodput(run: FaultyRun, committed_samples: int, end_s: float) -> dict[str, Any]:
    """end_s: Unix time at which the run was ended."""
    incarnations = {
        w: _incarnations(run, region, w, end_s) for region, workers in run.regions.items() for w in workers
    }
    could = could_all = 0.0
    for mine in incarnations.values():
        jobs = [job for incarnation in mine for job in incarnation.jobs]
        if jobs:
            rate = _rate(jobs)
            could += sum(
                incarnation.seconds * (_rate(incarnation.jobs) if incarnation.jobs else rate) for incarnation in mine
            )
            could_all += rate * (end_s - mine[0].begin_s)
    tokens = committed_samples * run.run.data.sequence_length
    every = [incarnation for mine in incarnations.values() for incarnation in mine]
    jobs_s = [_training_s(job) for incarnation in every for job in incarnation.jobs]
    fragments = len(parameter_map_of(run.run).fragments)
    lost_s = (
        sum(incarnation.died for incarnation in every) * (0.5 + (fragments - 1) / fragments) * fmean(jobs_s or [0.0])
    )
    stalls = [_longest_stall(incarnation) for incarnation in every]
    return {
        "committed_tokens": tokens,
        "goodput": round(tokens / could, 4) if could else 0.0,
        "goodput_bound": round(1 - lost_s / max(1e-9, sum(incarnation.seconds for incarnation in every)), 4),
        "deaths_of_workers": sum(incarnation.died for incarnation in every),
        "goodput_of_all": round(tokens / could_all, 4) if could_all else 0.0,
        "longest_stall_s": round(max(stalls, default=0.0), 2),
        "worker_incarnations": sum(len(mine) for mine in incarnations.values()),
        "surviving_share": round(
            sum(incarnation.seconds for incarnation in every)
            / max(1e-9, sum(end_s - mine[0].begin_s for mine in incarnations.values() if mine)),
            4,
        ),
    }


def _incarnations(run: FaultyRun, region: str, worker: str, end_s: float) -> list[Incarnation]:
    ranks = run.cluster.worker(region, worker).ranks
    joined: dict[str, dict[int, float]] = {}
    for event in run.events(region):  # a rank joins again when its server was restarted: the first time counts
        if event["event"] == "Joined" and event["member"] == worker:
            joined.setdefault(event["incarnation"], {}).setdefault(event["part"], event["time_s"])
    begins = sorted(max(parts.values()) for parts in joined.values() if len(parts) == ranks)
    ends = [t for t, fault in run.done if fault.what == "kill" and _hits(fault, region, worker)]
    ends += [e["time_s"] for e in run.events("launcher") if e["event"] == "ProcessDied" and e["group"] == worker]
    left = [e["time_s"] for e in run.events(region) if e["event"] == "Left" and e["member"] == worker]
    jobs = [e for e in run.events(worker) if e["event"] == "JobTrained"]
    incarnations = []
    for begin_s, next_s in zip(begins, [*begins[1:], end_s], strict=True):
        until_s = min([t for t in (*ends, *left) if begin_s < t < next_s], default=min(next_s, end_s))
        if until_s > begin_s:
            mine = tuple(job for job in jobs if begin_s < job["time_s"] <= until_s)
            incarnations.append(Incarnation(worker, begin_s, until_s, mine, until_s < end_s and until_s not in left))
    return incarnations


def _hits(fault: Any, region: str, worker: str) -> bool:
    return fault.kind == "launcher" or fault.of == worker or (fault.kind == "region" and fault.of == region)


def _training_s(job: dict[str, Any]) -> float:
    return float(job["tokens"] / job["tokens_per_s"] - job["waited_s"])


def _rate(jobs: Any) -> float:
    """Tokens a second while training."""
    return float(sum(job["tokens"] for job in jobs) / sum(map(_training_s, jobs)))


def _longest_stall(incarnation: Incarnation) -> float:
    """Seconds between two jobs' ends in which it did not train."""
    ends = [incarnation.begin_s, *(job["time_s"] for job in incarnation.jobs)]
    return max((end - before - _training_s(job) for before, end, job in zip(ends, ends[1:], incarnation.jobs,
    strict=False)),
               default=0.0)  # fmt: skip
