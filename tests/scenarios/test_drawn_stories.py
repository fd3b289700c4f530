"""Stories that are drawn: what operators, workers and links do is mixed, in memory, and the servers are held to
`tests.support.specification` at every message. At the end of each, all data is trained and the run ends.

`python -m tests.scenarios.test_drawn_stories 1000` plays so many.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from geotrain.common.names import GLOBAL
from geotrain.config import LimitsConfig, codec_config
from geotrain.config.batches import BatchSchedule
from tests.simulation.account import STEP, Account
from tests.support.local_servers import first_weights
from tests.support.net_worlds import outer, tiny_layout
from tests.support.outer_world import UPDATES
from tests.support.recorded_world import JournaledWorld
from tests.support.scenario_language import Scenario

REGIONS = {"eu": ("a", "b"), "us": ("c",)}
HOME = {worker: region for region, workers in REGIONS.items() for worker in workers}
STEPS = (
    *12 * ("train",), *4 * ("lease", "push"), "half a push, then new", "new", "silent", "silent eu", "strike",
    "expel", "refuse", "pause", "resume", "resume", "drain", "cut", "mend", "mend", "restart", "restart", "snapshot",
)  # fmt: skip


class Drawn(Scenario):
    """A scenario whose servers have an account."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__("memory", folder)
        self.random, self.done, self.faults = random.Random(seed), list[str](), list[str]()
        self.told = {
            "rule": self.random.choice(["halos", "region_momentum"]),
            "up": self.random.choice(["fp32", "int8"]),
            "down": self.random.choice(["fp32", "bf16", "int4"]),
            "updates_per_send": self.random.randint(1, 3),
            "lease_reserve": self.random.randint(0, 2),
            "strikes": 2,
            "fragments": self.random.choice(["on", "off"]),
            "samples": 4 * self.random.randint(2, 10),
        }
        if self.told["rule"] == "halos":
            self.told["ledger"] = self.random.choice(["on", "off"])

    def do_world(self, *regions: str, samples: int = 48, **settings: Any) -> None:
        codecs = {link: codec_config(settings[link]) for link in ("up", "down")}
        known = {k: v for k, v in settings.items() if k not in ("rule", "fragments", "strikes")}
        limits = LimitsConfig(strikes=settings["strikes"])
        parts = {} if settings["fragments"] else {"fragments": {}}
        config = outer(settings["rule"], **known | codecs, limits=limits, **parts)
        shape = tiny_layout(config)
        about = config, shape, REGIONS, first_weights(shape), samples, {*REGIONS, *HOME}
        self.account = Account(*about, BatchSchedule(STEP))
        self.account.updates = UPDATES
        super().do_world(*regions, samples=samples, norm_deviations=None, **settings)

    def says_parts(self, worker: str, part: int) -> bool:
        self.account.trains(self.parts[worker], self.world.workers[worker][1].slicings)
        return super().says_parts(worker, part)

    def begun(self, world: JournaledWorld, name: str) -> Any:
        server = BEGUN(world, name)
        self.account.watch(server, lambda: True, self.faults.append)
        return server

    def tell(self, *lines: str) -> None:
        for line in lines:
            self.done.append(line)
            self.play(line)
            assert not self.faults, (self.faults, self.done)

    def has_ended(self, worker: str) -> bool:
        """Whether its region's process has: the global server has taken its goodbye."""
        return bool(self.world.servers(HOME[worker]).done)

    def back(self, worker: str) -> None:
        """Have it join again where its server does not know it."""
        member = self.world.servers(HOME[worker]).members[worker]
        if member.quarantined:
            self.tell(f"unban {worker} at={HOME[worker]}")
        if member.incarnation != self.incarnation(worker):
            self.tell(f"new {worker}")
        elif not member.complete or member.away:
            self.tell(f"join {worker}")

    def step(self, what: str) -> None:
        worker, region = self.random.choice([*HOME]), self.random.choice([*REGIONS])
        if self.has_ended(worker) or self.world.servers(region).done:
            return
        self.back(worker)
        cut = region in self.world.held
        match what:
            case "train":
                self.tell(f"lease {worker}")
                self.trains(worker)
            case "push":
                self.trains(worker)
            case "half a push, then new":
                self.tell("push a part=0", "new a") if self.leases["a"] else None
            case "strike" | "expel":
                self.tell(
                    f"strike {worker} times=2" if what == "strike" else f"operator expel {worker} at={HOME[worker]}"
                )
                self.tell(f"unban {worker} at={HOME[worker]}", f"new {worker}")
            case "pause" | "resume":
                self.tell(f"operator {what}")
            case "cut" | "mend":
                self.tell(f"{what} {region}") if cut == (what == "mend") else None
            case "drain":
                self.tell(f"operator drain {region}")
            case "restart" | "snapshot":
                self.tell(f"{what} {self.random.choice([GLOBAL, region])}")
            case "refuse":
                self.tell(f"refuse {region}")
            case "silent eu":
                self.tell(what) if region == "eu" else None
            case _:
                self.tell(f"{what} {worker}")

    def trains(self, worker: str) -> None:
        if self.world.workers[worker][1].job + 1 in self.leases[worker]:
            self.tell(f"push {worker}")

    def play_out(self) -> None:
        """Nothing more goes wrong: the run ends."""
        self.world.refusing.clear()
        self.tell("operator resume", *(f"mend {region}" for region in sorted(self.world.held)))
        top = self.world.servers(GLOBAL)
        for _ in range(40):
            if top.over:
                break
            for worker in (w for w in HOME if not self.has_ended(w)):
                self.back(worker)
                self.tell(f"lease {worker}")
                self.trains(worker)
        for worker in (w for w in HOME if not self.has_ended(w)):
            self.back(worker)
            self.tell(f"leave {worker}")
        ledger = self.account.spec.ledger
        # What nobody has trained that was drained, is trained by a resumed run.
        drained = any("drain" in line for line in self.done)
        assert top.finished and (drained or ledger.committed == len(ledger.place)), (top.status(), self.done)


BEGUN = JournaledWorld.begun


def play(seed: int) -> None:
    with TemporaryDirectory() as folder:
        story = Drawn(seed, Path(folder))
        with patch.object(JournaledWorld, "begun", lambda world, name: story.begun(world, name)):
            settings = " ".join(f"{key}={value}" for key, value in story.told.items())
            story.tell(f"world eu:a/2,b us:c {settings}")
            for _ in range(40):
                story.step(story.random.choice(STEPS))
            story.play_out()
        story.world.close()


def test_whatever_is_drawn_the_servers_do_what_is_specified() -> None:
    for seed in range(20):
        play(seed)


if __name__ == "__main__":
    for drawn in range(int(sys.argv[1])):
        play(drawn)
