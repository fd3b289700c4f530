"""Payloads that are decoded before their update is judged, while the journal flushes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from geotrain.outer.messages import Refused, UpdatePart
from tests.support.outer_world import FakeWorker, columns, flat, halves, random_deltas
from tests.support.recorded_world import same_state


def filled(part: UpdatePart, byte: int) -> UpdatePart:
    """The part with payloads of this byte alone."""
    return replace(part, deltas=tuple(replace(d, payload=bytes([byte]) * len(d.payload)) for d in part.deltas))


def reply_of(server: Any, part: UpdatePart) -> Any:
    try:
        return server.handle(part).reply
    except Refused as refused:
        return str(refused)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_decoded_ahead_changes_no_bit(seed: int) -> None:
    """Parts come in any order, of two workers at once, some twice, some never; both workers come back with other
    slices, and an update is refused."""
    drawn, shape = random.Random(seed), flat().parameter_map
    calm, shaken = flat(), flat()
    workers = [FakeWorker(name, shape, []) for name in "ab"]
    older, replies = list[UpdatePart](), list[Any]()
    for turn in range(6):
        life = f"life-{turn // 3 + 2}"
        if turn % 3 == 0:
            for worker, cut in zip(workers, (columns, halves) if turn else (halves, columns), strict=True):
                worker.slicings = cut(shape)
                for join in worker.joins(calm.identity, life):
                    assert calm.handle(join).reply == shaken.handle(join).reply
        seeds = iter(range(10 * turn, 10 * turn + 2))
        said = [part for w in workers for part in w.parts(random_deltas(calm, next(seeds)), incarnation=life)]
        drawn.shuffle(said)
        if turn == 5:
            said[-1] = filled(said[-1], 255)
        for part in said:
            others = [*said, *older, *(filled(each, 1) for each in said)]
            for each in drawn.sample(others, drawn.randrange(5)) + [part] * drawn.randrange(2):
                shaken.store.decode_ahead(each)
            replies.append(reply_of(calm, part))
            assert reply_of(shaken, part) == replies[-1]
            same_state(calm, shaken)
        older = said
    assert replies.count(True) == 11 and replies.count(False) == 12 and "not finite" in replies[-1]


def test_nothing_is_decoded_twice_but_for_a_join(monkeypatch: pytest.MonkeyPatch) -> None:
    server, decoded = flat(), list[int]()
    decode = server.core.up.decode_measured

    def counted(payload: torch.Tensor, out: torch.Tensor) -> float:
        decoded.append(out.numel())
        return decode(payload, out)

    monkeypatch.setattr(server.core.up, "decode_measured", counted)
    worker = FakeWorker("a", server.parameter_map, halves(server.parameter_map))
    joins, fragments = worker.joins(server.identity, "life-2"), range(len(server.parameter_map.fragments))
    for join in joins:
        server.handle(join)
    for times in (1, 2):
        before = [server.weights(f).clone() for f in fragments]
        first, last = worker.parts(random_deltas(server, times), incarnation="life-2")
        for part in (first, last):
            server.store.decode_ahead(part)
            if times == 2 and part is last:
                server.handle(joins[0])  # whose slices may be others
            assert all(torch.equal(before[f], server.weights(f)) for f in fragments)
            server.handle(part)
        assert sum(decoded) == times * server.parameter_map.numel
        assert not any(torch.equal(before[f], server.weights(f)) for f in fragments)
        decoded.clear()
