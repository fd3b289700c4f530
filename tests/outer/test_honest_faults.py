"""What goes wrong without anybody lying: deaths, silence, restarts and refusals may cost time, but no sample is
skipped, none is trained twice without being counted, and no run stands still for ever."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from geotrain.config import codec_config
from geotrain.outer.codec import CodecError, make_codec
from geotrain.outer.events import StartedOver
from geotrain.outer.messages import DataGone, Finished, LeaseRequest, MemberSilent, Recall, Release, UpdateRejected
from tests.support.outer_world import FakeWorker, World, config, flat, make, random_deltas, whole
from tests.support.outer_world import parameter_map as toy


def two_in_a_region(train_samples: int = 64, **changes: Any) -> World:
    shape = toy()
    workers = [FakeWorker(name, shape, whole(shape)) for name in ("a", "b")]
    start = [torch.zeros(f.numel) for f in shape.fragments]
    return World(config(**changes), {"eu": workers}, start, shape, train_samples=train_samples)


# ------------------------------------------------------------------ an update that is refused above, for good


def test_a_region_that_hears_of_it_twice_starts_over_once():
    world = make(config(updates_per_send=1))
    world.push("a", random_deltas(world, 1))
    region = world.regions["eu"]
    for started in (1, 0):
        events = region.handle(UpdateRejected("eu", "life-1", "wild", 0, 1)).events
        assert len([e for e in events if isinstance(e, StartedOver)]) == started
        assert all(world.answer("eu", fragment, 0) for fragment in region.numbers) or not started


def test_an_answer_of_before_a_region_started_over_is_none():
    world = make(config(updates_per_send=1))
    world.push("a", random_deltas(world, 1))
    region = world.regions["eu"]
    world.deliver_up("eu")
    late = world.top.answer("eu", region.incarnation, 0, 0, 1)
    region.handle(UpdateRejected("eu", "life-1", "wild", 0, 1))
    assert late is not None and not region.handle(late).events and not region.fragments


def test_a_lease_that_went_back_while_it_was_asked_for_once_more_is_not_held():
    world = make(config(lease_reserve=1, local_steps=2))
    region = world.regions["eu"]
    world.tell("eu", LeaseRequest("a", 1))
    while world.up["eu"]:
        world.deliver("eu")
    (spare,) = [lease for lease in region.worker_data.leases.held["a"].values() if lease.job == 2]
    world.tell("eu", Recall())
    assert world.tell("eu", spare) == "again" and 2 not in region.worker_data.leases.held["a"]
    world.settle("eu")
    granted = world.top.handle(LeaseRequest("a", 2)).reply
    assert granted.lease != spare.lease and world.tell("eu", granted) is None
    assert region.worker_data.leases.held["a"][2] == granted


def test_data_of_a_job_to_which_a_worker_will_not_come_goes_back():
    world = make(config(lease_reserve=2, local_steps=2))
    region = world.regions["eu"]
    world.tell("eu", LeaseRequest("a", 1))
    while world.up["eu"]:
        world.deliver("eu")
    held = region.worker_data.leases.held["a"]
    third = held[3].lease
    del held[1], held[2]  # what they gave was refused for good, and its worker begins anew
    world.tell("eu", Finished("a", 1))
    assert Release((third,)) in world.up["eu"] and not held


def test_who_waits_for_its_server_and_holds_nothing_is_waited_for():
    world = make(config(lease_reserve=0, local_steps=2))
    region = world.regions["eu"]
    assert not region.waited_for_by("a")
    world.tell("eu", LeaseRequest("a", 1))
    assert region.waited_for_by("a")
    world.deliver("eu")
    assert not region.waited_for_by("a")
    world.tell("eu", LeaseRequest("a", 2))
    assert not region.waited_for_by("a"), "others want what it holds"


# ---------------------------------------------------------------------------- leases of the silent and of who left


def test_what_others_were_given_meanwhile_is_taken_from_nobody_who_counted_as_dead():
    """Of a flat run. An early fragment is held to it, too: it names no lease."""
    top, [made] = flat(samples=32), FakeWorker("a", toy(), whole(toy())).parts({0: torch.ones(64)})
    first, second = (top.handle(LeaseRequest("a", job)).reply for job in (1, 2))
    top.handle(MemberSilent("a", "life-1"))
    top.handle(dataclasses.replace(made, contains=(first.lease,)))
    assert top.lease_table.committed_samples == first.samples
    assert top.handle(LeaseRequest("b", 1)).reply.start == second.start
    for leases in ((second.lease,), ()):
        with pytest.raises(DataGone, match=r"leases \[2\] went to others"):
            top.intake.admit(dataclasses.replace(made, sequence=2, contains=leases))
    [join] = FakeWorker("a", toy(), whole(toy())).joins(top.identity, "life-2")
    top.handle(join)
    assert top.intake.admit(dataclasses.replace(made, sequence=2, incarnation="life-2"))


def test_a_lease_for_a_job_that_is_done_is_given_back_unless_it_is_a_copy():
    world = two_in_a_region()
    region = world.regions["eu"]
    lease = world.lease("a")
    assert lease is not None
    world.push("a", random_deltas(world, 1), (lease.lease,))
    assert region.handle(lease).sends == ()  # a copy of what was trained
    other = dataclasses.replace(lease, lease=lease.lease + 7)
    assert [send.message for send in region.handle(other).sends] == [Release((lease.lease + 7,))]


# ----------------------------------------------------------------------- no ledger; codes; lives


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0"])
def test_whatever_is_taken_decodes_to_finite_numbers(name):
    """Every code at the largest scale that passes, also those that no encoder writes."""
    codec = make_codec(codec_config(name))
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
