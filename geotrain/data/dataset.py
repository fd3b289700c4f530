"""Prepared data sets: token files and the manifest that describes them."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from geotrain.common.files import whole_file, write_whole
from geotrain.config import Block, ConfigError, DataConfig, PositiveInt, parse
from geotrain.data.remote import BlockCache, RemoteTokens, default_cache_folder, is_remote, open_cache, read_whole
from geotrain.data.tokens import BlockChecksums, DataError, VerifiedTokens, open_tokens

SPLITS = ("train", "validation")
_HASHED_TOKENS = 1 << 24  # tokens read at a time when a file is verified


class Shard(Block):
    """One of the .bin/.idx pairs of a sharded data set. prefix: relative to the folder of the set's manifest."""

    prefix: str
    tokens: PositiveInt
    sha256: str


class Manifest(Block):
    """Describes a .bin/.idx pair; lies at `<prefix>.json`.

    text_bytes: UTF-8 size of the text from which the tokens were made. end_of_document: id after each document; None:
    they do not all end with the same. begin_of_document: id before each; None: there is none. dtype: of the ids, as
    NumPy names it. sha256: digest of the .bin file.
    tokenizer: the tokenizer's folder, relative to the manifest; None: not known. tokenizer_sha256: its fingerprint
    (`geotrain.data.tokenizer`); None: not known. checksums: whether `<prefix>.crc` has those of the .bin's blocks
    (`BlockChecksums`), with which they are compared when read. shards: the pairs whose tokens, one after another, are
    the data set's; it has no pair of its own then, and sha256 is of their digests.
    """

    tokens: PositiveInt
    documents: PositiveInt
    text_bytes: PositiveInt | None
    vocab_size: PositiveInt
    end_of_document: int | None
    dtype: str
    sha256: str
    tokenizer: str | None
    tokenizer_sha256: str | None = None
    begin_of_document: int | None = None
    checksums: bool = False
    shards: tuple[Shard, ...] = ()


def manifest_path(prefix: Path) -> Path:
    """Path of the manifest of a .bin/.idx pair."""
    return prefix.with_name(prefix.name + ".json")


def read_manifest(prefix: str | Path) -> Manifest:
    """Read the manifest of a prepared data set. Raises DataError."""
    where = f"{prefix}.json"
    try:
        content = read_whole(where) if is_remote(prefix) else Path(where).read_bytes()
        return parse(Manifest, json.loads(content), where)
    except OSError as error:
        raise DataError(
            f"{where}: cannot be read: {error.strerror}; `geotrain prepare` writes it beside .bin and .idx, "
            "`geotrain adopt` for a pair that Megatron's tools made"
        ) from None
    except DataError:
        raise
    except (ConfigError, ValueError) as error:
        raise DataError(f"{where}: damaged; prepare the data again ({error})") from None


class Tokens(Protocol):
    """The tokens of a data set as a read-only array: uint16 or int32, of which slices are read."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> npt.NDArray[Any]: ...


def open_dataset(
    prefix: str | Path, model_vocab_size: int, cache: BlockCache | None = None
) -> tuple[Manifest, Tokens]:
    """Open a prepared data set and check it against its manifest and the model's vocabulary.

    cache: for a data set at a URL. Raises DataError: something is missing, damaged, or was prepared for a larger
    vocabulary.
    """
    manifest = read_manifest(prefix)
    if manifest.vocab_size > model_vocab_size:
        raise DataError(
            f"{prefix}: prepared with a tokenizer of {manifest.vocab_size} ids, but the model's vocab_size is "
            f"{model_vocab_size}; raise the model's vocab_size or prepare the data with another tokenizer"
        )
    if manifest.shards:
        return manifest, JoinedTokens(list(_open_shards(prefix, manifest, model_vocab_size, cache)))
    if is_remote(prefix):
        cache = cache or open_cache(default_cache_folder(), 0)
        stated = manifest.tokens, manifest.dtype, manifest.sha256, manifest.checksums
        return manifest, RemoteTokens(str(prefix), *stated, cache)
    file = open_tokens(prefix)
    found = (len(file.tokens), file.documents, file.tokens.dtype.name)
    if found != (manifest.tokens, manifest.documents, manifest.dtype):
        raise DataError(
            f"{prefix}: the .bin/.idx pair has {found[0]} tokens ({found[2]}) in {found[1]} documents, its manifest "
            f"states {manifest.tokens} ({manifest.dtype}) in {manifest.documents}; they do not belong together: "
            "prepare the data again"
        )
    return manifest, VerifiedTokens(file.prefix, file.tokens) if manifest.checksums else file.tokens


def _open_shards(
    prefix: str | Path, manifest: Manifest, model_vocab_size: int, cache: BlockCache | None
) -> Iterator[Tokens]:
    folder = str(prefix).rpartition("/")[0] or "."
    for shard in manifest.shards:
        own, tokens = open_dataset(f"{folder}/{shard.prefix}", model_vocab_size, cache)
        if (own.tokens, own.sha256, own.dtype) != (shard.tokens, shard.sha256, manifest.dtype):
            raise DataError(
                f"{folder}/{shard.prefix}: is other data than {prefix}.json was made of; run `geotrain merge` again"
            )
        yield tokens


class JoinedTokens:
    """Arrays of tokens of one type, one after another, as one: `len` and slices."""

    def __init__(self, parts: Sequence[Tokens]) -> None:
        self._parts = parts
        self._begins = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        start, stop, _ = part.indices(len(self))
        slices = [tokens[first:last] for tokens, first, last in self._within(start, stop)]
        return slices[0] if len(slices) == 1 else np.concatenate(slices or [self._parts[0][:0]])

    def fetch_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to fetch tokens start ≤ i < stop of remote parts. Does not wait; errors show when reading."""
        for start, stop in ranges:
            for tokens, first, last in self._within(start, stop):
                if isinstance(tokens, RemoteTokens):
                    tokens.fetch_ahead([(first, last)])

    def _within(self, start: int, stop: int) -> Iterator[tuple[Tokens, int, int]]:
        """Find the parts in which these tokens lie, each with its own numbers of them."""
        number = bisect_right(self._begins, start) - 1
        while start < stop:
            begin, end = self._begins[number], min(self._begins[number + 1], stop)
            yield self._parts[number], start - begin, end - begin
            number, start = number + 1, end


