"""Lives of members: refused joins change nothing, old lives stay out, nothing is taken twice, goodbyes last."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from geotrain.config import CodecConfig
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.member import FORMER_LIVES
from geotrain.outer.messages import Finished, LeaseRequest, Refused, Release, Welcome
from tests.outer.test_rules import config
from tests.outer.test_servers import halves, make, random_deltas
from tests.outer.world import World


def test_a_refused_join_leaves_the_living_in_place():
    world = make(config(), cut_a=halves)
    region, worker = world.regions["eu"], world.workers["a"][1]
    good = worker.joins(world.identity, "life-2")[0]
    for change in ({"part": 5}, {"pushes": ()}, {"layout_digest": "other"}):
        with pytest.raises(Refused):
            region.on_join(dataclasses.replace(good, **change))
    assert [region.on_part(p) for p in worker.parts(random_deltas(world, 1))] == [False, True]


def test_an_older_life_is_refused_for_good():
    world = make(config(), cut_a=halves)
    region, worker = world.regions["eu"], world.workers["a"][1]
    for join in worker.joins(world.identity, "life-2"):
        region.on_join(join)
    with pytest.raises(Refused, match="another process has joined") as refused:
        region.on_join(worker.joins(world.identity, "life-1")[0])
    assert refused.value.retry_s is None
    restored = saved_and_loaded(world, "eu")
    with pytest.raises(Refused, match="another process has joined"):
        restored.on_join(worker.joins(world.identity, "life-1")[0])


def test_every_restart_is_counted_however_many_lives_are_remembered():
    world = make(config(), cut_a=halves)
    worker, lives = world.workers["a"][1], 3 * FORMER_LIVES
    for life in range(lives):
        for join in worker.joins(world.identity, f"life-{life + 2}"):
            world.regions["eu"].on_join(join)
    restored = saved_and_loaded(world, "eu").members["a"]
    assert restored.status()["restarts"] == lives
    assert len(restored.former) == FORMER_LIVES
    old = {name: value for name, value in restored.state().items() if name != "restarts"}
    restored.load(old)
    assert restored.status()["restarts"] == FORMER_LIVES  # all that an older snapshot knows


def saved_and_loaded(world: World, region: str):
    old = world.regions[region]
    new = type(old)(region, world.identity, world.layout, world.config, tuple(old.members))
    new.load(*old.state())
    return new


@pytest.mark.parametrize("change", [{"deltas": ()}, {"weight": 0}, {"twice": True}])
def test_updates_that_make_no_sense_are_refused(change):
    world = make(config(), fragments=1)
    region, worker = world.regions["eu"], world.workers["a"][1]
    good = worker.parts(random_deltas(world, 1))[0]
    if change.pop("twice", False):
        change = {"deltas": (good.deltas[0], good.deltas[0])}
    with pytest.raises(Refused, match="is none"):
        region.on_part(dataclasses.replace(good, **change))
    assert region.on_part(good)


def test_whether_a_part_is_wanted_is_known_without_its_payload():
    world = make(config(), cut_a=halves)
    region, worker = world.regions["eu"], world.workers["a"][1]
    first, second = worker.parts(random_deltas(world, 1))

    def bare(part, size):
        deltas = tuple(dataclasses.replace(d, payload=range(size)) for d in part.deltas)
        return dataclasses.replace(part, deltas=deltas)

    size = len(first.deltas[0].payload)
    assert region.wants(bare(first, size))
    with pytest.raises(Refused, match="bytes, its slices need"):
        region.wants(bare(first, size + 1))
    region.on_part(first)
    assert not region.wants(bare(first, size))
    region.on_part(second)
    assert not region.wants(bare(second, len(second.deltas[0].payload)))


def test_an_answer_that_comes_twice_is_adopted_once():
    """With changes downwards, a second copy would be added to the mirror again."""
    world = make(config(updates_per_send=1, down=CodecConfig(name="int4")))
    region = world.regions["eu"]
    world.push("a", random_deltas(world, 1))
    update = world.deliver_up("eu")
    answer = world.top.answer("eu", "life-1", 0, update.sequence, (0,))
    region.on_global_weights(answer)
    x, mirror = region.fragments[0].x.clone(), region.downlink.mirror[0].clone()
    region.on_global_weights(answer)
    assert torch.equal(region.fragments[0].x, x) and torch.equal(region.downlink.mirror[0], mirror)


def test_a_second_copy_of_a_lease_that_is_done_is_dropped():
    world = make(config(), train_samples=64)
    lease = world.lease("a")
    world.push("a", random_deltas(world, 1), leases=(lease.lease,))
    region = world.regions["eu"]
    region.on_lease(lease)
    assert not any(region.leases.values()) and not region.outgoing()


def test_the_end_is_the_same_for_all_ranks_of_a_worker():
    """A lease that comes back after rank 0 was told "finished" must not go to rank 1."""
    world = make(config(), train_samples=8)
    lease = world.lease("a")
    top = world.top
    assert isinstance(top.on_lease_request(LeaseRequest("b", 1)), Finished)
    top.on_release(Release((lease.lease,)))
    assert isinstance(top.on_lease_request(LeaseRequest("b", 1)), Finished)
    again = top.on_lease_request(LeaseRequest("a", 1))
    assert (again.start, again.samples) == (lease.start, lease.samples)


def test_an_unknown_worker_gets_no_lease():
    world = make(config())
    with pytest.raises(Refused, match="no worker of this run is called 'zoe'"):
        world.top.on_lease_request(LeaseRequest("zoe", 1))


@pytest.mark.parametrize("step_s", [float("inf"), float("nan"), 0.0, -1.0])
def test_a_senseless_step_time_is_no_speed(step_s):
    world = make(config(scale_local_steps=True))
    for worker in ("a", "b"):
        assert world.top.on_lease_request(LeaseRequest(worker, 1, step_s)).steps == world.config.local_steps


def new_global(world: World) -> GlobalServer:
    names = {r: tuple(region.members) for r, region in world.regions.items()}
    return GlobalServer(world.identity, world.layout, world.config, names, world.top.book.train_samples, 1)


def test_goodbyes_outlive_a_restart_and_a_finished_run_can_go_on():
    world = make(config(), train_samples=64)
    world.top.on_leave("eu")
    restored = new_global(world)
    restored.load(*world.top.state())
    assert restored.members["eu"].left and not restored.finished
    world.top.on_leave("us")
    restored.load(*world.top.state())
    assert restored.finished
    restored.begin_again()
    assert not restored.finished and not restored.members["eu"].left  # it waits for its members to come back
    region = world.regions["eu"]
    region.on_leave("a")
    half_way = saved_and_loaded(world, "eu")
    assert half_way.gone and half_way.empty  # its goodbye is still to be said
    region.on_farewell()
    again = saved_and_loaded(world, "eu")
    assert again.done
    again.begin_again()
    assert not again.gone and not again.empty


def answered(world: World, region: str) -> None:
    """The region gets all weights of the global server."""
    server = world.regions[region]
    world.top.on_join(dataclasses.replace(server.join_message(), incarnation="life-2"))
    fragments = tuple(range(len(world.layout.fragments)))
    server.on_global_weights(world.top.answer(region, "life-2", 0, 0, fragments))


def test_a_region_learns_its_number_from_the_global_server():
    world = make(config(updates_per_send=1), fragments=1)
    region = saved_and_loaded(world, "eu")
    region.fragments = []  # its folder was lost: four updates are known above
    assert region.on_welcome(Welcome(5, 1)) == 0
    assert region.sequence == 4
    world.regions["eu"] = region
    answered(world, "eu")
    for join in world.workers["a"][1].joins(world.identity):
        region.on_join(join)
    world.push("a", random_deltas(world, 1))
    flying = sorted(region.in_flight)
    assert flying[0] == 5 and region.on_welcome(Welcome(5, 1)) == 0
    assert region.on_welcome(Welcome(7, 1)) == 0 and sorted(region.in_flight) == flying  # two are applied already
    region.global_versions = [9] * len(flying)
    lost = Welcome(2, 1, versions=(0,) * len(flying))
    assert region.on_welcome(lost) == 3  # restored from an older state: three acknowledged ones are lost
    assert sorted(region.in_flight) == [n - 3 for n in flying]
    assert [u.sequence for u in region.in_flight.values()] == sorted(region.in_flight)
    assert region.sequence == max(region.in_flight)
    assert region.global_versions == [0] * len(flying)  # nobody knows the lost versions


def test_a_region_restored_from_an_older_state_sends_nothing_twice():
    """What that state holds as pending went up after it: the region begins again from the global weights, gives its
    data back, and its workers' updates, whose versions it still knows, are taken."""
    world = make(config(updates_per_send=2), fragments=1)
    region, worker = world.regions["eu"], world.workers["a"][1]
    lease = world.lease("a")
    assert lease is not None
    world.push("a", random_deltas(world, 1), (lease.lease,))
    older = saved_and_loaded(world, "eu")  # one update is pending
    world.push("a", random_deltas(world, 2))
    while sent := world.deliver_up("eu"):
        world.deliver_down("eu", sent)
    committed = world.top.book.committed_samples
    assert committed > 0 and region.sequence > 0 and older.sequence == 0
    weights = [state.x.clone() for state in world.top.fragments]

    world.regions["eu"] = older
    welcome = world.top.on_join(dataclasses.replace(older.join_message(), incarnation="life-2"))
    versions = [state.version for state in older.fragments]
    assert older.on_welcome(welcome) == 0
    assert [send.message for send in older.outgoing()] == [Release((lease.lease,))]
    assert older.fragments == [] and older.sequence == welcome.sequence - 1
    assert saved_and_loaded(world, "eu").first_versions == versions
    answered(world, "eu")
    assert [state.version for state in older.fragments] == versions
    assert all(torch.equal(state.x, x) for state, x in zip(older.fragments, weights, strict=True))
    assert not any(older.rule.pending(state) for state in older.fragments) and not older.in_flight
    for join in worker.joins(world.identity):
        older.on_join(join)
    worker.sequence -= 1
    older.on_part(worker.parts(random_deltas(world, 3), version=versions[0])[0])
    assert world.top.book.committed_samples == committed


