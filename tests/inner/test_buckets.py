"""Buckets of ZeRO-1 in one process: what each rank has after a reduction and a gathering, element by element."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geotrain.inner.zero import buckets
from geotrain.inner.zero.buckets import Bucket, PartGathering, owned_parts

SIZES, SHARD = (7, 5, 9), 11  # elements of the parameters, which 2 ranks own in shards of 11; the last is padding
NUMEL = sum(SIZES)


class AllToAll:
    """All ranks' part of one exchange: once all have handed in, each waits for its own. The group is the rank."""

    def __init__(self) -> None:
        self.handed_in: list[tuple[Tensor, list[Tensor]]] = []  # by rank: where it receives, what it sends to each

    def begin(self, out: Tensor, sent: Tensor, out_sizes: list[int], sizes: list[int], group: int, **_: Any) -> Any:
        assert group == len(self.handed_in) and out.numel() == sum(out_sizes)
        self.handed_in.append((out, [part.clone() for part in sent.split(sizes)]))
        return self

    def wait(self) -> None:
        for rank, (out, _) in enumerate(self.handed_in):
            out.copy_(torch.cat([parts[rank] for _, parts in self.handed_in]))


@pytest.fixture(autouse=True)
def exchange(monkeypatch: pytest.MonkeyPatch) -> AllToAll:
    exchange = AllToAll()
    monkeypatch.setattr(buckets.ds_comm, "all_to_all_single", exchange.begin)
    monkeypatch.setattr(buckets.dist, "get_rank", lambda group: group)
    monkeypatch.setattr(buckets.dist, "get_world_size", lambda group: 2)
    return exchange


def cut(flat: Tensor) -> list[list[tuple[int, Tensor]]]:
    """Each parameter's parts, by owner."""
    return [list(owned_parts(flat, begin, end, SHARD)) for begin, end in pairwise(accumulate(SIZES, initial=0))]


def bucket_of(rank: int, gradients: Tensor, weights: Tensor, parameters: list[nn.Parameter]) -> Bucket:
    by_owner: list[list[Tensor]] = [[], []]
    for owner, view in (part for parts in cut(gradients) for part in parts):
        by_owner[owner].append(view)
    parts = dict(zip(parameters, cut(weights), strict=True))
    return Bucket(rank, by_owner, parts, torch.float32, False, 0)  # type: ignore[arg-type]


def test_owners_get_the_sum_and_all_get_the_weights_of_every_element() -> None:
    gradients = [torch.arange(1.0, NUMEL + 1) * (1 + 9 * rank) for rank in range(2)]
    weights = [torch.full((NUMEL,), float(rank)) for rank in range(2)]
    parameters = [nn.Parameter(torch.empty(size)) for size in SIZES]
    of_ranks = [bucket_of(rank, gradients[rank], weights[rank], parameters) for rank in range(2)]
    total = gradients[0] + gradients[1]
    for bucket in of_ranks:
        bucket.begin_reduction()
    for bucket in of_ranks:
        bucket.finish_reduction()
    assert torch.equal(gradients[0][:SHARD], total[:SHARD]) and torch.equal(gradients[1][SHARD:], total[SHARD:])


def test_a_gathering_brings_the_parts_of_what_has_changed_and_no_others() -> None:
    weights = [torch.full((NUMEL,), float(rank)) for rank in range(2)]
    ways = [PartGathering([part for parts in cut(weights[rank])[1:] for part in parts], rank) for rank in range(2)]  # type: ignore[arg-type]
    for way in ways:
        way.wait()
    owners = torch.arange(NUMEL).ge(SHARD).float()
    for rank, held in enumerate(weights):
        assert torch.equal(held[SIZES[0] :], owners[SIZES[0] :]) and held[: SIZES[0]].eq(rank).all()
