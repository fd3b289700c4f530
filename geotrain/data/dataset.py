"""Prepared data sets: token files and the manifest that describes them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np

from geotrain.config import Block, ConfigError, DataConfig, PositiveInt, parse
from geotrain.data.tokens import DataError, TokenFile, open_tokens
from geotrain.files import write_whole

_HASHED_TOKENS = 1 << 24  # tokens read at a time when a file is verified


class Manifest(Block):
    """`<prefix>.json`: describes a .bin/.idx pair.

    text_bytes: UTF-8 size of the text from which the tokens were made. end_of_document: id after each document; None:
    they do not all end with the same. dtype: of the ids, as NumPy names it. sha256: digest of the .bin file.
    tokenizer: the tokenizer's folder, relative to the manifest. None: not known.
    """

    tokens: PositiveInt
    documents: PositiveInt
    text_bytes: PositiveInt | None
    vocab_size: PositiveInt
    end_of_document: int | None
    dtype: str
    sha256: str
    tokenizer: str | None


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
            f"{path}: cannot be read: {error.strerror}; `geotrain prepare` writes it beside the .bin and .idx files, "
            "`geotrain adopt` for a pair that Megatron's tools made"
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
    found = (len(file.tokens), file.documents, file.tokens.dtype.name)
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
        for _ in file.all_document_ends():
            pass
        digest = hashlib.sha256()
        for start in range(0, len(file.tokens), _HASHED_TOKENS):
            digest.update(file.tokens[start : start + _HASHED_TOKENS].tobytes())
        if digest.hexdigest() != manifest.sha256:
            raise DataError(
                f"{prefix}.bin: its content does not match the digest in its manifest; prepare the data again"
            )
    return manifest, file


def training_digest(data: DataConfig) -> str:
    """Digest of a run's training data: of one set, that in its manifest; of several, the digest of theirs, in order.

    Raises DataError."""
    digests = [read_manifest(Path(each.prefix)).sha256 for each in data.train]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def end_of_document(data: DataConfig) -> int | None:
    """The id behind which a run's attention begins anew; None: it does not. Raises DataError: the data do not say."""
    if data.attention == "sample":
        return None
    found = {prefix: read_manifest(Path(prefix)).end_of_document for prefix in data.prefixes}
    first = found[data.train[0].prefix]
    for prefix, end in found.items():
        if end is None:
            raise DataError(
                f"{prefix}: its documents do not all end with the same id, as data.attention = 'document' needs; "
                "prepare the data again (Megatron's tools: with --append-eod), or use 'sample'"
            )
        if end != first:
            raise DataError(
                f"{prefix}: its documents end with the id {end}, those of {data.train[0].prefix} with {first}; "
                "data.attention = 'document' needs sets of one tokenizer"
            )
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
    digest, largest, ids_at_ends, start = hashlib.sha256(), 0, set[int](), 0
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
    vocab_size = largest + 1
    if tokenizer is not None:
        from geotrain.data.tokenizer import vocabulary_size  # slow to import

        vocab_size = vocabulary_size(tokenizer)
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
    )
    write_whole(path, manifest.model_dump_json(indent=1) + "\n")
    return manifest
