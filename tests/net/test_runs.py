"""Whole runs over real sockets: workers that are plain functions, a region server or two, a global server."""

from __future__ import annotations

import pytest
import torch

from tests.support.net_worlds import (
    Cluster,
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


@pytest.mark.parametrize("rule", ["sync", "halos"])
def test_slicings_do_not_change_the_global_state(make, rule):
    """Bitwise, in fp32: the same model cut differently in each region."""
    states = []
    for cut_a, cut_b in ((whole, whole), (halves, stripes)):
        cluster = make(outer(rule), {"eu": {"a": cut_a}, "us": {"b": cut_b}}, train_samples=32)
        if rule == "sync":
            train_all(cluster)
        else:
            run_in_turns(cluster)
        states.append(weights_of(cluster.top.server))
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)


def run_in_turns(cluster: Cluster) -> None:
    """An asynchronous run whose order does not depend on timing: one worker at a time, the region caught up."""
    workers = [cluster.worker(name) for name in cluster.slicings]
    for worker in workers:
        worker.join()
    for turn in range(8):
        worker = workers[turn % 2]
        lease = worker.lease()
        assert lease is not None
        for f in range(len(cluster.parameter_map.fragments)):
            worker.exchange(worker.parts(lease, (f,)), (f,))
            region = cluster.region_of(worker.name).server
            wait_for(lambda r=region: not r.in_flight)
        worker.job += 1
    for worker in workers:
        worker.close()
