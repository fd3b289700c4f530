"""One member with a valid certificate says what is not so: each lie meets a bound and a refusal with its reason, and
nobody else's training suffers from it."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import ROOT
from geotrain.config import LimitsConfig, load_run
from geotrain.net.transport import wire
from geotrain.outer.identity import identity_of
from geotrain.outer.messages import (
    Identity,
    Join,
    Lease,
    LeaseRequest,
    MemberSilent,
    Refused,
    Release,
    TakeBack,
    TakenBack,
    Trained,
    UpdatePart,
)
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.leases import FASTER, LeaseTable
from geotrain.outer.server.limits import FAR, NormLimits
from geotrain.outer.server.member import MOST_LEASES, MOST_METRICS, MOST_NAME
from tests.support.outer_world import FakeWorker, World, config, make, parameter_map, random_deltas, whole

# ------------------------------------------------------------------------------------------------------ weight


def test_a_weight_without_data_excuses_no_norm_and_changes_no_usual():
    world = make(config(updates_per_send=1, limits=LimitsConfig(norm_free_updates=4)))
    for turn in range(6):
        for name, region in (("a", "eu"), ("b", "us")):
            world.push(name, random_deltas(world, 10 * turn + ord(name)))
            world.settle(region)
    [part] = world.workers["a"][1].parts({f: 1000 * d for f, d in random_deltas(world, 5).items()})
    lie = dataclasses.replace(
        part, member="eu", sequence=world.top.members["eu"].fragments[0].sequence + 1, weight=10**6
    )
    norms = json.dumps(world.top.intake.norms.state())
    with pytest.raises(Refused, match="far out of the ordinary"):
        world.top.handle(lie)
    assert json.dumps(world.top.intake.norms.state()) == norms


# ------------------------------------------------------------------------------------------------------ growth


@given(st.floats(1.01, 1.9), st.integers(1, 4), st.integers(0, 3))
def test_who_grows_alone_is_stopped(factor, often, seed):
    """However slowly it grows and, within what is remembered, however often it sends: its updates stay within what
    the others' allow."""
    gen = torch.Generator().manual_seed(seed)
    limits, size, largest = NormLimits(LimitsConfig(), 1, 2), 1.0, 0.0
    members = {"liar", "honest"}
    for turn in range(2000):
        honest = float(torch.rand((), generator=gen)) + 0.5
        limits.check("honest", 0, honest, 4, members)  # never refused
        limits.note("honest", 0, honest, 4)
        for _ in range(often):
            try:
                limits.check("liar", 0, size, 4, members)
            except Refused:
                assert size > 7  # times the middle of what the others send
                break
            limits.note("liar", 0, size, 4)
            largest, size = max(largest, size), size * factor if turn > 4 else size
        else:
            continue
        break
    assert largest < 80 * FAR and turn < 1999


def test_a_member_may_differ_from_the_others_by_as_much_as_regions_do():
    """One of a single worker beside one of ten: by plain averaging, ten times as far at each send."""
    limits = NormLimits(LimitsConfig(), 1, 2)
    for _ in range(300):
        for member, size in (("small", 10.0), ("large", 1.0)):
            limits.check(member, 0, size, 4, {"small", "large"})
            limits.note(member, 0, size, 4)


def test_who_is_alone_at_work_is_measured_by_its_own_history():
    """The norms of a warmup grow by a hundred while the other region is cut off."""
    limits, size = NormLimits(LimitsConfig(), 1, 2), 1.0
    for _ in range(40):
        for member in ("here", "gone"):
            limits.check(member, 0, 1.0, 4, {"here", "gone"})
            limits.note(member, 0, 1.0, 4)
    for _ in range(200):
        size *= 1.03
        limits.check("here", 0, size, 4, {"here"})
        limits.note("here", 0, size, 4)
    with pytest.raises(Refused, match="to be expected by what the others send"):
        limits2 = NormLimits(LimitsConfig(), 1, 2)
        for turn in range(400):
            for member, told in (("here", 1.03**turn), ("gone", 1.0)):
                limits2.check(member, 0, told, 4, {"here", "gone"})
                limits2.note(member, 0, told, 4)


