"""Goodput under failures, at the scale and rates of Decoupled DiLoCo (arXiv 2604.21428)."""

from __future__ import annotations

from typing import Any

from claims_methods import METHODS, OURS

from geotrain.simulate.goodput import Failures, elastic_data_parallel, ours, pause_for, quorum_syncer
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import synthetic_world
from geotrain.simulate.world import one_block

DEVICES = 2_400_000  # a device fails once a year: one failure every 13 s
PUBLISHED_ELASTIC, PUBLISHED_QUORUM, LEARNERS = 0.58, 0.88, 8


def goodput_table(reduced: bool) -> dict[str, Any]:
    """Ours is run, in a timing-only world of workers of 240 devices each; the rivals are models, whose one constant
    (the pause at a failure) is set so that elastic data parallelism keeps the published 58 %."""
    failures = Failures(DEVICES)
    pause_s = pause_for(failures, PUBLISHED_ELASTIC)
    share = 25 if reduced else 1  # of the workers: they do not touch each other
    regions, workers = (20, 20) if reduced else (100, 100)
    outer = METHODS[OURS].base.model_copy(
        update={"local_steps": 32, "updates_per_send": 50, "scale_local_steps": False}
    )
    world = synthetic_world(regions, workers, 20.0, LinkSpec(25.0, 0.05), spread=1.2)
    mine = ours(outer, one_block(70 * 10**9), world, Failures(DEVICES // share), until_s=12 * 3600.0)
    return {
        "ours": mine["goodput"],
        "ours_deaths": mine["deaths"],
        "ours_lost_share": mine["lost_share"],
        "quorum_syncer": quorum_syncer(failures, pause_s, LEARNERS),
        "quorum_syncer_published": PUBLISHED_QUORUM,
        "elastic_data_parallel": elastic_data_parallel(failures, pause_s),
        "pause_s": pause_s,
    }
