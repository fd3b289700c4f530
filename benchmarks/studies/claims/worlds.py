"""The published environment, and the harsher worlds that the papers leave out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from benchmarks.studies import environments
from benchmarks.studies.environments import Environment
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import RegionSpec, WorldSpec


@dataclass(frozen=True)
class Setting:
    """environment: with its trouble. quarter_of: worker → kind of text (non-IID). changes: of every method's outer
    block where it has regions that work asynchronously."""

    environment: Environment
    quarter_of: dict[str, int] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)


def published(environment: Environment, bound_s: float) -> Setting:
    return Setting(environment)


def latency(environment: Environment, bound_s: float) -> Setting:
    """100 ms one way on every link between regions, the global server's own region included."""
    return Setting(_world(environment, environments.with_links(environment.world, latency_s=0.1)))


def contention(environment: Environment, bound_s: float) -> Setting:
    """Let all regions but the global server's share an uplink of 0.3 Gbit/s, and messages queue in it."""
    world = environments.with_links(environment.world, shared=True)
    trunk = LinkSpec(0.3)
    away = len(world.regions) - 1  # of a ring, so many hops lead through it each way
    ring_gbps = min(environment.ring_gbps, trunk.gbps / away)
    return Setting(replace(_world(environment, replace(world, trunk=trunk)), ring_gbps=ring_gbps))


def cut_off(environment: Environment, bound_s: float) -> Setting:
    """Region 1 cannot be reached for a tenth of the run. Asynchronous regions hold leases in reserve for it."""
    gap = (0.35 * bound_s, 0.45 * bound_s)
    cut = replace(environment.world.regions[1].link, outages=(gap,))
    jobs = int(0.1 * bound_s / 0.5) + 1  # of the shortest jobs
    return Setting(_with_region(environment, 1, lambda r: replace(r, link=cut)), changes={"lease_reserve": jobs})


def dying(environment: Environment, bound_s: float) -> Setting:
    """Each worker dies three times on average, and needs 2 % of the run to come back."""
    world = environments.dying(environment.world, 3 / bound_s, 0.02 * bound_s, 3 * bound_s, "fate")
    return Setting(_world(environment, world))


def non_iid(environment: Environment, bound_s: float) -> Setting:
    """Each region reads its own quarter of the training text; the loss is over all kinds."""
    regions = environment.world.regions
    return Setting(environment, {w.name: i for i, region in enumerate(regions) for w in region.workers})


def late_join(environment: Environment, bound_s: float) -> Setting:
    """Region 3, the one with most compute, joins after three tenths of the run."""
    away = ((0.0, 0.3 * bound_s),)
    return Setting(
        _with_region(environment, 3, lambda r: replace(r, workers=tuple(replace(w, away=away) for w in r.workers)))
    )


WORLDS: dict[str, Callable[[Environment, float], Setting]] = {
    "published": published,
    "latency-100ms": latency,
    "shared-uplink": contention,
    "region-cut-off": cut_off,
    "workers-dying": dying,
    "non-iid": non_iid,
    "late-join": late_join,
}


def _world(environment: Environment, world: WorldSpec) -> Environment:
    return replace(environment, world=world)


def _with_region(environment: Environment, index: int, change: Callable[[RegionSpec], RegionSpec]) -> Environment:
    regions = list(environment.world.regions)
    regions[index] = change(regions[index])
    return _world(environment, replace(environment.world, regions=tuple(regions)))
