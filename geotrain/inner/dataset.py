"""Token files: Megatron-core's indexed dataset (.bin with the tokens, .idx with the lengths of the documents).

A thin adapter that adds what Megatron-core leaves out: atomic writing, and checks before anything is read.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from geotrain.inner import platform

with platform.quiet_imports():
    from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType, IndexedDataset, IndexedDatasetBuilder

_HEADER = struct.Struct(f"<{len(_INDEX_HEADER)}sQBQQ")  # magic, version, dtype code, sequences, document bounds
_TOKEN_DTYPES = (np.uint16, np.int32)


class DatasetError(ValueError):
    """A token file cannot be written or is not sound. The message names the file and what to do."""


@dataclass(frozen=True)
class TokenFile:
    """An open token file.

    tokens: 1-D, all documents one after another, mapped read-only (uint16 or int32).
    document_ends: 1-D int64; document i is tokens[document_ends[i-1] : document_ends[i]].
    """

    prefix: str
    tokens: np.memmap
    document_ends: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        return self.tokens.dtype


def _paths(prefix: str) -> tuple[Path, Path]:
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


class TokenWriter:
    """Writes documents to `prefix`.bin and `prefix`.idx. Neither exists under its name before `close()`.

    Use as a context manager: an exception inside discards what was written. An existing pair is replaced.
    """

    def __init__(self, prefix: str, vocab_size: int) -> None:
        """vocab_size: ids must be below it; below 65,500 they are stored as uint16, else int32.

        Raises DatasetError if the folder cannot be written.
        """
        self.prefix, self.vocab_size = prefix, vocab_size
        self._final = _paths(prefix)
        self._temporary = tuple(path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in self._final)
        try:
            self._final[0].parent.mkdir(parents=True, exist_ok=True)
            self._builder = IndexedDatasetBuilder(str(self._temporary[0]), dtype=DType.optimal_dtype(vocab_size))
        except OSError as error:
            raise DatasetError(f"{prefix}: cannot be written: {error.strerror}") from None
        self._closed = False

    def add_document(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document. Raises DatasetError for an empty one or an id outside the vocabulary."""
        tokens = np.asarray(ids)
        if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise DatasetError(f"{self.prefix}: a document must be a non-empty list of integers, not {tokens!r:.80}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise DatasetError(f"{self.prefix}: token id {wrong} is outside the vocabulary of {self.vocab_size}")
        try:
            self._builder.add_document(tokens, [tokens.size])
        except OSError as error:
            self.discard()
            raise DatasetError(f"{self.prefix}: writing failed: {error.strerror}; free some space") from None

    def close(self) -> None:
        """Make both files durable and give them their names. Raises DatasetError, leaving nothing behind."""
        if self._closed:
            return
        try:
            if not self._builder.sequence_lengths:
                raise DatasetError(f"{self.prefix}: no document was added; an empty token file is of no use")
            self._builder.finalize(str(self._temporary[1]))
            for path in self._temporary:
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
            # Without an .idx there is no token file: so a crash between the two renames leaves none, not a mixture.
            self._final[1].unlink(missing_ok=True)
            for temporary, final in zip(self._temporary, self._final, strict=True):
                temporary.replace(final)
            self._closed = True
        except OSError as error:
            raise DatasetError(f"{self.prefix}: writing failed: {error.strerror}; free some space") from None
        finally:
            self.discard()

    def discard(self) -> None:
        """Drop what was written. Does nothing after close()."""
        self._closed = True
        with contextlib.suppress(OSError):  # a full disk may fail again when buffers are flushed
            self._builder.data_file.close()
        for path in self._temporary:
            path.unlink(missing_ok=True)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def open_tokens(prefix: str) -> TokenFile:
    """Open `prefix`.bin and `prefix`.idx for reading.

    Raises DatasetError when a file is missing, empty or truncated, is no token file, or the two disagree.
    """
    data, index = _paths(prefix)
    dtype = _check(data, index)
    dataset = IndexedDataset(str(prefix))
    lengths = np.asarray(dataset.sequence_lengths, dtype=np.int64)
    bounds = np.asarray(dataset.document_indices)
    token_count = data.stat().st_size // dtype.itemsize
    if bounds[0] != 0 or bounds[-1] != lengths.size or (np.diff(bounds) < 0).any() or (lengths < 0).any():
        raise DatasetError(f"{index}: its documents are not in order: the file is damaged; prepare the data again")
    if int(lengths.sum()) != token_count:
        raise DatasetError(
            f"{data} holds {token_count} tokens but {index} tells of {int(lengths.sum())}: "
            "the two do not belong together, or the copy is truncated; copy or prepare both again"
        )
    ends = np.concatenate(([0], np.cumsum(lengths)))[bounds[1:]]
    return TokenFile(str(prefix), np.memmap(data, dtype=dtype, mode="r"), ends)


def _check(data: Path, index: Path) -> np.dtype:
    """Sizes and header, before Megatron-core maps anything. Returns the tokens' dtype."""
    for path in (data, index):
        try:
            if path.stat().st_size == 0:
                raise DatasetError(f"{path}: is empty; prepare the data again")
            with path.open("rb") as stream:
                header = stream.read(_HEADER.size)
        except OSError as error:
            raise DatasetError(
                f"{path}: cannot be read: {error.strerror}; give the prefix of a .bin/.idx pair (without the ending)"
            ) from None
    if not header.startswith(_INDEX_HEADER):
        raise DatasetError(f"{index}: is no Megatron index file (wrong magic bytes)")
    if len(header) < _HEADER.size:
        raise DatasetError(f"{index}: is truncated: its header has {len(header)} of {_HEADER.size} bytes")
    _, version, code, sequences, bounds = _HEADER.unpack(header)
    if version != 1:
        raise DatasetError(f"{index}: has version {version}; only 1 is known")
    if code not in [DType.code_from_dtype(dtype) for dtype in _TOKEN_DTYPES]:
        raise DatasetError(f"{index}: holds values of dtype code {code}; tokens are uint16 (8) or int32 (4)")
    size, wanted = index.stat().st_size, _HEADER.size + sequences * (4 + 8) + bounds * 8
    if size != wanted:
        raise DatasetError(
            f"{index}: has {size} bytes instead of {wanted}: truncated, or not a plain text dataset; copy it again"
        )
    if sequences == 0 or bounds < 2:
        raise DatasetError(f"{index}: tells of no document; prepare the data again")
    with index.open("rb") as stream:
        stream.seek(-8, os.SEEK_END)
        if int.from_bytes(stream.read(8), "little") != sequences:  # Megatron-core asserts it
            raise DatasetError(f"{index}: its last document does not end with the file: it is damaged; copy it again")
    dtype = np.dtype(DType.dtype_from_code(code))
    if data.stat().st_size % dtype.itemsize:
        raise DatasetError(
            f"{data}: its size is no multiple of {dtype.itemsize} bytes, so it is truncated; copy it again"
        )
    return dtype
