"""Members, parts, exactly once, layouts, leases, state."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from geotrain.config import codec_config
from geotrain.net.storage.recovery import left_out
from geotrain.outer.codec import NonFiniteError
from geotrain.outer.messages import LeaseRequest, Leave, MemberSilent, Refused, UpdatePart
from geotrain.outer.shards.protocol import SendUp
from geotrain.parameters.parameter_map import StridedSlice
from tests.support.outer_world import (
    FakeWorker,
    World,
    columns,
    config,
    halves,
    make,
    parameter_map,
    random_deltas,
    saved_and_loaded,
    weights_of,
    whole,
)


def updates_up(world: World) -> list[UpdatePart]:
    """What the region has sent up and nobody has taken."""
    return [message for message in world.up["eu"] if isinstance(message, UpdatePart)]


def test_a_region_sends_no_fragment_again_before_it_was_answered() -> None:
    world = make(config(updates_per_send=1))
    world.push("a", random_deltas(world, 1))
    world.push("a", random_deltas(world, 2))
    assert [update.weight for update in updates_up(world)] == [1]
    update = world.deliver_up("eu")
    assert update and world.deliver_down("eu", update)
    assert [update.weight for update in updates_up(world)] == [1]
    world.push("a", random_deltas(world, 3))
    assert len(updates_up(world)) == 1


def test_a_lease_goes_up_with_the_last_of_the_fragments_that_hold_its_training() -> None:
    world = make(config(updates_per_send=1), fragments=1)
    lease = world.lease("a")
    assert lease
    world.push("a", random_deltas(world, 1), (lease.lease,))
    *earlier, last = updates_up(world)
    assert len(earlier) == 3 and not any(update.leases for update in earlier) and last.leases == (lease.lease,)


def play(world: World, rounds: int = 12) -> list[torch.Tensor]:
    for i in range(rounds):
        for n, r in (("a", "eu"), ("b", "us")):
            world.push(n, random_deltas(world, 10 * i + ord(n)))
            world.settle(r)
        for r in world.regions:  # a synchronous round is answered only now
            world.settle(r)
    return weights_of(world.top)


@pytest.mark.parametrize("fragments", [None, 1])
@pytest.mark.parametrize("rule", ["halos", "region_momentum", "sync"])
def test_different_layouts_give_the_same_server_state_as_equal_ones(rule, fragments):
    equal = play(make(config(rule=rule), fragments=fragments))
    different = play(make(config(rule=rule), halves, columns, fragments=fragments))
    for a, b in zip(equal, different, strict=True):
        assert torch.equal(a, b)
    assert float(equal[0].std()) > 0.1


def test_progress_that_is_not_finite_is_refused_by_the_parameters_name():
    world = make(config(up=codec_config("int4")), chunk_elements=40)
    region = world.regions["eu"]
    [*_, (name, last)] = world.parameter_map.split(0, region.weights(0))
    region.shards.all[0].vectors[1].x[-last.numel()] = float("inf")
    with pytest.raises(NonFiniteError, match=f"region eu: parameter {name}: holds infinities"):
        region.shards.execute(SendUp(0, 1, {}))


def test_an_update_is_applied_once_and_only_whole():
    world = make(config(), cut_a=halves)
    region, worker = world.regions["eu"], world.workers["a"][1]
    first, second = worker.parts(random_deltas(world, 1))
    before = region.weights(0).clone()
    assert not region.handle(first).reply
    assert not region.handle(first).reply  # a retry of half an update
    assert torch.equal(region.weights(0), before)
    assert region.handle(second).reply
    after = region.weights(0).clone()
    assert not torch.equal(after, before)
    for retry in (first, second):
        assert not region.handle(retry).reply
    assert torch.equal(region.weights(0), after)
    assert region.fragments[0].version == 1


def test_all_parts_are_answered_with_the_same_version_however_late_they_ask():
    world = make(config(), cut_a=halves)
    region, worker = world.regions["eu"], world.workers["a"][1]
    for part in worker.parts(random_deltas(world, 1)):
        region.handle(part)
    early = region.answer("a", "life-1", 0, 1, (0,))
    region.weights(0).add_(1)  # someone else's update arrives in between
    region.fragments[0].version += 1
    late = region.answer("a", "life-1", 1, 1, (0,))
    assert early is not None and late is not None
    assert early.weights[0].version == late.weights[0].version == 1


def test_a_new_life_drops_the_half_update_of_the_old_one():
    world = make(config(), cut_a=halves)
    region, worker = world.regions["eu"], world.workers["a"][1]
    region.handle(worker.parts(random_deltas(world, 1))[0])
    for join in worker.joins(world.identity, "life-2"):
        welcome = region.handle(join).reply
    assert welcome.sequence == 1
    with pytest.raises(Refused, match="join first"):
        region.handle(dataclasses.replace(worker.parts(random_deltas(world, 1))[1], sequence=1))
    worker.sequence = 0
    parts = worker.parts(random_deltas(world, 2), incarnation="life-2")
    assert [region.handle(p).reply for p in parts] == [False, True]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"member": "zoe"}, "no member is called 'zoe'"),
        ({"config_digest": "other"}, "config digest differs: a has other .* has config"),
        (
            {"parameter_map_digest": "other", "model": "a big one"},
            "parameter map digest differs: a has other .a big one.",
        ),
        ({"part": 2}, "part 2 of 2"),
        ({"pushes": ((StridedSlice(0, 65),),)}, "does not lie within"),
        ({"pushes": ((StridedSlice(0, 8, -1, 2),),)}, "does not lie within"),
        ({"pushes": ()}, "slices for 0 chunks"),
    ],
)
def test_a_join_that_does_not_fit_is_refused(change, reason):
    world = make(config(), cut_a=halves)
    join = dataclasses.replace(world.workers["a"][1].joins(world.identity)[0], incarnation="life-2", **change)
    with pytest.raises(Refused, match=reason):
        world.regions["eu"].handle(join)


def test_ranks_that_do_not_cover_the_model_are_refused():
    world = make(config(), cut_a=halves)
    first, second = world.workers["a"][1].joins(world.identity, "life-2")
    region = world.regions["eu"]
    region.handle(first)
    with pytest.raises(Refused, match="element 0 of 64 is covered 2 times"):
        region.handle(dataclasses.replace(second, pushes=first.pushes))


def test_damaged_updates_are_refused_and_change_nothing():
    world = make(config())
    region, worker = world.regions["eu"], world.workers["a"][1]
    before = region.weights(0).clone()
    good = worker.parts(random_deltas(world, 1))[0]

    def damaged(payload: bytes):
        return dataclasses.replace(good, deltas=(dataclasses.replace(good.deltas[0], payload=payload),))

    nan = torch.full((64,), torch.nan).numpy().tobytes()
    for part, reason in (
        (damaged(good.deltas[0].payload[:-1]), "has 255 bytes, its slices need 256"),
        (damaged(nan), "not finite"),
        (dataclasses.replace(good, sequence=5), r"update a/5 came, but 1 is next"),
        (dataclasses.replace(good, incarnation="ghost"), "join first"),
    ):
        with pytest.raises(Refused, match=reason):
            region.handle(part)
    assert torch.equal(region.weights(0), before)
    assert region.handle(good).reply


@pytest.mark.parametrize("rule", ["halos", "region_momentum", "sync"])
@pytest.mark.parametrize("down", ["fp32", "int4"])
def test_a_server_restored_from_its_state_goes_on_to_the_same_bits(rule, down):
    straight = make(config(rule=rule, up=codec_config("int4"), down=codec_config(down)))
    want = play(straight, 9)
    broken = make(config(rule=rule, up=codec_config("int4"), down=codec_config(down)))
    for i in range(9):
        for n, r in (("a", "eu"), ("b", "us")):
            broken.push(n, random_deltas(broken, 10 * i + ord(n)))
            restart(broken, r)
            broken.settle(r)
        for r in broken.regions:
            broken.settle(r)
    for a, b in zip(want, weights_of(broken.top), strict=True):
        assert torch.equal(a, b)


def restart(world: World, region: str) -> None:
    """Replace a region server by one restored from its state, as after a kill; its members stay as they are."""
    old = world.regions[region]
    tensors, meta = old.state()
    tensors = {k: v.clone() for k, v in tensors.items()}
    new = type(old)(region, world.identity, world.parameter_map, world.config, old.rule, tuple(old.members))
    new.incarnation = old.incarnation
    new.load(tensors, meta)
    for name, member in old.members.items():
        for join in member.joined.values():
            new.handle(join)
        for shard, dead in zip(new.shards.all, old.shards.all, strict=True):
            shard.members[name].senders = dead.members[name].senders
    world.regions[region] = new


def test_incremental_answers_track_the_weights():
    """4-bit changes downwards: what one leaves out goes with the next, so the region stays near."""
    world = make(config(down=codec_config("int4"), updates_per_send=1, merge_alpha=1.0))
    for i in range(30):
        world.push("a", {0: torch.randn(64, generator=torch.Generator().manual_seed(i)) / (1 + i)})
        update = world.deliver_up("eu")
        assert update is not None
        world.deliver_down("eu", update)
    receiver = world.regions["eu"].state()[0]["mirror.0"]
    scale = float((world.top.weights(0)).norm())
    assert float((receiver - world.top.weights(0)).norm()) < 0.02 * scale


def test_leases_follow_the_delta_that_used_them():
    world = make(config(updates_per_send=2), train_samples=64)
    for _ in range(2):
        lease = world.lease("a")
        assert lease is not None
        world.push("a", random_deltas(world, lease.lease), leases=(lease.lease,))
    assert world.top.lease_table.committed_samples == 0  # trained, but not yet part of the global weights
    world.deliver_up("eu")
    assert world.top.lease_table.committed_samples == 16


def test_a_dead_workers_lease_is_trained_again():
    world = make(config(), train_samples=64)
    lease = world.lease("a")
    assert lease is not None
    for join in world.workers["a"][1].joins(world.identity, "life-2"):
        world.tell("eu", join)
    assert not world.up["eu"] and world.tell("eu", LeaseRequest("a", 1)) == lease  # by its next incarnation
    world.tell("eu", MemberSilent("a", "life-2"))
    world.deliver_up("eu")
    again = world.lease("b")
    assert again is not None
    assert (again.start, again.samples) == (lease.start, lease.samples)


def test_flush_at_the_end_leaves_nothing_pending():
    world = make(config(updates_per_send=100), train_samples=64)
    lease = world.lease("a")
    assert lease is not None
    world.push("a", random_deltas(world, 1), leases=(lease.lease,))
    assert world.deliver_up("eu") is None
    world.tell("eu", Leave("a"))
    update = world.deliver_up("eu")
    assert update is not None and update.leases == (lease.lease,)
    world.deliver_down("eu", update)
    assert world.deliver_up("eu") is None
    assert world.top.members["eu"].left
    assert world.top.lease_table.committed_samples == lease.samples


def test_a_loaded_region_sends_the_same_numbers_for_people():
    """An update in flight is part of the state: its metrics are of all workers, also of one that was silent since."""
    lay = parameter_map()
    workers = {"eu": [FakeWorker(name, lay, whole(lay)) for name in "ab"]}
    world = World(config(updates_per_send=1), workers, [torch.zeros(64)], lay)

    def update(name: str, loss: float):
        [part] = world.workers[name][1].parts(random_deltas(world, ord(name)))
        return dataclasses.replace(part, metrics={"loss": loss})

    world.tell("eu", update("b", 4.0))
    world.settle("eu")
    old = world.regions["eu"]
    new = saved_and_loaded(world, "eu")
    new.incarnation = old.incarnation
    for message in left_out(old):
        new.handle(message)
    part = update("a", 2.0)
    for region in (old, new):
        region.handle(part)
    assert old.state()[1] == new.state()[1]
    assert [sent.metrics["loss"] for sent in new.in_flight.values()] == [3.0]
