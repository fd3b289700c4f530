import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.data.order import SampleOrder


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 50))
def test_an_epoch_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    globals_ = np.arange(epoch * samples, (epoch + 1) * samples)
    assert sorted(SampleOrder(samples, seed).positions(globals_).tolist()) == list(range(samples))


@given(st.integers(1, 500), st.integers(0, 2**31), st.data())
def test_any_range_can_be_computed_alone(samples: int, seed: int, data: st.DataObject) -> None:
    order = SampleOrder(samples, seed)
    whole = order.positions(np.arange(3 * samples))
    start = data.draw(st.integers(0, 3 * samples))
    end = data.draw(st.integers(start, 3 * samples))
    assert order.positions(np.arange(start, end)).tolist() == whole[start:end].tolist()


def test_a_large_domain_is_injective_without_memory() -> None:
    samples = 10**13  # petabytes of tokens
    positions = SampleOrder(samples, 5).positions(np.arange(samples - 50_000, samples + 50_000))
    for epoch in (positions[:50_000], positions[50_000:]):
        assert np.unique(epoch).size == 50_000
        assert epoch.min() >= 0
        assert epoch.max() < samples


def test_seeds_and_epochs_differ() -> None:
    samples = 1000
    one = SampleOrder(samples, 1).positions(np.arange(2 * samples))
    two = SampleOrder(samples, 2).positions(np.arange(samples))
    for first, second in ((one[:samples], one[samples:]), (one[:samples], two)):
        assert (first == second).sum() < 10  # about one expected by chance


@pytest.mark.parametrize("samples", [17, 64, 1000])
def test_the_order_looks_random(samples: int) -> None:
    """Over many seeds, first element and successor are spread evenly: chi-squared within 6 sigma of its mean."""
    seeds = 400
    orders = np.stack([SampleOrder(samples, seed).positions(np.arange(samples)) for seed in range(seeds)])
    steps = (orders[:, 1:] - orders[:, :-1]) % samples
    for values in (orders[:, 0], orders[:, samples // 2], steps[:, 0]):
        counts = np.bincount(values * 8 // samples, minlength=8)
        expected = np.bincount(np.arange(samples) * 8 // samples, minlength=8) * seeds / samples
        assert ((counts - expected) ** 2 / expected).sum() < 7 + 6 * 14**0.5
    assert abs(np.corrcoef(orders[0], np.arange(samples))[0, 1]) < 6 / samples**0.5


def test_golden_values() -> None:
    """A change here changes the data that a resumed run trains on: it must never happen."""
    assert SampleOrder(10, 1234).positions(np.arange(20)).tolist() == GOLDEN_10
    assert SampleOrder(1_000_003, 7).positions(np.arange(5_000_000, 5_000_006)).tolist() == GOLDEN_1M
    assert SampleOrder(10**13 + 7, 9).positions(2 * 10**14 + np.arange(4)).tolist() == GOLDEN_LARGE


GOLDEN_10 = [5, 7, 2, 3, 0, 1, 9, 6, 8, 4, 4, 9, 5, 1, 2, 0, 8, 6, 7, 3]
GOLDEN_LARGE = [13321422860, 4141589415439, 5560557751439, 4565576510963]
GOLDEN_1M = [377805, 263550, 519710, 853418, 9454, 762620]
