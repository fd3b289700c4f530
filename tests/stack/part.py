"""A part of a training, in whichever stack this Python has: prints each model's losses as JSON.

python -m tests.stack.part FOLDER FIRST LAST: goes on from the checkpoint that another part left in FOLDER where FIRST
is not 0, and leaves one.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# What is unlike in their layers.
NAMES = (
    "llama",
    "deepseek",
    "qwen_moe",
    "smollm3",
    "olmo3",
    "gemma3",
    "gpt_oss",
    "qwen3_next",
    "granite_4",
    "nemotron_3",
)


def play(folder: str, name: str, first: int, last: int) -> list[float]:
    from geotrain.config import ParallelConfig
    from tests.support.checkpoints import load, save
    from tests.support.families import SMOLLM3
    from tests.support.inner_worlds import deepspeed_block, start, stop, train
    from tests.support.layouts import MODELS

    engine: Any = start({**MODELS, "smollm3": SMOLLM3}[name], ParallelConfig(), deepspeed_block(1))
    if first and not load(engine, f"{folder}/{name}"):
        raise OSError(f"no checkpoint of {name} in {folder}")
    losses = [loss for loss, _ in train(engine, range(first, last))]
    save(engine, f"{folder}/{name}", f"step{last}", {"steps": last}, 1, with_masters=True)
    stop(engine)
    return losses


if __name__ == "__main__":
    from geotrain.launch.check import free_ports

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_ports(1)[0])
    found = {name: play(sys.argv[1], name, int(sys.argv[2]), int(sys.argv[3])) for name in NAMES}
    print(json.dumps(found))
