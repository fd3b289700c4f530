import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from geotrain.data import loader
from geotrain.data.loader import LeasedLoader, SampleSource, validation_batches
from geotrain.data.tokens import DataError
from tests.support.executors import AtOnce

SEQUENCE = 4
SAMPLES = 36  # per epoch


def source(seed: int | None = 3, tokens: int = SAMPLES * SEQUENCE + 3) -> SampleSource:
    """Token i is i, so that a sample tells its place."""
    return SampleSource(np.arange(tokens, dtype=np.uint16), SEQUENCE, seed, 1000, "tokens")


def trained(batches: list[torch.Tensor]) -> list[int]:
    """The places of a step's samples."""
    return [int(row[0]) // SEQUENCE for batch in batches for row in batch]


def test_a_sample_is_a_window_that_shares_its_last_token() -> None:
    batch = source(seed=None).batch(np.array([0, 1, SAMPLES - 1]))
    assert batch.dtype == torch.int64
    assert batch.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [140, 141, 142, 143, 144]]
    assert source().samples_per_epoch == SAMPLES


def test_every_sample_is_trained_once_by_any_number_of_workers_and_ranks() -> None:
    """Two workers take turns at leases; one has 3 ranks with micro-batches of 2, the other 2 ranks with 3."""
    layouts = [(3, 2), (2, 3)]
    seen: list[int] = []
    for lease, start in enumerate(range(0, 2 * SAMPLES, 12)):
        ranks, micro = layouts[lease % 2]
        for rank in range(ranks):
            for step in LeasedLoader(source(), 6, micro, rank, ranks).steps(start, 12):
                assert [tuple(batch.shape) for batch in step.own] == [(micro, SEQUENCE + 1)] * (6 // ranks // micro)
                seen += trained(step.own)
    assert sorted(seen) == sorted([*range(SAMPLES), *range(SAMPLES)])


@pytest.mark.parametrize("micro", [1, 3])
def test_any_micro_batch_of_the_worker_can_be_read(micro: int) -> None:
    """Micro-batches that any rank may take: together they are what the ranks otherwise have one after the other."""
    loader = LeasedLoader(source(), 6, micro, 1, 2)
    for step, whole in zip(loader.steps(6, 12), LeasedLoader(source(), 6, 6, 0, 1).steps(6, 12), strict=True):
        assert torch.equal(torch.cat([step.micro_batch(i) for i in range(6 // micro)]), whole.own[0])
    with pytest.raises(DataError, match="no whole number of steps"):
        loader.steps(0, 7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_for_a_gpu_are_pinned() -> None:
    for pinned in (False, True):
        (step,) = LeasedLoader(source(), 6, 3, 1, 2, pinned=pinned).steps(0, 6)
        assert [batch.is_pinned() for batch in (*step.own, step.micro_batch(0))] == [pinned] * 2


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 12), (2, 3), (4, 1), (12, 1)])
def test_what_a_step_trains_does_not_depend_on_the_layout(ranks: int, micro: int) -> None:
    def steps(ranks: int, micro: int) -> list[list[int]]:
        parts = [list(LeasedLoader(source(), 12, micro, rank, ranks).steps(24, 24)) for rank in range(ranks)]
        return [[place for part in parts for place in trained(part[step].own)] for step in range(2)]

    assert steps(ranks, micro) == steps(1, 12)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 1), (1, 2)])
def test_steps_of_a_growing_batch_have_their_places_in_any_lease_and_layout(ranks: int, micro: int) -> None:
    def places(start: int, samples: int) -> list[list[int]]:
        loaders = [LeasedLoader(source(), 6, micro, rank, ranks, ramp=(2, 2, 8)) for rank in range(ranks)]
        parts = [list(loader.steps(start, samples)) for loader in loaders]
        return [[place for part in parts for place in trained(part[step].own)] for step in range(len(parts[0]))]

    (whole,) = LeasedLoader(source(), SAMPLES, SAMPLES, 0, 1).steps(0, SAMPLES)
    order = trained(whole.own)
    cuts = [0, 2, 4, 8, 14, 20, 26]
    assert places(0, 26) == [order[a:b] for a, b in pairwise(cuts)]
    assert places(2, 12) == [order[a:b] for a, b in pairwise(cuts[1:5])]
    with pytest.raises(DataError, match=r"3 samples from 0 is no whole number of steps of 6 samples after a ramp"):
        places(0, 3)
    with pytest.raises(DataError, match=r"2 samples \(.*rampup_batch_size.*\) do not divide .* a multiple of 3"):
        LeasedLoader(source(), 6, 3, 0, 1, ramp=(2, 2, 8))