def test_a_region_keeps_leases_in_reserve_and_gives_back_what_it_does_not_need():
    """Cut off, it hands out what it asked for before; each job's lease is asked for once; a new life frees them."""
    world = make(config(lease_reserve=2), train_samples=640)
    region = world.regions["eu"]

    def asked() -> list[int]:
        sends = [s for s in region.outgoing() if isinstance(s.message, LeaseRequest)]
        for send in sends:
            region.on_lease(world.top.on_lease_request(send.message))
        return [s.message.job for s in sends]

    assert region.on_lease_request(LeaseRequest("a", 1)) is None
    assert asked() == [1, 2, 3]
    assert [s.message.job for s in region.outgoing()] == [1]  # the worker waits for one, and is told of one
    assert region.on_lease_request(LeaseRequest("a", 2)).job == 2
    assert region.on_lease_request(LeaseRequest("a", 3)).job == 3
    assert asked() == [4, 5]
    assert len(world.top.book.open) == 5
    for join in world.workers["a"][1].joins(world.identity, "life-2"):
        region.on_join(join)
    (release,) = [s.message for s in region.outgoing()]
    world.top.on_release(release)
    assert not world.top.book.open and not any(region.leases.values())
    assert region.on_lease_request(LeaseRequest("a", 1)) is None and asked() == [1, 2, 3]
