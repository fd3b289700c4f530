"""Ranks of one worker whose server restarts between their pulls adopt the answers of one incarnation only."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from geotrain.config import OuterConfig
from geotrain.outer.exchange import Exchange, wait_for
from geotrain.outer.messages import Answer, ChunkDelta, Identity, Join, Lease, UpdatePart, Welcome


class RestartingServer:
    """Answers with its incarnation. At the pulls that `restarts` names (counted over both ranks), it has just
    restarted."""

    def __init__(self, restarts: set[int]) -> None:
        self.restarts, self.incarnation, self.pulls = restarts, 1, 0
        self.lock = threading.Lock()

    def answer(self, sequence: int) -> Answer:
        with self.lock:
            self.pulls += 1
            if self.pulls in self.restarts:
                self.incarnation += 1
            return Answer(sequence, (), f"incarnation {self.incarnation}")


class TwoRanks:
    """agree() over two threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.flags = [True, True]

    def agree(self, rank: int, flag: bool) -> bool:
        self.flags[rank] = flag
        self.barrier.wait()
        together = all(self.flags)
        self.barrier.wait()
        return together


class OneRank:
    """A rank with its client and its (empty) weights, as the exchange sees them."""

    pushes = holds = ((),)
    world_size = 2

    def __init__(self, rank: int, group: TwoRanks, server: RestartingServer) -> None:
        self.rank, self.group, self.server = rank, group, server
        self.adopted: list[str] = []
        self.answer_life = ""

    def agree(self, flag: bool) -> bool:
        return self.group.agree(self.rank, flag)

    def settle(self) -> None:
        pass

    def refresh(self, changed: Any) -> None:
        self.adopted.append(self.answer_life)

    def parameters(self, fragments: tuple[int, ...]) -> tuple[int, ...]:
        return fragments

    def join(self, join: Join) -> Welcome:
        return Welcome(1, 1, f"incarnation {self.server.incarnation}")

    def push(self, part: UpdatePart) -> Future[None]:
        return done(None)

    def pull(self, sequence: int, fragments: tuple[int, ...]) -> Future[Answer]:
        answer = self.server.answer(sequence)
        self.answer_life = answer.incarnation
        return done(answer)

    def make_delta(self, fragment: int, seed: int) -> Any:
        return done(ChunkDelta(0, 0, b""))

    def when_made(self, call: Any) -> Any:
        return call()

    def on_weights(self, weights: Any, start: bool = False) -> None:
        pass


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize("restarts", [set(), {2}, {3}, {4}, {2, 4}, {4, 6}, {3, 4, 5, 6, 7}])
def test_ranks_adopt_the_answers_of_one_life(restarts):
    server, group = RestartingServer(restarts), TwoRanks()
    ranks = [OneRank(i, group, server) for i in range(2)]

    def run(rank: OneRank) -> None:
        exchange = Exchange("w", OuterConfig(), rank, rank, rank, [[0]], clock=lambda: 0.0)
        wait_for(exchange.start(Identity("r", "c", "l", "m"), "1"))
        for job in range(1, 4):
            exchange.begin(Lease("w", job, job, 0, 1, 1))
            wait_for(exchange.after_step((0,), {}))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ranks[0].adopted == ranks[1].adopted and len(ranks[0].adopted) == 4
    if not restarts:
        assert server.pulls == 8  # nothing is pulled twice