# ------------------------------------------------------------------------------------------------------ speed


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.floats(1e-6, 1e6), st.booleans()), min_size=1, max_size=30))
def test_a_speed_that_is_claimed_cuts_jobs_to_a_fourth_at_most(claims):
    """Relative to what the others' own speeds give: against the plain definition."""
    coordinator, told = LeaseTable(10**9, 1, 64, scale_local_steps=True), dict[str, float]()
    for job, (worker, step_s, resumed) in enumerate(claims, 1):
        lease = coordinator.grant(LeaseRequest(worker, job, step_s))
        told[worker] = step_s
        ordered = sorted(told.values())
        fastest = max(ordered[0], ordered[1] / FASTER) if len(ordered) > 1 else ordered[0]
        assert isinstance(lease, Lease) and lease.steps == max(1, math.ceil(64 * min(1, fastest / step_s)))
        if resumed:
            saved = LeaseTable(10**9, 1, 64, scale_local_steps=True)
            saved.load(json.loads(json.dumps(coordinator.state())))
            coordinator = saved


# ------------------------------------------------------------------------------------------------------ numbers


def test_what_a_member_says_of_itself_overwrites_nothing():
    world = make(config())
    region = world.regions["eu"]
    [part] = world.workers["a"][1].parts(random_deltas(world, 1))
    claims = {"left": 1.0, "joined": 0.0, "quarantined": 1.0, "loss": float("nan"), "lr": 0.5, "tokens": math.inf}
    claims |= {"grad_norm": 1e300, "tokens_per_s": -5.0, "my reward": -5.0, "\x1b[2J": 1.0, "mfu": -1e300}
    region.handle(dataclasses.replace(part, metrics=claims))
    told = region.status()["members"]["a"]
    assert (told["left"], told["joined"], told["quarantined"], told["lr"]) == (False, True, False, 0.5)
    assert told["my reward"] == -5.0
    assert not {"loss", "tokens", "grad_norm", "tokens_per_s", "\x1b[2J", "mfu"} & told.keys()
    json.dumps(region.status(), allow_nan=False)


def test_what_a_region_merges_can_always_be_written_down():
    """Workers that each tell all they may, and very many leases that were trained while the region was cut off."""
    shape = parameter_map()
    names = [f"worker-{n}" for n in range(40)]
    start = [torch.zeros(f.numel) for f in shape.fragments]
    workers = [FakeWorker(name, shape, whole(shape)) for name in names]
    world = World(config(updates_per_send=1000), {"eu": workers}, start, shape, train_samples=1 << 20)
    region = world.regions["eu"]
    for fake in workers:
        [part] = fake.parts(random_deltas(world, 1))
        metrics = {f"{fake.name}-{n:03}".ljust(MOST_NAME, "x"): 1.0 for n in range(MOST_METRICS)}
        region.handle(dataclasses.replace(part, metrics=metrics))
    region.uplink.contains[0] = list(range(1, 3 * MOST_LEASES))
    told = 0
    for fake in workers:
        handled = region.handle(MemberSilent(fake.name, "life-1"))
    while handled.sends:
        [update] = [send.message for send in handled.sends if isinstance(send.message, UpdatePart)] or [None]
        for send in handled.sends:
            assert len(next(wire.frames(send.message))) < wire.MAX_HEADER_BYTES
            told += len(getattr(send.message, "contains", ()) or send.message.leases)
        if update is None:
            break
        assert len(update.metrics) <= MOST_METRICS and world.top.handle(update).reply
        answer = world.top.answer("eu", "life-1", 0, 0, update.sequence)
        handled = region.handle(answer)
    assert told == 3 * MOST_LEASES - 1


# ------------------------------------------------------------------------------------------------------ data


def test_who_joins_first_does_not_decide_which_data_is_right():
    """Where the run file says it."""
    shape = parameter_map()
    right, wrong = "aa" * 32, "bb" * 32
    run = load_run(ROOT / "configs/runs/quickstart.json")
    run = run.model_copy(update={"data": run.data.model_copy(update={"sha256": right})})
    told = identity_of(run, shape)
    identity = Identity("t", "c", shape.digest, "m", told.data)
    top = GlobalServer(identity, shape, config(), {"eu": ("a",), "us": ("b",)}, 64, 1)
    slices = tuple(shape.whole(f.index) for f in shape.fragments)

    def join(name: str, data: str) -> Join:
        return Join("t", "c", shape.digest, "m", name, "life-1", 0, 1, slices, slices, (), data)

    with pytest.raises(Refused, match="data differs: eu trains on data"):
        top.handle(join("eu", wrong))
    assert top.handle(join("us", right)).reply and top.data == right


def test_nobody_trains_or_takes_back_the_data_of_another():
    world = make(config())
    lease = world.lease("b")
    world.top.handle(Trained("eu", 0, (lease.lease,)))
    assert world.top.holds("us") and not world.top.status()["committed_samples"]
    world.top.handle(Release((lease.lease,)))  # its worker counted as dead
    assert world.top.handle(TakeBack("a", (lease.lease,))).reply == TakenBack("a", (), (lease.lease,))
    assert not world.top.lease_table.open
