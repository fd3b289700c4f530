"""What failures cost: our own loop in a timing-only world with a failure trace, beside models of its rivals.

Goodput is the share of the devices' time that ends in the run's weights. The rivals are modelled, not run: elastic
data parallelism stops everyone for `pause_s` at each failure; a quorum syncer (Decoupled DiLoCo, arXiv 2604.21428)
stops only the learner that the failed device belongs to, elastic in itself, and merges whoever is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from geotrain.config import OuterConfig
from geotrain.outer.layout import Layout
from geotrain.simulate.spec import WorkerSpec, WorldSpec
from geotrain.simulate.world import World, timing_task

YEAR_S = 365 * 24 * 3600.0


@dataclass(frozen=True)
class Failures:
    """device_mtbf_s: mean time between a device's failures. devices: of the whole run. restart_s: from a worker's
    death to its next life. seed: of the trace."""

    devices: int
    device_mtbf_s: float = YEAR_S
    restart_s: float = 300.0
    seed: int = 0


def elastic_data_parallel(failures: Failures, pause_s: float) -> float:
    """Everyone stops for pause_s whenever a device fails; a failure during a pause begins it anew."""
    return _running_share(failures.device_mtbf_s / failures.devices, pause_s)


def quorum_syncer(failures: Failures, pause_s: float, learners: int) -> float:
    """The same within each of `learners` equal parts; the syncer itself costs nothing."""
    return _running_share(failures.device_mtbf_s * learners / failures.devices, pause_s)


def pause_for(failures: Failures, goodput: float) -> float:
    """The pause with which elastic data parallelism has that goodput: what the published pair of figures implies."""
    mtbf_s = failures.device_mtbf_s / failures.devices
    return mtbf_s * (1 / goodput - 1)


def ours(outer: OuterConfig, model: Layout, world: WorldSpec, failures: Failures, until_s: float) -> dict[str, float]:
    """Our loop in that world, each worker dying by its share of the devices. Returns goodput and its losses."""
    run = World(dying(world, failures, until_s), timing_task(outer, model, 10**12, 1))
    run.run(until_s)
    trained_s = sum(w.trained_s for w in run.workers.values())
    lost_s = sum(w.lost_s for w in run.workers.values())
    available_s = until_s * len(run.workers)
    return {
        "goodput": (trained_s - lost_s) / available_s,
        "lost_share": lost_s / available_s,
        "deaths": float(sum(w.lives - 1 for w in run.workers.values())),
    }


def dying(world: WorldSpec, failures: Failures, until_s: float) -> WorldSpec:
    """The world with a failure trace for each worker."""
    mtbf_s = failures.device_mtbf_s * len(world.workers) / failures.devices

    def fated(worker: WorkerSpec) -> WorkerSpec:
        random = Random(f"{failures.seed} {worker.name}")
        away, now = [], random.expovariate(1 / mtbf_s)
        while now < until_s:
            away.append((now, now + failures.restart_s))
            now = away[-1][1] + random.expovariate(1 / mtbf_s)
        return replace(worker, away=tuple(away))

    return replace(
        world, regions=tuple(replace(r, workers=tuple(fated(w) for w in r.workers)) for r in world.regions)
    )


def _running_share(mtbf_s: float, pause_s: float) -> float:
    return mtbf_s / (mtbf_s + pause_s)
