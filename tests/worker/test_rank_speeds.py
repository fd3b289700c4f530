"""A rank that is far slower than its equals is told within a minute."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from geotrain.worker.rank_speeds import EVERY_S, RankSpeeds

CPU = torch.device("cpu")
STEP_S = 0.5


class Ranks:
    """Ranks of one worker in virtual time, over a store of torch's. seconds: of each one's product, which may change;
    None: it hangs."""

    def __init__(self, *seconds: float | None) -> None:
        self.seconds, self.now_s, self.told = list(seconds), 0.0, list[tuple[float, str]]()
        store = dist.HashStore()

        def rank(number: int) -> RankSpeeds:
            return RankSpeeds(
                CPU,
                lambda what: self.told.append((self.now_s, what)),
                store,
                number,
                len(seconds),
                measure=lambda device: self.seconds[number] or 0.0,
                clock=lambda: self.now_s,
            )

        self.ranks = [rank(number) for number in range(len(seconds))]

    def run(self, for_s: float) -> None:
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += STEP_S
            for rank, seconds in zip(self.ranks, self.seconds, strict=True):
                if seconds is not None:
                    rank.after_step()


def test_a_slow_rank_is_told_once_within_a_minute_of_its_fault() -> None:
    ranks = Ranks(1e-3, 1e-3, 1.2e-3, 1e-3)
    ranks.run(300.0)
    assert ranks.told == []
    ranks.seconds[2], begin_s = 2.5e-3, ranks.now_s
    ranks.run(300.0)
    ((at_s, words),) = ranks.told
    assert at_s - begin_s < 60.0
    assert re.search(r"rank 2 on \S+ computes at 40% of its equals' speed", words) and "2.5 ms there, 1 ms" in words
    ranks.seconds[2] = 1e-3
    ranks.run(100.0)
    ranks.seconds[2] = 2.5e-3
    ranks.run(100.0)
    assert len(ranks.told) == 2  # it was well in between


@pytest.mark.parametrize("seconds", [(1e-3,), (1e-3, None), (1e-3, 1.9e-3)])
def test_nobody_is_slow_without_an_equal_or_by_less_than_twice(seconds: tuple[float | None, ...]) -> None:
    ranks = Ranks(*seconds)
    ranks.run(200.0)
    assert ranks.told == []


def test_a_moment_is_no_fault_and_a_rank_that_hangs_is_not_compared() -> None:
    ranks = Ranks(1e-3, 1e-3)
    ranks.seconds[1] = 5e-3
    ranks.run(2 * EVERY_S + 1)
    ranks.seconds[1] = 1e-3
    ranks.run(2 * EVERY_S)
    assert ranks.told == []
    ranks.seconds[1] = 5e-3
    ranks.run(EVERY_S)
    ranks.seconds[1] = None
    ranks.run(20 * EVERY_S)
    assert ranks.told == []


def test_the_product_of_this_machine_takes_some_time() -> None:
    told: list[str] = []
    store, now_s = dist.HashStore(), [0.0]
    rank = RankSpeeds(CPU, told.append, store, 1, 2, clock=lambda: now_s[0])
    rank.after_step()
    assert not store.check(["geotrain.speed.1"])
    now_s[0] = EVERY_S
    rank.after_step()
    assert re.fullmatch(r'\["cpu", ".*", [0-9.e-]+, 1\]', store.get("geotrain.speed.1").decode())
