"""Whole runs in virtual time: nothing is lost or applied twice, restarts find all, every run ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.simulation.lives import dies_half_way, digest, live, settings_of, violations

ROOT = Path(__file__).parents[2]
TOLD = """
import sys
from tests.simulation.lives import digest, live
print(*(digest(live(int(seed))) for seed in sys.argv[1:]))
"""


# The last are the first that find faults of `tests/mutants` which those before do not.
@pytest.mark.parametrize("seeds", [range(10), range(10, 20), range(20, 30), [*range(30, 40), 85]])
def test_every_life_ends_and_loses_nothing(seeds: Sequence[int]) -> None:
    for seed in seeds:
        assert violations(live(seed)) == [], f"python -m tests.simulation --seed {seed} --lives 1 --trace"


def test_a_part_that_a_dead_server_had_is_sent_again() -> None:
    seed = next(seed for seed in range(40) if settings_of(seed)["shards"] == ())
    world = live(seed, dies_half_way)
    assert violations(world) == [] and world.processes["eu"].deaths == 3


@pytest.mark.long("geotrain/net", "geotrain/outer", "tests/simulation")
@pytest.mark.parametrize("first", range(1_000, 2_000, 100))
def test_every_one_of_a_thousand_lives(first: int) -> None:
    for seed in range(first, first + 100):
        assert violations(live(seed)) == [], f"python -m tests.simulation --seed {seed} --lives 1 --trace"


def test_a_seed_replays_a_life_to_the_last_event_also_in_another_process() -> None:
    seeds = 0, 9
    here = [digest(live(seed)) for seed in seeds]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", TOLD, *map(str, seeds)]
    there = subprocess.check_output(command, cwd=ROOT, env=environment, text=True, timeout=300)
    assert there.split() == here
    assert len(set(here)) == len(seeds)
