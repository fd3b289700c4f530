"""Reads input files as streams of raw blocks of bounded size, and parses blocks into documents.

Reading (decompression, cutting into lines) is sequential, and one process does it. Parsing needs nothing but the
block, so many processes can do it. Supported: .txt and .jsonl, each also .gz or .zst, .parquet, and Hugging Face data
sets, whose files are .arrow.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow
import pyarrow.parquet
import zstandard

from geotrain.data.hf_datasets import arrow_files, is_hf_dataset
from geotrain.data.tokens import DataError

BLOCK_BYTES = 1 << 20  # approximate size of a block; a longer .txt file becomes several documents
LINE_LIMIT_BYTES = 64 << 20  # a longer line of JSON is broken, since it would have to be held in memory whole
BLOCK_ROWS = 256  # rows of a parquet or Arrow file in a block
SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst", ".parquet")
_READ_BYTES = 1 << 20
_ZSTD_READ_BYTES = 1 << 14  # little: all that comes out of it is in memory at once, and may be many times as much
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class UnreadableError(DataError):
    """Raised where a disk or a network fails, whatever the file holds: what follows in it must not be passed over."""


@dataclass(frozen=True)
class TextBlock:
    """A part of one input file, not yet parsed.

    kind: what the items are. "text": one item, a document. "jsonl": lines, a JSON object each. "rows": documents,
    None for a null. "fault": one item, which says why the rest of the file cannot be read.
    first: number of the first line or row, from 1, for errors.
    position_bytes: how much of the file on disk has been read with this block, for the progress display.
    """

    path: str
    kind: Literal["text", "jsonl", "rows", "fault"]
    first: int
    items: tuple[bytes | None, ...]
    position_bytes: int


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Find the input files that files, folders, glob patterns and Hugging Face data sets (`arrow_files`) name.

    In the order of the patterns, sorted within each, and each file once. Sorted, so that the output does not depend
    on the file system's order; those of a data set have an order of their own. Raises DataError: nothing found, or a
    file of an unsupported kind was named.
    """
    found: list[Path] = []
    for pattern in patterns:
        if is_hf_dataset(pattern):
            found += arrow_files(pattern)
            continue
        path = Path(pattern)
        if path.is_dir():
            matches = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
        elif path.exists():
            matches = [path]
        else:
            within = Path(path.anchor)  # an absolute pattern is searched from its root
            matches = sorted(p for p in within.glob(str(path.relative_to(within))) if p.is_file())
        if not matches:
            raise DataError(f"{pattern}: no such file, or no file in it that ends in {', '.join(SUFFIXES)}")
        for match in matches:
            if not match.name.endswith(SUFFIXES):
                raise DataError(f"{match}: unsupported kind of file; supported: {', '.join(SUFFIXES)}")
        found += matches
    return list(dict.fromkeys(found))


def read_blocks(path: Path, text_key: str) -> Generator[TextBlock, None, None]:
    """Stream a file. Memory is bounded by a block and a line of JSON. text_key: the column in parquet and Arrow.

    Where reading stops before the end, as in a file that was cut, the last block is a fault, behind all that came
    before it. Raises UnreadableError.
    """
    rows, lines = (".parquet", ".arrow"), (".jsonl", ".jsonl.gz", ".jsonl.zst")
    try:
        if path.name.endswith(rows):
            yield from _row_blocks(path, text_key)
        else:
            yield from (_jsonl_blocks if path.name.endswith(lines) else _text_blocks)(path)
    except UnreadableError:
        raise
    except DataError as error:
        yield TextBlock(str(path), "fault", 1, (str(error).encode(),), path.stat().st_size if path.exists() else 0)


def check_inputs(files: Sequence[Path], text_key: str) -> None:
    """Read the beginning of each input file, before anything is made of them.

    Raises DataError: naming the files of which nothing can be read, or what is wrong with the first line where no
    file begins with a text.
    """
    useless, broken, found = list[str](), list[str](), False
    for path in files:
        with closing(read_blocks(path, text_key)) as blocks:
            block = next(blocks, None)
        if block is not None and block.kind == "fault":
            list(parse_block(block, text_key, useless))
        elif block is not None:
            found |= any(parse_block(block, text_key, broken))
    if useless:
        more = f"; and {len(useless) - 3} more files" if len(useless) > 3 else ""
        raise DataError("; ".join(useless[:3]) + more)
    if broken and not found:
        raise DataError(f"no input begins with a text: {broken[0]}")


