"""A state follows from the messages alone, in whatever process they are handled."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

from tests.outer.test_specification import NAMES_USED, STEPS, Lives
from tests.support.specified_world import REGIONS, frozen

ROOT = Path(__file__).parents[2]
LIVES, LENGTH = 30, 60
# In processes of these two, sets of the names used here have opposite orders.
HASH_SEEDS = "3", "6"


def played() -> str:
    """A digest of all states that the servers have come to in some random lives."""
    found = hashlib.sha256()
    for seed in range(LIVES):
        dice = random.Random(seed)
        machine = Lives()
        rule = dice.choice(["halos", "published", "region_momentum", "sync"])
        machine.begin(rule, "int8", dice.choice(["bf16", "int4"]), dice.randint(1, 3), dice.randint(0, 2), 40, 1)
        for _ in range(LENGTH):
            server = dice.choice(["global", *REGIONS])
            machine.step(dice.choice(STEPS), dice.choice(NAMES_USED), dice.choice(list(REGIONS)), server)
            for each in machine.world.servers.values():
                tensors, plain = frozen(each)
                found.update(plain.encode())
                for name, tensor in tensors.items():
                    found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def test_no_state_depends_on_the_order_of_a_set() -> None:
    """Which differs from process to process: a snapshot would differ from what a replay gives, and what is dropped
    first as the oldest would be another."""
    command = [sys.executable, "-c", f"from {__name__} import played; print(played())"]
    lives = [
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE)
        for seed in HASH_SEEDS
    ]
    one, other = (life.communicate(timeout=600)[0] for life in lives)
    assert one and one == other
