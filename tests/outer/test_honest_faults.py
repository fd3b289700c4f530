"""What goes wrong without anybody lying: deaths, silence, restarts and refusals may cost time, but no sample is
skipped, none is trained twice without being counted, and no run stands still for ever."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain.config import FragmentConfig, OuterConfig, codec_config
from geotrain.outer.codec import CodecError, make_codec
from geotrain.outer.events import StartedOver
from geotrain.outer.messages import (
    Finished,
    Lease,
    LeaseRequest,
    Leave,
    MemberSilent,
    NotJoined,
    OperatorCommand,
    Refused,
    Release,
    Trained,
    UpdatePart,
    UpdateRejected,
)
from geotrain.outer.server.leases import LeaseTable
from geotrain.outer.server.region_server import RegionServer
from geotrain.parameters.parameter_map import Parameter, ParameterMap
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import RegionSpec, WorkerSpec, WorldSpec
from geotrain.simulate.world import VirtualWorld, timing_task
from tests.support.outer_configs import outer_config
from tests.support.outer_world import (
    FakeWorker,
    World,
    config,
    halves,
    make,
    random_deltas,
    saved_and_loaded,
    weights_of,
    whole,
)
from tests.support.outer_world import parameter_map as toy


def two_in_a_region(train_samples: int = 64, **changes: Any) -> World:
    shape = toy()
    workers = [FakeWorker(name, shape, whole(shape)) for name in ("a", "b")]
    start = [torch.zeros(f.numel) for f in shape.fragments]
    return World(config(**changes), {"eu": workers}, start, shape, train_samples=train_samples)


def rejoin(world: World, worker: str, incarnation: str) -> int:
    """An incarnation of the worker joins. Returns the number of its next job."""
    region, fake = world.workers[worker]
    fake.sequence = world.regions[region].members[worker].sequence
    for join in fake.joins(world.identity, incarnation):
        job = world.tell(region, join).job
    return job


# ------------------------------------------------------------------ an update that is refused above, for good


def refused_above(world: World, region: str) -> UpdatePart:
    """The region's next update is refused for good, and the region hears of it."""
    sent = next(m for m in world.up[region] if isinstance(m, UpdatePart))
    world.up[region].remove(sent)
    world.tell(region, UpdateRejected(region, world.regions[region].incarnation, "far out of the ordinary"))
    return sent


def test_a_region_whose_update_is_refused_for_good_starts_over():
    """It gives back its data, forgets what it sent, tells it, and goes on from the global weights; so does what a
    restart leaves of it."""
    world = make(config(updates_per_send=1), train_samples=64)
    region = world.regions["eu"]
    first = world.lease("a")
    assert first is not None
    world.push("a", random_deltas(world, 1), (first.lease,))
    second = world.lease("a")
    assert second is not None
    before = [state.version for state in region.fragments]
    sent = next(m for m in world.up["eu"] if isinstance(m, UpdatePart))
    handled = region.handle(UpdateRejected("eu", "life-1", "far out of the ordinary"))
    assert StartedOver("far out of the ordinary") in handled.events
    [given_back] = [send.message for send in handled.sends]
    assert isinstance(given_back, Release) and set(given_back.leases) == {first.lease, second.lease}
    assert not region.in_flight and not region.fragments and not region.resend()
    assert not saved_and_loaded(world, "eu").resend()
    world.top.handle(given_back)
    assert not world.top.lease_table.open and world.top.lease_table.committed_samples == 0
    # It joins again, takes the global weights, and its worker trains on.
    welcome = world.top.handle(region.join_message()).reply
    assert world.tell("eu", welcome) == 0  # nothing that was acknowledged is lost
    assert world.answer("eu", 0, tuple(range(len(before))))
    assert [state.version for state in region.fragments] == before
    assert all(map(torch.equal, weights_of(region), weights_of(world.top)))
    job = rejoin(world, "a", "life-2")
    world.up["eu"].clear()
    world.workers["a"][1].job = job - 1
    lease = world.lease("a")
    assert lease is not None
    world.tell("eu", world.workers["a"][1].parts(random_deltas(world, 2), (lease.lease,), "life-2", before[0])[0])
    update = next(m for m in world.up["eu"] if isinstance(m, UpdatePart))
    assert update.sequence == sent.sequence and world.top.handle(update).reply