def parse_block(block: TextBlock, text_key: str, broken: list[str] | None = None) -> Iterator[str]:
    """Parse a block into documents; empty ones are left out. text_key: of the text in a JSON object.

    broken: a list to which the faults of items are appended, each naming file and line or row; such items are passed
    over. None: they raise DataError.
    """
    number = block.first
    for item in block.items:
        text, fault = "", None
        try:
            if item is None:
                raise ValueError(f"the column {text_key!r} is null")
            text = item.decode() if block.kind != "jsonl" else _json_text(item, text_key)
            text.encode()  # JSON may hold lone surrogates, which no tokenizer accepts: found here, they have a line
            fault = text if block.kind == "fault" else None
        except UnicodeDecodeError as error:
            before = error.object[: error.start] if block.kind == "text" else b""
            line = number + before.count(b"\n")
            fault = f"{block.path}:{line}: not UTF-8 ({error.reason}); convert the file to UTF-8"
        except UnicodeEncodeError as error:
            fault = f"{block.path}:{number}: not valid Unicode ({error.reason}); repair the line"
        except (ValueError, RecursionError) as error:
            fault = f"{block.path}:{number}: {error}"
        if fault is not None:
            if broken is None:
                raise DataError(fault)
            broken.append(fault)
        elif text:
            yield text
        number += 1


def _json_text(line: bytes, text_key: str) -> str:
    """Parse a line of JSON and return its text; "" for an empty line. Raises ValueError saying what is wrong."""
    if not line.strip():
        return ""
    if len(line) > LINE_LIMIT_BYTES:
        raise ValueError(f"a line longer than {LINE_LIMIT_BYTES >> 20} MiB; cut the document")
    try:
        record = json.loads(line.decode())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON: {error.msg} at column {error.colno}; each line must be one JSON object"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not a JSON object with the key {text_key!r}")
    if text_key not in record:
        raise ValueError(f"no key {text_key!r}; keys present: {', '.join(list(record)[:8])}; set the text key")
    if not isinstance(record[text_key], str):
        raise ValueError(f"the key {text_key!r} holds no string but a {type(record[text_key]).__name__}")
    return str(record[text_key])


# ------------------------------------------------------------------------------------------ text and JSON lines


def _jsonl_blocks(path: Path) -> Iterator[TextBlock]:
    lines: list[bytes] = []
    first, size_bytes, rest, position_bytes = 1, 0, b"", 0
    damage: DataError | None = None
    try:
        for chunk, position_bytes in _decompressed(path):
            *whole, rest = (rest + chunk).split(b"\n")  # rest: a line whose end has not been read yet
            rest = rest[: LINE_LIMIT_BYTES + 1]  # enough to see that it is too long
            for line_bytes in whole:
                lines.append(line_bytes)
                size_bytes += len(line_bytes)
                if size_bytes >= BLOCK_BYTES:
                    yield TextBlock(str(path), "jsonl", first, tuple(lines), position_bytes)
                    first += len(lines)
                    lines, size_bytes = [], 0
    except DataError as error:
        damage, rest = error, b""
    if rest:
        lines.append(rest)
    if lines:
        yield TextBlock(str(path), "jsonl", first, tuple(lines), position_bytes)
    if damage:
        raise damage


def _text_blocks(path: Path) -> Iterator[TextBlock]:
    first, text, position_bytes = 1, b"", 0
    for chunk, position_bytes in _decompressed(path):
        text += chunk
        while len(text) > BLOCK_BYTES:
            # Cut after the last line end within a block, else the last space, else between two characters.
            end = text.rfind(b"\n", 0, BLOCK_BYTES) + 1 or text.rfind(b" ", 0, BLOCK_BYTES) + 1 or BLOCK_BYTES
            while BLOCK_BYTES - 4 < end <= BLOCK_BYTES and text[end] & 0xC0 == 0x80:  # a continuation byte of UTF-8
                end -= 1
            yield TextBlock(str(path), "text", first, (text[:end],), position_bytes)
            first += text.count(b"\n", 0, end)
            text = text[end:]
    if text:
        yield TextBlock(str(path), "text", first, (text,), position_bytes)


