"""Lives of members: refused joins change nothing, old lives stay out, nothing is taken twice, goodbyes last."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from geotrain.common.names import GLOBAL
from geotrain.net.storage.recovery import end_incarnations
from geotrain.outer.events import Joined
from geotrain.outer.messages import (
    AnswerWanted,
    Fact,
    Facts,
    Finished,
    Lease,
    LeaseRequest,
    Leave,
    LiftQuarantine,
    MemberSilent,
    OperatorCommand,
    Recall,
    Refused,
    TakenBack,
)
from geotrain.outer.server.leases import RETURNED_KEPT
from geotrain.outer.server.member import MOST_INCARNATIONS, Member
from geotrain.outer.server.parts import ServerPart
from tests.support.outer_world import (
    FakeWorker,
    config,
    flat,
    halves,
    make,
    random_deltas,
    saved_and_loaded,
    weights_of,
    whole,
)


def test_only_a_life_that_ended_without_goodbye_or_stop_is_restarted():
    world = make(config(), cut_a=halves)
    region, worker = world.regions["eu"], world.workers["a"][1]

    def restarts(incarnation: str, new: bool = True) -> int:
        """After this incarnation has joined with both ranks, and the region was saved and loaded."""
        nonlocal region
        joined = [region.handle(join).events[0] for join in worker.joins(world.identity, incarnation)]
        assert joined == [Joined("a", 0, incarnation, new), Joined("a", 1, incarnation, False)]
        region = saved_and_loaded(world, "eu")
        world.regions["eu"] = region
        return region.status()["members"]["a"]["restarts"]

    region.handle(Leave("a"))
    region = world.regions["eu"] = saved_and_loaded(world, "eu")
    region.begin_again()
    assert restarts("life-2") == 0  # the run had ended and is resumed
    assert restarts("life-3") == 1  # it died
    end_incarnations(region)  # all were told to stop (`geotrain.net.storage.recovery.Stopped`)
    assert restarts("life-4") == 1
    end_incarnations(region)  # only its server was: this incarnation goes on, and dies later
    assert restarts("life-4", new=False) == 1
    assert restarts("life-5") == 2


def test_a_share_belongs_to_who_takes_part():
    """Whoever left, is lost, was expelled or has never come divides nobody's delta; back again, it has its share. One
    that ends as no data is left keeps it: the others' last deltas weigh what those before weighed."""
    names = ("a", "b", "c", "d", "never")
    top = flat("region_momentum", samples=8, workers=names, local_steps=4)
    top.members["never"] = Member()
    top.membership.sharing.discard("never")
    fakes = {name: FakeWorker(name, top.parameter_map, whole(top.parameter_map)) for name in names}

    def share(life: str = "life-1", name: str = "a") -> float:
        """By how much the weights follow its delta of ones."""
        before = top.weights(0).clone()
        top.handle(fakes[name].parts({0: torch.ones_like(before)}, incarnation=life)[0])
        moved = (before - top.weights(0)).tolist()
        assert moved == pytest.approx([1 / top.status()["sharing"]] * len(moved))
        return round(1 / moved[0])

    assert share() == 4
    for message, others in (
        (Leave("b"), 3),
        (MemberSilent("c", "life-1"), 2),
        (OperatorCommand("expel", "d"), 1),
        (LiftQuarantine("d"), 2),
        (fakes["b"].joins(top.identity, "life-2")[0], 3),
    ):
        top.handle(message)
        assert share() == others
        assert {name for name in names if top.status()["members"][name]["takes_part"]} == top.membership.sharing
    assert share(name="c") == 4, "it lives, and counts in its own update already"
    top.handle(LeaseRequest("a", 1))
    top.handle(Leave("d"))
    assert share() == 3
    top.handle(LeaseRequest("a", 2))
    top.handle(Leave("b"))
    assert not top.lease_table.left and share() == 3
    assert top.status()["members"]["b"]["left"]


