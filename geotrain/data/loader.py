"""Turns tokens into batches. A rank reads its own part of a lease, one step ahead.

Nothing is kept between leases: which samples a rank reads follows from the lease alone. So a lease can go to another
worker, with another layout, and the loader has nothing to save in a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from geotrain.config import DataConfig, RunConfig
from geotrain.config.batches import BatchSchedule, Ramp
from geotrain.data.dataset import JoinedTokens, Tokens, open_dataset
from geotrain.data.mixture import Mixture
from geotrain.data.order import SampleOrder
from geotrain.data.remote import BlockCache, RemoteTokens, default_cache_folder, is_remote, open_cache
from geotrain.data.tokens import DataError

STEPS_AHEAD = 1  # read while the caller trains
STEPS_FETCHED_AHEAD = 8  # that are brought to this machine, where the data are remote
READ_DEADLINE_S = 300.0  # a batch takes milliseconds, but a network file system may hang without an error


class SampleSource:
    """A token stream, cut into samples of S + 1 tokens, with S = sequence_length.

    The sample at place k is tokens[k·S : k·S + S + 1]. Neighbours share one token, which is the last target of one
    and the first input of the other, so that no token is lost as a target between them.
    tokens: 1-D, integers. seed: of the order in which the run's samples visit the places (see `SampleOrder`); None:
    the file's order. name: of the file, for errors. Raises DataError: fewer tokens than one sample.
    """

    def __init__(self, tokens: Tokens, sequence_length: int, seed: int | None, vocab_size: int, name: str) -> None:
        self.sequence_length = sequence_length
        self.samples_per_epoch = (len(tokens) - 1) // sequence_length
        if self.samples_per_epoch < 1:
            raise DataError(
                f"{name}: {len(tokens)} tokens are fewer than one sample of {sequence_length} + 1; "
                "give more text or a shorter sequence_length"
            )
        self.name = name
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._order = None if seed is None else SampleOrder(self.samples_per_epoch, seed)

    def batch(self, samples: npt.NDArray[Any]) -> torch.Tensor:
        """Read samples by their numbers in the run (int64 [n]); returns int64 [n, sequence_length + 1].

        Raises DataError: the file holds an id outside the model's vocabulary (it is damaged).
        """
        places, length = self._places(samples), self.sequence_length
        self._fetch(places)  # all at once, since one after the other would wait for each
        rows = np.empty((len(places), length + 1), np.int64)
        for row, place in zip(rows, places.tolist(), strict=True):
            row[:] = self._tokens[place * length : place * length + length + 1]
        # Checked here because the model would fail on such an id without naming the file, on a GPU far from the
        # cause.
        if rows.size and (rows.max() >= self._vocab_size or rows.min() < 0):
            row_index, column = np.argwhere((rows >= self._vocab_size) | (rows < 0))[0].tolist()
            raise DataError(
                f"{self.name}: token {int(places[row_index]) * length + column} is {rows[row_index, column]}, "
                f"outside the model's vocabulary of {self._vocab_size}; the file is damaged: prepare the data again"
            )
        return torch.from_numpy(rows)

    def fetch_ahead(self, samples: npt.NDArray[Any]) -> None:
        """Begin to fetch samples that will be read soon, if they are remote. Does not wait."""
        self._fetch(self._places(samples))

    def _places(self, samples: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        return samples % self.samples_per_epoch if self._order is None else self._order.positions(samples)

    def _fetch(self, places: npt.NDArray[np.int64]) -> None:
        if isinstance(self._tokens, RemoteTokens | JoinedTokens):
            length = self.sequence_length
            self._tokens.fetch_ahead([(place * length, place * length + length + 1) for place in places.tolist()])


class MixedSource:
    """Several data sets, read in the shares and the order of a mixture. Raises what they raise."""

    def __init__(self, sources: Sequence[SampleSource], mixture: Mixture) -> None:
        self.name = ", ".join(source.name for source in sources)
        self._sources, self._mixture = sources, mixture

    def fetch_ahead(self, samples: npt.NDArray[Any]) -> None:
        """Begin to fetch samples that will be read soon, if they are remote. Does not wait."""
        sets, numbers = self._mixture.places(samples)
        for which in np.unique(sets).tolist():
            self._sources[which].fetch_ahead(numbers[sets == which])

    def batch(self, samples: npt.NDArray[Any]) -> torch.Tensor:
        """Read samples by their numbers in the run (int64 [n]); returns int64 [n, sequence_length + 1]."""
        sets, numbers = self._mixture.places(samples)
        rows = torch.empty((len(samples), self._sources[0].sequence_length + 1), dtype=torch.int64)
        for which in np.unique(sets).tolist():
            (chosen,) = np.nonzero(sets == which)
            rows[torch.from_numpy(chosen)] = self._sources[which].batch(numbers[chosen])
        return rows


def open_source(
    prefix: str | Path, sequence_length: int, model_vocab_size: int, seed: int | None, cache: BlockCache | None = None
) -> SampleSource:
    """Open a prepared data set, checked against its manifest and the model. cache: for one at a URL; without it, a
    small one. Raises DataError."""
    _, tokens = open_dataset(prefix, model_vocab_size, cache)
    return SampleSource(tokens, sequence_length, seed, model_vocab_size, str(prefix))


def open_training(data: DataConfig, model_vocab_size: int, seed: int) -> MixedSource:
    """Open the run's training data. seed: the run's. Raises DataError."""
    # The first set has the run's seed, so that a run of one set keeps the order it always had.
    sources = [
        open_source(each.prefix, data.sequence_length, model_vocab_size, _seed_of(seed, number), cache_of(data))
        for number, each in enumerate(data.train)
    ]
    ends = [floor(Fraction(repr(phase.until)) * data.train_samples) for phase in data.phases]
    return MixedSource(sources, Mixture([(end, p.weights) for end, p in zip(ends, data.phases, strict=True)]))


def cache_of(data: DataConfig) -> BlockCache | None:
    """Open the cache of a run's remote data; None: all of them are local. Raises DataError."""
    if not any(map(is_remote, data.prefixes)):
        return None
    folder = Path(data.cache_folder) if data.cache_folder else default_cache_folder()
    return open_cache(folder.absolute(), int(data.cache_gb * 1e9))


