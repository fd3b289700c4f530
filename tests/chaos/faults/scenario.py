"""Faults as data: what happens to whom, and when. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from geotrain.common.names import GLOBAL
from geotrain.config import shard_name

KILLS = ("rank", "deepspeed", "guard", "server", "global", "region", "launcher")
BURDENS = ("starve", "files", "fill")  # what servers must bear
ENDS = "ends"  # an event that is in no log: the server has written its last snapshot
END_S = 5.0  # after which it is left alone: it may have gone long before
PACKETS = ("drop", "corrupt", "delay", "reorder", "duplicate")  # what befalls a share of a link's packets


@dataclass(frozen=True)
class Event:
    """The `count`-th event of this kind in one process's event log. source: a worker, a region or "global"."""

    source: str
    kind: str
    count: int = 1


@dataclass(frozen=True)
class Fault:
    """what: kill (SIGKILL), stop (SIGSTOP, later SIGCONT) a process; cut or slow a region's emulated link; drop,
    corrupt, delay, reorder or duplicate its packets; starve a server's process (it gets a tenth of its time), take
    its last free file descriptors (EMFILE), or fill the disk of the whole run.

    kind: of process: "rank" (one of a worker's), "deepspeed" (a worker's launcher), "guard" (a worker's, under
    GeoTrain's launcher), "server" (a region's), "global", "shard" (of either), "region" (all its processes at once),
    "launcher": of the whole run, which is then launched again with --resume.
    of: a worker, a region or a shard. when: seconds from the beginning, or an event, and after_s after that.
    for_s: how long it lasts.
    rate, seed, amount: of packets, as in `geotrain.emulate.impairments`.
    """

    what: Literal[
        "kill", "stop", "cut", "slow", "drop", "corrupt", "delay", "reorder", "duplicate", "starve", "files", "fill",
    ]  # fmt: skip
    when: float | Event
    of: str = "global"
    kind: str = ""
    after_s: float = 0.0
    for_s: float = 0.0
    bytes_per_s: float = 0.0
    rate: float = 0.0
    seed: int = 0
    amount: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.for_s:g} s" if self.for_s else ""
        share = f" {self.rate:.0%} of the packets on the" if self.rate else ""
        return f"{self.what}{share} {self.kind or 'link'} of {self.of}{lasting}"

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers of a link's disturbance, as `wan.disturb` takes them."""
        more = {"cut": (), "slow": (self.bytes_per_s,)}
        return (self.for_s, *more.get(self.what, (self.rate, self.seed, self.amount)))


def random_faults(
    seed: int, seconds: float, every_s: float, regions: dict[str, Sequence[str]], shards: int = 0
) -> list[Fault]:
    """Faults at random times, none in the last 20 s (nobody would recover from it).

    About one each `every_s` befalls processes and whole links: every kind of process is killed once before any is
    killed again, with cuts, slow links and stops in between. About as many befall packets, and half as many are
    burdens of servers, independently: so they also meet what recovers. regions: region → its workers. shards: of each
    server, in processes of their own; of every server one is killed as often as any kind of process.
    """
    dice = random.Random(seed)
    victims = [*KILLS, *([f"kill of {site}" for site in (GLOBAL, *regions)] if shards else [])]
    processes = [*victims, *victims, "rank", "cut", "slow", "stop", *(["stop of shard"] if shards else [])]
    burdens = [*BURDENS, *(["starve of shard", "files of shard"] if shards else [])]
    decks = (processes, 1), ([*PACKETS, "corrupt"], 1), (burdens, 2)
    faults = [
        fault for kinds, rare in decks for fault in _dealt(kinds, dice, seconds, rare * every_s, regions, shards)
    ]
    return sorted(faults, key=lambda fault: float(fault.when))


def short_faults(regions: dict[str, Sequence[str]], shards: int = 0) -> list[Fault]:
    """One of each burden, and a kill of each server, within twelve seconds. regions: region → its workers. shards: of
    each server, in processes of their own: one of each is killed, some are stopped, starved and without files."""
    first, last = min(regions), max(regions)
    of_shards = [
        Fault("kill", 2.0, shard_name(first, 0), "shard"),  # it comes back to a full disk
        Fault("starve", 5.0, shard_name(first, 0), "shard", for_s=2.5),
        Fault("files", 5.5, shard_name(last, shards - 1), "shard", for_s=3.0),
        Fault("kill", 7.0, shard_name(GLOBAL, shards - 1), "shard"),
        Fault("stop", 9.5, shard_name(GLOBAL, 0), "shard", for_s=1.5),
        Fault("kill", 10.5, shard_name(last, 0), "shard"),
    ]
    faults = [
        Fault("fill", 0.5, "all", "disk", for_s=2.5),
        Fault("kill", 1.5, "global", "global"),  # it comes back to a full disk
        Fault("files", 4.5, first, "server", for_s=3.0),
        Fault("starve", 5.0, last, "server", for_s=4.0),
        Fault("corrupt", 5.0, first, for_s=5.0, rate=0.1, seed=1, amount=0.25),
        Fault("kill", 8.0, first, "server"),
        Fault("kill", 9.0, regions[first][0], "rank"),
    ]
    return sorted([*faults, *(of_shards if shards else [])], key=lambda fault: float(fault.when))