def test_whether_a_part_is_wanted_is_known_without_its_payload():
    world = make(config(), cut_a=halves)
    region, worker = world.regions["eu"], world.workers["a"][1]
    first, second = worker.parts(random_deltas(world, 1))

    def bare(part, size):
        deltas = tuple(dataclasses.replace(d, payload=range(size)) for d in part.deltas)
        return dataclasses.replace(part, deltas=deltas)

    size = len(first.deltas[0].payload)
    assert region.intake.admit(bare(first, size))
    with pytest.raises(Refused, match="bytes, its slices need"):
        region.intake.admit(bare(first, size + 1))
    region.handle(first)
    assert not region.intake.admit(bare(first, size))
    region.handle(second)
    assert not region.intake.admit(bare(second, len(second.deltas[0].payload)))


def test_goodbyes_outlive_a_restart_and_a_finished_run_can_go_on():
    world = make(config(), train_samples=64)
    world.top.handle(Leave("eu"))
    restored = saved_and_loaded(world, GLOBAL)
    assert restored.members["eu"].left and not restored.finished
    world.top.handle(Leave("us"))
    restored = saved_and_loaded(world, GLOBAL)
    assert restored.finished
    restored.begin_again()
    assert not restored.finished and not restored.members["eu"].left  # it waits for its members to come back
    region = world.regions["eu"]
    region.handle(Leave("a"))
    half_way = saved_and_loaded(world, "eu")
    assert half_way.gone and half_way.membership.empty  # its goodbye is still to be said
    region.handle(Leave("eu"))
    again = saved_and_loaded(world, "eu")
    assert again.done
    again.begin_again()
    assert not again.gone and not again.membership.empty


def test_a_reserve_has_no_gap_that_a_worker_does_not_come_across():
    """A lease was asked for before a recall, and comes after it: that of an earlier job has gone back."""
    world = make(config(lease_reserve=2, local_steps=2), train_samples=6)
    world.tell("eu", LeaseRequest("a", 1))
    late = world.up["eu"].pop()
    while world.up["eu"]:
        world.deliver("eu")
    world.tell("eu", Recall())
    world.up["eu"].appendleft(late)
    while world.up["eu"]:
        world.deliver("eu")
    assert world.regions["eu"].worker_data.leases.held["a"].keys() == {1} and len(world.top.lease_table.open) == 1
    world.tell("eu", LeaseRequest("a", 2))
    while world.up["eu"]:
        world.deliver("eu")
    assert world.regions["eu"].worker_data.leases.held["a"].keys() == {1, 2, 3}


def test_a_restarted_region_keeps_all_leases_that_it_answers_for_however_many():
    world = make(config(local_steps=1))
    numbers = tuple(world.top.handle(LeaseRequest("a", job)).reply.lease for job in range(1, RETURNED_KEPT + 3))
    again = dataclasses.replace(world.regions["eu"].join_message(), incarnation="life-2", leases=numbers[:-1])
    assert world.top.handle(again).reply.gone == ()
    assert tuple(world.top.membership.leases.holds("eu")) == numbers[:-1]
    assert world.top.handle(LeaseRequest("b", 1)).reply.start == RETURNED_KEPT + 1  # that of which it knows nothing


def test_a_run_that_is_resumed_with_fewer_samples_than_were_handed_out_trains_no_more():
    world = make(config(lease_reserve=6, local_steps=2), train_samples=100)
    world.tell("eu", LeaseRequest("a", 1))
    while world.up["eu"]:
        world.deliver("eu")
    world.push("a", random_deltas(world, 1), (world.regions["eu"].worker_data.leases.held["a"][1].lease,))
    world.top.handle(OperatorCommand("stop"))
    world.tell("eu", Recall())
    world.tell("eu", Leave("a"))
    world.settle("eu")
    assert world.top.lease_table.committed_samples == 2 and sum(size for _, size in world.top.lease_table.pool) == 12
    tensors, meta = world.top.state()
    shorter = make(config(local_steps=2), train_samples=10).top
    shorter.load(tensors, meta)
    shorter.begin_again()
    assert sum(size for _, size in shorter.lease_table.pool) == 8 and shorter.lease_table.next_start == 14
    granted = [shorter.handle(LeaseRequest("b", job)).reply for job in range(1, 6)]
    assert [type(reply) for reply in granted] == [Lease] * 4 + [Finished]


