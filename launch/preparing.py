"""`geotrain prepare`: the choice of a tokenizer, a progress display, and what writes Megatron's files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from geotrain.config import ConfigError
from geotrain.data.prepare import prepare, training_texts
from geotrain.data.progress import progress_display
from geotrain.data.readers import find_inputs
from geotrain.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe


def prepare_files(
    inputs: Sequence[str],
    out: Path,
    tokenizer_folder: Path | None,
    bpe_size: int | None,
    use_bytes: bool,
    validation_fraction: float,
    text_key: str = "text",
    end_of_document: str | None = None,
    processes: int | None = None,
) -> None:
    """Raises ConfigError, DataError, OutputError; then nothing is written."""
    console = Console(stderr=True)
    files = find_inputs(inputs)
    tokenizer = _tokenizer(files, tokenizer_folder, bpe_size, use_bytes, text_key, end_of_document, console)
    from geotrain.inner.dataset import TokenWriter  # imports Megatron-core

    with progress_display(console) as progress:
        manifests = prepare(
            files,
            out,
            tokenizer,
            TokenWriter,
            text_key=text_key,
            validation_fraction=validation_fraction,
            processes=processes or len(os.sched_getaffinity(0)),
            progress=progress,
        )
    for split, manifest in manifests.items():
        console.print(f"{out / split}: {manifest.tokens:,} tokens in {manifest.documents:,} documents")


def _tokenizer(
    files: list[Path],
    folder: Path | None,
    bpe_size: int | None,
    use_bytes: bool,
    text_key: str,
    end_of_document: str | None,
    console: Console,
) -> Tokenizer:
    if sum((folder is not None, bpe_size is not None, use_bytes)) != 1:
        raise ConfigError("prepare: choose one of --tokenizer FOLDER, --train-bpe IDS and --bytes")
    if folder is not None:
        return load_tokenizer(folder, end_of_document)
    if bpe_size is not None:
        console.print(f"training a BPE of {bpe_size:,} ids…")
        return train_bpe(training_texts(files, text_key), bpe_size)
    return byte_tokenizer()
