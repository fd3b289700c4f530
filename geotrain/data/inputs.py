"""Finds the input files of `prepare`, and says of every other file in the way why it is not read."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.filesize import decimal

from geotrain.data.hf_datasets import arrow_files, is_hf_dataset
from geotrain.data.readers import UnreadableError, ending
from geotrain.data.tokens import DataError

SUPPORTED = ".txt, .jsonl, .ndjson, each also .gz, .zst, .bz2, .xz; .json.gz and its like; .parquet"
_NAMES_AT_MOST, _REASONS_AT_MOST = 3, 12  # in a line; in lines


def find_inputs(patterns: Sequence[str], passed_over: list[tuple[Path, str]] | None = None) -> list[Path]:
    """Find the input files that files, folders, glob patterns and Hugging Face data sets (`arrow_files`) name.

    In the order of the patterns, sorted within each, and each file once, by the first of its names. Sorted, so that
    the output does not depend on the file system's order; those of a data set have an order of their own. In folders
    links are followed and hidden names left out.
    passed_over: a list to which the files and folders that are not read are appended, each with the reason.
    Raises DataError: nothing found, a file of an unsupported kind was named, or a folder cannot be searched.
    """
    files: dict[tuple[int, int], Path] = {}
    passed_over = [] if passed_over is None else passed_over
    for pattern in patterns:
        found = [(p, "") for p in arrow_files(pattern)] if is_hf_dataset(pattern) else list(_named(pattern))
        if all(why for _, why in found):
            there = f"; {found[0][0]}: {found[0][1]}" if found else ""
            raise DataError(f"{pattern}: no such file, or no file in it that is read ({SUPPORTED}){there}")
        for path, why in found:
            if not why and files.setdefault(_identity(path), path) != path:
                why = "another name of a file that is read"
            if why:
                passed_over.append((path, why))
    return list(files.values())


def describe(files: Sequence[Path], passed_over: Sequence[tuple[Path, str]]) -> list[str]:
    """Describe in a few lines what is read, what is not and why, and what may be there twice."""

    def some(paths: Sequence[Path]) -> str:
        more = len(paths) - _NAMES_AT_MOST
        return ", ".join(map(str, paths[:_NAMES_AT_MOST])) + (f" and {more:,} more" if more > 0 else "")

    kinds = Counter("".join(ending(path)) for path in files).most_common()
    size = decimal(sum(path.stat().st_size for path in files))
    lines = [f"reading {size} in {', '.join(f'{count:,} {kind}' for kind, count in kinds)}"]
    reasons = dict[str, list[Path]]()
    for path, why in passed_over:
        named = why in reasons or len(reasons) < _REASONS_AT_MOST
        reasons.setdefault(why if named else "of other kinds", []).append(path)
    lines += [f"not read, {why}: {some(paths)}" for why, paths in reasons.items()]
    contents = [str(path).removesuffix(ending(path)[1]) for path in files]
    counts = Counter(contents)
    if twice := [path for path, content in zip(files, contents, strict=True) if counts[content] > 1]:
        lines.append(f"all read, though by their names they hold the same: {some(twice)}")
    return lines


def _named(pattern: str) -> Iterator[tuple[Path, str]]:
    """Yield the files that one pattern names, each with why it is not read, or ""."""
    matches = glob.glob(pattern, recursive=True)  # noqa: PTH207 (as a shell does: through links, no hidden names)
    for path in sorted(map(Path, [pattern] if Path(pattern).exists() else matches)):
        if path.is_dir():
            yield from sorted(_in_folder(path))
        elif why := _unsupported(path):
            raise DataError(f"{path}: {why}; supported: {SUPPORTED}")
        else:
            yield path, ""


def _in_folder(top: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder likewise; a folder that is not searched stands for those in it."""

    def unreadable(error: OSError) -> None:
        raise UnreadableError(f"{error.filename}: cannot be searched: {error.strerror or error}")

    searched: dict[tuple[int, int], Path] = {}
    for where, folders, names in os.walk(top, onerror=unreadable, followlinks=True):
        folder = Path(where)
        if searched.setdefault(_identity(folder), folder) != folder:  # links may lead round in a circle
            yield folder, "another name of a folder that is searched"
            folders.clear()
            continue
        yield from ((folder / name, "hidden") for name in (*folders, *names) if name.startswith("."))
        yield from ((folder / name, _unsupported(folder / name)) for name in names if not name.startswith("."))
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def _unsupported(path: Path) -> str:
    """Say why a file is of no kind that is read, or ""."""
    kind, packed = ending(path)
    if not path.is_file():
        return "a link to nothing" if path.is_symlink() else "no file"
    if kind in (".txt", ".jsonl", ".ndjson") or (kind, packed) == (".parquet", "") or (kind == ".json" and packed):
        return ""
    hint = "; where each line is an object, name it .jsonl" if kind == ".json" else ""
    return f"unsupported kind of file{f' ({kind}{packed})' if kind or packed else ''}{hint}"


def _identity(path: Path) -> tuple[int, int]:
    """What a file or folder has in common under all its names."""
    status = path.stat()
    return status.st_dev, status.st_ino