def test_a_member_has_only_so_many_lives():
    """Rather a new incarnation is refused than an old one let in."""
    world = make(config())
    region, fake = world.regions["eu"], world.workers["a"][1]
    member = region.members["a"]
    member.former = dict.fromkeys(f"{n:016x}" for n in range(MOST_INCARNATIONS))
    with pytest.raises(Refused, match=f"more than {MOST_INCARNATIONS:,} incarnations"):
        region.handle(fake.joins(world.identity, "one-more")[0])
    assert region.handle(fake.joins(world.identity, "life-1")[0]).reply


def test_what_a_shard_took_before_it_knew_that_a_lease_went_back_counts_once_the_lease_is_held_again():
    world = make(config())
    numbers = tuple(range(len(world.parameter_map.fragments)))
    region, zeros = world.build("eu", ServerPart((numbers,))), (0,) * len(numbers)
    for join in world.workers["a"][1].joins(world.identity):
        region.handle(join)
    region.handle(Facts(0, 0, (), zeros, zeros, seen=region.as_ledger.changes))
    region.handle(LeaseRequest("a", 1))
    region.handle(Lease("a", 1, 7, 0, 1, 1))
    over = Fact("over", reason="an update was refused")
    taken = (Fact("applied", "a", "life-1", fragment, 1, 1, contains=(7,)) for fragment in numbers)
    region.handle(Facts(0, 0, (over, *taken), zeros, zeros))
    assert not region.worker_data.leases.held["a"] and not region.worker_data.trained
    region.handle(TakenBack("a", (7,), ()))
    assert region.worker_data.trained == {7} and not region.worker_data.leases.held["a"]


def test_what_is_out_goes_to_others_where_a_ledger_came_back_older_than_its_shards():
    world = make(config())
    numbers = tuple(range(len(world.parameter_map.fragments)))
    top, region = (world.build(name, ServerPart((numbers,))) for name in (GLOBAL, "eu"))
    zeros = (0,) * len(numbers)
    for server, join in ((region, world.workers["a"][1].joins(world.identity)[0]), (top, region.join_message())):
        server.handle(join)
        server.handle(Facts(0, 0, (), zeros, zeros, seen=server.as_ledger.changes))
    region.handle(LeaseRequest("a", 1))
    region.handle(granted := top.handle(LeaseRequest("a", 1)).reply)
    forgotten = Facts(0, 1, (), zeros, zeros)  # a first fact was said before, and is known on neither side
    assert region.handle(forgotten).sends and not region.worker_data.leases.held["a"]
    with pytest.raises(Refused, match="came back from an older state"):
        region.membership.current("a", "life-1")
    assert top.handle(forgotten).reply == 1
    again = top.handle(LeaseRequest("b", 1)).reply
    assert (again.start, granted.lease) == (granted.start, 1) and again.lease > 1 << 20
    for name in top.members:
        top.handle(Leave(name))
    assert not top.finished, "a fact may be on its way"
    top.handle(dataclasses.replace(forgotten, seen=top.as_ledger.changes))
    assert top.finished


def test_last_weights_that_lack_an_update_on_its_way_are_asked_for_once_more():
    world = make(config(merge_alpha=0.5, updates_per_send=1))
    region, worker = world.regions["eu"], world.workers["a"][1]
    region.worker_data.final, region.worker_data.no_data_job = set(), {"a": 1}
    deltas = random_deltas(world, 1)
    for part in worker.parts(deltas, ()):
        world.tell("eu", part)
    own = [vector.clone() for vector in weights_of(region)]
    assert region.uplink.in_flight.keys() == set(deltas)
    world.answer("eu", 0, 0)
    assert torch.equal(weights_of(region)[0], own[0]) and not region.worker_data.final
    while world.up["eu"]:
        world.deliver("eu")
    for update in list(region.uplink.in_flight.values()):
        world.deliver_down("eu", update)
    assert [send for send in world.up["eu"] if isinstance(send, AnswerWanted)]
    for fragment in deltas:
        world.answer("eu", fragment, 0)
        assert torch.equal(region.weights(fragment), world.top.weights(fragment))
