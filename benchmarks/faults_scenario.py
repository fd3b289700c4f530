"""Faults as data: what happens to whom, and when. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

KILLS = ("rank", "deepspeed", "guard", "server", "global", "region", "launcher")


@dataclass(frozen=True)
class Event:
    """The `count`-th event of this kind in one process's event log. source: a worker, a region or "global"."""

    source: str
    kind: str
    count: int = 1


@dataclass(frozen=True)
class Fault:
    """what: kill (SIGKILL), stop (SIGSTOP, later SIGCONT) a process; cut or slow a region's emulated link.

    kind: of process: "rank" (one of a worker's), "deepspeed" (a worker's launcher), "guard" (a worker's, under
    GeoTrain's launcher), "server" (a region's), "global", "region" (all its processes at once), "launcher": of
    the whole run, which is then launched again with --resume.
    of: a worker or a region. when: seconds from the beginning, or an event. for_s: how long it lasts.
    """

    what: Literal["kill", "stop", "cut", "slow"]
    when: float | Event
    of: str = "global"
    kind: str = ""
    for_s: float = 0.0
    bytes_per_s: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.for_s:g} s" if self.for_s else ""
        return f"{self.what} {self.kind or 'link'} of {self.of}{lasting}"


def random_faults(seed: int, seconds: float, every_s: float, regions: dict[str, Sequence[str]]) -> list[Fault]:
    """Faults at random times, about one each `every_s`, none in the last 20 s (nobody would recover from it).

    Every kind of process is killed once before any is killed again; cuts, slow links and stops come in between.
    regions: region → its workers.
    """
    dice = random.Random(seed)
    faults: list[Fault] = []
    deck: list[str] = []
    at_s = every_s * dice.uniform(0.2, 0.6)
    while at_s < seconds - 20.0:
        if not deck:
            deck = [*KILLS, "rank", "cut", "cut", "slow", "stop"]
            dice.shuffle(deck)
        faults.append(_fault(deck.pop(), round(at_s, 2), dice, regions))
        at_s += every_s * dice.uniform(0.6, 1.4)
    return faults


def _fault(what: str, at_s: float, dice: random.Random, regions: dict[str, Sequence[str]]) -> Fault:
    region = dice.choice(sorted(regions))
    worker = dice.choice(sorted(regions[region]))
    if what == "cut":
        return Fault("cut", at_s, region, for_s=round(dice.uniform(3.0, 20.0), 1))
    if what == "slow":
        return Fault("slow", at_s, region, for_s=round(dice.uniform(5.0, 20.0), 1), bytes_per_s=100_000.0)
    if what == "stop":
        return Fault("stop", at_s, region, "server", for_s=round(dice.uniform(1.0, 4.0), 1))
    of = {"global": "global", "launcher": "all", "server": region, "region": region}.get(what, worker)
    return Fault("kill", at_s, of, what)
