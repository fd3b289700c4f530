"""When deltas leave and answers are adopted, step by step; whatever would wait is seen as a yield."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from geotrain.config import OuterConfig, OverlapConfig, rule_config
from geotrain.outer.codec import NonFiniteError
from geotrain.outer.events import Event, LeaseBegun, UpdateEncoded, UpdateStage
from geotrain.outer.exchange import Exchange, Waiting, wait_for
from geotrain.outer.messages import Answer, ChunkDelta, ChunkWeights, Identity, Join, Lease, UpdatePart, Welcome
from geotrain.parameters.parameter_map import fragments_due
from geotrain.plan.model.rounds import stops
from geotrain.staging.interface import Ready


class Everything:
    """The only rank, its weights, and a server whose answers come when the test says so."""

    rank, world_size = 0, 1
    pushes = holds = ()

    def __init__(self) -> None:
        self.sent: list[UpdatePart] = []
        self.answers: dict[tuple[int, int], Future[Answer]] = {}  # by fragment and sequence
        self.adopted: list[int] = []
        self.seeds: list[int] = []
        self.settled = 0
        self.refreshed: list[tuple[int, ...]] = []
        self.instant = False  # answers are there when they are asked for

    def agree(self, flag: bool) -> bool:
        return flag

    def settle(self) -> None:
        self.settled += 1

    def refresh(self, changed: tuple[int, ...]) -> None:
        self.refreshed.append(changed)

    def parameters(self, fragments: tuple[int, ...]) -> tuple[int, ...]:
        return fragments

    def make_delta(self, fragment: int, seed: int) -> Any:
        self.seeds.append(seed)
        return Ready(ChunkDelta(fragment, 0, b""))

    def when_made(self, call: Any) -> Any:
        return call()

    def on_weights(self, weights: ChunkWeights, start: bool = False) -> None:
        if not start:
            self.adopted.append(weights.chunk)

    def join(self, join: Join) -> Welcome:
        return Welcome((1,) * 12, 1, ("incarnation",) * 12)

    def push(self, part: UpdatePart) -> Any:
        self.sent.append(part)
        return Ready(None)

    def pull(self, fragment: int, sequence: int) -> Future[Answer]:
        self.answers[fragment, sequence] = Future()
        if sequence == 0 or self.instant:
            self.answer(fragment, sequence)
        return self.answers[fragment, sequence]

    def answer(self, fragment: int, sequence: int) -> None:
        answer = Answer(fragment, sequence, (ChunkWeights(fragment, 1, b""),), "incarnation")
        self.answers[fragment, sequence].set_result(answer)


def begun(
    late: str, name: str = "w", rule: str = "halos", overlap_steps: int = 2, groups: tuple[int, ...] = (0, 1)
) -> tuple[Exchange, Everything]:
    world = Everything()
    adopt = "rebase" if overlap_steps else "replace"
    overlap = OverlapConfig(steps=overlap_steps, late=late, adopt=adopt)  # type: ignore[arg-type]
    outer, chunks = OuterConfig(rule=rule_config(rule), overlap=overlap), [[f] for f in range(len(groups))]
    exchange = Exchange(name, outer, world, world, world, chunks, groups, clock=lambda: 0.0)
    assert not waits(exchange.start(Identity("run", "c", "l", "m"), "1"))
    exchange.begin(Lease("w", 1, 7, 0, 8, 8))
    return exchange, world


def waits(script: Waiting[Any]) -> bool:
    """Whether training would have to wait here."""
    try:
        pending = next(script)
        while pending.done():
            pending = script.send(pending.result())
    except StopIteration:
        return False
    return True


def test_a_late_answer_does_not_hold_training_up():
    exchange, world = begun("continue")
    assert not waits(exchange.after_step((0,), {}))  # step 1: the delta leaves
    for _ in range(3):  # τ = 2 has long passed
        assert not waits(exchange.after_step((), {}))
    assert not world.adopted
    assert not waits(exchange.after_step((0, 1), {}))  # fragment 0 is still under way: only 1 leaves
    assert [[d.chunk for d in part.deltas] for part in world.sent] == [[0], [1]]
    world.answer(0, 1)
    assert not waits(exchange.after_step((), {}))
    assert world.adopted == [0]
    assert [part.adopted[:2] for part in world.sent] == [(0, 0), (0, 0)]
    world.answer(1, 1)  # there at once, but due only two steps after it left
    assert not waits(exchange.after_step((), {}))
    assert world.adopted == [0, 1]


def test_fragments_that_leave_together_are_numbered_apart_and_one_brings_the_metrics() -> None:
    exchange, world = begun("continue")
    waits(exchange.after_step((1,), {}))
    world.answer(1, 1)
    for _ in range(2):
        waits(exchange.after_step((), {}))
    waits(exchange.after_step((0, 1), {"loss": 2.0}))
    numbered = [(part.fragment, part.sequence, part.metrics) for part in world.sent]
    assert numbered == [(1, 1, {}), (0, 1, {}), (1, 2, {"loss": 2.0})]
    assert world.sent[1].adopted[:2] == (0, 1)


def test_an_update_says_when_its_answer_is_needed() -> None:
    """A step before it is adopted, by the speed so far; at the end of all training at once."""
    exchange, world = begun("continue", overlap_steps=4)
    now_s = [0.0]
    exchange.clock = lambda: now_s[0]

    def step(*due: int, ends: bool = False) -> None:
        now_s[0] += 2.0
        exchange.ends = ends
        waits(exchange.after_step(due, {}))

    step(0)
    assert world.sent[-1].need_s == 6.0
    for _ in range(4):
        step()
    step(1, ends=True)  # two steps before the end
    assert world.sent[-1].need_s == 2.0
    world.answer(0, 1), world.answer(1, 1)
    step()
    step(0, ends=True)
    assert world.sent[-1].need_s == 0.0


def test_the_stages_of_an_update_are_told_in_their_order() -> None:
    exchange, world = begun("continue")
    told: list[Event] = []
    exchange.report = told.append
    waits(exchange.after_step((0,), {}))
    assert told == [UpdateEncoded("w/0.1", 1, [], 0)]
    world.answer(0, 1)
    for _ in range(2):
        waits(exchange.after_step((), {}))
    exchange.begin(Lease("w", 2, 8, 8, 4, 8))
    assert told[1:] == [UpdateStage("w/0.1", "adopted"), LeaseBegun("w", 2, 8, 8, 4)]


def test_a_lease_is_complete_only_with_the_delta_that_was_held_back():
    exchange, world = begun("continue")
    for step in range(1, 9):
        assert not waits(exchange.after_step((0,) if step == 1 else (0, 1) if step == 8 else (), {}))
    # Fragment 0's last steps have not left.
    assert [(part.fragment, part.contains) for part in world.sent] == [(0, ()), (1, (7,))]
    exchange.begin(Lease("w", 2, 8, 8, 8, 8))
    world.answer(0, 1)
    assert not waits(exchange.after_step((0,), {}))
    assert (world.sent[-1].fragment, world.sent[-1].contains) == (0, (7,)) and not exchange.unsent


def test_where_it_is_told_to_wait_training_stands_still_after_τ_steps():
    exchange, world = begun("wait")
    assert not waits(exchange.after_step((0,), {}))
    assert not waits(exchange.after_step((), {}))
    script = exchange.after_step((), {})
    assert next(script).done()  # the delta has been sent
    pending = script.send(None)
    assert pending is world.answers[0, 1]
    world.answer(0, 1)
    with pytest.raises(StopIteration):
        script.send(pending.result())
    assert world.adopted == [0]


def test_in_a_synchronous_run_no_round_is_left_out():
    """The server waits for every worker's delta: if one left out a round, the others' last had no answer."""
    exchange, world = begun("continue", rule="sync")
    assert not waits(exchange.after_step((0,), {}))
    for _ in range(4):
        assert not waits(exchange.after_step((), {}))  # late, and nothing to wait for yet
    assert waits(exchange.after_step((0, 1), {}))
    assert len(world.sent) == 1


def test_every_delta_rounds_with_random_bits_of_its_own_and_the_same_in_every_life():
    seeds = []
    for name in ("v", "w", "w"):
        exchange, world = begun("continue", name)
        assert not waits(exchange.after_step((0, 1), {}))
        seeds += world.seeds
    assert len(set(seeds[:4])) == 4 and seeds[2:4] == seeds[4:]


@pytest.mark.parametrize(
    ("fragments", "tau", "settles", "refreshes"),
    [(1, 0, 1, 1), (1, 2, 2, 1), (4, 0, 4, 4), (4, 1, 8, 4), (4, 2, 4, 4), (3, 2, 5, 3), (12, 1, 8, 8)],
)
def test_weights_are_made_whole_as_often_as_the_planner_counts(
    fragments: int, tau: int, settles: int, refreshes: int
) -> None:
    steps = 8
    overlap = OverlapConfig(steps=tau, adopt="rebase" if tau else "replace")
    outer, world = OuterConfig(local_steps=steps, overlap=overlap), Everything()
    world.instant = True
    exchange = Exchange(
        "w", outer, world, world, world, [[f] for f in range(fragments)], range(fragments), clock=lambda: 0.0
    )
    assert not waits(exchange.start(Identity("run", "c", "l", "m"), "1"))
    for job in range(3):
        exchange.begin(Lease("w", 1, 7, 0, steps, steps))
        at_rest, world.refreshed = 0, []
        for step in range(1, steps + 1):
            world.settled = 0
            assert not waits(exchange.after_step(fragments_due(range(fragments), steps, step), {}))
            at_rest += world.settled > 0  # a second one finds nothing under way
        if job:  # in the first, nothing of an earlier one is adopted
            assert (at_rest, len(world.refreshed)) == (settles, refreshes)
            assert sorted(f for changed in world.refreshed for f in changed) == list(range(fragments)), "each once"
    assert stops(outer, fragments, steps) == (settles, refreshes)


@pytest.mark.parametrize(("late", "steps"), [("continue", 2), ("wait", 2), ("wait", 0)])
def test_a_delta_that_cannot_be_made_ends_the_run_though_no_answer_ever_comes(late, steps):
    """A GPU says so only after `make_delta` has returned; nothing is sent then."""
    exchange, world = begun(late, overlap_steps=steps)
    made: Future[None] = Future()
    world.when_made = lambda call: made  # type: ignore[method-assign]
    if steps:
        assert not waits(exchange.after_step((0,), {}))
        made.set_exception(NonFiniteError("parameter x: holds infinities or NaN"))
        with pytest.raises(NonFiniteError, match="parameter x"):
            wait_for(exchange.after_step((0,), {}))  # at the next step already, long before the answer is due
    else:
        script = exchange.after_step((0,), {})
        assert next(script) is made
    assert not world.sent and not world.answers[0, 1].done()


def test_the_end_of_a_run_waits_until_its_last_delta_has_been_sent():
    exchange, world = begun("continue")
    for step in range(1, 9):
        assert not waits(exchange.after_step((0, 1) if step == 8 else (), {}))
    pushed: Future[None] = Future()
    exchange.in_flight[0].pushes[1] = pushed
    world.answer(0, 1), world.answer(1, 1)
    script = exchange.finish()
    assert next(script).done() and script.send(None) is pushed


@pytest.mark.parametrize(("groups", "left"), [((0, 1), [0]), ((0, 0), []), ((0, 0, 1), [0, 1])])
def test_in_rounds_all_but_what_left_after_the_last_step_leaves_at_the_end(groups, left):
    exchange, world = begun("wait", rule="sync", overlap_steps=0, groups=groups)
    for _ in exchange.finish():
        break
    assert [f for f, sequence in world.answers if sequence] == left


# ------------------------------------------------- two ranks, whose server restarts between their pulls


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
            return Answer(0, sequence, (), f"incarnation {self.incarnation}")


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


class OneRank(Everything):
    """One of two ranks, as the exchange sees it."""

    pushes = holds = ((),)
    world_size = 2

    def __init__(self, rank: int, group: TwoRanks, server: RestartingServer) -> None:
        super().__init__()
        self.rank, self.group, self.server = rank, group, server
        self.taken: list[str] = []  # incarnations of the server whose answers it has adopted

    def agree(self, flag: bool) -> bool:
        return self.group.agree(self.rank, flag)

    def join(self, join: Join) -> Welcome:
        return Welcome((1,), 1, (f"incarnation {self.server.incarnation}",))

    def refresh(self, changed: tuple[int, ...]) -> None:
        self.taken.append(self.answered)

    def pull(self, fragment: int, sequence: int) -> Any:
        answer = self.server.answer(sequence)
        self.answered = answer.incarnation
        return Ready(answer)


@pytest.mark.parametrize("restarts", [set(), {2}, {3}, {4}, {2, 4}, {4, 6}, {3, 4, 5, 6, 7}])
def test_ranks_adopt_the_answers_of_one_incarnation(restarts: set[int]) -> None:
    server, group = RestartingServer(restarts), TwoRanks()
    ranks = [OneRank(i, group, server) for i in range(2)]

    def run(rank: OneRank) -> None:
        exchange = Exchange("w", OuterConfig(), rank, rank, rank, [[0]], [0], clock=lambda: 0.0)
        wait_for(exchange.start(Identity("r", "c", "l", "m"), "1"))
        for job in range(1, 4):
            exchange.begin(Lease("w", job, job, 0, 1, 1))
            wait_for(exchange.after_step((0,), {}))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ranks[0].taken == ranks[1].taken and len(ranks[0].taken) == 4
    if not restarts:
        assert server.pulls == 8  # nothing is pulled twice