class RunSamples:
    """The run's training data as a map-style data set of torch's, for a loop of the user's own.

    Sample i is the i-th of the run, int64 [sequence_length + 1], in the run's own order. Raises DataError.
    """

    def __init__(self, run: RunConfig) -> None:
        if not run.data.train:
            raise DataError("data.train: the run file names no training data; give your own, or prepare some")
        vocab_size = run.architecture.vocab_size if run.model.config else np.iinfo(np.int64).max
        self._source, self._samples = open_training(run.data, int(vocab_size), run.seed), run.data.train_samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, sample: int) -> torch.Tensor:
        return self._source.batch(np.array([sample]))[0]


def _seed_of(seed: int, number: int) -> int:
    """Derive the seed for the order of the number-th set: equally long sets shall not be visited in step."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"data set {seed} {number}".encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class StepBatch:
    """The batch of one inner step (`geotrain.inner.engine.engine.StepReader`).

    own: this rank's micro-batches, int64 [micro_batch, sequence_length + 1], already read.
    micro_batch: reads the i-th micro-batch of the worker's whole batch, counted replica after replica. A replica that
    takes over micro-batches of a slower one needs it.
    """

    own: list[torch.Tensor]
    micro_batch: Callable[[int], torch.Tensor]


class LeasedLoader:
    """Reads one rank's batches of the samples that its worker leased.

    A lease is a range of the run's samples. In its s-th inner step the worker trains the s-th `samples_per_step` of
    them, or those that a `ramp` of the batch gives it, whatever its layout is; data-parallel rank r of dp_size takes
    the r-th equal part of those, cut into micro-batches of `micro_batch` samples. pinned: batches lie in page-locked
    memory, so that a GPU copies them while the host goes on. Raises DataError: the sizes do not divide.
    """

    def __init__(
        self,
        source: SampleSource | MixedSource,
        samples_per_step: int,
        micro_batch: int,
        dp_rank: int,
        dp_size: int,
        pinned: bool = False,
        ramp: Ramp | None = None,
    ) -> None:
        self._batches = BatchSchedule(samples_per_step, ramp)
        for size in self._batches.sizes:
            if size % (micro_batch * dp_size):
                raise DataError(
                    f"{size} samples (train_batch_size, rampup_batch_size or validation_samples) do not divide into "
                    f"micro-batches of {micro_batch} (train_micro_batch_size_per_gpu) on {dp_size} data-parallel "
                    f"ranks; make it a multiple of {micro_batch * dp_size}"
                )
        self._source, self._micro_batch, self._pinned = source, micro_batch, pinned
        self._dp_rank, self._dp_size = dp_rank, dp_size

    def steps(self, lease_start: int, lease_samples: int) -> Iterator[StepBatch]:
        """Yield the batch of each inner step of a lease. The next one is read while the caller trains.

        Raises DataError: the lease is no whole number of steps.
        """
        # Not a generator itself: a wrong lease must be an error at the call, not at the first batch.
        steps = self._batches.steps(lease_start, lease_samples)
        if steps is None:
            raise DataError(
                f"a lease of {lease_samples} samples from {lease_start} is no whole number of steps of "
                f"{self._batches.batch} samples" + " after a ramp" * (self._batches.ramp is not None)
            )
        for step in steps[:STEPS_FETCHED_AHEAD]:
            self._fetch(step)
        return self._read_ahead(steps)

    def expect(self, lease_start: int, lease_samples: int) -> None:
        """Begin to fetch the first steps of a lease that will be trained next, if they are remote. Does not wait."""
        for step in (self._batches.steps(lease_start, lease_samples) or [])[:STEPS_FETCHED_AHEAD]:
            self._fetch(step)

    def _fetch(self, step: range) -> None:
        self._source.fetch_ahead(np.array(self._own(step)))

    def _own(self, step: range) -> range:
        """Return this rank's samples of a step."""
        count = len(step) // self._dp_size
        return step[self._dp_rank * count :][:count]

    def _read_ahead(self, steps: list[range]) -> Iterator[StepBatch]:
        reader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        ahead: deque[Future[StepBatch]] = deque()
        coming, to_fetch = iter(steps), iter(steps[STEPS_FETCHED_AHEAD:])
        try:
            while True:
                for step in islice(coming, STEPS_AHEAD + 1 - len(ahead)):
                    ahead.append(reader.submit(self._read, step))
                    for later in islice(to_fetch, 1):
                        self._fetch(later)
                if not ahead:
                    return
                yield ahead.popleft().result(timeout=READ_DEADLINE_S)
        except TimeoutError:
            raise DataError(
                f"{self._source.name}: a batch could not be read in {READ_DEADLINE_S:.0f} s; "
                "does its file system answer?"
            ) from None
        finally:
            reader.shutdown(wait=False, cancel_futures=True)  # waiting could take for ever where a read hangs

    def _read(self, step: range) -> StepBatch:
        def samples(of: range) -> torch.Tensor:
            batch = self._source.batch(np.array(of))
            return batch.pin_memory() if self._pinned else batch

        own, size = list(samples(self._own(step)).split(self._micro_batch)), self._micro_batch
        return StepBatch(own, lambda i: samples(step[i * size :][:size]))


def validation_batches(
    source: SampleSource, samples: int, micro_batch: int, dp_rank: int, dp_size: int
) -> list[torch.Tensor]:
    """Read this rank's micro-batches of the first `samples` samples of a source opened without a seed.

    Raises DataError: the file has fewer, or the number does not divide.
    """
    if samples > source.samples_per_epoch:
        raise DataError(
            f"{source.name}: {samples} validation samples are wanted, but there are {source.samples_per_epoch}; "
            "lower validation_samples or prepare more validation text"
        )
    # The validation set is read like a lease of one step.
    [batch] = LeasedLoader(source, samples, micro_batch, dp_rank, dp_size).steps(0, samples)
    return batch.own