def test_what_was_acknowledged_before_the_refused_update_is_not_taken_for_lost():
    world = make(config(updates_per_send=1), fragments=1)
    region = world.regions["eu"]
    world.push("a", random_deltas(world, 1))
    sent = [m for m in world.up["eu"] if isinstance(m, UpdatePart)]
    assert len(sent) > 2
    for update in sent[:2]:
        world.top.handle(update)
    region.handle(UpdateRejected("eu", "life-1", "wild"))
    welcome = world.top.handle(region.join_message()).reply
    assert region.handle(welcome).reply == 0 and region.sequence == 2


def test_a_region_that_hears_of_it_twice_starts_over_once():
    world = make(config(updates_per_send=1))
    world.push("a", random_deltas(world, 1))
    region = world.regions["eu"]
    for started in (1, 0):
        events = region.handle(UpdateRejected("eu", "life-1", "wild")).events
        assert len([e for e in events if isinstance(e, StartedOver)]) == started
        assert world.answer("eu", 0, tuple(range(len(region.parameter_map.fragments)))) or not started


def test_what_is_begun_again_of_a_synchronous_round():
    """Fragment 0 is taken above, 1 refused, 2 waits for the other worker's delta: who sent 1 or 2 trains again."""
    shape = toy(1)
    workers = [FakeWorker(name, shape, whole(shape)) for name in ("a", "b")]
    start = [torch.zeros(f.numel) for f in shape.fragments]
    world = World(config("sync"), {"eu": workers}, start, shape, train_samples=64)
    region, deltas = world.regions["eu"], random_deltas(world, 1)
    for name, fragments in (("a", (0, 1, 2)), ("b", (0, 1))):
        for fragment in fragments:
            world.workers[name][1].job = 0
            world.push(name, {fragment: deltas[fragment]})
    first, second = (m for m in world.up["eu"] if isinstance(m, UpdatePart))
    assert world.top.handle(first).reply
    world.tell("eu", UpdateRejected("eu", "life-1", "wild", second.sequence))
    restarted = saved_and_loaded(world, "eu")
    for server in (region, restarted):
        assert {name: (m.came[0], m.came[1], m.came.get(2, 0)) for name, m in server.members.items()} == {
            "a": (1, 0, 0),
            "b": (1, 0, 0),
        }
        assert [m.sequence for m in server.members.values()] == [2, 1] and not server.in_flight
    assert rejoin(world, "a", "life-2") == rejoin(world, "b", "life-2") == 1


# -------------------------------------------------------------------------- synchronous rounds of several fragments


def model(fragments: int) -> ParameterMap:
    """One fragment; or three or more, those of its layers, the embedding and the head."""
    layers = [Parameter(f"layer.{i}", (1,), i, "normal") for i in range(fragments - 2)]
    embedding, head = (Parameter(name, (1,), None, "normal") for name in ("embedding", "head"))
    return ParameterMap([embedding, *layers, head], 1 if layers else None)


def simulated(
    outer: OuterConfig, fragments: int, away: dict[str, tuple[tuple[float, float], ...]], steps: int = 48
) -> VirtualWorld:
    """Three workers in two regions, a second an inner step; who is away when."""

    def worker(name: str, step_s: float) -> WorkerSpec:
        return WorkerSpec(name, step_s, away.get(name, ()))

    link = LinkSpec(gbps=1.0, latency_s=0.05)
    regions = (
        RegionSpec("eu", (worker("a", 1.0), worker("b", 1.3)), link),
        RegionSpec("us", (worker("c", 0.9),), link),
    )
    world = VirtualWorld(WorldSpec(regions), timing_task(outer, model(fragments), steps, 1))
    world.run(until_s=100_000)
    return world


SPANS = st.lists(st.tuples(st.floats(0.1, 30), st.floats(0.05, 9)), min_size=1, max_size=3)


