"""What a prepared data set is: a .bin/.idx pair, read and written through two small interfaces, and its manifest.

The pair's format is Megatron's; what reads and writes it is handed in, so that nothing here imports Megatron.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from geotrain.config import Block, ConfigError, PositiveInt, parse

_HASHED_TOKENS = 1 << 24  # tokens read at a time when a file is verified


class DataError(ValueError):
    """Input text or a prepared data set is wrong. Says which file, where in it, and what to do."""


class TokenWriter(Protocol):
    """Writes `<prefix>.bin` and `<prefix>.idx`; neither exists before close() returns.

    discard() gives up and removes what was written so far; after close() it does nothing.
    """

    def add_document(self, ids: npt.NDArray[Any]) -> None: ...

    def close(self) -> None: ...

    def discard(self) -> None: ...


class TokenFile(Protocol):
    """A .bin/.idx pair, opened. document_ends[i] is the position after the last token of document i."""

    @property
    def tokens(self) -> npt.NDArray[Any]: ...

    @property
    def document_ends(self) -> npt.NDArray[Any]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


WriterFactory = Callable[[str, int], TokenWriter]  # (prefix, vocabulary size)
OpenTokens = Callable[[str], TokenFile]


class Manifest(Block):
    """`<prefix>.json`: what stands in a .bin/.idx pair.

    text_bytes: UTF-8 size of the text (tokens without the end-of-document ids stand for so many bytes).
    sha256: digest of the .bin file. tokenizer: the tokenizer's folder, relative to the manifest.
    """

    tokens: PositiveInt
    documents: PositiveInt
    text_bytes: PositiveInt
    vocab_size: PositiveInt
    end_of_document: int
    dtype: str
    sha256: str
    tokenizer: str


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Type of the ids in a .bin file; the limit is Megatron's."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def manifest_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def read_manifest(prefix: Path) -> Manifest:
    """Raises DataError."""
    path = manifest_path(prefix)
    try:
        return parse(Manifest, json.loads(path.read_text()), str(path))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; `geotrain prepare` writes it beside the .bin and .idx files"
        ) from None
    except (ConfigError, ValueError) as error:
        raise DataError(f"{path}: damaged; prepare the data again ({error})") from None


def open_dataset(
    prefix: Path, open_tokens: OpenTokens, model_vocab_size: int, verify: bool = False
) -> tuple[Manifest, TokenFile]:
    """Open a prepared data set and check it against its manifest and the model's vocabulary.

    verify: also read the whole file and compare its digest (about a gigabyte a second).
    Raises DataError: something is missing, damaged, or was prepared for a larger vocabulary.
    """
    manifest = read_manifest(prefix)
    try:
        file = open_tokens(str(prefix))
    except (OSError, ValueError) as error:
        raise DataError(str(error)) from None
    found = (len(file.tokens), len(file.document_ends), np.dtype(file.dtype).name)
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
    if verify and _digest(file.tokens) != manifest.sha256:
        raise DataError(
            f"{prefix}.bin: its content does not match the digest in its manifest; prepare the data again"
        )
    return manifest, file


def _digest(tokens: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(tokens), _HASHED_TOKENS):
        digest.update(tokens[start : start + _HASHED_TOKENS].tobytes())
    return digest.hexdigest()
