"""Prepares a data set for `geotrain prepare`: chooses the tokenizer, shows progress, writes Megatron's files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from geotrain.common.files import check_replaceable
from geotrain.config import ConfigError
from geotrain.data.dataset import Manifest
from geotrain.data.inputs import describe, find_inputs
from geotrain.data.prepare import FEW_DOCUMENTS, Progress, prepare, training_texts, validation_share
from geotrain.data.progress import progress_display
from geotrain.data.readers import check_inputs
from geotrain.data.shards import INPUTS, parse_shard, shard_folder
from geotrain.data.tokenizer import byte_tokenizer, load_tokenizer, train_bpe


def prepare_files(
    inputs: Sequence[str],
    out: Path,
    tokenizer_folder: Path | None,
    bpe_size: int | None,
    use_bytes: bool,
    validation_fraction: float | None,
    text_key: str = "text",
    end_of_document: str | None = None,
    processes: int | None = None,
    overwrite: bool = False,
    strict: bool = False,
    shard: str | None = None,
    begin_of_document: str | None = None,
) -> dict[str, Manifest]:
    """Make a Megatron data set of text files; returns its manifests, by split.

    validation_fraction: None: `validation_share`. overwrite: replace a data set that is there. strict: a broken line
    or row is an error; otherwise such are passed over, and counted. shard: "3/8": only this part of the files.
    Raises ConfigError, DataError, OutputError; then nothing is written."""
    console = Console(stderr=True)
    passed_over = list[tuple[Path, str]]()
    files, part = find_inputs(inputs, passed_over), parse_shard(shard) if shard else (1, 1)
    folder = shard_folder(out, *part) if part[1] > 1 else out
    if any((folder / name).exists() for name in ("train.json", INPUTS)) and not overwrite:
        raise ConfigError(f"{folder} holds a data set already; --overwrite replaces it, another --out keeps both")
    if sum((tokenizer_folder is not None, bpe_size is not None, use_bytes)) != 1:
        raise ConfigError("prepare: choose one of --tokenizer FOLDER, --train-bpe IDS and --bytes")
    if tokenizer_folder is None and (end_of_document or begin_of_document):
        raise ConfigError("prepare: --end-of-document and --begin-of-document name tokens of a --tokenizer; give one")
    for line in describe(files, passed_over):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if validation_fraction is None:
        validation_fraction = validation_share(files, text_key)
        if not validation_fraction:
            console.print("a single document: none is held out for validation", style="yellow")
    if tokenizer_folder is not None:
        tokenizer = load_tokenizer(tokenizer_folder, end_of_document, begin_of_document)
    elif bpe_size is not None:
        check_inputs(files, text_key)  # what can be wrong with them, and with the output, costs no training
        check_replaceable(folder, "dataset")
        console.print(f"training a BPE of {bpe_size:,} ids…")
        tokenizer = train_bpe(training_texts(files, text_key, skip_broken=not strict), bpe_size)
    else:
        tokenizer = byte_tokenizer()

    last: Progress | None = None
    with progress_display(console) as shown:

        def progress(now: Progress) -> None:
            nonlocal last
            last = now
            shown(now)

        manifests = prepare(
            files,
            out,
            tokenizer,
            text_key=text_key,
            validation_fraction=validation_fraction,
            processes=processes or len(os.sched_getaffinity(0)),
            skip_broken=not strict,
            shard=part,
            progress=progress,
        )
    for split, manifest in manifests.items():
        console.print(f"{folder / split}: {manifest.tokens:,} tokens in {manifest.documents:,} documents")
    if last is not None and last.broken:
        warning = f"{last.broken:,} broken lines or rows were passed over; the first: {last.first_broken}"
        console.print(warning, style="yellow", highlight=False, markup=False, soft_wrap=True)
    held_out = manifests.get("validation")
    if held_out is not None and held_out.documents < FEW_DOCUMENTS:
        documents = held_out.documents + manifests["train"].documents
        warning = (
            f"only {held_out.documents} of {documents:,} documents are held out for validation (a hash of each text "
            f"decides): a loss on so few says little; give more text, or a larger --validation than "
            f"{validation_fraction:.2g}"
        )
        console.print(warning, style="yellow", highlight=False, markup=False, soft_wrap=True)
    return manifests