def kills_at_the_end(
    seed: int, seconds: float, every_s: float, regions: dict[str, Sequence[str]], shards: int = 0
) -> list[Fault]:
    """Kills of servers and of their shards, about one each `every_s`: of each once before any is killed again. Then
    of each once more, within END_S from when its server, or that which it is a shard of, ends: an event ENDS.
    Each second one comes at once, and most others soon, since a server may live on for less than a second."""
    dice = random.Random(seed)
    sites = {GLOBAL: "global", **dict.fromkeys(sorted(regions), "server")}
    victims = [*sites.items(), *((shard_name(site, i), "shard") for site in sites for i in range(shards))]
    deck: list[tuple[str, str]] = []
    kills, at_s = [], every_s * dice.uniform(0.2, 1.0)
    while at_s < seconds:
        deck = deck or dice.sample(victims, len(victims))
        kills.append(Fault("kill", round(at_s, 2), *deck.pop()))
        at_s += every_s * dice.uniform(0.6, 1.4)
    for number, (of, kind) in enumerate(victims):
        end = Event(of.partition(".shard-")[0], ENDS)
        kills.append(Fault("kill", end, of, kind, after_s=round(number % 2 * END_S * dice.random() ** 3, 2)))
    return kills


def _dealt(
    kinds: list[str], dice: random.Random, seconds: float, every_s: float, regions: dict[str, Sequence[str]],
    shards: int,
) -> Iterator[Fault]:  # fmt: skip
    deck: list[str] = []
    at_s = every_s * dice.uniform(0.2, 0.6)
    while at_s < seconds - 20.0:
        if not deck:
            deck = list(kinds)
            dice.shuffle(deck)
        card = deck.pop()
        made = _of_shard if " of " in card else _fault
        yield made(card, round(at_s, 2), dice, regions, shards)
        at_s += every_s * dice.uniform(0.6, 1.4)


def _fault(what: str, at_s: float, dice: random.Random, regions: dict[str, Sequence[str]], _: int) -> Fault:
    region = dice.choice(sorted(regions))
    worker = dice.choice(sorted(regions[region]))
    if what == "cut":
        return Fault("cut", at_s, region, for_s=round(dice.uniform(3.0, 20.0), 1))
    if what == "slow":
        return Fault("slow", at_s, region, for_s=round(dice.uniform(5.0, 20.0), 1), bytes_per_s=100_000.0)
    if what == "stop":
        return Fault("stop", at_s, region, "server", for_s=round(dice.uniform(1.0, 4.0), 1))
    if what == "fill":
        return Fault("fill", at_s, "all", "disk", for_s=round(dice.uniform(2.0, 6.0), 1))
    if what in BURDENS:
        of = dice.choice(["global", region])
        return Fault(what, at_s, of, "global" if of == "global" else "server", for_s=round(dice.uniform(3, 8), 1))
    if what in PACKETS:
        amount = {"corrupt": 0.25, "delay": 0.2}.get(what, 0.0)
        rate, for_s = round(dice.uniform(0.05, 0.3), 2), round(dice.uniform(5.0, 20.0), 1)
        return Fault(what, at_s, region, for_s=for_s, rate=rate, seed=dice.randrange(1000), amount=amount)
    of = {"global": "global", "launcher": "all", "server": region, "region": region}.get(what, worker)
    return Fault("kill", at_s, of, what)


def _of_shard(card: str, at_s: float, dice: random.Random, regions: dict[str, Sequence[str]], shards: int) -> Fault:
    """card: "kill of <server>", of one of its shards; others "of shard", of any server."""
    what, _, of = card.partition(" of ")
    site = dice.choice([GLOBAL, *sorted(regions)]) if of == "shard" else of
    shard = shard_name(site, dice.randrange(shards))
    for_s = {"kill": 0.0, "stop": dice.uniform(1.0, 4.0)}.get(what, dice.uniform(3.0, 8.0))
    return Fault(what, at_s, shard, "shard", for_s=round(for_s, 1))
