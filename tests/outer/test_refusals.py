"""A server refuses messages in words, and has changed nothing then: a table for each kind of message."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from geotrain.common.names import GLOBAL
from geotrain.config import LimitsConfig
from geotrain.outer.messages import (
    Answer,
    ChunkDelta,
    Finished,
    LeaseRequest,
    OperatorCommand,
    Refused,
    Release,
    RunComplete,
    TakeBack,
    UpdatePart,
    Validated,
    Welcome,
)
from geotrain.outer.server.member import (
    MOST_JOBS,
    MOST_LEASES,
    MOST_METRICS,
    MOST_NAME,
    MOST_PARTS,
    MOST_SLICES,
    MOST_WEIGHT,
)
from geotrain.parameters.parameter_map import StridedSlice
from tests.support.outer_world import config, flat, halves, make, random_deltas, saved_and_loaded
from tests.support.recorded_world import frozen


def refuses(server: Any, message: Any, reason: str) -> None:
    """Check that the server refuses the message when it is told, an update also before its payload is here, and that
    its state is the same then."""
    tensors, plain = frozen(server)
    takes = [server.handle]
    if isinstance(message, UpdatePart) and "not finite" not in reason and "beyond all" not in reason:
        takes.insert(0, server.intake.admit)
    for take in takes:
        with pytest.raises(Refused, match=reason):
            take(message)
    after, same = frozen(server)
    assert same == plain and all(torch.equal(after[name], x) for name, x in tensors.items())


NAN = torch.full((8,), torch.nan).numpy().tobytes()
HUGE = torch.full((8,), 3e38).numpy().tobytes()


def delta(**change: Any) -> Any:
    """Return what changes the last delta of an update."""
    return lambda part: replace(part, deltas=(*part.deltas[:-1], replace(part.deltas[-1], **change)))


def having(**change: Any) -> Any:
    return lambda part: replace(part, **change)


UPDATES = {
    "no delta": (having(deltas=()), "an update of chunks .*; fragment 3 has"),
    "no weight": (having(weight=0), "is none"),
    "the same chunk twice": (
        lambda part: replace(part, deltas=(*part.deltas, part.deltas[-1])), "an update of chunks"
    ),
    "half a fragment": (lambda part: replace(part, deltas=part.deltas[:-1]), "an update of chunks"),
    "chunks in another order": (lambda part: replace(part, deltas=part.deltas[::-1]), "an update of chunks"),
    "an unknown chunk": (
        lambda part: replace(part, deltas=(*part.deltas[:-1], ChunkDelta(99, 0, b""))), "an update of chunks"
    ),
    "a byte too few": (
        lambda part: delta(payload=part.deltas[-1].payload[:-1])(part), "has 7 bytes, its slices need 8"
    ),
    "no numbers": (lambda part: delta(payload=NAN[: len(part.deltas[-1].payload)])(part), "not finite"),
    "a norm beyond all numbers": (
        lambda part: delta(payload=HUGE[: len(part.deltas[-1].payload)])(part), "beyond all numbers"
    ),
    "an unknown fragment": (having(fragment=9), "a: no fragment 9; the run has 4"),
    "a stranger": (having(member="zoe"), "no member is called 'zoe'"),
    "a job beyond all": (having(job=MOST_JOBS + 1), f"a: no worker comes to job {MOST_JOBS + 1}"),
    "too many metrics": (
        having(metrics={str(n): 1.0 for n in range(MOST_METRICS + 1)}),
        f"with {MOST_METRICS + 1} metrics; at most {MOST_METRICS}",
    ),
    "a metric's long name": (having(metrics={"x" * (MOST_NAME + 1): 1.0}), "with 1 metrics; at most"),
    "too many leases": (
        having(contains=tuple(range(MOST_LEASES + 1))), f"contains {MOST_LEASES + 1} leases; at most {MOST_LEASES}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UPDATES)
def test_refused_updates(what: str) -> None:
    change, reason = UPDATES[what]
    world = make(config(limits=LimitsConfig(norm_deviations=None)), cut_a=halves, fragments=1, chunk_elements=6)
    region = world.regions["eu"]
    parts = first, good = world.workers["a"][1].parts(random_deltas(world, 1))[-2:]  # of the last fragment
    region.handle(first)
    refuses(region, change(good), reason)
    if "numbers" in what:  # the update was whole, and is refused for good: so are its parts, in this incarnation
        for part in parts:
            refuses(region, part, reason)
        for join in world.workers["a"][1].joins(world.identity, "life-2"):
            region.handle(join)
        parts = [replace(part, incarnation="life-2") for part in parts]
    assert [region.handle(part).reply for part in parts] == [False, True]


def test_refused_updates_whose_chunks_start_from_different_versions() -> None:
    world = make(config(), fragments=1, chunk_elements=6)
    world.push("a", random_deltas(world, 1))
    part = world.workers["a"][1].parts(random_deltas(world, 2))[-1]
    first, *others = part.deltas
    older = replace(first, anchor_version=1 - first.anchor_version)
    refuses(world.regions["eu"], replace(part, deltas=(older, *others)), "start from different versions")


JOINS = {
    "a stranger": ({"member": "zoe"}, "no member is called 'zoe'"),
    "another run file": ({"config_digest": "other"}, "config digest differs: a has other .* has config"),
    "another model": (
        {"parameter_map_digest": "other", "model": "a big one"},
        "parameter map digest differs: a has other .a big one.",
    ),
    "a rank too many": ({"part": 2}, "part 2 of 2"),
    "a slice beyond the end": ({"pushes": ((StridedSlice(0, 65),),)}, "does not lie within"),
    "a slice that goes back": ({"pushes": ((StridedSlice(0, 8, -1, 2),),)}, "does not lie within"),
    "no slices": ({"pushes": ()}, "slices for 0 chunks"),
    "very many slices": (
        {"holds": ((StridedSlice(0, 1),) * (MOST_SLICES + 1),)}, f"name {MOST_SLICES + 2:,} slices; at most 1,048,576"
    ),
    "very many ranks": ({"parts": MOST_PARTS + 1}, f"part 0 of {MOST_PARTS + 1} .* has at most {MOST_PARTS}"),
    "more ranks than numbers": ({"parts": 1 << 61, "part": 1 << 60}, f"has at most {MOST_PARTS}"),
    "an incarnation's long name": ({"incarnation": "x" * 257}, "is no text of 1 to 256 characters"),
    "an incarnation's name with escapes": ({"incarnation": "life\x1b[2J"}, "is no text of 1 to 256"),
    "one of before the server's state was lost": ({"applied": (0,)}, "a: this server's state was lost, or is older"),
    "one that has sent more": ({"incarnation": "life-1", "applied": (1,)}, "a: this server's state was lost, or is"),
    "the state of another run": ({"origin": "another"}, "a: its state is of another run of the name 'test'"),
}  # fmt: skip


@pytest.mark.parametrize("what", JOINS)
def test_refused_joins(what: str) -> None:
    """The incarnation that is there stays and is heard."""
    change, reason = JOINS[what]
    world = make(config(), cut_a=halves)
    region, worker = world.regions["eu"], world.workers["a"][1]
    refuses(region, replace(worker.joins(world.identity, "life-2")[0], **change), reason)
    assert [region.handle(part).reply for part in worker.parts(random_deltas(world, 1))] == [False, True]


def test_a_rank_joins_a_restarted_server_before_its_first_update() -> None:
    world = make(config())
    again = world.workers["a"][1].joins(world.identity)[0]
    saved_and_loaded(world, "eu").handle(replace(again, applied=(0,) * len(world.parameter_map.fragments)))


def test_a_region_is_one_part() -> None:
    world = make(config())
    join = replace(world.regions["eu"].join_message(), incarnation="life-2", parts=2)
    refuses(world.top, join, "part 0 of 2 does not fit its 2 parts; a region has at most 1")


def test_refused_ranks_that_do_not_cover_the_model() -> None:
    world = make(config(), cut_a=halves)
    first, second = world.workers["a"][1].joins(world.identity, "life-2")
    world.regions["eu"].handle(first)
    refuses(world.regions["eu"], replace(second, pushes=first.pushes), "element 0 of 64 is covered 2 times")


@pytest.mark.parametrize(("rule", "weight"), [("halos", MOST_WEIGHT + 1), ("sync", 2)])
def test_refused_weights_of_regions(rule: str, weight: int) -> None:
    """A region stands for its workers."""
    world = make(config(rule, limits=LimitsConfig(norm_deviations=None)))
    for _ in range(1 if rule == "sync" else 3):
        world.push("a", random_deltas(world, 1))
    update = next(m for m in world.up["eu"] if isinstance(m, UpdatePart))
    refuses(world.top, replace(update, weight=weight), f"an update of weight {weight}; it may stand for")
    assert world.top.handle(update).reply


SLOW = "a: no worker comes to job 1, or takes .* s a step"
LEASES = {
    **{str(job): (LeaseRequest("a", job), f"a: no worker comes to job {job}") for job in (0, MOST_JOBS + 1, 1 << 62)},
    **{f"{s} s a step": (LeaseRequest("a", 1, s), SLOW) for s in (1e-300, 1e300, math.inf, math.nan, -1.0)},
    "a stranger": (LeaseRequest("zoe", 1), "no (worker of this run|member) is called 'zoe'"),
}


@pytest.mark.parametrize("what", LEASES)
@pytest.mark.parametrize("where", ["eu", GLOBAL, "flat"])
def test_refused_lease_requests(where: str, what: str) -> None:
    refuses(flat() if where == "flat" else make(config(lease_reserve=2)).server(where), *LEASES[what])


@pytest.mark.parametrize(
    "change",
    [
        *({"seconds": math.nan}, {"seconds": -1.0}, {"seconds": 1e300}, {"loss": math.inf}, {"loss": -1e300}),
        *({"version": -1}, {"number": 7}),
    ],
    ids=str,
)
def test_refused_validations(change: dict[str, Any]) -> None:
    top = make(config(), train_samples=64).top
    top.validations.number = 1
    good = Validated("a", 1, 3, 2.5, 1.0)
    refuses(top, replace(good, **change), "was not asked for")
    top.handle(good)


NOTHING = {
    **{
        type(message).__name__: (GLOBAL, message, f"a {type(message).__name__} means nothing to this server")
        for message in (Welcome((1,), 1), Answer(0, 0, ()), Finished("a", 1))
    },
    "RunComplete": (GLOBAL, RunComplete(), "members are at work: the run has not ended"),
    "expel nobody": ("eu", OperatorCommand("expel", "mars"), "no member is called 'mars' here; known: a"),
    "Release": ("eu", Release((1,)), "a Release means nothing"),
    "TakeBack": ("eu", TakeBack("a", (1,)), "a TakeBack means nothing"),
    "take back nobody's": (GLOBAL, TakeBack("mars", (1,)), "no worker of this run is called 'mars'"),
    "pause at a region": ("eu", OperatorCommand("pause"), "can snapshot, unban, expel and set, not pause"),
}


@pytest.mark.parametrize("what", NOTHING)
def test_refused_messages_that_mean_nothing_to_a_server(what: str) -> None:
    where, message, reason = NOTHING[what]
    refuses(make(config()).server(where), message, reason)