def training_digest(data: DataConfig) -> str:
    """Digest a run's training data: of one set, that in its manifest; of several, the digest of theirs, in order.

    Raises DataError.
    """
    digests = [read_manifest(each.prefix).sha256 for each in data.train]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def local_files(prefix: str) -> list[str]:
    """List the files of a data set that must be on a machine that reads it: none of one at a URL.

    If the manifest is not here, the files of a single pair.
    """
    if is_remote(prefix):
        return []
    pairs, suffixes = [prefix], [".bin", ".idx"]
    with suppress(DataError):
        pairs = [f"{Path(prefix).parent / shard.prefix}" for shard in read_manifest(prefix).shards] or pairs
        suffixes += [".crc"] if all(read_manifest(pair).checksums for pair in pairs) else []
    return [f"{prefix}.json", *(f"{pair}{suffix}" for pair in pairs for suffix in suffixes)]


def end_of_document(data: DataConfig) -> int | None:
    """Find the id behind which a run's attention begins anew; None: it does not. Raises DataError: no such id."""
    return None if data.attention == "sample" or not data.train else end_of_documents(data.prefixes)


def end_of_documents(prefixes: Sequence[str]) -> int:
    """Find the id with which all documents of these data sets end. Raises DataError: there is no such id."""
    found = {prefix: read_manifest(prefix).end_of_document for prefix in prefixes}
    first = found[prefixes[0]]
    for prefix, end in found.items():
        if end is None:
            raise DataError(
                f"{prefix}: its documents do not all end with the same id, as data.attention = 'document' needs; "
                "prepare the data again (Megatron's tools: with --append-eod), or use 'sample'"
            )
        if end != first:
            raise DataError(
                f"{prefix}: its documents end with the id {end}, those of {prefixes[0]} with {first}; "
                "data.attention = 'document' needs sets of one tokenizer"
            )
    assert first is not None
    return first


def adopt(prefix: Path, tokenizer: Path | None = None) -> Manifest:
    """Write the manifest of a .bin/.idx pair that has none, such as Megatron-LM's tools make, and return it.

    Reads the whole pair. tokenizer: folder of the one that made the ids, for the vocabulary's size; None: the largest
    id decides. Raises DataError, OutputError; then nothing is written.
    """
    path = manifest_path(prefix)
    if path.exists():
        raise DataError(f"{path} is there already; remove it to have it written anew")
    file = open_tokens(prefix)
    digest, checksums, largest, ids_at_ends, start = hashlib.sha256(), BlockChecksums(), 0, set[int](), 0
    for ends in file.all_document_ends():
        ends_here = ends[np.diff(ends, prepend=start) > 0]  # Megatron's tools may write empty documents
        for first in range(0, len(ends_here), _HASHED_TOKENS):
            ids_at_ends.update(np.unique(file.tokens[ends_here[first : first + _HASHED_TOKENS] - 1]).tolist())
        start = int(ends[-1])
    for start in range(0, len(file.tokens), _HASHED_TOKENS):
        part = file.tokens[start : start + _HASHED_TOKENS]
        if part.min() < 0:
            raise DataError(
                f"{prefix}.bin: token {start + int(part.argmin())} is {part.min()}, no id; is it of text?"
            )
        largest = max(largest, int(part.max()))
        digest.update(part.tobytes())
        checksums.update(part.tobytes())
    vocab_size, made_by = largest + 1, None
    if tokenizer is not None:
        from geotrain.data.tokenizer import describe  # slow to import

        vocab_size, made_by = describe(tokenizer)
        if largest >= vocab_size:
            raise DataError(
                f"{prefix}: holds the id {largest}, but the tokenizer in {tokenizer} has ids below {vocab_size}; is "
                "it the one that made the tokens?"
            )
    manifest = Manifest(
        tokens=len(file.tokens),
        documents=file.documents,
        text_bytes=None,
        vocab_size=vocab_size,
        end_of_document=ids_at_ends.pop() if len(ids_at_ends) == 1 else None,
        dtype=file.tokens.dtype.name,
        sha256=digest.hexdigest(),
        tokenizer=None if tokenizer is None else os.path.relpath(tokenizer, path.parent),
        checksums=True,
        tokenizer_sha256=made_by,
    )
    with whole_file(Path(f"{prefix}.crc"), "wb") as crc:  # before the manifest, which says that it is there
        crc.write(checksums.content())
    write_whole(path, manifest.model_dump_json(indent=1) + "\n")
    return manifest
