"""The .bin/.idx pairs of token files, in the format of Megatron-core's indexed dataset.

.bin holds the tokens, .idx the lengths of the documents. They are written and read here because Megatron-core writes
whole documents from memory and trusts what it reads. Here what is read is checked before it is used. An index has 20
bytes a document, 90 GB for 10 TB of text: it is never in memory whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from zlib_ng.zlib_ng import crc32

from geotrain.common.files import git_lfs_pointer

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document bounds
_LENGTH, _CHECKSUM = struct.Struct("<i"), struct.Struct("<I")
# Megatron's codes of the types that tokens can have.
_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
BLOCK_BYTES = 1 << 18  # of a .bin, that has a checksum and is fetched at a time where it is remote
_AT_ONCE = 1 << 20  # entries of an index that are in memory at a time


class DataError(ValueError):
    """Input text or a prepared data set is wrong. Says which file, where in it, and what to do."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Choose the type of the ids in a .bin file, by Megatron's limit, so that its tools would choose the same."""
    return _DTYPES[8] if vocab_size < 65500 else _DTYPES[4]


def _pair(prefix: str | Path) -> tuple[Path, Path]:
    """Paths of .bin and .idx. The ending is appended, since `with_suffix` would cut a prefix that has a dot in it."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


class BlockChecksums:
    """Computes the CRC-32 of each BLOCK_BYTES of what is passed to `update`; the last block may be shorter."""

    def __init__(self) -> None:
        self._checksums, self._rest = bytearray(), bytearray()  # rest: of a block that is not whole yet

    def update(self, content: bytes) -> None:
        self._rest += content
        while len(self._rest) >= BLOCK_BYTES:
            self._checksums += _CHECKSUM.pack(crc32(self._rest[:BLOCK_BYTES]))
            del self._rest[:BLOCK_BYTES]

    def content(self) -> bytes:
        """Return the content of `<prefix>.crc`: 4 bytes a block, little-endian."""
        return bytes(self._checksums) + (_CHECKSUM.pack(crc32(self._rest)) if self._rest else b"")


def read_checksums(prefix: str, content: bytes, size_bytes: int) -> npt.NDArray[np.uint32]:
    """Read the content of `<prefix>.crc`, for a .bin of that size. Raises DataError."""
    if len(content) != (wanted := 4 * -(-size_bytes // BLOCK_BYTES)):
        raise DataError(f"{prefix}.crc: has {len(content)} bytes instead of {wanted}; copy it again")
    return np.frombuffer(content, "<u4")


class VerifiedTokens:
    """The tokens of a .bin file on this machine, as a read-only array: `len` and slices. A block of the file is
    compared with its checksum when it is read for the first time. Raises DataError."""

    def __init__(self, prefix: str, tokens: npt.NDArray[Any]) -> None:
        self._prefix, self._tokens, self._content = prefix, tokens, tokens.view(np.uint8)
        path = Path(f"{prefix}.crc")
        try:
            self._checksums = read_checksums(prefix, path.read_bytes(), len(self._content))
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read: {error.strerror}; it belongs to {prefix}.bin: copy it, too"
            ) from None
        self._checked = np.zeros(len(self._checksums), bool)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        start, stop, _ = part.indices(len(self._tokens))
        size = self._tokens.itemsize
        first, last = start * size // BLOCK_BYTES, -(-stop * size // BLOCK_BYTES)
        for block in first + np.flatnonzero(~self._checked[first:last]):
            begin = int(block) * BLOCK_BYTES
            content = self._content[begin : begin + BLOCK_BYTES]
            if crc32(content) != self._checksums[block]:
                raise DataError(
                    f"{self._prefix}.bin: block {block}, the {len(content)} bytes from {begin} on, does not match "
                    f"its checksum in {self._prefix}.crc: it is damaged: copy both again, or prepare the data again"
                )
            self._checked[block] = True
        return self._tokens[start:stop]


class TokenWriter:
    """Writes documents to `prefix`.bin and `prefix`.idx, in place: `whole_folder` lets their folder appear whole.

    A context manager, which closes both; an exception inside discards them. documents, tokens: how many so far.
    digest: sha256 of the .bin file's content so far. checksums: of its blocks. Raises OSError.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        """Begin the files. vocab_size: all ids must be below it."""
        self.prefix, self.vocab_size, self.dtype = prefix, vocab_size, token_dtype(vocab_size)
        self.documents = self.tokens = 0
        self.digest, self.checksums = hashlib.sha256(), BlockChecksums()
        self._paths = _pair(prefix)
        self._data = self._paths[0].open("wb")
        # They may be more than memory holds.
        self._lengths = tempfile.TemporaryFile(dir=self._paths[0].parent)  # noqa: SIM115

    def add_document(self, ids: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append one document. Raises DataError for an empty one or an id outside the vocabulary."""
        tokens = np.asarray(ids)
        if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise DataError(f"{self.prefix}: a document must be a non-empty list of integers, not {tokens!r:.80}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise DataError(f"{self.prefix}: token id {wrong} is outside the vocabulary of {self.vocab_size}")
        content = tokens.astype(self.dtype).tobytes()
        self._data.write(content)
        self._lengths.write(_LENGTH.pack(tokens.size))
        self.digest.update(content)
        self.checksums.update(content)
        self.documents, self.tokens = self.documents + 1, self.tokens + tokens.size

    def close(self) -> None:
        """Write the index. Raises DataError where there is no document, and leaves no file then."""
        if self._data.closed:
            return
        if not self.documents:
            self.discard()
            raise DataError(f"{self.prefix}: no document was added, and a token file needs one")
        self._data.close()
        code = next(code for code, dtype in _DTYPES.items() if dtype == self.dtype)
        with self._paths[1].open("wb") as index, self._lengths:
            # The format has bounds because Megatron's documents may have several sequences; ours have one each.
            index.write(_HEADER.pack(_MAGIC, 1, code, self.documents, self.documents + 1))
            index.writelines(lengths.tobytes() for lengths in self._read_lengths())
            end = 0
            for lengths in self._read_lengths():
                ends = end + np.cumsum(lengths, dtype="<i8")
                index.write(((ends - lengths) * self.dtype.itemsize).tobytes())
                end = ends[-1]
            for first in range(0, self.documents + 1, _AT_ONCE):
                bounds = np.arange(first, min(first + _AT_ONCE, self.documents + 1), dtype="<i8")
                index.write(bounds.tobytes())

    def _read_lengths(self) -> Iterator[npt.NDArray[np.int32]]:
        self._lengths.seek(0)
        while part := self._lengths.read(_AT_ONCE * _LENGTH.size):
            yield np.frombuffer(part, "<i4")

    def discard(self) -> None:
        """Drop what was written."""
        for file in (self._data, self._lengths):
            with contextlib.suppress(OSError):  # a full disk may fail again when buffers are flushed
                file.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


@dataclass(frozen=True)
class TokenFile:
    """A .bin/.idx pair, open for reading.

    tokens: 1-D, uint16 or int32, all documents one after another. documents: how many. Everything is mapped into
    memory: files may be larger than it, and ranks of a host share their pages.
    """

    prefix: str
    tokens: npt.NDArray[Any]
    documents: int
    _begins: npt.NDArray[np.int64]  # of each sequence in the .bin, in bytes
    _bounds: npt.NDArray[np.int64]  # numbers of the sequences with which documents begin, and of sequences in all

    def document_ends(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Read where the documents `first` ≤ i < `last` end: token numbers, int64 [last − first].

        Document i is tokens[end of i − 1 : end of i]. Reads nothing else of the index. Raises DataError: it is
        damaged.
        """
        bounds = self._bounds[first : last + 1]
        if bounds[0] < 0 or bounds[-1] > len(self._begins) or (bounds[1:] < bounds[:-1]).any():
            raise DataError(f"{self.prefix}.idx: its documents are not in order: it is damaged; copy it again")
        inside = bounds[1:] < len(self._begins)
        ends = np.full(len(bounds) - 1, len(self.tokens), np.int64)
        ends[inside], rest = np.divmod(self._begins[bounds[1:][inside]], self.tokens.itemsize)
        if rest.any() or (ends[:1] < 0).any() or (ends[1:] < ends[:-1]).any() or (ends[-1:] > len(self.tokens)).any():
            raise DataError(f"{self.prefix}.idx: its documents overlap: it is damaged; copy it again")
        return ends

    def all_document_ends(self) -> Iterator[npt.NDArray[np.int64]]:
        """Read where all documents end, a part at a time. Raises DataError."""
        last = 0
        for first in range(0, self.documents, _AT_ONCE):
            ends = self.document_ends(first, min(first + _AT_ONCE, self.documents))
            if ends[0] < last:
                raise DataError(f"{self.prefix}.idx: its documents overlap: it is damaged; copy it again")
            last = int(ends[-1])
            yield ends


def open_tokens(prefix: str | Path) -> TokenFile:
    """Open `prefix`.bin and `prefix`.idx for reading.

    Raises DataError if a file is missing, empty or truncated, is no token file, or if the two disagree. A rank that
    read a damaged file would train on other text than the others without an error.
    """
    data, index = _pair(prefix)
    for path in (data, index):
        try:
            size = path.stat().st_size
            with path.open("rb") as stream:
                header = stream.read(_HEADER.size)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read: {error.strerror}; give the prefix of a .bin/.idx pair (without the ending)"
            ) from None
        if not header:
            raise DataError(f"{path}: is empty; prepare the data again")
        if pointer := git_lfs_pointer(path):
            raise DataError(f"{path}: {pointer}")
    if not header.startswith(_MAGIC):
        raise DataError(f"{index}: is no Megatron index file (wrong magic bytes)")
    if len(header) < _HEADER.size:
        raise DataError(f"{index}: is truncated: its header has {len(header)} of {_HEADER.size} bytes")
    _, version, code, sequences, bound_count = _HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{index}: has version {version}; only 1 is known")
    if code not in _DTYPES:
        raise DataError(f"{index}: holds values of dtype code {code}; tokens are uint16 (8) or int32 (4)")
    wanted = _HEADER.size + sequences * (4 + 8) + bound_count * 8
    if size != wanted:
        raise DataError(
            f"{index}: has {size} bytes instead of {wanted}: truncated, or not a plain text dataset; copy it again"
        )
    if sequences == 0 or bound_count < 2:
        raise DataError(f"{index}: lists no document; prepare the data again")
    lengths_end = _HEADER.size + sequences * 4
    begins = np.memmap(index, "<i8", "r", lengths_end, (sequences,))
    bounds = np.memmap(index, "<i8", "r", lengths_end + sequences * 8, (bound_count,))
    last_length = int(np.memmap(index, "<i4", "r", lengths_end - 4, (1,))[0])
    if bounds[0] != 0 or bounds[-1] != sequences:
        raise DataError(f"{index}: its last document does not end with the file: it is damaged; copy it again")
    dtype = _DTYPES[code]
    count, rest = divmod(data.stat().st_size, dtype.itemsize)
    if rest:
        raise DataError(
            f"{data}: its size is no multiple of {dtype.itemsize} bytes, so it is truncated; copy it again"
        )
    # What lies between is checked where it is read: all of it would take hours at terabytes of text.
    stated = int(begins[-1]) // dtype.itemsize + last_length
    if begins[0] != 0 or stated != count:
        raise DataError(
            f"{data} holds {count} tokens but {index} states {stated}: "
            "the two do not belong together, or the copy is truncated; copy or prepare both again"
        )
    return TokenFile(str(prefix), np.memmap(data, dtype, "r"), bound_count - 1, begins, bounds)
