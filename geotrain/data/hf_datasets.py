"""Hugging Face data sets as input files: the Arrow files in which the `datasets` package keeps them on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geotrain.data.tokens import DataError

PREFIX = "hf:"  # before the name of a data set that `datasets` finds by itself
URL = "hf://datasets/"  # the same, as a hub writes it
_SAVED = ("state.json", "dataset_dict.json")  # in a folder of `save_to_disk`: of a data set, of one with splits


def is_hf_dataset(pattern: str) -> bool:
    """Whether a pattern names a Hugging Face data set, for `arrow_files`."""
    return pattern.startswith(PREFIX) or any((Path(pattern) / name).is_file() for name in _SAVED)


def arrow_files(pattern: str) -> list[Path]:
    """Find the files of a data set's split, in its order.

    pattern: "hf:NAME[,CONFIG][:SPLIT]", or hf://datasets/NAME likewise, of what `datasets.load_dataset` finds, with
    HF_DATASETS_OFFLINE=1 in its cache only; or a folder that `save_to_disk` wrote, of several splits the split's own.
    Without a word it is the split "train". Raises DataError, also where the package is missing.
    """
    try:
        import datasets  # an extra, and slow to import
    except ImportError:
        raise DataError(f"{pattern}: a Hugging Face data set needs a package: pip install datasets") from None
    name, _, split = pattern.removeprefix(URL).removeprefix(PREFIX).partition(":")
    if pattern.startswith(PREFIX) and (name.startswith("//") or name.count("/") > 1):
        raise DataError(f"{pattern}: names no data set; write {URL}OWNER/NAME, with ,CONFIG or :SPLIT behind")
    name, _, config = name.partition(",")
    if "[" in split:
        raise DataError(f"{pattern}: a part of a split; name the whole split")
    try:
        found: Any
        if pattern.startswith(PREFIX):
            found = datasets.load_dataset(name, config or None, split=split or "train")
        else:
            found = datasets.load_from_disk(pattern)
    except Exception as error:  # whatever the library, its builders and the network raise
        reason = str(error).strip().splitlines()
        raise DataError(f"{pattern}: cannot be loaded: {reason[0] if reason else type(error).__name__}") from None
    if isinstance(found, dict):
        if "train" not in found:
            raise DataError(f"{pattern}: has no split 'train'; name the folder of one: {', '.join(found)}")
        found = found["train"]
    if not found.cache_files:
        raise DataError(f"{pattern}: is empty")
    return [Path(file["filename"]) for file in found.cache_files]
