"""Tokenizers: any fast Hugging Face tokenizer from a folder, a byte-level BPE that we train, or plain bytes.

The latter two become a `tokenizer.json` like any other, so that `transformers.AutoTokenizer` loads the folder that is
exported with the model.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from geotrain.common.files import git_lfs_pointer
from geotrain.data.tokens import DataError

END_OF_DOCUMENT = "<|endoftext|>"
VOCAB_MULTIPLE = 8  # so that tensor parallelism up to 8 splits the embedding evenly
SMALLEST_BPE = 264  # 256 bytes, the end of a document, rounded up
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "vocab.json", "merges.txt",
)  # fmt: skip


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as `prepare` needs it.

    json: content of tokenizer.json. vocab_size: largest id + 1. end_of_document: id that is put after each document.
    files: name → content of the files in its folder. begin_of_document: id that is put before each; None: none is.
    """

    json: str
    vocab_size: int
    end_of_document: int
    files: dict[str, bytes]
    begin_of_document: int | None = None

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, and only those, from one folder to another. Raises DataError: there are none."""
    names = [name for name in _FILES if (source / name).is_file()]
    if not names:
        raise DataError(f"{source}: no tokenizer here; expected a folder with tokenizer.json")
    for name in names:
        shutil.copyfile(source / name, target / name)


def finish_export(folder: Path, max_positions: int) -> dict[str, int | None]:
    """Complete the tokenizer of an exported model; returns the ids of its bos, eos and pad tokens, by config key.

    Its `tokenizer_config.json` then says how many tokens the model takes (`model_max_length`, of max_positions) and,
    where it was silent, that batches are padded with the eos token, and on the left, as generation needs. Raises
    DataError.
    """
    path = folder / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    loaded = _load(folder)
    settings["model_max_length"] = max_positions
    settings.setdefault("padding_side", "left")
    if loaded.pad_token is None and loaded.eos_token is not None:
        settings["pad_token"] = loaded.pad_token = loaded.eos_token
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    return {f"{kind}_token_id": getattr(loaded, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}


def describe(folder: Path) -> tuple[int, str | None]:
    """Compute the largest id + 1, and the fingerprint, of the tokenizer in a folder. A tokenizer without a fast
    implementation has no fingerprint. Raises DataError."""
    path = folder / "tokenizer.json"
    if path.is_file():
        content = path.read_bytes()
    elif (loaded := _load(folder)).is_fast:
        content = loaded.backend_tokenizer.to_str().encode()
    else:
        return max(loaded.get_vocab().values()) + 1, None
    try:
        vocabulary = tokenizers.Tokenizer.from_str(content.decode()).get_vocab()
    except Exception as error:  # the library raises no type of its own
        raise DataError(f"{path}: {git_lfs_pointer(path) or f'not a tokenizer: {error}'}") from None
    return max(vocabulary.values(), default=-1) + 1, fingerprint(content)


def fingerprint(tokenizer_json: bytes) -> str:
    """Digest how the content of a tokenizer.json makes ids of text (sha256). Truncation, padding, templates and
    decoding are left out, since `prepare` does not use them."""
    read = json.loads(tokenizer_json)
    kept = {key: read.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def load_tokenizer(
    folder: Path, end_of_document: str | None = None, begin_of_document: str | None = None
) -> Tokenizer:
    """Read a Hugging Face tokenizer's folder. end_of_document: a token; default: the tokenizer's eos token.
    begin_of_document: a token; default: none.

    Raises DataError: no tokenizer there, not one with a fast implementation, or it lacks one of the two tokens.
    """
    loaded = _load(folder)
    if not loaded.is_fast:
        raise DataError(f"{folder}: {type(loaded).__name__} has no tokenizer.json; convert it to a fast tokenizer")
    token = end_of_document or loaded.eos_token
    if token is None:
        raise DataError(f"{folder}: the tokenizer has no eos token; name the token that ends a document")
    vocabulary = loaded.get_vocab()
    for each, does in ((token, "end"), (begin_of_document, "begin")):
        if each is not None and each not in vocabulary:
            raise DataError(f"{folder}: the tokenizer has no token {each!r} to {does} documents with")
    begin = None if begin_of_document is None else vocabulary[begin_of_document]
    files = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
    text = loaded.backend_tokenizer.to_str()
    files.setdefault("tokenizer.json", text.encode())
    # Not the number of tokens: ids may have gaps, and the embedding needs a row for the largest one.
    return Tokenizer(text, max(vocabulary.values()) + 1, vocabulary[token], files, begin)


def _load(folder: Path) -> Any:
    """Load a Hugging Face tokenizer, from the folder only: nothing is fetched from the network."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such tokenizer folder")
    for name in _FILES:
        if pointer := git_lfs_pointer(folder / name):
            raise DataError(f"{folder / name}: {pointer}")
    from transformers import AutoTokenizer  # slow to import, and not needed for bytes or a BPE

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises whatever its parsers raise
        reason = str(error).strip().splitlines()
        raise DataError(f"{folder}: not a tokenizer: {reason[0] if reason else type(error).__name__}") from None


def byte_tokenizer() -> Tokenizer:
    """Make the tokenizer of bytes: ids 0..255 are those of the UTF-8 text, 256 ends a document, 257..263 are
    spare."""
    # The character that stands for each byte in a byte-level vocabulary (GPT-2's table): printable Latin-1 bytes
    # stand for themselves; the others take the characters from U+0100 on, in order.
    printable, spare = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}, iter(range(0x100, 0x200))
    vocabulary = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([_special(END_OF_DOCUMENT)])
    return _finished(tokenizer)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE. The result has at most `vocab_size` ids, rounded up to a multiple of 8.

    Raises DataError: vocab_size is too small.
    """
    if vocab_size < SMALLEST_BPE:
        raise DataError(f"a byte-level BPE needs a vocabulary of at least {SMALLEST_BPE}, not {vocab_size}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_special(END_OF_DOCUMENT)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so that any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _finished(tokenizer)


def _finished(tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    """Round the vocabulary up to a multiple of VOCAB_MULTIPLE with reserved tokens, and make the folder's files."""
    tokenizer.decoder = decoders.ByteLevel()
    used = tokenizer.get_vocab_size()
    spare = -used % VOCAB_MULTIPLE
    tokenizer.add_special_tokens([_special(f"<|reserved_{i}|>") for i in range(spare)])
    text = tokenizer.to_str(pretty=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    config = json.dumps({**settings, "clean_up_tokenization_spaces": False}, indent=2) + "\n"
    files = {"tokenizer.json": text.encode(), "tokenizer_config.json": config.encode()}
    return Tokenizer(text, used + spare, tokenizer.get_vocab()[END_OF_DOCUMENT], files)


def _special(text: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, special=True, normalized=False)
