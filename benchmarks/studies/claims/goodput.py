"""Measure what failures cost: our own loop in a timing-only world with a failure trace, beside models of its rivals.

Goodput is the share of the devices' time whose training becomes a part of the run's weights. The rivals are not run
but modelled: elastic data parallelism stops everyone for `pause_s` at each failure; a quorum syncer (Decoupled
DiLoCo, arXiv 2604.21428, whose scale and failure rates these are) stops only the learner that the failed device
belongs to, and merges the learners that are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.studies.claims.methods import METHODS, OURS
from benchmarks.studies.environments import dying, one_block, synthetic_world
from geotrain.config import OuterConfig
from geotrain.parameters.parameter_map import ParameterMap
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import WorldSpec
from geotrain.simulate.world import VirtualWorld, timing_task

YEAR_S = 365 * 24 * 3600.0
DEVICES = 2_400_000  # a device fails once a year: one failure every 13 s
PUBLISHED_ELASTIC, PUBLISHED_QUORUM, LEARNERS = 0.58, 0.88, 8


@dataclass(frozen=True)
class Failures:
    """device_mtbf_s: mean time between a device's failures. devices: of the whole run. restart_s: from a worker's
    death to its next incarnation. seed: of the trace."""

    devices: int
    device_mtbf_s: float = YEAR_S
    restart_s: float = 300.0
    seed: int = 0


def goodput_table(reduced: bool) -> dict[str, Any]:
    """Ours is run, in a timing-only world of workers of 240 devices each; the rivals are models, whose one constant
    (the pause at a failure) is set so that elastic data parallelism keeps the published 58 %."""
    failures = Failures(DEVICES)
    pause_s = pause_for(failures, PUBLISHED_ELASTIC)
    share = 25 if reduced else 1  # fewer workers show the same, because a failure touches only one of them
    regions, workers = (20, 20) if reduced else (100, 100)
    outer = METHODS[OURS].base.with_rule(updates_per_send=50)
    outer = outer.model_copy(update={"local_steps": 32, "scale_local_steps": False})
    world = synthetic_world(regions, workers, 20.0, LinkSpec(25.0, 0.05), spread=1.2)
    mine = ours(outer, one_block(70 * 10**9), world, Failures(DEVICES // share), until_s=12 * 3600.0)
    return {
        "ours": mine["goodput"],
        "ours_deaths": mine["deaths"],
        "ours_devices": DEVICES // share,
        "ours_lost_share": mine["lost_share"],
        "quorum_syncer": quorum_syncer(failures, pause_s, LEARNERS),
        "quorum_syncer_published": PUBLISHED_QUORUM,
        "elastic_data_parallel": elastic_data_parallel(failures, pause_s),
        "pause_s": pause_s,
    }


def elastic_data_parallel(failures: Failures, pause_s: float) -> float:
    """Everyone stops for pause_s whenever a device fails; a failure during a pause begins it anew."""
    return _running_share(failures.device_mtbf_s / failures.devices, pause_s)


def quorum_syncer(failures: Failures, pause_s: float, learners: int) -> float:
    """Each of `learners` equal parts is elastic in itself and stops alone; the syncer costs nothing."""
    return _running_share(failures.device_mtbf_s * learners / failures.devices, pause_s)


def pause_for(failures: Failures, goodput: float) -> float:
    """The pause that follows from a published goodput of elastic data parallelism."""
    mtbf_s = failures.device_mtbf_s / failures.devices
    return mtbf_s * (1 / goodput - 1)


def ours(
    outer: OuterConfig, model: ParameterMap, world: WorldSpec, failures: Failures, until_s: float
) -> dict[str, float]:
    """Our loop in that world, each worker dying by its share of the devices. Returns goodput and its losses."""
    deaths_per_s = 1 / (failures.device_mtbf_s * len(world.workers) / failures.devices)
    world = dying(world, deaths_per_s, failures.restart_s, until_s, failures.seed)
    run = VirtualWorld(world, timing_task(outer, model, 10**12, 1))
    run.run(until_s)
    trained_s = sum(w.trained_s for w in run.workers.values())
    lost_s = sum(w.lost_s for w in run.workers.values())
    available_s = until_s * len(run.workers)
    return {
        "goodput": (trained_s - lost_s) / available_s,
        "lost_share": lost_s / available_s,
        "deaths": float(sum(w.lives - 1 for w in run.workers.values())),
    }


def _running_share(mtbf_s: float, pause_s: float) -> float:
    return mtbf_s / (mtbf_s + pause_s)
