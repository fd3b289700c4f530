"""Whole runs over real sockets: workers that are plain functions, a region server or two, a global server."""

from __future__ import annotations

import pytest

from tests.support.net_worlds import (
    halves,
    outer,
    stripes,
    target,
    train_all,
    wait_for,
    whole,
)
from tests.support.outer_world import weights_of


@pytest.mark.parametrize("rule", ["halos", "region_momentum", "sync"])
def test_a_run_trains_every_sample_once_and_ends(make, rule):
    cluster = make(outer(rule), {"eu": {"a": halves, "b": whole}, "us": {"c": stripes}}, train_samples=72)
    before = [x.clone() for x in weights_of(cluster.top.server)]
    workers = train_all(cluster)
    ranges = sorted((lease.start, lease.samples) for w in workers for lease in w.trained)
    assert [start for start, _ in ranges] == list(range(0, 72, 4))
    lease_table = cluster.top.server.lease_table
    assert (lease_table.committed_samples, lease_table.open, lease_table.pool) == (72, {}, [])
    for f, start in enumerate(before):
        goal = target(cluster.parameter_map, f)
        assert (cluster.top.server.weights(f) - goal).norm() < 0.95 * (start - goal).norm()
    for region in cluster.regions.values():
        assert region.server.lost_updates == 0 and not region.server.in_flight
        assert wait_for(lambda r=region: r.server.done)
