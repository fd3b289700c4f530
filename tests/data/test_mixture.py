"""Several data sets in one run: shares, epochs, phases, and that every worker computes the same."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.config import ConfigError, DataConfig, parse
from geotrain.config.agreement import config_digest
from geotrain.data.dataset import adopt, training_digest
from geotrain.data.loader import LeasedLoader, open_source, open_training
from geotrain.data.mixture import MOST_PARTS, Mixture, parts_of
from geotrain.data.tokens import TokenWriter
from tests.support.inner_worlds import LLAMA, deepspeed_block, run_config

SEQUENCE = 4
WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any)


def shares(weights: tuple[float, ...]) -> list[Fraction]:
    exact = [Fraction(repr(float(weight))) for weight in weights]
    return [each / sum(exact) for each in exact]


@given(WEIGHTS)
def test_each_share_is_exact_to_within_one_sample_at_every_prefix(weights: list[int]) -> None:
    samples = 2 * sum(weights) + 3
    sets, _ = Mixture([(samples, weights)]).places(np.arange(samples))
    for number, share in enumerate(shares(tuple(weights))):
        had = np.cumsum(sets == number)
        for n in range(1, samples + 1):
            assert abs(int(had[n - 1]) - n * share) < 1, (weights, number, n)


@given(st.lists(WEIGHTS, min_size=1, max_size=3), st.data())
def test_samples_of_a_set_are_numbered_without_gaps_in_all_phases(
    phases: list[list[int]], data: st.DataObject
) -> None:
    sets = max(map(len, phases))
    lengths = [data.draw(st.integers(1, 150)) for _ in phases]
    ends = np.cumsum(lengths).tolist()
    mixture = Mixture([(end, [*w, *[0] * (sets - len(w))]) for end, w in zip(ends, phases, strict=True)])
    which, numbers = mixture.places(np.arange(ends[-1] + 50))  # a longer run goes on with the last phase's weights
    for number in range(sets):
        assert numbers[which == number].tolist() == list(range((which == number).sum()))
    # A part of the run, in any order, needs nothing of what came before it.
    some = np.array(data.draw(st.lists(st.integers(0, int(ends[-1]) + 49), min_size=1, max_size=9)))
    again = mixture.places(some)
    assert (again[0].tolist(), again[1].tolist()) == (which[some].tolist(), numbers[some].tolist())


def test_a_phase_has_its_own_shares() -> None:
    which, _ = Mixture([(800, (3, 1)), (1000, (0, 1))]).places(np.arange(1000))
    assert np.bincount(which[:800]).tolist() == [600, 200]
    assert (which[800:] == 1).all()


def test_a_long_run_takes_no_more_memory_than_a_period() -> None:
    late = 10**12
    which, numbers = Mixture([(late * 2, (0.7, 0.2, 0.1))]).places(np.arange(late, late + 1000))
    assert np.bincount(which).tolist() == [700, 200, 100]
    assert numbers[which == 1].tolist() == list(range(late // 5, late // 5 + 200))


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ((1.0,), (1,)),
        ((0.7, 0.3), (7, 3)),
        ((2, 4, 0), (1, 2, 0)),
        ((0.1, 0.2), (1, 2)),
        ((1e-12, 1), (1, 2**20 - 1)),
    ],
)
def test_weights_become_whole_parts(weights: tuple[float, ...], parts: tuple[int, ...]) -> None:
    assert parts_of(weights) == parts


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=50))
def test_odd_weights_are_rounded_by_less_than_a_millionth_of_the_whole_each(weights: list[float]) -> None:
    parts = parts_of(weights)
    assert sum(parts) <= MOST_PARTS
    assert min(parts) >= 1
    for part, share in zip(parts, shares(tuple(weights)), strict=True):
        assert abs(Fraction(part, sum(parts)) - share) < Fraction(len(weights), MOST_PARTS)


def test_golden_values() -> None:
    """A change here changes the data that a resumed run trains on: it must never happen."""
    which, numbers = Mixture([(12, (5, 3, 2)), (100, (1, 0, 2))]).places(np.arange(18))
    assert which.tolist() == GOLDEN_SETS
    assert numbers.tolist() == GOLDEN_NUMBERS


GOLDEN_SETS = [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1, 2, 0, 2, 2, 0, 2]
GOLDEN_NUMBERS = [0, 0, 1, 0, 2, 1, 3, 2, 4, 1, 5, 3, 2, 6, 3, 4, 7, 5]


# ------------------------------------------------------------------------------------------------- in a run


def write(prefix: Path, first: int, samples: int) -> str:
    """A data set whose tokens are the numbers from `first` on, so that a sample tells set and place."""
    with TokenWriter(prefix, 60_000) as writer:
        writer.add_document(np.arange(first, first + samples * SEQUENCE + 1))
    adopt(prefix)
    return str(prefix)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sets")
    return [write(folder / name, 10_000 * i, samples) for i, (name, samples) in enumerate([("a", 30), ("b", 12)])]


def block(train: object, **more: object) -> DataConfig:
    return parse(DataConfig, {"train": train, "sequence_length": SEQUENCE, "train_samples": 240, **more}, "run.json")


def firsts(batches: list) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


def test_a_run_trains_every_sample_once_an_epoch_of_its_set_on_any_layout(prefixes: list[str]) -> None:
    """Two workers of other layouts take turns at the leases of two sets, mixed 1 to 3."""
    data = block([{"prefix": prefixes[0]}, {"prefix": prefixes[1], "weight": 3}])
    seen: list[int] = []
    for lease, start in enumerate(range(0, 120, 12)):
        ranks, micro = [(3, 2), (2, 3)][lease % 2]
        for rank in range(ranks):
            loader = LeasedLoader(open_training(data, 60_000, 7), 6, micro, rank, ranks)  # as after a restart
            for step in loader.steps(start, 12):
                seen += firsts(step.own)
    counts = np.bincount(np.array(seen) // 10_000)
    assert counts.tolist() == [30, 90]
    places_of_b = [(value - 10_000) // SEQUENCE for value in seen if value >= 10_000]
    assert sorted(value // SEQUENCE for value in seen if value < 10_000) == list(range(30)), "one epoch"
    assert sorted(set(np.bincount(places_of_b).tolist())) == [7, 8], "seven epochs of 12 and a half"


def test_one_set_keeps_the_order_it_always_had(prefixes: list[str]) -> None:
    alone = open_source(Path(prefixes[0]), SEQUENCE, 60_000, 1234)
    for train in (prefixes[0], [{"prefix": prefixes[0], "weight": 5}]):
        run = open_training(block(train), 60_000, 1234)
        assert np.array_equal(run.batch(np.arange(77)), alone.batch(np.arange(77)))
    assert firsts([open_training(block(prefixes[0]), 60_000, 1234).batch(np.arange(8))]) == GOLDEN_PLACES


GOLDEN_PLACES = [84, 112, 0, 32, 52, 20, 72, 92]


def test_equally_long_sets_are_not_visited_in_step(tmp_path: Path) -> None:
    sets = [{"prefix": write(tmp_path / name, 10_000 * i, 50)} for i, name in enumerate("ab")]
    values = np.array(firsts([open_training(block(sets), 60_000, 3).batch(np.arange(100))]))
    first, second = values[values < 10_000], values[values >= 10_000] - 10_000
    assert (first == second).sum() < 10


def test_the_curriculum_follows_the_run(prefixes: list[str]) -> None:
    phases = [{"until": 0.75, "weights": [1, 0]}, {"until": 1, "weights": [1, 2]}]
    source = open_training(block([{"prefix": p} for p in prefixes], curriculum=phases), 60_000, 7)
    values = np.array(firsts([source.batch(np.arange(240))]))
    assert (values[:180] < 10_000).all()
    assert np.bincount(values[180:] // 10_000).tolist() == [20, 40]


def test_what_the_data_is_follows_from_all_sets(prefixes: list[str]) -> None:
    a, b = ({"prefix": prefix} for prefix in prefixes)
    digests = {training_digest(block(train)) for train in (prefixes[0], [a, b], [b, a])}
    assert len(digests) == 3
    assert training_digest(block([a])) == training_digest(block(prefixes[0]))


def test_a_run_with_a_curriculum_cannot_be_made_longer() -> None:
    """Its phases are shares of the run: what was trained would have been something else."""

    def digest(samples: int, **more: object) -> str:
        run = run_config(LLAMA, deepspeed_block(0))
        return config_digest(run.model_copy(update={"data": block("a", train_samples=samples, **more)}))

    phases = [{"until": 1, "weights": [1]}]
    assert digest(100) == digest(200)
    assert digest(100, curriculum=phases) != digest(200, curriculum=phases)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"train": [{"prefix": "a", "weigth": 2}]}, r"train\.0\.weigth: unknown key; did you mean 'weight'"),
        ({"train": [{"prefix": "a"}, {"prefix": "a"}]}, "train names 'a' twice"),
        ({"curriculum": []}, "the last phase's `until` must be 1"),
        ({"curriculum": [{"until": 0.5, "weights": [1]}]}, "the last phase's `until` must be 1"),
        ({"curriculum": [{"until": 1, "weights": [1, 2]}]}, "a weight for each of the 1 data sets"),
        ({"curriculum": [{"until": 1, "weights": [0]}]}, "not all of them 0"),
        ({"curriculum": [{"until": 1, "weights": [1]}, {"until": 1, "weights": [1]}]}, "must be above 1.0"),
        ({"train": [{"prefix": "a", "weight": 1}], "curriculum": [{"until": 1, "weights": [1]}]}, "leave out"),
    ],
)
def test_a_wrong_mixture_is_named(raw: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        block(raw.pop("train", "a"), **raw)
