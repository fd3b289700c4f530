"""Real processes that are killed and cut off at chosen moments, and burdened; then the accounts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from geotrain.launch.machine import HostMachine
from geotrain.launch.site_processes import LaunchRequest, local_processes
from geotrain.outer.messages import ChunkDelta, UpdatePart
from geotrain.parameters.chunks import deal
from geotrain.parameters.parameter_map import parameter_map_of
from tests.chaos.faults.audit import coverage
from tests.chaos.faults.clocks import Clocks, on_one_clock
from tests.chaos.faults.liar import lies
from tests.chaos.faults.runner import FaultyRun
from tests.chaos.faults.scenario import (
    BURDENS,
    END_S,
    ENDS,
    KILLS,
    PACKETS,
    Event,
    kills_at_the_end,
    random_faults,
    short_faults,
)
from tests.chaos.faults.world import make_world

ROOT = Path(__file__).parents[3]
START_S = 500.0
REGIONS = {"eu": ("eu-0", "eu-1"), "us": ("us-0", "us-1")}
BURDENED = {
    "kills": 4, "full_disks": 1, "out_of_files": 1, "starved": 1, "liars": 1, "clock_steps": 3, "lies_refused": 1
}  # fmt: skip
KILLED = {f"kill {kind}": 1 for kind in KILLS} | {"partitions": 1, "slows": 1, "stops": 1}


def test_random_faults_are_the_same_again_and_of_every_kind() -> None:
    faults = random_faults(3, 600.0, 20.0, REGIONS)
    assert faults == random_faults(3, 600.0, 20.0, REGIONS) != random_faults(4, 600.0, 20.0, REGIONS)
    assert {fault.kind for fault in faults if fault.what == "kill"} == set(KILLS)
    assert {fault.what for fault in faults} == {"kill", "stop", "cut", "slow", *PACKETS, *BURDENS}
    of_packets = [fault for fault in faults if fault.what in PACKETS]
    burdens = [fault for fault in faults if fault.what in BURDENS]
    assert 20 < len(of_packets) < 40 and 8 < len(burdens) < 24
    assert 20 < len(faults) - len(of_packets) - len(burdens) < 40
    assert all(0.0 < fault.rate < 1.0 for fault in of_packets)
    times = [fault.when for fault in faults]
    assert times == sorted(times) and times[-1] < 580.0
    assert {fault.of for fault in faults} <= {"global", "all", *REGIONS, *REGIONS["eu"], *REGIONS["us"]}


def test_with_shards_there_are_more_to_kill_and_without_all_is_as_it_was() -> None:
    faults, without = (random_faults(3, 900.0, 15.0, REGIONS, shards) for shards in (2, 0))
    assert without == random_faults(3, 900.0, 15.0, REGIONS) and not any(f.kind == "shard" for f in without)
    of_shards = [fault for fault in faults if fault.kind == "shard"]
    assert {fault.what for fault in of_shards} == {"kill", "stop", "starve", "files"}
    killed = {fault.of for fault in of_shards if fault.what == "kill"}
    assert {name.partition(".shard-")[0] for name in killed} == {"global", *REGIONS}
    assert {fault.of for fault in of_shards} <= {f"{site}.shard-{i}" for site in ("global", *REGIONS) for i in (0, 1)}
    assert {fault.kind for fault in faults if fault.what == "kill"} == {*KILLS, "shard"}
    short = [fault for fault in short_faults(REGIONS, 2) if fault.kind == "shard"]
    assert [fault.of for fault in short if fault.what == "kill"] == ["eu.shard-0", "global.shard-1", "us.shard-0"]
    assert [fault for fault in short_faults(REGIONS, 2) if fault not in short] == short_faults(REGIONS)


def test_at_the_end_every_server_and_shard_is_killed_before_any_is_again() -> None:
    kills = kills_at_the_end(1, 40.0, 3.0, REGIONS, 2)
    assert kills == kills_at_the_end(1, 40.0, 3.0, REGIONS, 2) != kills_at_the_end(2, 40.0, 3.0, REGIONS, 2)
    them = {("global", "global"), ("eu", "server"), ("us", "server")}
    shards = {(f"{site}.shard-{i}", "shard") for site in ("global", *REGIONS) for i in (0, 1)}
    assert len(kills) >= 9 and {(fault.of, fault.kind) for fault in kills[:9]} == them | shards
    timed = [fault.when for fault in kills if isinstance(fault.when, float)]
    assert timed == sorted(timed) and timed[-1] < 40.0 and {fault.what for fault in kills} == {"kill"}
    last = kills[len(timed) :]
    assert {(fault.of, fault.kind) for fault in last} == them | shards and len(last) == 9
    assert all(fault.when == Event(fault.of.partition(".")[0], ENDS) for fault in last)
    assert all(0.0 <= fault.after_s <= END_S for fault in last)
    assert {(fault.of, fault.kind) for fault in kills_at_the_end(1, 40.0, 3.0, REGIONS)} == them


def test_a_run_with_shards_knows_their_processes_and_keeps_what_they_write(tmp_path: Path) -> None:
    run = FaultyRun(*make_world(tmp_path, pace_s=0.0, shards=2), tmp_path / "archive")
    assert run.servers == [n for site in ("global", "eu", "us") for n in (site, f"{site}.shard-0", f"{site}.shard-1")]
    assert all(len(own) > 1 for own in deal(parameter_map_of(run.run).chunks, 2))
    request = LaunchRequest(run.run, run.cluster, ("global", "eu", "us"), resume=False)
    commands = [list(p.command) for p in local_processes(request, tmp_path, HostMachine(2)) if p.role != "worker"]
    guards = [run._recognize(1, words) for words in commands]
    assert [(found.kind, found.of) for found in guards if found] == [("guard-of-server", n) for n in run.servers]
    found = [run._recognize(1, words[words.index("-m") - 1 :]) for words in commands]
    kinds = {"global": "global", "eu": "server", "us": "server"}
    assert [(each.kind, each.of) for each in found if each] == [(kinds.get(n, "shard"), n) for n in run.servers]
    for name in run.servers:
        there = run.folder / "servers" / name
        (there / "journal").mkdir(parents=True)
        (there / "snapshots" / "00000001").mkdir(parents=True)
        (there / "journal" / "00000002.journal").write_text(name)
        (there / "snapshots" / "00000001" / "meta.json").write_text(name)
    run.keep_journals()
    shutil.rmtree(run.folder / "servers")
    run.keep_journals()
    for name in run.servers:
        assert (run.archive / name / "journal" / "00000002.journal").read_text() == name
        assert (run.archive / name / "snapshots" / "00000001" / "meta.json").read_text() == name


def test_every_lie_can_be_told() -> None:
    true = UpdatePart("a", "incarnation", 1, 0, (ChunkDelta(0, 0, b"\0\0"), ChunkDelta(1, 0, b"\0\0")), job=1)
    told = dict(lies(true))
    assert len(told) == 5 and all(lie != true and len(lie.deltas) == 2 for lie in told.values())


def test_coverage() -> None:
    assert coverage([(0, 4), (8, 4), (4, 4)]) == (12, 0)
    assert coverage([(0, 4), (2, 4), (8, 2)]) == (8, 2)
    assert coverage([]) == (0, 0)


def test_a_clock_is_stepped_while_a_process_reads_it(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path)
    # It sleeps before each line: libfaketime fails there.
    script = (
        "import sys, time\nfor _ in sys.stdin:\n time.sleep(0.01)\n"
        " print(time.time(), time.monotonic(), time.localtime().tm_year > 2000, flush=True)"
    )
    env = {**os.environ, **clocks.env("eu")}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for step_s in (0, 3600, -3600, 0):
            clocks.set("eu", step_s)
            clocks.env("eu")  # which sets nothing back
            wall_s, monotonic_s = time.time(), time.monotonic()
            process.stdin.write("\n")
            told = process.stdout.readline().split()
            assert float(told[0]) - wall_s == pytest.approx(step_s, abs=600.0)
            assert float(told[1]) - monotonic_s == pytest.approx(0, abs=600.0)
        process.stdin.close()


def test_events_of_a_stepped_clock_are_told_by_one() -> None:
    told = [10.0, 11.0, 3612.0, 3613.0, 14.0, -3585.0, -3584.0, 17.0]
    events = on_one_clock([{"time_s": t} for t in told], 9.0, 18.0, {3600, -3600})
    assert [e["time_s"] for e in events] == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0]


@pytest.mark.long("tests/chaos", "geotrain/net", "geotrain/outer", "launch")
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("words", "fewest"),
    [
        (("--profile", "short", "--pace", "0.1", "--kills-at-end", "15", "--shards", "2"), BURDENED),
        (("--seconds", "120", "--every", "6", "--pace", "0.25"), KILLED),
    ],
    ids=["burdens", "kills"],
)
def test_nothing_is_lost_whatever_befalls_a_run(words: tuple[str, ...], fewest: dict[str, int]) -> None:
    """A full disk, no files, no time, wrong clocks and a liar, and kills while the run ends; any process is killed,
    and links are cut and slow."""
    command = [sys.executable, "-m", "tests.chaos.faults", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for figure in (
        "lost_acknowledged", "applied_twice", "replay_mismatches", "samples_skipped", "samples_twice_uncounted",
        "hung", "servers_ended", "ended_badly",
    ):  # fmt: skip
        assert found[figure] == 0, (figure, found)
    counted = {**found, **found["kinds"]}
    assert all(counted.get(what, 0) >= count for what, count in fewest.items()), found
    assert " s after stop, at its end: kill " in done.stdout or "--kills-at-end" not in words, done.stdout
    assert found["acknowledged_updates"] > 10 and found["snapshots_compared"] > 2
    assert 0.0 < found["goodput"] <= 1.0