def test_a_later_lease_needs_no_history() -> None:
    whole = list(LeasedLoader(source(), 6, 2, 0, 1).steps(0, SAMPLES))
    later = list(LeasedLoader(source(), 6, 2, 0, 1).steps(18, 18))
    assert [trained(b.own) for b in later] == [trained(b.own) for b in whole[3:]]


def test_the_next_step_is_read_ahead_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "ThreadPoolExecutor", AtOnce)
    reads: list[int] = []

    class Watched(SampleSource):
        def batch(self, samples: np.ndarray[Any, Any]) -> torch.Tensor:
            reads.append(int(samples[0]))
            return super().batch(samples)

    watched = Watched(np.arange(200, dtype=np.uint16), SEQUENCE, 1, 1000, "tokens")
    steps = LeasedLoader(watched, 6, 6, 0, 1).steps(0, 36)
    for expected in ([], [0, 6], [0, 6, 12]):
        assert reads == expected
        next(steps)


def test_a_loader_left_early_ends_its_thread() -> None:
    steps = LeasedLoader(source(), 6, 6, 0, 1).steps(0, 36)
    next(steps)
    threads = [t for t in threading.enumerate() if t.name.startswith("loader")]
    assert threads
    steps.close()  # type: ignore[attr-defined]
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_a_read_error_reaches_the_caller() -> None:
    damaged = SampleSource(np.array([1, 2, 3, 4, 9, 6, 7, 8, 9], np.uint16), SEQUENCE, None, 9, "a/train")
    with pytest.raises(DataError, match=r"a/train: token 4 is 9, outside the model's vocabulary of 9.*damaged"):
        list(LeasedLoader(damaged, 1, 1, 0, 1).steps(0, 2))


def test_a_hanging_file_system_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "READ_DEADLINE_S", 0.05)
    release = threading.Event()

    class Hanging(SampleSource):
        def batch(self, samples: np.ndarray[Any, Any]) -> torch.Tensor:
            release.wait(60)
            return super().batch(samples)

    hanging = Hanging(np.arange(200, dtype=np.uint16), SEQUENCE, 1, 1000, "a/train")
    with pytest.raises(DataError, match=r"a/train: a batch could not be read"):
        next(LeasedLoader(hanging, 6, 6, 0, 1).steps(0, 36))
    release.set()


def test_sizes_that_do_not_divide_are_named() -> None:
    with pytest.raises(DataError, match=r"10 samples .* micro-batches of 2 .* on 3 .*; make it a multiple of 6"):
        LeasedLoader(source(), 10, 2, 0, 3)
    with pytest.raises(DataError, match="a lease of 10 samples from 0 is no whole number of steps of 6 samples"):
        LeasedLoader(source(), 6, 2, 0, 3).steps(0, 10)


def test_too_few_tokens_are_named() -> None:
    with pytest.raises(DataError, match=r"tokens: 4 tokens are fewer than one sample of 4 \+ 1"):
        source(tokens=4)
    assert source(tokens=5).samples_per_epoch == 1


def test_validation_is_the_files_beginning_in_order() -> None:
    parts = [validation_batches(source(seed=None), 12, 2, rank, 3) for rank in range(3)]
    assert [place for part in parts for place in trained(part)] == list(range(12))
    with pytest.raises(DataError, match=r"40 validation samples are wanted, but there are 36"):
        validation_batches(source(seed=None), 40, 1, 0, 1)
    with pytest.raises(DataError, match="make it a multiple of 6"):
        validation_batches(source(seed=None), 8, 2, 0, 3)