@given(
    st.sampled_from([1, 3, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from("abc"),
    SPANS,
    st.booleans(),
    st.sampled_from([0, 1]),
)
def test_a_synchronous_run_ends_with_all_samples_trained_whenever_a_worker_dies(
    fragments, levels, who, spans, scaled, tau
):
    """Also between the deltas of one job, while an answer travels, and at the very end."""
    outer = outer_config(
        "sync",
        levels=levels,
        local_steps=4,
        scale_local_steps=scaled,
        fragments=FragmentConfig(layers_per_fragment=1),
        overlap={"steps": tau, "adopt": "rebase"} if tau else {},
    )
    away, now = [], 0.0
    for alive_s, dead_s in spans:
        away.append((now + alive_s, now + alive_s + dead_s))
        now += alive_s + dead_s
    rounds: list[int] = []
    lay_out = LeaseTable._lay_out

    def counting(lease_table: LeaseTable, job: int) -> bool:
        whole = lay_out(lease_table, job)
        if whole:
            rounds.append(sum(samples for _, samples in lease_table.laid_out[job].values()))
        return whole

    with patch.object(LeaseTable, "_lay_out", counting):
        world = simulated(outer, fragments, {who: tuple(away)})
    assert world.report()["finished"], world.top.server.status()
    lease_table = world.top.server.lease_table
    assert not lease_table.open and lease_table.committed_samples == sum(rounds)
    versions = [state.version for state in world.top.server.fragments]
    assert versions == [len(rounds) + 1] * (fragments - 1) + [len(rounds)]  # the last is sent with a job's last step


def in_flight(region: RegionServer) -> list[UpdatePart]:
    return [send.message for send in region.resend() if isinstance(send.message, UpdatePart)]


def test_a_delta_that_came_in_this_round_is_not_taken_again():
    """Its next incarnation trains the whole job again; what has come of it counts once."""
    world = make(config("sync"), fragments=1)
    region, fake = world.regions["eu"], world.workers["a"][1]
    deltas = random_deltas(world, 1)
    last = max(deltas)
    lease = world.lease("a")
    assert lease is not None

    def said(fragments: list[int], incarnation: str, leases: tuple[int, ...] = ()) -> None:
        [part] = fake.parts({f: deltas[f] for f in fragments}, leases, incarnation)
        world.tell("eu", dataclasses.replace(part, job=1))

    said([0], "life-1")
    assert rejoin(world, "a", "life-2") == 1
    assert world.top.handle(LeaseRequest("a", 1)).reply == lease  # the same data: the others' are laid out
    said([0], "life-2")
    assert len(region.in_flight) == 1  # once
    assert region.answer("a", "life-2", 0, fake.sequence, (0,)) is None  # the round has not ended
    said([f for f in deltas if f != 0], "life-2", (lease.lease,))
    assert sorted(u.deltas[0].chunk for u in region.in_flight.values()) == sorted(deltas)
    for update in in_flight(region):
        world.top.handle(update)
    world.push("b", deltas)
    while world.deliver_up("us"):
        pass
    for update in in_flight(region):
        assert world.answer("eu", update.sequence, (update.deltas[0].chunk,))
    assert region.answer("a", "life-2", 0, fake.sequence - 1, (0,)) is not None
    assert region.fragments[last].version == 1 and [s.version for s in world.top.fragments] == [1] * len(deltas)


# ---------------------------------------------------------------------------- leases of the silent and of who left


def all_leases(world: World) -> set[int]:
    return set(world.top.lease_table.open)


@pytest.mark.parametrize("levels", [1, 2])
def test_a_lease_asked_for_while_paused_does_not_go_to_the_dead(levels):
    world = two_in_a_region(levels=2)
    top, region = world.top, world.regions["eu"]
    if levels == 1:
        flat = type(top)(
            top.identity, top.parameter_map, config().model_copy(update={"levels": 1}), {"eu": ("a", "b")}, 64, 1
        )
        flat.set_weights([x.clone() for x in weights_of(top)])
        for join in world.workers["a"][1].joins(world.identity):
            flat.handle(join)
        flat.handle(OperatorCommand("pause"))
        assert flat.handle(LeaseRequest("a", 1)).reply is None
        flat.handle(MemberSilent("a", "life-1"))
        flat.handle(OperatorCommand("resume"))
        with pytest.raises(NotJoined):  # the call that waited asks again
            flat.handle(LeaseRequest("a", 1))
        assert not flat.lease_table.open
        for join in world.workers["a"][1].joins(world.identity):  # should it live: it joins, and asks again
            flat.handle(join)
        assert isinstance(flat.handle(LeaseRequest("a", 1)).reply, Lease)
        return
    top.handle(OperatorCommand("pause"))
    world.tell("eu", LeaseRequest("a", 1))
    request = world.up["eu"].popleft()
    assert top.handle(request).reply is None
    world.tell("eu", MemberSilent("a", "life-1"))
    top.handle(OperatorCommand("resume"))
    granted = top.handle(request).reply
    world.tell("eu", granted)
    assert not region.holds("a")
    while world.up["eu"]:
        world.deliver("eu")
    assert not top.lease_table.open and top.lease_table.pool


@pytest.mark.parametrize("end", [MemberSilent("a", "life-1"), Leave("a")])
def test_a_reserve_that_comes_too_late_is_given_back(end):
    world = two_in_a_region(lease_reserve=3)
    assert world.tell("eu", LeaseRequest("a", 1)) is None
    world.tell("eu", end)
    while world.up["eu"]:
        world.deliver("eu")
    assert not all_leases(world) and not any(world.regions["eu"].leases.held.values())
    free = sum(samples for _, samples, *_ in world.top.lease_table.pool) + 64 - world.top.lease_table.next_start
    assert free == 64


def test_a_reserve_is_asked_for_in_order_again_after_a_silence():
    """Otherwise the lease of a later job is granted where an earlier job's finds no data left; nobody trains it."""
    world = two_in_a_region(lease_reserve=2)
    world.tell("eu", LeaseRequest("a", 1))
    world.tell("eu", MemberSilent("a", "life-1"))
    rejoin(world, "a", "life-1")
    world.up["eu"].clear()
    world.tell("eu", LeaseRequest("a", 1))
    assert [message.job for message in world.up["eu"] if isinstance(message, LeaseRequest)] == [1, 2, 3]


def test_a_lease_for_a_job_that_is_done_is_given_back_unless_it_is_a_copy():
    world = two_in_a_region()
    region = world.regions["eu"]
    lease = world.lease("a")
    assert lease is not None
    world.push("a", random_deltas(world, 1), (lease.lease,))
    assert region.handle(lease).sends == ()  # a copy of what was trained
    other = dataclasses.replace(lease, lease=lease.lease + 7)
    assert [send.message for send in region.handle(other).sends] == [Release((lease.lease + 7,))]


def test_a_region_that_leaves_keeps_no_lease():
    world = make(config(), train_samples=64)
    assert world.lease("a") is not None
    world.top.handle(Leave("eu"))
    assert not world.top.lease_table.open and world.top.lease_table.pool


def test_who_was_told_that_it_is_finished_gets_no_later_job():
    """With a reserve it asks for several ahead; one of another's may come back between two of them."""
    world = two_in_a_region(train_samples=8)
    top = world.top
    lease = top.handle(LeaseRequest("a", 1)).reply
    assert isinstance(top.handle(LeaseRequest("b", 1)).reply, Finished)
    top.handle(Release((lease.lease,)))
    assert isinstance(top.handle(LeaseRequest("b", 2)).reply, Finished) and not top.lease_table.open


# ------------------------------------------------------------------- updates of those who were taken for dead


def test_who_was_taken_for_dead_and_comes_back_has_its_training_counted():
    """Its lease lies in the pool still: nobody trains it again."""
    world = two_in_a_region(train_samples=8, updates_per_send=1)
    lease = world.lease("a")
    assert lease is not None
    world.tell("eu", MemberSilent("a", "life-1"))
    while world.up["eu"]:
        world.deliver("eu")
    assert world.top.lease_table.pool and not world.top.lease_table.open
    world.regions["eu"] = restored(world)
    world.push("a", random_deltas(world, 1), (lease.lease,))
    assert world.deliver_up("eu") is not None
    lease_table = world.top.lease_table
    assert lease_table.committed_samples == lease.samples == 8 and lease_table.finished and not lease_table.pool
    assert lease_table.repeated_samples == 0


def restored(world: World) -> Any:
    new = saved_and_loaded(world, "eu")
    new.incarnation = "life-1"
    for fake in [w for r, w in world.workers.values() if r == "eu"]:
        for join in fake.joins(world.identity):
            new.handle(join)
    return new


@pytest.mark.parametrize("whose", ["worker", "region"])
def test_what_others_have_been_given_meanwhile_is_counted_as_trained_twice(whose):
    world = two_in_a_region(train_samples=8, updates_per_send=1)
    lease = world.lease("a")
    assert lease is not None
    if whose == "worker":
        world.tell("eu", MemberSilent("a", "life-1"))
        while world.up["eu"]:
            world.deliver("eu")
    else:
        world.top.handle(MemberSilent("eu", "life-1"))
        world.top.handle(world.regions["eu"].join_message())
    other = world.lease("b")
    assert other is not None and other.start == lease.start
    world.push("a", random_deltas(world, 1), (lease.lease,))
    world.deliver_up("eu")
    lease_table = world.top.lease_table
    assert (lease_table.committed_samples, lease_table.repeated_samples) == (0, 8)
    assert world.top.status()["repeated_samples"] == 8
    world.push("b", random_deltas(world, 2), (other.lease,))
    sent = [u for u in world.regions["eu"].in_flight.values()]
    world.deliver_down("eu", sent[0])
    world.deliver_up("eu")
    assert (lease_table.committed_samples, lease_table.repeated_samples) == (8, 8) and lease_table.finished


def test_a_new_life_cannot_count_what_its_old_one_held():
    world = two_in_a_region(train_samples=8, updates_per_send=1)
    lease = world.lease("a")
    assert lease is not None
    world.tell("eu", MemberSilent("a", "life-1"))
    rejoin(world, "a", "life-2")
    world.tell("eu", world.workers["a"][1].parts(random_deltas(world, 1), (lease.lease,), "life-2")[0])
    while world.up["eu"]:
        world.deliver("eu")
    assert world.top.lease_table.committed_samples == 0 and world.top.lease_table.repeated_samples == 0


# --------------------------------------------------------------------- ranks whose peers have not joined again


def test_a_rank_that_has_joined_waits_for_its_peers_and_does_not_join_again():
    world = make(config(), cut_a=halves)
    region = saved_and_loaded(world, "eu")
    fake = world.workers["a"][1]
    first, second = fake.joins(world.identity)
    parts = fake.parts(random_deltas(world, 1))
    region.handle(first)
    for waits in (
        lambda: region.handle(parts[0]),
        lambda: region.answer("a", "life-1", 0, 0, (0,)),
        lambda: region.weights_to_validate("a", "life-1", 0, 1),
        lambda: region.current("a", "life-1", 0),
    ):
        with pytest.raises(Refused, match="its other ranks have not joined yet") as told:
            waits()
        assert not isinstance(told.value, NotJoined) and told.value.retry_s
    for unknown in (lambda: region.handle(parts[1]), lambda: region.current("a", "life-1", 1)):
        with pytest.raises(NotJoined):
            unknown()
    region.handle(second)
    assert [region.handle(part).reply for part in parts] == [False, True]


# ----------------------------------------------------------------------- no ledger; codes; lives


def test_without_a_ledger_every_trained_lease_is_committed_at_the_end():
    world = two_in_a_region(train_samples=24, rule="halos", ledger=False, updates_per_send=1)
    region, leases = world.regions["eu"], []
    for turn in range(3):
        lease = world.lease("a")
        assert lease is not None
        leases.append(lease)
        world.push("a", random_deltas(world, turn), (lease.lease,))
    sent = world.deliver_up("eu")
    assert sent is not None and world.deliver_down("eu", sent)  # what came meanwhile is lost, as published
    assert region.lost_updates == 2 and not region.in_flight
    for name in ("a", "b"):
        world.tell("eu", Leave(name))
    restarted = saved_and_loaded(world, "eu")
    for told in (world.up["eu"], [send.message for send in restarted.resend()]):
        [words] = [message for message in told if isinstance(message, Trained)]
        assert set(sent.leases + words.leases) == {lease.lease for lease in leases}
    assert world.deliver_up("eu") is None
    table = world.top.lease_table
    assert table.finished and table.committed_samples == 24 and world.top.members["eu"].left


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0", "e2m1"])
@pytest.mark.parametrize("scale", ["fp32", "bf16", "e8m0"])
def test_whatever_is_taken_decodes_to_finite_numbers(name, scale):
    """Every code at the largest scale that passes, also those that no encoder writes."""
    codec = make_codec(codec_config(name, scale=scale))
    numel = 256
    biggest = codec.encode(torch.full((numel,), torch.finfo(torch.float32).max)).payload
    codes = biggest.clone()
    half = codes[-codec.encoded_bytes(numel) // 2 :]
    half.copy_(torch.arange(256, dtype=torch.uint8).repeat(9)[: len(half)])
    for payload in (biggest, codes):
        try:
            values = codec.decode(payload, numel)
        except CodecError:
            continue
        assert bool(values.isfinite().all())
