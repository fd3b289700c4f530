"""A prepared data set: a .bin/.idx pair of token files and a manifest.

The pair has the format of Megatron-core's indexed dataset: .bin holds the tokens, .idx the lengths of the documents.
It is written and read here because Megatron-core writes in place and trusts what it reads. Ours appear whole or not
at all, and everything is checked before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geotrain.config import Block, ConfigError, PositiveInt, parse
from geotrain.files import sync

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document bounds
# Megatron's codes of the types that tokens can have.
_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
_HASHED_TOKENS = 1 << 24  # tokens read at a time when a file is verified


class DataError(ValueError):
    """Input text or a prepared data set is wrong. Says which file, where in it, and what to do."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Type of the ids in a .bin file. Megatron's limit, so that its tools would choose the same type."""
    return _DTYPES[8] if vocab_size < 65500 else _DTYPES[4]


def _pair(prefix: str | Path) -> tuple[Path, Path]:
    """(.bin, .idx). The ending is appended, since `with_suffix` would cut a prefix that has a dot in it."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


class TokenWriter:
    """Writes documents to `prefix`.bin and `prefix`.idx. `close()` gives both their names; it replaces an old pair.

    A context manager: an exception inside discards what was written.
    lengths: tokens of each document so far. digest: sha256 of the .bin file's content so far.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        """vocab_size: all ids must be below it. Raises DataError if the folder cannot be written."""
        self.prefix, self.vocab_size, self.dtype = prefix, vocab_size, token_dtype(vocab_size)
        self.lengths: list[int] = []
        self.digest = hashlib.sha256()
        self._final, self._closed = _pair(prefix), False
        self._temporary = tuple(path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in self._final)
        try:
            self._final[0].parent.mkdir(parents=True, exist_ok=True)
            self._data = self._temporary[0].open("wb")
        except OSError as error:
            raise DataError(f"{prefix}: cannot be written: {error.strerror}") from None

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
        try:
            self._data.write(content)
        except OSError as error:
            self.discard()
            raise DataError(f"{self.prefix}: writing failed: {error.strerror}; free some space") from None
        self.digest.update(content)
        self.lengths.append(tokens.size)

    def close(self) -> None:
        """Make both files durable and give them their names. Raises DataError, leaving nothing behind."""
        if self._closed:
            return
        try:
            if not self.lengths:
                raise DataError(f"{self.prefix}: no document was added; an empty token file is of no use")
            self._data.close()
            lengths = np.array(self.lengths, "<i4")
            begins = (np.cumsum(lengths, dtype="<i8") - lengths) * self.dtype.itemsize
            # The format has bounds because Megatron's documents may have several sequences; ours have one each.
            bounds = np.arange(lengths.size + 1, dtype="<i8")
            code = next(code for code, dtype in _DTYPES.items() if dtype == self.dtype)
            with self._temporary[1].open("wb") as index:
                index.write(_HEADER.pack(_MAGIC, 1, code, lengths.size, bounds.size))
                index.writelines(array.tobytes() for array in (lengths, begins, bounds))
            # Contents first: otherwise a power failure could leave a file with its name and without its content.
            for path in self._temporary:
                sync(path)
            # An old .idx beside a new .bin would be a mixture. Without .idx there is no data set: a crash between the
            # two renames leaves none.
            self._final[1].unlink(missing_ok=True)
            for temporary, final in zip(self._temporary, self._final, strict=True):
                temporary.replace(final)
        except OSError as error:
            raise DataError(f"{self.prefix}: writing failed: {error.strerror}; free some space") from None
        finally:
            self.discard()

    def discard(self) -> None:
        """Drop what was written. After `close()` there is nothing left to drop."""
        self._closed = True
        with contextlib.suppress(OSError):  # a full disk may fail again when buffers are flushed
            self._data.close()
        for path in self._temporary:
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

    tokens: 1-D, uint16 or int32, all documents one after another. Mapped into memory, so that a file larger than
    memory can be read and ranks of a host share its pages.
    document_ends: 1-D int64; document i is tokens[document_ends[i-1] : document_ends[i]].
    """

    tokens: npt.NDArray[Any]
    document_ends: npt.NDArray[np.int64]


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
        raise DataError(f"{index}: tells of no document; prepare the data again")
    lengths = np.fromfile(index, "<i4", sequences, offset=_HEADER.size).astype(np.int64)
    bounds = np.fromfile(index, "<i8", bound_count, offset=_HEADER.size + sequences * (4 + 8))
    if bounds[-1] != sequences:
        raise DataError(f"{index}: its last document does not end with the file: it is damaged; copy it again")
    if bounds[0] != 0 or (bounds[1:] < bounds[:-1]).any() or (lengths < 0).any():
        raise DataError(f"{index}: its documents are not in order: the file is damaged; prepare the data again")
    dtype = _DTYPES[code]
    count, rest = divmod(data.stat().st_size, dtype.itemsize)
    if rest:
        raise DataError(
            f"{data}: its size is no multiple of {dtype.itemsize} bytes, so it is truncated; copy it again"
        )
    if int(lengths.sum()) != count:
        raise DataError(
            f"{data} holds {count} tokens but {index} tells of {int(lengths.sum())}: "
            "the two do not belong together, or the copy is truncated; copy or prepare both again"
        )
    ends = np.concatenate(([0], np.cumsum(lengths)))[bounds[1:]]
    return TokenFile(np.memmap(data, dtype=dtype, mode="r"), ends)


class Manifest(Block):
    """`<prefix>.json`: describes a .bin/.idx pair.

    text_bytes: UTF-8 size of the text from which the tokens were made. end_of_document: id after each document.
    dtype: of the ids, as NumPy names it. sha256: digest of the .bin file.
    tokenizer: the tokenizer's folder, relative to the manifest.
    """

    tokens: PositiveInt
    documents: PositiveInt
    text_bytes: PositiveInt
    vocab_size: PositiveInt
    end_of_document: int
    dtype: str
    sha256: str
    tokenizer: str


def manifest_path(prefix: Path) -> Path:
    """Where the manifest of a .bin/.idx pair lies."""
    return prefix.with_name(prefix.name + ".json")


def read_manifest(prefix: Path) -> Manifest:
    """The manifest of a prepared data set. Raises DataError."""
    path = manifest_path(prefix)
    try:
        return parse(Manifest, json.loads(path.read_text()), str(path))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; `geotrain prepare` writes it beside the .bin and .idx files"
        ) from None
    except (ConfigError, ValueError) as error:
        raise DataError(f"{path}: damaged; prepare the data again ({error})") from None


def open_dataset(prefix: Path, model_vocab_size: int, verify: bool = False) -> tuple[Manifest, TokenFile]:
    """Open a prepared data set and check it against its manifest and the model's vocabulary.

    verify: also read the whole file and compare its digest (about a gigabyte a second).
    Raises DataError: something is missing, damaged, or was prepared for a larger vocabulary.
    """
    manifest = read_manifest(prefix)
    file = open_tokens(prefix)
    found = (len(file.tokens), len(file.document_ends), file.tokens.dtype.name)
    stated = (manifest.tokens, manifest.documents, manifest.dtype)
    if found != stated:
        raise DataError(
            f"{prefix}: the .bin/.idx pair has {found[0]} tokens ({found[2]}) in {found[1]} documents, its manifest "
            f"states {stated[0]} ({stated[2]}) in {stated[1]}; they do not belong together: prepare the data again"
        )
    if manifest.vocab_size > model_vocab_size:
        raise DataError(
            f"{prefix}: prepared with a tokenizer of {manifest.vocab_size} ids, but the model's vocab_size is "
            f"{model_vocab_size}; raise the model's vocab_size or prepare the data with another tokenizer"
        )
    if verify:
        digest = hashlib.sha256()
        for start in range(0, len(file.tokens), _HASHED_TOKENS):
            digest.update(file.tokens[start : start + _HASHED_TOKENS].tobytes())
        if digest.hexdigest() != manifest.sha256:
            raise DataError(
                f"{prefix}.bin: its content does not match the digest in its manifest; prepare the data again"
            )
    return manifest, file
