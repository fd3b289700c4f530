"""Events as a long run of many regions would write them, without a run: to load the status page with."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from geotrain.monitor.events import LivenessChanged, MemberSampled, Record, Recovery, ServerSampled, SnapshotWritten
from geotrain.monitor.history import PageFacts
from geotrain.outer.events import UpdateApplied, ValidationDone

FRAGMENTS = 4
SAMPLE_S, MERGE_S = 30.0, 60.0  # of each member
MODEL_BYTES = 700_000_000


def synthetic_facts(regions: int, hours: float) -> PageFacts:
    members = {
        f"region-{i:02d}": {"region": f"region-{i:02d}", "workers": 2, "gbps": 1.0, "rtt_ms": 80.0}
        for i in range(regions)
    }
    target = int(tokens_per_s(regions) * hours * 3600 * 1.5)
    return PageFacts(
        "synthetic", 1_240_000_000, 2048, target, tuple(f"layers {i}" for i in range(FRAGMENTS)), members
    )


def tokens_per_s(regions: int) -> float:
    return 41_000.0 * regions


def synthetic_events(facts: PageFacts, end_s: float, hours: float, seed: int = 0) -> Iterator[Record]:
    """Make events in order of time, the last one at end_s. Each region merges once a minute; one in sixteen is lost
    now and then, and one in ten is slow."""
    rng = random.Random(seed)
    names, begin_s = list(facts.members), end_s - hours * 3600
    rate = tokens_per_s(len(names))
    versions = [0] * FRAGMENTS
    totals = dict.fromkeys(names, 0)
    lost: set[str] = set()
    yield Record(begin_s, "global", Recovery(0))
    for name in names:
        yield Record(begin_s + rng.random() * 5, "global", LivenessChanged(name, "up", 0.0))
    seconds = int(hours * 3600)
    for second in range(10, seconds, 5):
        at_s, share = begin_s + second, second / seconds
        for i, name in enumerate(names):
            if (second // 5 + i) % int(MERGE_S // 5) == 0 and name not in lost:
                fragment = (second // 60) % FRAGMENTS
                versions[fragment] += 1
                yield Record(at_s, "global", a_merge(rng, name, i, fragment, versions, share, int(rate * second)))
            if (second // 5 + i) % int(SAMPLE_S // 5) == 0:
                totals[name] += 0 if name in lost else int(SAMPLE_S * 9e6)
                yield Record(at_s, "global", _sample(rng, name, totals[name], name in lost))
            if i % 16 == 5 and rng.random() < 5 / 3600:
                event = LivenessChanged(name, *(("up", 240.0) if name in lost else ("cut off", 6.0)))
                lost.symmetric_difference_update({name})
                yield Record(at_s, "global", event)
        if second % 1800 == 0:
            yield Record(at_s, "global", SnapshotWritten(second // 1800, rng.uniform(4, 7)))
        if second % 900 == 0:
            checked = _loss(share) + rng.gauss(0, 0.01)
            yield Record(
                at_s, "global", ValidationDone(names[0], second // 900, 1, checked, 20.0, int(rate * second))
            )
        if second % 30 == 0:
            yield Record(at_s, "global", _server(versions, len(names)))


def _loss(share: float) -> float:
    return 2.1 + 8.5 * math.exp(-9 * share) + 0.6 * math.exp(-1.5 * share)


def a_merge(
    rng: random.Random, name: str, index: int, fragment: int, versions: list[int], share: float, tokens: int
) -> UpdateApplied:
    slow = index % 10 == 7
    loss = _loss(share) + rng.gauss(0, 0.035)
    staleness = max(0, int(rng.gauss(14 if slow else 5, 2)))
    compute = 6.2 if slow else rng.uniform(9.0, 9.6)
    metrics = {
        "loss": loss,
        "lr": 3e-4 * (1 - 0.9 * share),
        "grad_norm": rng.uniform(0.3, 0.5),
        "tokens_per_s": (17_000.0 if slow else 40_000.0) * rng.uniform(0.97, 1.03),
        "compute_s": compute,
        "communication_s": 0.3 + (2.9 if slow else 0.0),
        "waiting_s": 10 - compute - 0.3 - (2.9 if slow else 0.0),
        "mfu": 0.19 if slow else rng.uniform(0.40, 0.44),
    }
    size = MODEL_BYTES // FRAGMENTS
    return UpdateApplied(
        name, fragment, 1, 1, list(versions), staleness, 512, size, loss, metrics, rng.uniform(1.5, 2.0), tokens,
    )  # fmt: skip


def _sample(rng: random.Random, name: str, total: int, lost: bool) -> MemberSampled:
    rates = (0.0, 0.0) if lost else (rng.uniform(6e6, 12e6), rng.uniform(5e6, 11e6))
    says = {"workers": 2.0, "in_flight": 1.0, "pending": 3.0, "retries": 0.0, "rss_bytes": 9.4e9, "queue": 0.0}
    return MemberSampled(name, 120.0 if lost else rng.uniform(0, 2), total, total, *rates, 0, says)


def _server(versions: list[int], members: int) -> ServerSampled:
    return ServerSampled(
        21_000_000_000, 480_000_000_000, 960_000_000_000, 0, members * 100, 1 << 30, 60, 0.4, versions
    )