def _decompressed(path: Path) -> Iterator[tuple[bytes, int]]:
    """Read a file's content in chunks, each with the position in the file on disk up to which was read.

    Failures of reading and decompressing become DataError here.
    """
    lines = 0  # so far, for errors
    try:
        with path.open("rb") as file:
            for number, chunk in enumerate(_chunks(path, file)):
                yield chunk if number else chunk.removeprefix(_BYTE_ORDER_MARK), file.tell()
                lines += chunk.count(b"\n")
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path}: damaged after line {lines}: {error}; fetch or compress the file again") from None
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read after line {lines}: {error.strerror or error}") from None


def _chunks(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    if not path.name.endswith(".zst"):
        stream: Any = gzip.GzipFile(fileobj=file, mode="rb") if path.name.endswith(".gz") else file
        while chunk := stream.read1(_READ_BYTES):  # of a cut file, `read` would lose up to a whole chunk
            yield chunk
        return
    # Frame after frame, because the library's own file reader takes a cut-off file for a complete one.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # archives made with --long
    frame, inside, pending = decompressor.decompressobj(), False, b""
    while pending or (pending := file.read(_ZSTD_READ_BYTES)):
        if chunk := frame.decompress(pending):
            yield chunk
        inside, pending = not frame.eof, frame.unused_data
        if not inside:
            frame = decompressor.decompressobj()
    if inside:
        raise EOFError("the compressed data end in the middle of a frame")


# ----------------------------------------------------------------------------------- rows of parquet and Arrow


def _row_blocks(path: Path, text_key: str) -> Iterator[TextBlock]:
    row = 0
    try:
        for column, position_bytes in (_arrow if path.name.endswith(".arrow") else _parquet)(path, text_key):
            items = tuple(column.cast(pyarrow.large_binary()).to_pylist())
            yield TextBlock(str(path), "rows", row + 1, items, position_bytes)
            row += len(items)
    except (OSError, pyarrow.ArrowException) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, OSError) and error.errno is not None:  # Arrow has none for what a file holds
            raise UnreadableError(f"{path}: cannot be read after row {row}: {why}") from None
        kind = path.suffix.removeprefix(".")
        raise DataError(f"{path}: damaged or no {kind} file, after row {row}: {why}") from None


def _parquet(path: Path, text_key: str) -> Iterator[tuple[Any, int]]:
    """Read a column of parquet, BLOCK_ROWS at a time, each with the position in the file up to which it goes."""
    size_bytes, row = path.stat().st_size, 0
    with pyarrow.parquet.ParquetFile(path) as file:
        _check_column(path, file.schema_arrow, text_key)
        rows = max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(batch_size=BLOCK_ROWS, columns=[text_key]):
            row += batch.num_rows
            yield batch.column(0), size_bytes * row // rows


def _arrow(path: Path, text_key: str) -> Iterator[tuple[Any, int]]:
    """Read a column of an Arrow stream likewise. It is mapped into memory, so only its text is read."""
    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        _check_column(path, stream.schema, text_key)
        for batch in stream:
            for first in range(0, batch.num_rows, BLOCK_ROWS):
                yield batch.column(text_key).slice(first, BLOCK_ROWS), file.tell()


def _check_column(path: Path, schema: Any, text_key: str) -> None:
    if text_key not in schema.names:
        raise DataError(f"{path}: no column {text_key!r}; columns: {', '.join(schema.names[:8])}; set the text key")
    kind = schema.field(text_key).type
    try:
        pyarrow.nulls(0, kind).cast(pyarrow.large_binary())  # strings and bytes, long or short, views and categories
    except pyarrow.ArrowException:
        fits = False
    else:
        fits = not pyarrow.types.is_null(kind)
    if not fits:
        raise DataError(f"{path}: the column {text_key!r} holds {kind}, not strings")
