"""A data set that several hosts wrote, each a shard: divides the input, and merges the shards by a manifest.

    <out>/shard-0001-of-0008/train.bin …      one folder a host, by `geotrain prepare … --shard 1/8`
    <out>/train.json, <out>/tokenizer         by `geotrain merge <out>`, which moves no token

The shards' tokens in the order of their numbers are those that a single host would have written.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from geotrain.common.files import write_whole
from geotrain.data.dataset import SPLITS, Manifest, Shard, manifest_path, open_dataset, read_manifest
from geotrain.data.tokens import DataError

_FOLDER = re.compile(r"shard-(\d{4,})-of-(\d{4,})")
INPUTS = "inputs.txt"  # in a shard's folder: what all shards must have in common


def parse_shard(text: str) -> tuple[int, int]:
    """Parse "3/8" into (number from 1, shards in all). Raises DataError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise DataError(f"--shard {text}: write which of how many, as 3/8, counted from 1")
    return int(found[1]), int(found[2])


def shard_folder(out: Path, number: int, shards: int) -> Path:
    return out / f"shard-{number:04d}-of-{shards:04d}"


def files_of_shard(files: Sequence[Path], number: int, shards: int) -> list[Path]:
    """Select the files of one shard: those whose middle lies in its part of all bytes.

    Every host must find the same files. Raises DataError: there are none.
    """
    sizes = [path.stat().st_size for path in files]
    total, before, mine = max(sum(sizes), 1), 0, []
    for path, size in zip(files, sizes, strict=True):
        if min((before + size / 2) * shards // total, shards - 1) == number - 1:
            mine.append(path)
        before += size
    if not mine:
        raise DataError(
            f"--shard {number}/{shards}: no file falls to it, since files are not divided: {len(files)} are too few "
            "or too unequal; use fewer shards or smaller files"
        )
    return mine


def describe_inputs(
    files: Sequence[Path], tokenizer_json: str, around: tuple[int | None, int], validation_fraction: float
) -> str:
    """Describe, as text, what must be the same for all shards. around: ids before and after each document."""
    names = "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
    return (
        f"{len(files)} input files: {hashlib.sha256(names.encode()).hexdigest()}\n"
        f"tokenizer: {hashlib.sha256(tokenizer_json.encode()).hexdigest()}, documents between {around}\n"
        f"validation share: {validation_fraction}\n"
    )


def merge(out: Path) -> dict[str, Manifest]:
    """Write the manifests that make one data set of the shards in a folder. Returns them by split.

    Raises DataError naming the shards that are missing or do not belong together; then nothing is written.
    """
    found = {path: match for path in sorted(out.glob("shard-*")) if (match := _FOLDER.fullmatch(path.name))}
    totals = {int(match[2]) for match in found.values()}
    if len(totals) != 1:
        held = f"shards of {' and of '.join(map(str, sorted(totals)))}" if totals else "no shards"
        raise DataError(f"{out}: holds {held}; every host must prepare its part of the same number: --shard I/N")
    (total,) = totals
    folders = [shard_folder(out, number, total) for number in range(1, total + 1)]
    if missing := [folder.name for folder in folders if not (folder / INPUTS).is_file()]:
        raise DataError(f"{out}: not there yet: {', '.join(missing[:3])} ({len(missing)} of {total} shards)")
    common = (folders[0] / INPUTS).read_text()
    for folder in folders:
        if (folder / INPUTS).read_text() != common:
            raise DataError(
                f"{folder}: was made of other files, with another tokenizer or another validation share than "
                f"{folders[0].name}; prepare it again like that"
            )
    manifests = {}
    for split in SPLITS:
        parts = {
            folder: read_manifest(folder / split) for folder in folders if manifest_path(folder / split).exists()
        }
        if not parts:
            continue
        for folder, part in parts.items():
            open_dataset(folder / split, part.vocab_size)  # whether it is whole
        first = next(iter(parts.values()))
        shards = tuple(
            Shard(prefix=f"{folder.name}/{split}", tokens=part.tokens, sha256=part.sha256)
            for folder, part in parts.items()
        )
        manifests[split] = first.model_copy(
            update={
                "tokens": sum(part.tokens for part in parts.values()),
                "documents": sum(part.documents for part in parts.values()),
                "text_bytes": sum(part.text_bytes or 0 for part in parts.values()),
                "sha256": hashlib.sha256("\n".join(part.sha256 for part in shards).encode()).hexdigest(),
                "checksums": False,
                "shards": shards,
            }
        )
    if (folders[0] / "tokenizer").is_dir():
        shutil.copytree(folders[0] / "tokenizer", out / "tokenizer", dirs_exist_ok=True)
    for split, manifest in manifests.items():
        write_whole(manifest_path(out / split), manifest.model_dump_json(indent=1) + "\n")
    return manifests
