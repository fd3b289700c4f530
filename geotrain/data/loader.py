"""Tokens → batches. A rank reads just its own part of a lease, ahead of its use, and keeps no state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from geotrain.data.order import SampleOrder
from geotrain.data.tokens import DataError, OpenTokens, open_dataset

STEPS_AHEAD = 1  # read while the caller trains
READ_DEADLINE_S = 300.0  # a batch takes milliseconds; a network file system may hang


class SampleSource:
    """A token stream as samples of sequence_length + 1 tokens; neighbours share one token.

    The sample at place k is tokens[k·S : k·S + S + 1]. seed: of the order in which global samples visit the places
    (see `SampleOrder`); None: in the file's order. Raises DataError: fewer tokens than one sample.
    """

    def __init__(
        self, tokens: npt.NDArray[Any], sequence_length: int, seed: int | None, vocab_size: int, name: str
    ) -> None:
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
        """Global samples (int64 [n]) → int64 tensor [n, sequence_length + 1].

        Raises DataError: the file holds an id outside the model's vocabulary (it is damaged).
        """
        places = samples % self.samples_per_epoch if self._order is None else self._order.positions(samples)
        length = self.sequence_length
        rows = np.empty((len(places), length + 1), np.int64)
        for row, place in zip(rows, places.tolist(), strict=True):
            row[:] = self._tokens[place * length : place * length + length + 1]
        if rows.size and (rows.max() >= self._vocab_size or rows.min() < 0):
            row_index, column = np.argwhere((rows >= self._vocab_size) | (rows < 0))[0].tolist()
            raise DataError(
                f"{self.name}: token {int(places[row_index]) * length + column} is {rows[row_index, column]}, "
                f"outside the model's vocabulary of {self._vocab_size}; the file is damaged: prepare the data again"
            )
        return torch.from_numpy(rows)


def open_source(
    prefix: Path, open_tokens: OpenTokens, sequence_length: int, model_vocab_size: int, seed: int | None
) -> SampleSource:
    """Open a prepared data set, checked against its manifest and the model. Raises DataError."""
    _, file = open_dataset(prefix, open_tokens, model_vocab_size)
    return SampleSource(file.tokens, sequence_length, seed, model_vocab_size, str(prefix))


class LeasedLoader:
    """One rank's batches of the samples its worker was lent.

    A lease is a range of global samples; in its s-th inner step the worker trains the s-th `samples_per_step` of
    them, whatever its layout: rank r of dp_size takes the r-th equal part of those, cut into micro-batches.
    Raises DataError: the sizes do not divide.
    """

    def __init__(
        self, source: SampleSource, samples_per_step: int, micro_batch: int, dp_rank: int, dp_size: int
    ) -> None:
        if samples_per_step % (micro_batch * dp_size):
            raise DataError(
                f"{samples_per_step} samples (train_batch_size or validation_samples) do not divide into "
                f"micro-batches of {micro_batch} (train_micro_batch_size_per_gpu) on {dp_size} data-parallel ranks; "
                f"make it a multiple of {micro_batch * dp_size}"
            )
        self._source, self._samples_per_step, self._micro_batch = source, samples_per_step, micro_batch
        self._own = samples_per_step // dp_size
        self._offset = dp_rank * self._own

    def steps(self, lease_start: int, lease_samples: int) -> Iterator[list[torch.Tensor]]:
        """For each inner step, this rank's micro-batches: int64 tensors [micro_batch, sequence_length + 1].

        The next step's are read while the caller trains. Raises DataError: the lease is no whole number of steps.
        """
        return self._read_ahead(self._starts(lease_start, lease_samples))

    def shared_steps(self, lease_start: int, lease_samples: int) -> Iterator[Callable[[int], torch.Tensor]]:
        """For each inner step, what reads micro-batch i of the worker's whole batch: int64 [micro_batch,
        sequence_length + 1]. Raises DataError as `steps`."""

        def reader(start: int) -> Callable[[int], torch.Tensor]:
            size = self._micro_batch
            return lambda i: self._source.batch(np.arange(start + i * size, start + (i + 1) * size))

        return map(reader, self._starts(lease_start, lease_samples))

    def _starts(self, lease_start: int, lease_samples: int) -> list[int]:
        count, rest = divmod(lease_samples, self._samples_per_step)
        if rest or lease_start < 0:
            raise DataError(
                f"a lease of {lease_samples} samples from {lease_start} is no whole number of steps of "
                f"{self._samples_per_step} samples"
            )
        return [lease_start + step * self._samples_per_step for step in range(count)]

    def _read_ahead(self, starts: list[int]) -> Iterator[list[torch.Tensor]]:
        reader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        ahead: deque[Future[list[torch.Tensor]]] = deque()
        try:
            for start in starts:
                ahead.append(reader.submit(self._read, start))
                if len(ahead) > STEPS_AHEAD:
                    yield self._take(ahead)
            while ahead:
                yield self._take(ahead)
        finally:
            reader.shutdown(wait=False, cancel_futures=True)

    def _take(self, ahead: deque[Future[list[torch.Tensor]]]) -> list[torch.Tensor]:
        try:
            return ahead.popleft().result(timeout=READ_DEADLINE_S)
        except TimeoutError:
            raise DataError(
                f"{self._source.name}: a batch could not be read in {READ_DEADLINE_S:.0f} s; "
                "does its file system answer?"
            ) from None

    def _read(self, step_start: int) -> list[torch.Tensor]:
        first = step_start + self._offset
        return list(self._source.batch(np.arange(first, first + self._own)).split(self._micro_batch))


def validation_batches(
    source: SampleSource, samples: int, micro_batch: int, dp_rank: int, dp_size: int
) -> list[torch.Tensor]:
    """This rank's micro-batches of the first `samples` samples of a source opened without a seed.

    Raises DataError: the file has fewer, or the number does not divide.
    """
    if samples > source.samples_per_epoch:
        raise DataError(
            f"{source.name}: {samples} validation samples are wanted, but there are {source.samples_per_epoch}; "
            "lower validation_samples or prepare more validation text"
        )
    [batches] = LeasedLoader(source, samples, micro_batch, dp_rank, dp_size).steps(0, samples)
    return batches
