"""What launch and dry run find wrong with a run on a cluster from the two files alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from geotrain.commands import dry_run
from geotrain.config import ClusterConfig, RunConfig, parse
from geotrain.launch.host_check import hosts_of
from geotrain.launch.run_rules import doubts, misfits
from tests.support.families import NEMOTRON_3, PREDICTING
from tests.support.plan_cases import small_run


def worker(name: str, host: str = "", **keys: Any) -> dict[str, Any]:
    return {"name": name, "launcher": "ssh", "hosts": [{"host": host or f"{name}-host", "slots": 4}], **keys}


def region(name: str, *workers: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"name": name, "server": {"host": f"{name}-0", "port": 7077}, "workers": list(workers), **keys}


TWO = (region("eu", worker("a"), worker("b")), region("us", worker("c")))
LATE = {"steps": 10, "late": "continue", "adopt": "rebase"}
CPU = {"env": {"DS_ACCELERATOR": "cpu"}}
KINDS = {
    "large": {"memory_gb": 80.0, "tflops": 100.0},
    "small": {"memory_gb": 8.0, "tflops": 100.0},
    "tiny": {"memory_gb": 2.0, "tflops": 100.0},
}


def on(*kinds: str) -> tuple[dict[str, Any], ...]:
    hosts = [{"host": f"h{i}", "slots": 4, "device": kind} for i, kind in enumerate(kinds)]
    return (region("eu", {"name": "a", "launcher": "ssh", "hosts": hosts}),)


def pair(regions: tuple[dict[str, Any], ...], **outer: Any) -> tuple[RunConfig, ClusterConfig]:
    """A run of 1,000 steps, and a cluster of these regions."""
    cluster = {"name": "c", "regions": list(regions), "devices": KINDS}
    return small_run(outer=outer), parse(ClusterConfig, cluster, "c")


@pytest.mark.parametrize(
    ("regions", "outer", "told"),
    [
        (TWO, {}, ""),
        (on("large", "large"), {}, ""),
        (on("large", "small"), {}, "worker 'a': its tightest rank needs .* GB .*, devices.small.memory_gb = 8; "),
        ((region("eu", worker("a", "h"), worker("b", "h")),), {},
         "host 'h' is given to worker 'a' and worker 'b': both would take its accelerators"),
        ((region("eu", worker("a", "h")), region("us", worker("b", "h"))), {}, "given to worker 'a' and worker 'b'"),
        ((region("eu", worker("a", "h")), region("us", worker("b", "h", **CPU))), {}, ""),
        ((region("eu", worker("a", "h", launcher="slurm"), worker("b", "h", launcher="slurm")),), {}, ""),
        # `local`: each region's machine deals its own devices out.
        ((region("eu", worker("a", launcher="local"), worker("b", launcher="local"), ssh="h"),), {}, ""),
        ((region("eu", worker("a", launcher="local"), ssh="me@h"), region("us", worker("b", launcher="local"),
          ssh="h")), {}, "host 'h' is given to region 'eu' and region 'us'"),
        ((region("eu", worker("a", launcher="local")), region("us", worker("b", launcher="local"))), {}, ""),
        (TWO, {"local_steps": 333}, ""),
        (TWO, {"local_steps": 334}, "the first jobs of 3 workers take 1002 inner steps, the run has 1000 .*; use at "
         "most 333, or more samples"),
        (TWO, {"local_steps": 998, "scale_local_steps": True}, ""),
        (TWO, {"local_steps": 999, "scale_local_steps": True}, "the first jobs of 3 workers take 1001 inner steps"),
    ],
)  # fmt: skip
def test_what_no_run_can_begin_with(regions: tuple[dict[str, Any], ...], outer: dict[str, Any], told: str) -> None:
    found = "\n".join(map(str, misfits(*pair(regions, **outer))))
    assert re.search(told, found) if told else not found, found


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        ({"local_steps": 2}, ""),
        ({"local_steps": 12}, "^each worker has about 28 jobs .*$"),  # two regions that send after four jobs
        ({"local_steps": 13}, "about 9.6 times .* (1000 inner steps, 104 between"),
        ({"local_steps": 33, "levels": 1}, ""),  # each of three workers sends by itself
        ({"local_steps": 34, "levels": 1}, "about 9.8 times"),
        ({"local_steps": 34, "rule": {"name": "sync"}}, "about 9.8 times"),
        ({"local_steps": 1, "rule": {"name": "region_momentum", "updates_per_send": 64}}, "about 7.8 times"),
        ({"local_steps": 40, "overlap": LATE}, "about 12 times|^each worker has about 8.3 jobs .* the merged global"),
        (
            {"local_steps": 40, "overlap": LATE, "rule": {"name": "region_momentum", "answers": "wait"}},
            "about 12 times|^each worker has .* which wait for the deltas of all at work",
        ),
        ({"local_steps": 40}, "about 8.3 jobs in the run: regions answer before they know .*'sync' ends lower"),
        (
            {"local_steps": 40, "overlap": LATE, "rule": {"name": "region_momentum", "merge_alpha": 0.75}},
            "regions answer before they know of the others",
        ),
        ({"local_steps": 2, "overlap": LATE, "rule": {"name": "region_momentum", "updates_per_send": 1}}, ""),
    ],
)
def test_few_exchanges_are_told(outer: dict[str, Any], told: str) -> None:
    files = pair(TWO, **outer)
    assert not list(misfits(*files))
    found = "\n".join(doubts(*files))
    assert re.search(told.replace("(", r"\("), found) if told else not found, found


def test_layers_that_are_left_out_are_told() -> None:
    run, cluster = pair(TWO, local_steps=5)
    config = {**NEMOTRON_3, "num_nextn_predict_layers": 1}
    found = list(doubts(run.model_copy(update={"model": run.model.model_copy(update={"config": config})}), cluster))
    assert sum("num_nextn_predict_layers = 1: the layers that predict tokens" in note for note in found) == 1
    built = run.model_copy(update={"model": run.model.model_copy(update={"config": PREDICTING})})
    assert not any("predict tokens" in note for note in doubts(built, cluster))


@pytest.mark.parametrize(
    ("kinds", "last", "told"),
    [
        (("large", "small"), 1, ""),
        (("small", "large"), 1, "devices.small.memory_gb"),
        (("large", "tiny"), 4, "devices.tiny.memory_gb"),
    ],
)
def test_a_stage_of_few_layers_fits_a_small_kind(kinds: tuple[str, ...], last: int, told: str) -> None:
    _, cluster = pair(on(*kinds))
    first = small_run().architecture.layers - last
    run = small_run(parallel={"pipeline": 2, "stage_layers": [first, last]})
    found = list(misfits(run, cluster))
    assert bool(found) == bool(told) and all(told in str(error) for error in found)
    # The dry run and each host are told of the stage that stands there, not of the fullest on the smallest device.
    (needs,) = dry_run.needs(run, cluster).workers
    kind = needs.device.rpartition("(")[2].rstrip(")")
    assert (sum(needs.memory.values()) > 1e9 * KINDS[kind]["memory_gb"]) == bool(told)
    hosts = [each[0] for each in hosts_of(run, cluster, ("eu",)).values()]
    fits = [each.memory_bytes <= 1e9 * KINDS[str(each.device)]["memory_gb"] for each in hosts]
    assert all(fits) == (not told) and len({each.memory_bytes for each in hosts}) == 2
