"""Real processes that are killed and cut off at chosen moments, and burdened; then the accounts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.faults.audit import coverage
from tests.chaos.faults.scenario import KILLS

ROOT = Path(__file__).parents[3]
BURDENED = {
    "kills": 4, "full_disks": 1, "out_of_files": 1, "starved": 1
}  # fmt: skip
KILLED = {f"kill {kind}": 1 for kind in KILLS} | {"partitions": 1, "slows": 1, "stops": 1}


def test_coverage() -> None:
    assert coverage([(0, 4), (8, 4), (4, 4)]) == (12, 0)
    assert coverage([(0, 4), (2, 4), (8, 2)]) == (8, 2)
    assert coverage([]) == (0, 0)


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
    """A full disk, no files and no time, and kills while the run ends; any process is killed,
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
